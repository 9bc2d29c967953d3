"""One seed, several independent random streams: drawing more from one moves no other."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What is drawn; the numbers are part of every result and stay as they are."""

    SEARCHES = 0  # lengths and trees of generated searches
    MIX = 1  # which search arrives
    ARRIVALS = 2  # when it arrives


def stream(seed: int, purpose: Stream, number: int = 0) -> np.random.Generator:
    """The generator for one purpose, and for one item (`number`) of it."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(purpose), number))
    return np.random.default_rng(sequence)
