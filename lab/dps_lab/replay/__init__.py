"""Recorded sessions sent again: a client, what it saw, and what it should have seen."""
