"""Simulated against measured: the same search on the simulator and on a live model, compared."""
