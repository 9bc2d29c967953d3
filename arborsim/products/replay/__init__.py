"""Recorded searches replayed under policies."""
