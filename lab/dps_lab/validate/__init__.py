"""Runs on emulated engines in real time, beside simulations of the same runs."""
