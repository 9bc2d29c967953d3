"""The slot table of a pool on the host: which token sits where, and which slots are free.

Every group has slots of its own.  A freed slot is the first to be taken again, so a cache that
evicts one token for every one that enters stays without gaps.
"""

from __future__ import annotations

import numpy as np

from arborsim.core.tree import GrowingTable

NOWHERE = -1
_MOST_NOTED = 1 << 17  # pairs that came or went between two looks; beyond, all is looked at anew


class SlotTable:
    """The slot of every token, per group.

    Slots below `high` have been taken at some time.  `used` are the tokens held, both int64
    ``[groups]``, and `total` their sum.
    """

    def __init__(self, groups: int) -> None:
        self.high = np.zeros(groups, dtype=np.int64)
        self.used = np.zeros(groups, dtype=np.int64)
        self.total = 0
        self._groups = groups
        self._slot = GrowingTable(groups, np.int32)
        self._free = np.zeros((groups, 16), dtype=np.int32)  # stacks; the last entry is taken next
        self._num_free = np.zeros(groups, dtype=np.int64)
        self._noted: list[tuple[np.ndarray | None, np.ndarray]] | None = None
        self._num_noted = 0

    def changes(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Pairs (group, token) that have come or gone since the last call; some of them twice.

        None at first, if they were too many to note, or if slots have been numbered anew.
        """
        noted, self._noted, self._num_noted = self._noted, [], 0
        if noted is None:
            return None
        if not noted:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        zeros = (np.zeros(len(t), dtype=np.int64) if g is None else g for g, t in noted)
        return np.concatenate(list(zeros)), np.concatenate([token for _, token in noted])

    def _note(self, group: np.ndarray | None, token: np.ndarray) -> None:
        if self._noted is None:
            return
        self._num_noted += len(token)
        if self._num_noted > _MOST_NOTED:
            self._noted = None
        else:
            self._noted.append((group, token))

    def grow(self, tokens: int) -> None:
        """Know of tokens up to, not including, number `tokens`; they sit nowhere yet."""
        if tokens > len(self._slot):
            self._slot.extend(tokens - len(self._slot), NOWHERE)

    @property
    def of(self) -> np.ndarray:
        """Int32 ``[groups, tokens]``: slots; `NOWHERE` for tokens that are not here.  A view."""
        return self._slot.values

    @property
    def next(self) -> np.ndarray:
        """Int64 ``[groups]``: the slot that the next token of each group gets."""
        last = np.take_along_axis(self._free, np.maximum(self._num_free - 1, 0)[:, None], axis=1)
        return np.where(self._num_free > 0, last[:, 0], self.high)

    def take(self, group: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Give slots to pairs (group, token); returns them, int64 ``[pairs]``."""
        self.total += len(token)
        counts = np.bincount(group, minlength=self._groups)
        rank = _rank(group, counts)
        spare = self._num_free[group]
        again = rank < spare
        top = np.where(again, spare - 1 - rank, 0)
        slot = np.where(again, self._free[group, top], self.high[group] + rank - spare)
        from_free = np.minimum(counts, self._num_free)
        self._num_free -= from_free
        self.high += counts - from_free
        self.used += counts
        self._slot.values[group, token] = slot
        self._note(group, token)
        return np.asarray(slot, dtype=np.int64)

    def take_shared(self, token: np.ndarray) -> np.ndarray:
        """`take` where there is one group, without looking for ranks."""
        count, spare, high = len(token), int(self._num_free[0]), int(self.high[0])
        again = min(count, spare)
        slot = np.arange(high - again, high - again + count)
        if again:
            slot[:again] = self._free[0, spare - again : spare][::-1]
            self._num_free[0] = spare - again
        self.high[0] = high + count - again
        self.used[0] += count
        self.total += count
        self._slot.values[0, token] = slot
        self._note(None, token)
        return slot

    def give_back(self, group: np.ndarray, token: np.ndarray) -> None:
        """Free the slots of pairs."""
        slot = self._slot.values[group, token]
        counts = np.bincount(group, minlength=self._groups)
        needed = int((self._num_free + counts).max(initial=0))
        if needed > self._free.shape[1]:
            grown = np.zeros((self._groups, max(needed, 2 * self._free.shape[1])), dtype=np.int32)
            grown[:, : self._free.shape[1]] = self._free
            self._free = grown
        self._free[group, self._num_free[group] + _rank(group, counts)] = slot
        self._num_free += counts
        self.used -= counts
        self.total -= len(token)
        self._slot.values[group, token] = NOWHERE
        self._note(group, token)

    def give_back_shared(self, token: np.ndarray) -> None:
        """`give_back` where there is one group, without looking for ranks."""
        count, spare = len(token), int(self._num_free[0])
        if spare + count > self._free.shape[1]:
            grown = np.zeros((1, max(spare + count, 2 * self._free.shape[1])), dtype=np.int32)
            grown[0, :spare] = self._free[0, :spare]
            self._free = grown
        row = self._slot.values[0]
        self._free[0, spare : spare + count] = row[token]
        row[token] = NOWHERE
        self._num_free[0] = spare + count
        self.used[0] -= count
        self.total -= count
        self._note(None, token)

    def compact(self) -> list[np.ndarray]:
        """Number the slots of each group anew, without gaps, in the order of tokens.

        Returns a list of int64 ``[used]``: per group the old slots in their new order.
        """
        old = []
        for g in range(self._groups):
            row = self._slot.values[g]
            held = np.flatnonzero(row >= 0)
            old.append(row[held].astype(np.int64))
            row[held] = np.arange(len(held))
        self.high[:] = self.used
        self._num_free[:] = 0
        self._noted = None
        return old


def _rank(group: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many pairs of its group come before each pair."""
    if len(counts) == 1:
        return np.arange(len(group))
    order = np.argsort(group, kind="stable")
    first = np.cumsum(counts) - counts
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - first[group[order]]
    return rank
