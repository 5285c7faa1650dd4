"""Helpers for unit, integration and end-to-end tests: processes, clients, clusters, fakes and load."""

from hypothesis import settings

# A busy machine could exceed a deadline.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
