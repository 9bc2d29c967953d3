"""Layers with a sliding window: which tokens they hold, and which must be recomputed.

Such layers manage themselves: of each path they keep the newest `window` tokens, whatever a policy
decides about the layers that keep everything.  On a tree, the paths are those to all leaves that
the search has not given up, since it may go on at any of them; a token in the windows of several is
held once.  A node that already has children is no leaf: when the search opens another child under
it and its window has been given up, the missing tokens are recomputed (these tokens alone, which is
a lower bound: their own windows may be incomplete, too).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.tree import ThoughtTree
from arborsim.memory.ledger import Ledger
from arborsim.trace.schema import Geometry


@dataclass(frozen=True)
class WindowProfile:
    """Tokens in window layers at every iteration of a run, its own included; int64 ``[steps]``."""

    held: np.ndarray  # in any window
    shared: np.ndarray  # in the windows of the paths that are read, each once ...
    branches: np.ndarray  # ... or once per path


class Windows:
    """Follows the windows of all leaves.

    The tree is the controller's; it may be ahead of the ledger by the tokens of the current run.
    """

    def __init__(self, tree: ThoughtTree, ledger: Ledger, geometry: Geometry) -> None:
        self._tree = tree
        self._ledger = ledger
        self._size = geometry.window
        self._token_bytes = geometry.window_bytes_per_token
        self._leaves: set[int] = set()
        self.held_bytes = 0

    def activate(self, leaves: tuple[int, ...]) -> np.ndarray:
        """The search turns to `leaves`; returns the tokens that must be recomputed, int64."""
        if not self._size:
            return np.empty(0, dtype=np.int64)
        end = self._ledger.num_tokens
        before = self._inside(self._leaves, end)
        nodes = self._tree.nodes
        parents = {node.parent for node in nodes}
        open_ones = (i for i, node in enumerate(nodes) if i not in parents and not node.pruned)
        self._leaves = {*open_ones, *leaves}
        now = self._inside(self._leaves, end)
        self.held_bytes = int(now.sum()) * self._token_bytes
        return np.flatnonzero(now & ~before)

    def advance(self, leaves: tuple[int, ...], steps: int) -> WindowProfile | None:
        """Each leaf has decoded `steps` tokens, which the ledger has accounted for."""
        if not self._size:
            return None
        self._leaves.update(leaves)
        end = self._ledger.num_tokens
        start = end - steps * len(leaves)
        # The iteration, from 1, after which each old token is in no window any more.
        read, branches = np.zeros(start, dtype=np.int64), np.zeros(steps, dtype=np.int64)
        appended = np.arange(1, steps + 1)
        for leaf in leaves:
            path = self._window_of(leaf, start)
            # The k-th newest of n tokens is the (k + t)-th newest after t more.
            stays = self._size - np.arange(len(path), 0, -1)
            read[path] = np.maximum(read[path], stays)
            branches += np.minimum(len(path) + appended, self._size)
        fresh = len(leaves) * np.minimum(appended, self._size)
        shared = _count_at_least(read, appended) + fresh
        held = read
        held[self._inside(self._leaves - set(leaves), start)] = steps
        held = _count_at_least(held, appended) + fresh
        self.held_bytes = int(held[-1]) * self._token_bytes
        return WindowProfile(held, shared, branches)

    def _inside(self, leaves: set[int], end: int) -> np.ndarray:
        """Bool ``[end]``: tokens in the window of any of `leaves`."""
        inside = np.zeros(end, dtype=bool)
        for leaf in leaves:
            inside[self._window_of(leaf, end)] = True
        return inside

    def _window_of(self, leaf: int, end: int) -> np.ndarray:
        """The newest tokens before token `end` on the path to `leaf`, oldest first."""
        path = self._tree.path(leaf)
        n = int(np.searchsorted(path, end))
        return path[max(0, n - self._size) : n]


def _count_at_least(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """How many of `values` reach each of `bounds`."""
    return len(values) - np.searchsorted(np.sort(values), bounds)
