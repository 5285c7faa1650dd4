"""The results in the paper, simulated and compared with the published values."""
