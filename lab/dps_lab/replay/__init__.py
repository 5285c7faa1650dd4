"""Replay of recorded sessions: the client, its records, and an oracle for the routing decisions."""
