"""Searches replayed on recorded thoughts: which would have been right, and at what cost."""

from arborsim.bank.bank import Bank
from arborsim.bank.visited import visited
from arborsim.bank.walk import DecodeRun, Step, Walk, walk

__all__ = ["Bank", "DecodeRun", "Step", "Walk", "visited", "walk"]
