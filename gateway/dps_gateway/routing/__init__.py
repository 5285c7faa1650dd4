"""The routing rule: pure functions from a measured turn to a pool and a reason."""
