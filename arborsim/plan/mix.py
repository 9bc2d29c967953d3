"""Which searches arrive: episodes of a mix of traces, drawn by weight.

The draws depend on the mix and the seed, on nothing that a candidate could change.  Every candidate
therefore serves the same searches in the same order (common random numbers), and what separates two
candidates is not which searches they happened to get.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arborsim.plan.streams import Stream, stream


@dataclass(frozen=True)
class Draws:
    """Searches in the order of their arrival.

    Attributes
    ----------
    entry : int64 ``[n]``
        Which trace of the mix.
    episode : int64 ``[n]``
        Which of its episodes.
    """

    entry: np.ndarray
    episode: np.ndarray

    def __len__(self) -> int:
        return len(self.entry)

    def distinct(self) -> list[tuple[int, int]]:
        """Each (entry, episode) that occurs, once, sorted: what must be replayed."""
        return sorted(set(zip(self.entry.tolist(), self.episode.tolist(), strict=True)))


def draw_mix(weights: Sequence[float], episodes: Sequence[int], count: int, seed: int) -> Draws:
    """Draw `count` searches, each independently: a trace by weight, then any of its episodes.

    Fewer draws are the beginning of more: a longer run goes on where a shorter one ended.

    Parameters
    ----------
    weights : sequence of float
        One per trace, above 0; only their ratios count.
    episodes : sequence of int
        Episodes of each trace, at least 1.
    count : int
    seed : int
    """
    draws = stream(seed, Stream.MIX).random((count, 2))
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    entry = np.searchsorted(edges[:-1] / edges[-1], draws[:, 0], side="right")
    sizes = np.asarray(episodes, dtype=np.int64)[entry]
    # A product of a number below 1 can round up to the size itself.
    episode = np.minimum((draws[:, 1] * sizes).astype(np.int64), sizes - 1)
    return Draws(entry, episode)
