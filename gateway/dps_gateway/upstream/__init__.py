"""The engines: which replicas there are, which one takes a turn, and the exchange with it."""
