"""Discrete-event simulation of one search on one GPU: the only place that knows SimPy."""
