"""Measures the machine for `arborsim calibrate hardware`: one module per kind of measurement."""
