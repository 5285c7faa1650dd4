"""The routing rule: pure functions from what is known about a turn to a pool and a reason."""
