"""Builders of the child objects of a DPSRouter. This package performs no I/O."""
