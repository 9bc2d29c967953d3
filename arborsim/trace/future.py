"""What a recording knows and a live search cannot: how much attention each token will receive."""

from __future__ import annotations

import numpy as np

from arborsim.events import Decode, Prefill, Transition
from arborsim.signals.scores import CumulativeAttention
from arborsim.trace.episode import Episode
from arborsim.trace.play import play
from arborsim.tree import ThoughtTree


def total_attention(episode: Episode) -> np.ndarray:
    """Attention every token has received when the search is over; float64 ``[tokens]``.

    Summed by the very code that sums attention while a search runs, in the same order: what is
    still to come for a token is an exact difference, 0 when nothing is.
    """
    tree = ThoughtTree()
    received = CumulativeAttention().start(episode.info.geometry.layers)
    for event in play(episode):
        match event:
            case Prefill(run):
                tree.open(0, -1)
            case Transition(leaves, opened):
                for node, parent in opened:
                    tree.open(node, parent)
                tree.forget_paths(leaves)
                continue
            case Decode(run):
                pass
            case _:
                continue
        tree.append(run.leaves, run.steps)
        received.begin(run, tree, isinstance(event, Decode))
        for step in range(run.steps):
            received.observe(step)
    return received.values.copy()
