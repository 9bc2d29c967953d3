"""Tokens below HBM at full precision: quantised, or copied to the host's memory and back."""
