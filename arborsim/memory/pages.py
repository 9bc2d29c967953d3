"""Pages: HBM is handed out in blocks of slots, and a block is free only when it is empty.

A page belongs to one node of the tree, because a shared node must be shared whole.  Tokens of a
node fill its pages in order.  A token keeps its slot when it leaves HBM and takes it again when it
comes back.  Quantised tokens live in a twin of their page with narrower slots.  So evicting single
tokens frees bytes only once all tokens of a page are gone, or after `PageTable.compact`.
"""

from __future__ import annotations

import numpy as np

from arborsim.core.errors import PlanError
from arborsim.core.tiers import Tier
from arborsim.core.tree import GrowingTable
from arborsim.memory.moves import Changes

#: Most slots in a page: tokens in each are counted in 16 bits.
MOST_PAGE_TOKENS = int(np.iinfo(np.int16).max)
_POOLS = int(Tier.DDR)  # full precision and two formats: the tiers of HBM


class PageTable:
    """Which page each token has its slot in, and how many tokens each page holds.

    Every group has pages of its own, numbered alike, of `page_tokens` slots.
    """

    def __init__(self, groups: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        #: Pages that hold at least one token, by pool (tier of HBM), all groups.
        self.open_pages = np.zeros(_POOLS, dtype=np.int64)
        self._groups = groups
        self._page = GrowingTable(groups, np.int32)  # of each token
        self._held = GrowingTable(_POOLS * groups, np.int16)  # tokens in each page
        self._owner = GrowingTable(1, np.int32)  # node of each page
        self._filling: dict[int, tuple[int, int]] = {}  # node: its newest page, slots used in it

    def append(self, leaves: tuple[int, ...], steps: int) -> None:
        """Give slots to `steps` tokens of each leaf, interleaved.  `advance` lets them in."""
        width, first = len(leaves), len(self._page)
        self._page.extend(steps * width, 0)
        for column, leaf in enumerate(leaves):
            page, used = self._filling.get(leaf, (-1, self.page_tokens))
            slot = used + np.arange(steps)
            fresh = int(slot[-1]) // self.page_tokens  # pages to open beyond the newest
            opened = self._open(leaf, fresh)
            pages = np.concatenate([[page], opened])
            self._page.values[:, first + column :: width] = pages[slot // self.page_tokens]
            self._filling[leaf] = int(pages[-1]), int(slot[-1]) % self.page_tokens + 1

    def _open(self, node: int, count: int) -> np.ndarray:
        first = len(self._owner)
        self._owner.extend(count, node)
        self._held.extend(count, 0)
        return np.arange(first, first + count)

    def advance(
        self, first: int, width: int, steps: int, changes: Changes
    ) -> tuple[np.ndarray, np.ndarray]:
        """Let tokens enter and move, and follow the number of open pages.

        The `width` tokens of each iteration, ids from `first` on, enter HBM in every group.  Then
        the iteration's changes happen.  Returns the open pages of each iteration before and after
        its changes, int64 ``[steps, pools]``.
        """
        cell, moment, delta = self._events(first, width, steps, changes)
        opened = np.zeros((2 * steps, _POOLS), dtype=np.int64)
        if len(cell):
            order = np.argsort(cell * (2 * steps) + moment, kind="stable")
            self._follow(cell[order], moment[order], delta[order], opened)
        level = self.open_pages + np.cumsum(opened, axis=0)
        self.open_pages = level[-1].copy()
        return level[0::2], level[1::2]

    def _events(
        self, first: int, width: int, steps: int, changes: Changes
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cell (pool, group, page), moment (even: entering, odd: moving) and +1 or -1 of each."""
        born = np.arange(first, first + steps * width)
        group = np.repeat(np.arange(self._groups), len(born))
        token = np.tile(born, self._groups)
        cells = [self._cell(Tier.HBM, group, token)]
        moments = [2 * ((token - first) // max(1, width))]
        deltas = [np.ones(len(token), dtype=np.int64)]
        for tier, sign in ((changes.source, -1), (changes.target, 1)):
            stays = tier < _POOLS
            cells.append(self._cell(tier[stays], changes.group[stays], changes.token[stays]))
            moments.append(2 * changes.step[stays] + 1)
            deltas.append(np.full(int(stays.sum()), sign))
        return np.concatenate(cells), np.concatenate(moments), np.concatenate(deltas)

    def _cell(self, pool: np.ndarray | int, group: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Index into the flattened table of held tokens."""
        row = np.asarray(pool, dtype=np.int64) * self._groups + group
        page = self._page.values[group, token]
        return np.asarray(row * len(self._held) + page)

    def _follow(
        self, cell: np.ndarray, moment: np.ndarray, delta: np.ndarray, opened: np.ndarray
    ) -> None:
        """Run events, sorted by cell and moment, and note where pages open (+1) and close (-1)."""
        row, page = np.divmod(cell, len(self._held))
        begins = np.append(True, cell[1:] != cell[:-1])
        # Tokens held after each event: a cumulative sum that starts anew with every cell.
        total = np.cumsum(delta)
        held = self._held.values[row, page].astype(np.int64)
        level = held + total - (total - delta)[begins][np.cumsum(begins) - 1]
        # Events of one moment count as one: look at the last of each, and at the one before it.
        last = np.append((cell[1:] != cell[:-1]) | (moment[1:] != moment[:-1]), True)
        cell, row, page, moment, level = (a[last] for a in (cell, row, page, moment, level))
        begins = np.append(True, cell[1:] != cell[:-1])
        earlier = np.where(begins, held[last], np.append(0, level[:-1]))
        step = (level > 0).astype(np.int64) - (earlier > 0)
        np.add.at(opened, (moment, row // self._groups), step)
        ends = np.append(begins[1:], True)
        self._held.values[row[ends], page[ends]] = level[ends]

    def compact(self, tier: np.ndarray) -> np.ndarray:
        """Merge the half-empty pages of each node where that frees pages.

        Pages that are being filled stay.

        Of tiers ``[groups, tokens]``.  Returns the tokens copied (per group), int64 ``[pools]``.
        """
        copied = np.zeros(_POOLS, dtype=np.int64)
        filling = np.array([page for page, _ in self._filling.values()], dtype=np.int64)
        for pool in range(_POOLS):
            for group in range(self._groups):
                copied[pool] += self._compact_group(pool, group, tier[group], filling)
        return copied

    def _compact_group(self, pool: int, group: int, tier: np.ndarray, filling: np.ndarray) -> int:
        row = pool * self._groups + group
        held = self._held.values[row]
        mergeable = (held > 0) & (held < self.page_tokens)
        mergeable[filling] = False
        page_of = self._page.values[group]
        tokens = np.flatnonzero((tier == pool) & mergeable[page_of])
        owner = self._owner.values[0]
        tokens = tokens[np.argsort(owner[page_of[tokens]], kind="stable")]
        nodes, starts, counts = np.unique(
            owner[page_of[tokens]], return_index=True, return_counts=True
        )
        occupied = np.bincount(owner[mergeable], minlength=int(nodes.max(initial=0)) + 1)
        copied = 0
        spans = zip(nodes.tolist(), starts.tolist(), counts.tolist(), strict=True)
        for node, start, count in spans:
            needed = -(-count // self.page_tokens)
            if needed < occupied[node]:
                self._repack(row, group, node, tokens[start : start + count], needed)
                self.open_pages[pool] -= int(occupied[node]) - needed
                copied += count
        return copied

    def _repack(self, row: int, group: int, node: int, tokens: np.ndarray, pages: int) -> None:
        """Move `tokens` of one node into fresh pages."""
        old = self._page.values[group, tokens]
        fresh = self._open(node, pages)
        new = fresh[np.arange(len(tokens)) // self.page_tokens]
        np.subtract.at(self._held.values[row], old, 1)
        np.add.at(self._held.values[row], new, 1)
        self._page.values[group, tokens] = new

    def check(self, tier: np.ndarray) -> None:
        """Recount the tokens of every page, and raise `PlanError` on a difference."""
        held = np.zeros_like(self._held.values)
        for pool in range(_POOLS):
            for group in range(self._groups):
                pages = self._page.values[group, tier[group] == pool]
                held[pool * self._groups + group] = np.bincount(pages, minlength=len(self._held))
        if not np.array_equal(held, self._held.values):
            wrong = int(np.flatnonzero((held != self._held.values).any(axis=0))[0])
            raise PlanError(f"pages: page {wrong} does not hold the tokens it is said to hold")
        opened = (held > 0).reshape(_POOLS, -1).sum(axis=1)
        if not np.array_equal(opened, self.open_pages):
            raise PlanError(f"pages: {opened} are open, the running count says {self.open_pages}")
