"""Policies on real models with a mask in place of removal: the same tokens, in less time."""
