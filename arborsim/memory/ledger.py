"""The ledger: where every token lives, and what that takes in bytes, exactly.

A *group* is the part of the cache that one decision treats alike: everything (1 group), a layer,
or a KV head of a layer.  All groups hold the same share of a token's bytes.  Bytes are integers, so
that what enters, moves and leaves can be checked to the byte (`Ledger.check`).  A whole run of
decode iterations is counted at once: its moves become increments per iteration, and their
cumulative sums are the counts of every iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import mul

import numpy as np

from arborsim.core.errors import PlanError, UsageError
from arborsim.core.tiers import DDR, HBM, MOST_TIERS, NUM_TIERS, RUNGS, Tier, by_tier
from arborsim.core.tree import GrowingTable
from arborsim.memory.moves import Changes, Moves, resolve
from arborsim.memory.pages import PageTable

_IN_HBM = by_tier(lambda tier: tier.in_hbm)
_IN_DDR = by_tier(lambda tier: tier.memory == DDR)
_QUANTISED = by_tier(lambda tier: tier.quantised)
# Members of an enum are slow to look up.
_HBM, _DDR = int(Tier.HBM), int(Tier.DDR)


@dataclass(frozen=True)
class RunProfile:
    """The ledger at every iteration of a run, in arrays of shape ``[steps]`` and dtype int64.

    ``before`` is when the iteration's tokens are in HBM and nothing has moved yet (the transient
    peak), ``after`` is when its moves are done.  Tokens are means over the groups, rounded up.
    """

    hbm_tokens_before: np.ndarray
    hbm_tokens_after: np.ndarray
    hbm_page_bytes_before: np.ndarray
    hbm_page_bytes_after: np.ndarray
    ddr_bytes_after: np.ndarray
    quantised_bytes_after: np.ndarray
    counts_before: np.ndarray  # int64 [tiers, steps]: tokens, summed over the groups
    changes: Changes  # what the moves of the run changed

    def with_windows(self, held_bytes: np.ndarray) -> RunProfile:
        """The profile with what layers with a sliding window hold, ``[steps]``, in its pages."""
        return replace(
            self,
            hbm_page_bytes_before=self.hbm_page_bytes_before + held_bytes,
            hbm_page_bytes_after=self.hbm_page_bytes_after + held_bytes,
        )


class Census:
    """Tokens by tier (`now`, int64 ``[rows, tiers]``) of every group, or of all together."""

    def __init__(self, rows: int, tiers: int = NUM_TIERS) -> None:
        self.now = np.zeros((rows, tiers), dtype=np.int64)

    def advance(
        self,
        steps: int,
        born: int,
        row: np.ndarray,
        changes: Changes,
        weight: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Let `born` tokens (a weighted count per row) enter HBM per iteration, then `changes`.

        `row`, int64 ``[m]``, is the row that each change belongs to.  `weight`, float64 ``[m]``,
        says how often it counts (whole numbers).

        Returns the counts of each iteration, int64 ``[rows, tiers, steps]``, once its tokens are in
        HBM, and once its moves are done.
        """
        after = np.repeat(self.now[:, :, None], steps, axis=2)
        after[:, _HBM] += born * np.arange(1, steps + 1)
        if not len(changes):
            self.now = after[:, :, -1].copy()
            return after, after
        before = after.copy()
        size = len(self.now) * steps
        cell = row * steps + changes.step
        flow = changes.flow.reshape(MOST_TIERS, MOST_TIERS)
        for tier in np.flatnonzero(flow.sum(axis=0) + flow.sum(axis=1)).tolist():  # seldom > 2
            net = _tally(cell, changes.target == tier, weight, size)
            net -= _tally(cell, changes.source == tier, weight, size)
            moved = net.reshape(-1, steps)
            total = np.cumsum(moved, axis=1)
            after[:, tier] += total
            before[:, tier] += total - moved
        self.now = after[:, :, -1].copy()
        return before, after

    def change(self, row: np.ndarray, changes: Changes, weight: np.ndarray | None = None) -> None:
        """Let `changes` happen at once, with the parameters of `advance`."""
        if len(self.now) == 1 and weight is None:
            flow = changes.flow.reshape(MOST_TIERS, MOST_TIERS)
            self.now[0] += (flow.sum(axis=0) - flow.sum(axis=1))[: self.now.shape[1]]
            return
        first, size = row * self.now.shape[1], self.now.size
        gained = np.bincount(first + changes.target, weight, size)
        gained -= np.bincount(first + changes.source, weight, size)
        self.now += gained.astype(np.int64).reshape(self.now.shape)


def _tally(cell: np.ndarray, mask: np.ndarray, weight: np.ndarray | None, size: int) -> np.ndarray:
    """Weighted number of changes per cell, int64 ``[size]``, among those that `mask` selects."""
    weights = None if weight is None else weight[mask]
    return np.bincount(cell[mask], weights, size).astype(np.int64)


class Ledger:
    """Accounts for the tier of every token of one search, per group.

    Parameters
    ----------
    groups : int
        Each holds ``kv_bytes_per_token / groups`` bytes of every token, rounded up to whole bytes
        (a small model's groups need not divide a large model's token).
    kv_bytes_per_token : int
        Keys and values of a token at full precision, all layers.
    quantised_bytes : tuple of int
        The same in the formats of the quantised tiers and of the coarse ones (the last stands in
        for what is missing): see `arborsim.core.formats.Format.token_bytes`.
    page_tokens : int
        Slots per page (1 accounts for every token exactly).
    tiers : int
        Columns of what is counted by tier (`arborsim.core.tiers.num_tiers`).

    Raises `UsageError` if there is no group, or there are more groups than bytes (but one group may
    be empty).
    """

    def __init__(
        self,
        groups: int,
        kv_bytes_per_token: int,
        quantised_bytes: tuple[int, ...],
        *,
        page_tokens: int = 1,
        tiers: int = NUM_TIERS,
    ) -> None:
        least = min(quantised_bytes)
        if not 1 <= groups <= max(1, least):
            raise UsageError(f"{least} bytes per token cannot be shared by {groups} groups")
        whole = (kv_bytes_per_token, quantised_bytes[0], quantised_bytes[-1])
        size = [-(-each // groups) for each in whole]
        self.groups = groups
        #: Bytes of one token in one group, by tier; int64 ``[MOST_TIERS]``.
        self.bytes_by_tier = by_tier(lambda tier: size[tier.rung] if tier != Tier.EVICTED else 0)
        self.tiers = tiers
        self.appended_bytes = 0
        self.destroyed_bytes = 0  # evicted, or the precision that quantising drops
        self.restored_bytes = 0  # recomputed, or widened again
        grown = self.bytes_by_tier[None] - self.bytes_by_tier[:, None]  # by source and target
        self._gained, self._dropped = np.maximum(grown, 0).ravel(), np.maximum(-grown, 0).ravel()
        self._sizes: list[int] = self.bytes_by_tier.tolist()
        self._narrow: list[int] = (self.bytes_by_tier * _QUANTISED).tolist()
        self._held: list[int] | None = None  # tokens by tier, all groups; None: to be counted
        self._tier = GrowingTable(groups, np.int8)
        self._census = Census(groups, tiers)
        self._pages = PageTable(groups, page_tokens) if page_tokens > 1 else None

    @property
    def tier(self) -> np.ndarray:
        """Int8 ``[groups, tokens]``, as a view that is valid until tokens are appended."""
        return self._tier.values

    @property
    def num_tokens(self) -> int:
        return len(self._tier)

    @property
    def counts(self) -> np.ndarray:
        """Int64 ``[groups, tiers]``: tokens by tier."""
        return self._census.now

    @property
    def hbm_tokens(self) -> int:
        """Tokens in HBM: the mean over groups, rounded up."""
        return -(-sum(self.held[:_DDR]) // self.groups)

    @property
    def held(self) -> list[int]:
        """Tokens by tier, summed over the groups."""
        if self._held is None:
            self._held = self.counts.sum(axis=0).tolist()
        return self._held

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the tokens in HBM, as if pages had no gaps."""
        return self.bytes_in(HBM)

    @property
    def hbm_page_bytes(self) -> int:
        """Bytes of the pages in HBM that hold at least one token."""
        if self._pages is None:
            return self.hbm_bytes
        return int(self._pages.open_pages @ self._page_bytes)

    @property
    def ddr_bytes(self) -> int:
        return self.bytes_in(DDR)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the tokens in memories other than HBM."""
        return sum(map(mul, self.held[_DDR:], self._sizes[_DDR:]))

    @property
    def quantised_bytes(self) -> int:
        """Bytes of the quantised tokens, in HBM and DDR."""
        return sum(map(mul, self.held, self._narrow))

    def bytes_in(self, memory: int) -> int:
        """Bytes of the tokens in a memory (`Tier.memory`)."""
        first, last = RUNGS * memory, RUNGS * (memory + 1)
        return sum(map(mul, self.held[first:last], self._sizes[first:last]))

    @property
    def has_pages(self) -> bool:
        """Whether a token that leaves HBM may leave its bytes occupied."""
        return self._pages is not None

    @property
    def _page_bytes(self) -> np.ndarray:
        assert self._pages is not None
        return self.bytes_by_tier[:_DDR] * self._pages.page_tokens

    def resolve(self, moves: Moves, arriving: int = 0) -> Changes:
        """Spell out `moves` into known tiers, as `arborsim.memory.moves.resolve` does."""
        if len(moves) and moves.target.max() >= self.tiers:
            raise PlanError(
                f"a plan moves tokens to {Tier(moves.target.max()).name}: name that among the "
                "policy's tiers"
            )
        return resolve(moves, self.tier, arriving)

    def append(self, leaves: tuple[int, ...], steps: int) -> None:
        """`steps` tokens of each leaf enter HBM, interleaved as in `ThoughtTree.append`."""
        self.advance(leaves, steps, Moves.none())

    def record(self, changes: Changes) -> None:
        """Carry out changes outside a run."""
        if len(changes):
            self._write(changes)
            self._census.change(changes.group, changes)
            if self._pages is not None:
                self._pages.advance(self.num_tokens, 0, 1, changes)

    def advance(self, leaves: tuple[int, ...], steps: int, moves: Moves) -> RunProfile:
        """Account for a run: each iteration appends a token per leaf, then its moves happen."""
        width, first = len(leaves), self.num_tokens
        changes = self.resolve(moves, arriving=steps * width)
        self._tier.extend(steps * width, _HBM)
        self.appended_bytes += steps * width * self.groups * self._sizes[_HBM]
        if not len(changes) and self._pages is None:
            return self._grow(steps, width)
        self._write(changes)
        before, after = self._census.advance(steps, width, changes.group, changes)
        if self._pages is None:
            pages_after = self._bytes(after, _IN_HBM)
            pages_before = pages_after if before is after else self._bytes(before, _IN_HBM)
        else:
            self._pages.append(leaves, steps)
            opened_before, opened_after = self._pages.advance(first, width, steps, changes)
            pages_before = opened_before @ self._page_bytes
            pages_after = opened_after @ self._page_bytes
        return RunProfile(
            hbm_tokens_before=_mean_in_hbm(before),
            hbm_tokens_after=_mean_in_hbm(after),
            hbm_page_bytes_before=pages_before,
            hbm_page_bytes_after=pages_after,
            ddr_bytes_after=self._bytes(after, _IN_DDR),
            quantised_bytes_after=self._bytes(after, _QUANTISED),
            counts_before=before.sum(axis=0),
            changes=changes,
        )

    def _grow(self, steps: int, width: int) -> RunProfile:
        """`advance` without moves or pages: nothing but the tokens in HBM grows."""
        now = [*self.held, self.hbm_tokens, self.hbm_bytes, self.ddr_bytes, self.quantised_bytes]
        steady = np.repeat(np.array(now)[:, None], steps, axis=1)  # one table: it is cheaper
        counts = steady[: self.tiers]
        tokens, page_bytes, ddr_bytes, small_bytes = steady[self.tiers :]
        grown = np.arange(width, width * steps + 1, width)
        tokens += grown
        counts[_HBM] += self.groups * grown
        page_bytes += self.groups * self._sizes[_HBM] * grown
        self._census.now[:, _HBM] += steps * width
        self._held = None
        return RunProfile(
            hbm_tokens_before=tokens,
            hbm_tokens_after=tokens,
            hbm_page_bytes_before=page_bytes,
            hbm_page_bytes_after=page_bytes,
            ddr_bytes_after=ddr_bytes,
            quantised_bytes_after=small_bytes,
            counts_before=counts,
            changes=Changes.none(),
        )

    def _bytes(self, counts: np.ndarray, tiers: np.ndarray) -> np.ndarray:
        """Bytes in the tiers of the mask, all groups, from counts ``[groups, tiers, steps]``."""
        tiers = np.flatnonzero(tiers[: self.tiers])
        return np.asarray(self.bytes_by_tier[tiers] @ counts[:, tiers].sum(axis=0))

    def _write(self, changes: Changes) -> None:
        """Write tiers and bring byte totals up to date, before the counts change."""
        self._held = None
        if len(changes):
            self.tier[changes.group, changes.token] = changes.target
            self.restored_bytes += changes.count(self._gained)
            self.destroyed_bytes += changes.count(self._dropped)

    def compact(self) -> int:
        """Merge the half-empty pages of each node, and return the bytes copied to do so."""
        if self._pages is None:
            return 0
        return int(self._pages.compact(self.tier) @ self.bytes_by_tier[:_DDR])

    def check(self) -> None:
        """Recompute everything from the tiers alone: `PlanError` if a byte or a count is wrong."""
        counts = np.stack([np.bincount(row, minlength=self.tiers) for row in self.tier])
        if not np.array_equal(counts, self.counts):
            raise PlanError(f"ledger: counts by tier are {counts}, the running ones {self.counts}")
        held = int(counts.sum(axis=0) @ self.bytes_by_tier[: self.tiers])
        entered = self.appended_bytes + self.restored_bytes
        if held + self.destroyed_bytes != entered:
            raise PlanError(
                f"ledger: {held} bytes held + {self.destroyed_bytes} destroyed != "
                f"{self.appended_bytes} appended + {self.restored_bytes} restored"
            )
        if self._pages is not None:
            self._pages.check(self.tier)


def _mean_in_hbm(counts: np.ndarray) -> np.ndarray:
    """Tokens in HBM, mean over groups rounded up, from counts ``[groups, tiers, steps]``."""
    return np.asarray(-(-counts[:, :_DDR].sum(axis=(0, 1)) // len(counts)))
