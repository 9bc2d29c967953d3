"""The tokens that decode iterations read on the active paths, by tier, in each recall mode.

Tokens in DDR take part in attention; the *recall mode* says how.

- ``stage``: they were copied into staging buffers in HBM before, and are read from there.
- ``stream``: they cross PCIe in every iteration, layer by layer, through a double buffer.
- ``near``: the CPU attends to them where they are and its partial results are merged exactly.
- ``ondemand``: the pages whose keys could matter most to a query are fetched, as in Quest (Tang et
  al. 2024, arXiv:2406.10774).  The others are not read, which is an approximation.

A plan may say what is read at all (`Plan.reads`, the *selection*).  The modes then speak of the
selected tokens alone: ``stage`` fetches those that are newly selected and gives up the buffers of
those that no longer are.  ``stream`` does the same a layer ahead, so that only what computing does
not hide is waited for.  DDR keeps its copy, so that a token that is no longer selected costs
nothing.  ``ondemand`` is another thing: the backend chooses inside each pass, from what a policy
has put into DDR, and fetches the choice again in every step.  No plan knows of it.

Layers with a sliding window manage themselves (`arborsim.machine.windows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from arborsim.core.formats import FP8
from arborsim.core.tiers import Tier, by_tier
from arborsim.core.tree import GrowingTable, ThoughtTree
from arborsim.machine.cost import Array, CostModel
from arborsim.machine.windows import WindowProfile
from arborsim.memory.ledger import Census, Ledger, RunProfile
from arborsim.memory.moves import Changes

PAGE_TOKENS = 16  #: tokens that the bounds of ``ondemand`` speak of together, as live
PAGES_TOP = 16  #: pages that each KV head chooses in a step, as live

_QUANTISED = by_tier(lambda tier: tier.quantised)
_OFFLOADED = by_tier(lambda tier: tier.offloaded)
_READABLE = by_tier(lambda tier: int(tier != Tier.EVICTED))


@dataclass(frozen=True)
class PathProfile:
    """The paths read in every iteration of a run, its tokens included, before its moves.

    Counts are summed over the cache groups, and leave out layers with a sliding window.
    """

    shared: np.ndarray  # every token on any such path once; int64 [tiers, steps]
    branches: np.ndarray  # every token once per path that holds it; int64 [tiers, steps]
    length: np.ndarray  # tokens on any path, readable or not, not summed over groups; int64 [steps]
    windows: WindowProfile | None = None  # None without layers with a window

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
    paths of the others are *read*.  The tree is the controller's; it is only read, and already
    holds tokens when the ledger gets them.
    """

    def __init__(self, tree: ThoughtTree, ledger: Ledger) -> None:
        self.leaves: tuple[int, ...] = ()
        self.shared = Census(1, ledger.tiers)
        self.branches = Census(1, ledger.tiers)
        self.length = 0
        self._tree = tree
        self._ledger = ledger
        self._turned_to: set[int] = set()
        # Whether the only path read is the whole tree: the ledger then counts its tokens.
        self._whole = False
        self._active = np.zeros(1, dtype=bool)
        self._per_node = np.zeros(1, dtype=np.int64)
        self._selection: GrowingTable | None = None  # bool [groups, tokens]; None: all are read
        #: Tokens by node and tier, all groups; None: to be counted
        self._of_nodes: np.ndarray | None = None

    def activate(self, leaves: tuple[int, ...]) -> None:
        """The paths to `leaves` are active and read from now on."""
        self._turned_to = set(leaves)
        self._active = self._tree.on_path(leaves)
        self.read(leaves)

    @property
    def turned(self) -> int:
        """Leaves that the search has turned to, those that pause included."""
        return len(self._turned_to)

    def are_active(self, leaves: tuple[int, ...]) -> bool:
        """Whether the search has turned to all of `leaves`."""
        return self._turned_to.issuperset(leaves)

    def read(self, leaves: tuple[int, ...]) -> None:
        """Let these of the active leaves decode from now on."""
        self.leaves = leaves
        self._per_node = np.zeros(len(self._tree), dtype=np.int64)
        for leaf in leaves:
            self._per_node[self._tree.ancestors(leaf)] += 1
        selected = self.selected
        self._whole = selected is None and len(leaves) == 1 and bool(self._per_node.all())
        if self._whole:
            self.length, self._of_nodes = self._ledger.num_tokens, None
            return
        held = self._by_node() if selected is None else self._count_nodes(selected)
        read = self._per_node > 0
        tiers = self._ledger.tiers
        self.shared = Census(1, tiers)
        # On a single path every token counts once: both are the same.
        self.branches = self.shared if len(leaves) == 1 else Census(1, tiers)
        self.shared.now[0] = held[read].sum(axis=0)
        self.branches.now[0] = self._per_node @ held
        if selected is None:
            self.length = int(self.shared.now.sum()) // self._ledger.groups
        else:
            owner = self._tree.node_of_token.values[: self._ledger.num_tokens]
            self.length = int(np.count_nonzero(read[owner]))

    def _by_node(self) -> np.ndarray:
        """Tokens by node and tier, int64 ``[nodes, tiers]``, all groups; brought up to date."""
        if self._of_nodes is None:
            self._of_nodes = self._count_nodes(None)
        elif len(self._of_nodes) < len(self._tree):
            more = np.zeros((len(self._tree) - len(self._of_nodes), self._ledger.tiers), np.int64)
            self._of_nodes = np.concatenate([self._of_nodes, more])
        return self._of_nodes

    def _count_nodes(self, selected: np.ndarray | None) -> np.ndarray:
        """The same, of the tokens ``[groups, tokens]`` that `selected` sets."""
        tier, tiers, size = self._ledger.tier, self._ledger.tiers, len(self._tree)
        cell = self._tree.node_of_token.values[: tier.shape[1]] * np.int64(tiers) + tier
        cell = cell.ravel() if selected is None else cell[selected]
        return np.bincount(cell, minlength=size * tiers).reshape(size, tiers)

    def select(self, reads: np.ndarray | None) -> bool:
        """From now on `reads` (`Plan.reads`) is read, and what is born; whether that is news."""
        if reads is None or reads.all():
            if self._selection is None:
                return False
            self._selection = None
        else:
            self._selection = GrowingTable(len(reads), np.bool_, reads.shape[1])
            self._selection.extend(reads.shape[1], reads)
        self.read(self.leaves)
        return True

    @property
    def selected(self) -> np.ndarray | None:
        """Bool ``[groups, tokens]``: what a plan says is read; None for everything."""
        if self._selection is None:
            return None
        self._selection.extend(self._ledger.num_tokens - len(self._selection), True)
        return self._selection.values

    def active(self, tokens: np.ndarray) -> np.ndarray:
        """Bool: which of `tokens` lie on an active path."""
        return np.asarray(self._active[self._tree.node_of_token.values[tokens]])

    def read_now(self, tokens: np.ndarray) -> np.ndarray:
        """Bool: which of `tokens` lie on a path that is being read."""
        return self._weight(tokens) > 0

    def readable_without(self, tokens: np.ndarray) -> int:
        """Readable tokens on the paths being read, other than `tokens`."""
        if self.selected is not None:
            there = self._ledger.tier[:, self.read_now(np.arange(self._ledger.num_tokens))]
            readable = int(np.count_nonzero(there != Tier.EVICTED)) // len(there)
        else:
            held = self._ledger.held if self._whole else self.shared.now[0].tolist()
            readable = (sum(held) - held[Tier.EVICTED]) // self._ledger.groups
        return max(0, readable - int(np.count_nonzero(self._weight(tokens))))

    def _weight(self, tokens: np.ndarray) -> np.ndarray:
        """Number of paths being read that hold each of `tokens`; int64."""
        return np.asarray(self._per_node[self._tree.node_of_token.values[tokens]])

    def _weights(self, group: np.ndarray, token: np.ndarray) -> np.ndarray:
        """The same of tokens ``[m]``, each in one cache group; 0 for what is not selected."""
        weight, selected = self._weight(token), self.selected
        return weight if selected is None else weight * selected[group, token]

    def count(self, group: np.ndarray, token: np.ndarray) -> PathProfile:
        """Those of the tokens ``[m]``, each in one cache group, that are read now."""
        tier, tiers = self._ledger.tier[group, token], self._ledger.tiers
        weight = self._weights(group, token)
        shared = np.bincount(tier, np.minimum(weight, 1), tiers)[:, None]
        branches = np.bincount(tier, weight, tiers)[:, None]
        length = np.zeros(1, dtype=np.int64)
        return PathProfile(shared.astype(np.int64), branches.astype(np.int64), length)

    def advance(self, run: RunProfile) -> PathProfile:
        """Each leaf decodes a token per iteration of `run`, which the ledger has accounted for."""
        groups, width, steps = self._ledger.groups, len(self.leaves), run.counts_before.shape[1]
        length = np.arange(self.length + width, self.length + width * steps + 1, width)
        self.length += width * steps
        if self._whole:
            return PathProfile(run.counts_before, run.counts_before, length)
        changes = run.changes
        if self._of_nodes is not None:
            self._by_node()[list(self.leaves), Tier.HBM] += steps * groups
            self._change_nodes(changes)
        weight = self._weights(changes.group, changes.token)
        row = np.zeros(len(changes), dtype=np.int64)
        (shared,), _ = self.shared.advance(
            steps, width * groups, row, changes, np.minimum(weight, 1)
        )
        if self.branches is self.shared:
            return PathProfile(shared, shared, length)
        newest = int(self._per_node[list(self.leaves)].sum())
        (branches,), _ = self.branches.advance(steps, newest * groups, row, changes, weight)
        return PathProfile(shared, branches, length)

    def change(self, changes: Changes) -> None:
        """Tokens have changed their tier outside a run, and the ledger knows."""
        if self._whole or not len(changes):
            return
        self._change_nodes(changes)
        row = np.zeros(len(changes), dtype=np.int64)
        weight = self._weights(changes.group, changes.token)
        self.shared.change(row, changes, np.minimum(weight, 1))
        if self.branches is not self.shared:
            self.branches.change(row, changes, weight)

    def _change_nodes(self, changes: Changes) -> None:
        if self._of_nodes is None or not len(changes):
            return
        held = self._by_node()
        first = self._tree.node_of_token.values[changes.token] * np.int64(held.shape[1])
        held += np.bincount(first + changes.target, minlength=held.size).reshape(held.shape)
        held -= np.bincount(first + changes.source, minlength=held.size).reshape(held.shape)


@dataclass(frozen=True)
class Reading:
    """The reads of each iteration of a run; arrays ``[steps]`` or single numbers."""

    #: Keys and values that the GPU reads: a shared node once with a tree-attention kernel, once per
    #: branch without; what those that must be dequantised would take in 8 bits.
    read_bytes: Array
    quantised_bytes: Array
    #: Tokens attended to, summed over the sequences, and those of them whose probabilities are
    #: written out; where layers differ, their mean.
    attended: Array
    rows: Array = 0.0
    streamed_bytes: Array = 0.0  # fetched from DDR
    remote_bytes: Array = 0.0  # read in DDR by the CPU; of ``ondemand``, bounds read in HBM
    #: Of `read_bytes`, in layers with a sliding window, where the CPU works during the others; 0
    #: where it does not.
    window_bytes: Array = 0.0
    buffer_bytes: np.ndarray | None = None  # HBM for what is fetched, in modes that fetch


class Recall:
    """Knows what iterations read in a recall mode.

    `fused` attention writes out no probabilities; with `tree_attention` a batch reads a shared
    token once, not once per branch.
    """

    def __init__(
        self, cost: CostModel, ledger: Ledger, mode: str, fused: bool, tree_attention: bool
    ) -> None:
        self.mode = mode
        self.fused = fused
        self._cost = cost
        groups = self._groups = ledger.groups
        self._tree_attention = tree_attention
        self._sizes = ledger.bytes_by_tier[: ledger.tiers]
        # Dequantising writes as many numbers whatever the format: it counts as in 8 bits.
        eight_bits = -(-FP8.token_bytes(cost.geometry) // groups)
        self._quantised_sizes = np.where(_QUANTISED, eight_bits, 0)[: ledger.tiers]
        self._offloaded, self._readable = _OFFLOADED[: ledger.tiers], _READABLE[: ledger.tiers]

    def reading(
        self,
        path: PathProfile,
        sequences: int,
        landing: PathProfile | None,
        fetched_bytes: np.ndarray | None = None,
    ) -> Reading:
        """The reads of a run of iterations in which `sequences` leaves decode in one batch.

        `landing` is the part of `path` that counts as being in DDR but is still read from its old
        place in HBM, because the copy has not finished.  `fetched_bytes`, int64 ``[steps]``, is
        what ``stream`` fetches of a selection, None without one.
        """
        rows: Array = 0.0 if self.fused else self._attended(path)
        if self.mode == "stage":
            return self._reading(path, rows)
        away = (path if landing is None else path.minus(landing)).of_tiers(self._offloaded)
        if self.mode == "stream":  # once per iteration; the GPU reads them from the buffer
            if fetched_bytes is None:
                fetched_bytes = self._sizes @ away.shared
            buffers = np.asarray(self._cost.double_buffer_bytes(fetched_bytes))
            return self._reading(path, rows, streamed_bytes=fetched_bytes, buffer_bytes=buffers)
        local = path.minus(away)
        if self.mode == "near":
            remote, windows = self._sizes @ self._read(away), self._window_bytes(local)
            return self._reading(local, rows, remote_bytes=remote, window_bytes=windows)
        return self._ondemand(local, away, sequences, rows)

    def _reading(self, path: PathProfile, rows: Array, **more: Any) -> Reading:
        count = self._read(path)
        read_bytes = self._sizes @ count + self._window_bytes(path)
        return Reading(
            read_bytes, self._quantised_sizes @ count, self._attended(path), rows, **more
        )

    def _ondemand(
        self, local: PathProfile, away: PathProfile, sequences: int, rows: Array
    ) -> Reading:
        """The pages of `away` with the largest bounds are fetched; the others are not read.

        Bounds are those of the live backend, in HBM: the smallest and largest key of each page.
        All sequences share a choice.  What is fetched has full precision.
        """
        cost, geometry = self._cost, self._cost.geometry
        held = away.shared.sum(axis=0) / self._groups
        per_head, fetched = cost.ondemand_tokens(held, PAGE_TOKENS, PAGES_TOP)
        fetched_bytes = np.ceil(fetched * geometry.full_bytes_per_token).astype(np.int64)
        # Attended to per head; at most what a path holds of it.
        attended = np.minimum(per_head, away.branches.sum(axis=0) / (self._groups * sequences))
        share = geometry.full_layers / geometry.layers
        count = self._read(local)
        window_bytes = self._window_bytes(local)
        bounds_bytes = cost.ondemand_bounds_bytes(held, PAGE_TOKENS).astype(np.int64)
        return Reading(
            self._sizes @ count + window_bytes + fetched_bytes,
            self._quantised_sizes @ count,
            self._attended(local) + sequences * attended * share,
            rows,
            fetched_bytes,
            bounds_bytes,
            window_bytes,
            bounds_bytes - (-fetched_bytes // max(1, geometry.full_layers)),
        )

    def _attended(self, path: PathProfile) -> np.ndarray:
        """Readable tokens, summed over the branches; the mean over the layers."""
        readable = (self._readable @ path.branches) / self._groups
        if path.windows is None:
            return np.asarray(readable)
        return np.asarray(self._cost.mean_over_layers(readable, path.windows.branches))

    def _read(self, path: PathProfile) -> np.ndarray:
        """Tokens read in attention; int64 ``[tiers, steps]``."""
        return path.shared if self._tree_attention else path.branches

    def _window_bytes(self, path: PathProfile) -> np.ndarray | int:
        """Read in layers with a sliding window."""
        if path.windows is None:
            return 0
        tokens = path.windows.shared if self._tree_attention else path.windows.branches
        return np.asarray(self._cost.geometry.window_bytes_per_token * tokens)
