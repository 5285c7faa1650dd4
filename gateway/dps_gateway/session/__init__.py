"""Session state: identity (which session), record (its history) and storage (Redis, in-process mirror)."""
