"""Pure builders of the child objects of a DPSRouter."""
