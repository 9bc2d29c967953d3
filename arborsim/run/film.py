"""Filming a search: where each thought block's tokens live, at the turns of the tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from arborsim.core.events import Answer, Boundary, Event, Transition
from arborsim.core.tiers import NUM_TIERS
from arborsim.core.tree import ThoughtTree
from arborsim.run.controller import Controller
from arborsim.run.results import Frame, NodeRecord

MAX_FRAMES = 40


class TreeFilm:
    """Takes a frame at every `Transition`, `Boundary` and `Answer`.

    Tokens are counted by tier in the first cache group.
    """

    def __init__(self) -> None:
        self._frames: list[Frame] = []

    def watch(self, events: Iterable[Event], controller: Controller) -> Iterator[Event]:
        """Pass `events` on, and take a frame after each of those that are filmed."""
        for event in events:
            yield event
            self._take(event, controller)

    def _take(self, event: Event, controller: Controller) -> None:
        match event:
            case Transition(turned, _):
                more = " ..." if len(turned) > 4 else ""
                label = f"turn to {', '.join(map(str, turned[:4]))}{more}"
            case Boundary(node, _, _):
                label = f"block {node} complete"
            case Answer():
                label = "answer"
            case _:
                return
        table = tokens_by_tier(controller)
        time_s = controller.executor.clock()
        self._frames.append(Frame(time_s, label, controller.view().leaves, table))

    def frames(self, nodes: int) -> tuple[Frame, ...]:
        """At most `MAX_FRAMES` of them, each with a row for every one of `nodes`."""
        return tuple(_padded(frame, nodes) for frame in _thinned(self._frames))


def tokens_by_tier(controller: Controller) -> np.ndarray:
    """Where the tokens of each node are now, in the first cache group; int64 ``[nodes, tiers]``."""
    tree, tier = controller.tree, controller.executor.tier[0]
    cell = tree.node_of_token.values * NUM_TIERS + tier.astype(np.int64)
    return np.bincount(cell, minlength=len(tree) * NUM_TIERS).reshape(-1, NUM_TIERS)


def node_records(tree: ThoughtTree) -> tuple[NodeRecord, ...]:
    """The blocks as they are now."""
    return tuple(
        NodeRecord(n.parent, n.depth, tree.num_node_tokens(i), n.reward, n.pruned, n.closed)
        for i, n in enumerate(tree.nodes)
    )


def _thinned(frames: list[Frame]) -> Iterator[Frame]:
    """At most `MAX_FRAMES`, evenly spread, first and last included."""
    if len(frames) <= MAX_FRAMES:
        return iter(frames)
    return (frames[i] for i in np.linspace(0, len(frames) - 1, MAX_FRAMES).round().astype(int))


def _padded(frame: Frame, nodes: int) -> Frame:
    """The same frame with a (zero) row for nodes that were opened later."""
    table = np.zeros((nodes, NUM_TIERS), dtype=np.int64)
    table[: len(frame.tokens_by_tier)] = frame.tokens_by_tier
    return replace(frame, tokens_by_tier=table)
