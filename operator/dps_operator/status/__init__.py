"""The status of a DPSRouter: its conditions, the problems of its pods, and the Events that report changes. No I/O."""
