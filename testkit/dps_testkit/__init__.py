"""Helpers for unit, integration and end-to-end tests: processes, clients, clusters, fakes and load."""
