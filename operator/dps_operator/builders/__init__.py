"""Pure builders: every object that a DPSRouter stands for, as a function of its spec."""
