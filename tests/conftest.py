"""Property tests draw the same examples in every run, and take as long as the machine needs. No fixtures live here."""

from __future__ import annotations

import importlib.util

# A machine that judges on its GPU may be without.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("same")
