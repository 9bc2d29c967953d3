"""Traces inspected and imported."""
