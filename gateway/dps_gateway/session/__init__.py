"""Session state: who is talking (identity), what is remembered (record), and where (Redis, mirror)."""
