"""Optimizers of others, unmodified: a metering proxy, an evaluation server, a runner."""
