"""Inference engines: command lines, ports and probes, shared by the operator and the local stack."""
