"""Recordings of live searches."""
