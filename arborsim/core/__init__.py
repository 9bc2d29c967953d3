"""Shared by everything: errors, events, the tree, tiers, budgets, records, workers."""

__version__ = "0.1.0"
