"""Runs on emulated engines in real time, compared with simulations of the same runs."""
