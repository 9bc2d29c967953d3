"""Machines: profiles, geometries, the cost model, and the simulated time of one search or many."""
