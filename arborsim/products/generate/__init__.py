"""Searches and requests drawn from stated distributions."""
