"""Continuous load: agents that send sessions turn by turn, and a table of what they observed."""
