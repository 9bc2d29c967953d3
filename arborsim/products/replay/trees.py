"""Search trees for the page: a tidy layered layout, and frames as differences.

Layers (depths) run from left to right, leaves from top to bottom; a parent stands in the middle of
its children, so a search that never branches is one straight line.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from arborsim.play.pictures import Frame, NodeRecord

#: Widths in a unit of about one pixel; narrower pages scale down to half of it, then scroll.
_NARROWEST, _WIDEST, _GAP = 8.0, 90.0, 18.0


def layout(nodes: Sequence[NodeRecord]) -> dict[str, Any]:
    """Places of the nodes, and what the page says about one when it is pointed at.

    Returns
    -------
    dict
        ``x``, ``w`` (left edge and width), ``row`` (vertical place, in rows), ``parent`` and facts
        with one entry per node; ``width`` and ``rows`` of the whole drawing.  A width grows with
        the square root of the node's tokens: a prompt of 400 does not dwarf thoughts of 20.
    """
    size = np.sqrt([max(node.tokens, 0) for node in nodes])
    w = (_NARROWEST + (_WIDEST - _NARROWEST) * size / (size.max(initial=0.0) or 1.0)).tolist()
    columns = [0.0] * (1 + max((node.depth for node in nodes), default=0))
    for node, width in zip(nodes, w, strict=True):
        columns[node.depth] = max(columns[node.depth], width)
    left = list(itertools.accumulate((column + _GAP for column in columns), initial=0.0))
    row, count = rows([node.parent for node in nodes])
    return {
        "x": [round(left[node.depth], 1) for node in nodes],
        "w": [round(width, 1) for width in w],
        "row": [round(each, 3) for each in row],
        "parent": [node.parent for node in nodes],
        "tokens": [int(node.tokens) for node in nodes],
        "reward": [float(node.reward) for node in nodes],
        "pruned": [int(node.pruned) for node in nodes],
        "closed": [int(node.closed) for node in nodes],
        "width": round(left[-1] - _GAP, 1),
        "rows": count,
    }


def rows(parents: Sequence[int]) -> tuple[list[float], int]:
    """The row of each node, from the place of its parent (-1: none), and how many rows there are.

    Leaves take the next row in depth-first order; parents the middle of their children.
    """
    children: list[list[int]] = [[] for _ in parents]
    roots: list[int] = []
    for i, parent in enumerate(parents):
        (children[parent] if parent >= 0 else roots).append(i)
    order, stack = [], roots[::-1]
    while stack:
        at = stack.pop()
        order.append(at)
        stack += children[at][::-1]
    found, taken = [0.0] * len(parents), 0
    for at in order:
        if not children[at]:
            found[at] = float(taken)
            taken += 1
    for at in reversed(order):
        if children[at]:
            found[at] = (found[children[at][0]] + found[children[at][-1]]) / 2
    return found, max(taken, 1)


def frames(taken: Sequence[Frame], most: int = 1 << 30) -> list[dict[str, Any]]:
    """At most `most` of the frames of a film, evenly spread, the first and the last among them.

    Each lists only the nodes whose tokens moved since the one before.

    ``changed`` is flat: node, then its tokens in every tier, and so on.
    """
    shown = []
    before: Any = 0
    picked = np.linspace(0, len(taken) - 1, min(most, len(taken)))
    for frame in (taken[i] for i in picked.round().astype(int)):
        table = np.asarray(frame.tokens_by_tier, dtype=np.int64)
        moved = np.flatnonzero((table != before).any(axis=1))
        changed = np.column_stack([moved, table[moved]]).ravel().tolist()
        active, time_s = list(map(int, frame.active)), float(frame.time_s)
        made = {"time_s": time_s, "label": frame.label, "active": active, "changed": changed}
        shown.append(made)
        before = table
    return shown
