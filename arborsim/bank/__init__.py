"""Searches replayed on recorded thoughts: which would have been right, and at what cost."""
