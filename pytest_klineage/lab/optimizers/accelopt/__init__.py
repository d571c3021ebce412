"""AccelOpt, a published optimizer, as a method. docs/concepts/baselines.md says where it differs from its release."""

from __future__ import annotations
