"""What the active paths hold: how many tokens of which tier each decode iteration attends to.

Layers with a sliding window manage themselves: of each path they keep the newest `window` tokens,
whatever a policy decides about the layers that keep everything.  On a tree, the paths are those to
all leaves that the search has not given up, since it may go on at any of them; a token in the
windows of several is held once.  A node that already has children is no leaf: when the search opens
another child under it and its window has been given up, the missing tokens are recomputed (these
tokens alone, which is a lower bound: their own windows may be incomplete, too).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.tiers import NUM_TIERS, Tier
from arborsim.core.tree import ThoughtTree
from arborsim.memory.ledger import Census, Ledger, RunProfile
from arborsim.memory.moves import Changes
from arborsim.trace.schema import Geometry


@dataclass(frozen=True)
class WindowProfile:
    """The window layers at every iteration of a run, its tokens included; int64 ``[steps]``.

    Attributes
    ----------
    held : array
        Tokens in any window.
    shared, branches : array
        Tokens in the windows of the paths that are read: each once, or once per path.
    """

    held: np.ndarray
    shared: np.ndarray
    branches: np.ndarray


class Windows:
    """Follows the windows of all leaves.

    Parameters
    ----------
    tree : ThoughtTree
        The controller's; it may be ahead of the ledger by the tokens of the current run.
    ledger : Ledger
    geometry : Geometry
    """

    def __init__(self, tree: ThoughtTree, ledger: Ledger, geometry: Geometry) -> None:
        self._tree = tree
        self._ledger = ledger
        self._size = geometry.window
        self._token_bytes = geometry.window_bytes_per_token
        self._leaves: set[int] = set()
        self.held_bytes = 0

    def turn(self, leaves: tuple[int, ...]) -> np.ndarray:
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


@dataclass(frozen=True)
class PathProfile:
    """The paths read in every iteration of a run, its tokens included, before its moves.

    Counts are summed over the cache groups.

    Attributes
    ----------
    shared : int64 ``[tiers, steps]``
        Every token on any such path once.
    branches : int64 ``[tiers, steps]``
        Every token once per path that holds it.
    length : int64 ``[steps]``
        Tokens on any such path, readable or not (not summed over groups).
    windows : WindowProfile or None
        The layers with a sliding window, which the counts leave out; None without such layers.
    """

    shared: np.ndarray
    branches: np.ndarray
    length: np.ndarray
    windows: WindowProfile | None = None

    def minus(self, part: PathProfile) -> PathProfile:
        """The same paths without the tokens of `part`."""
        shared, branches = self.shared - part.shared, self.branches - part.branches
        return PathProfile(shared, branches, self.length, self.windows)

    def of_tiers(self, mask: np.ndarray) -> PathProfile:
        """The same paths, but only the tokens in the tiers of `mask`, bool ``[tiers]``.

        Tokens in windows are in none.
        """
        return PathProfile(self.shared * mask[:, None], self.branches * mask[:, None], self.length)


class ActivePaths:
    """Follows the tokens on the paths from the root to the leaves that decode now.

    The *active* paths are those the search turned to last.  Of their leaves some may pause: the
    paths of the others are *read*.

    Parameters
    ----------
    tree : ThoughtTree
        The controller's; it is only read, and already holds tokens when the ledger gets them.
    ledger : Ledger
    """

    def __init__(self, tree: ThoughtTree, ledger: Ledger) -> None:
        self.leaves: tuple[int, ...] = ()
        self.shared = Census(1)
        self.branches = Census(1)
        self.length = 0
        self._tree = tree
        self._ledger = ledger
        self._turned_to: set[int] = set()
        # Whether the only path read is the whole tree: the ledger then counts its tokens.
        self._whole = False
        self._active = np.zeros(1, dtype=bool)
        self._per_node = np.zeros(1, dtype=np.int64)

    def turn(self, leaves: tuple[int, ...]) -> None:
        """The paths to `leaves` are active and read from now on."""
        self._turned_to = set(leaves)
        self._active = self._tree.on_path(leaves)
        self.read(leaves)

    def are_active(self, leaves: tuple[int, ...]) -> bool:
        """Whether the search has turned to all of `leaves`."""
        return self._turned_to.issuperset(leaves)

    def read(self, leaves: tuple[int, ...]) -> None:
        """Of the active leaves, these decode from now on."""
        self.leaves = leaves
        self._per_node = np.zeros(len(self._tree), dtype=np.int64)
        for leaf in leaves:
            self._per_node[self._tree.ancestors(leaf)] += 1
        tier = self._ledger.tier
        self._whole = len(leaves) == 1 and bool(self._per_node.all())
        if self._whole:
            self.length = tier.shape[1]
            return
        weight = self._weight(np.arange(tier.shape[1]))
        read = weight > 0
        self.length = int(read.sum())
        self.shared = Census(1)
        # On a single path every token counts once: both are the same.
        self.branches = self.shared if len(leaves) == 1 else Census(1)
        for row in tier[:, read]:
            self.shared.now[0] += np.bincount(row, minlength=NUM_TIERS)
            if self.branches is not self.shared:
                counts = np.bincount(row, weight[read], NUM_TIERS)
                self.branches.now[0] += counts.astype(np.int64)

    def active(self, tokens: np.ndarray) -> np.ndarray:
        """Bool: which of `tokens` lie on an active path."""
        return np.asarray(self._active[self._tree.node_of_token.values[tokens]])

    def read_now(self, tokens: np.ndarray) -> np.ndarray:
        """Bool: which of `tokens` lie on a path that is being read."""
        return self._weight(tokens) > 0

    def readable_besides(self, tokens: np.ndarray) -> int:
        """Readable tokens on the paths being read, other than `tokens`."""
        held = self._ledger.held if self._whole else self.shared.now[0].tolist()
        readable = sum(held[: Tier.EVICTED]) // self._ledger.groups
        return max(0, readable - int(np.count_nonzero(self._weight(tokens))))

    def _weight(self, tokens: np.ndarray) -> np.ndarray:
        """Number of paths being read that hold each of `tokens`; int64."""
        return np.asarray(self._per_node[self._tree.node_of_token.values[tokens]])

    def count(self, group: np.ndarray, token: np.ndarray) -> PathProfile:
        """Those of the tokens ``[m]``, each in one cache group, that are read now."""
        tier = self._ledger.tier[group, token]
        weight = self._weight(token)
        shared = np.bincount(tier, np.minimum(weight, 1), NUM_TIERS)[:, None]
        branches = np.bincount(tier, weight, NUM_TIERS)[:, None]
        length = np.zeros(1, dtype=np.int64)
        return PathProfile(shared.astype(np.int64), branches.astype(np.int64), length)

    def advance(self, run: RunProfile) -> PathProfile:
        """Each leaf decodes a token per iteration of `run`, which the ledger has accounted for."""
        groups, width, steps = self._ledger.groups, len(self.leaves), run.counts_before.shape[1]
        length = np.arange(self.length + width, self.length + width * steps + 1, width)
        self.length += width * steps
        if self._whole:
            return PathProfile(run.counts_before, run.counts_before, length)
        newest = int(self._per_node[list(self.leaves)].sum())
        shared, branches = self._follow(run.changes, steps, width * groups, newest * groups)
        return PathProfile(shared, branches, length)

    def change(self, changes: Changes) -> None:
        """Tokens have changed their tier outside a run, and the ledger knows."""
        if self._whole or not len(changes):
            return
        row, weight = np.zeros(len(changes), dtype=np.int64), self._weight(changes.token)
        self.shared.change(row, changes, np.minimum(weight, 1))
        if self.branches is not self.shared:
            self.branches.change(row, changes, weight)

    def _follow(
        self, changes: Changes, steps: int, shared_born: int, branches_born: int
    ) -> tuple[np.ndarray, np.ndarray]:
        row = np.zeros(len(changes), dtype=np.int64)
        weight = self._weight(changes.token)
        shared, _ = self.shared.advance(steps, shared_born, row, changes, np.minimum(weight, 1))
        if self.branches is self.shared:
            return shared[0], shared[0]
        branches, _ = self.branches.advance(steps, branches_born, row, changes, weight)
        return shared[0], branches[0]
