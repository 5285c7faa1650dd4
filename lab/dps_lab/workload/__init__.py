"""Recorded and synthetic sessions that can be replayed or simulated."""
