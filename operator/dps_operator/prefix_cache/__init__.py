"""Observes whether the common prefix cache of a DPSRouter serves its engines, for a condition."""
