"""Pairs (group, token) that move together, and copies of them that are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.host_rows import BlockList
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pool import StoredTokens
from arborsim_torch.cache.state import CacheState
from arborsim_torch.tiers.copies import Ticket

#: A group, tokens, and what reads what they hold: nothing is allocated before it is called.
GroupContent = tuple[int, np.ndarray, Callable[[], StoredTokens]]


@dataclass
class GroupTokenPairs:
    """(group, token) pairs, each of which takes a slot of its own; int64 arrays ``[m]``."""

    group: np.ndarray
    token: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    @classmethod
    def none(cls) -> GroupTokenPairs:
        return cls(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def where(self, mask: np.ndarray) -> GroupTokenPairs:
        return GroupTokenPairs(self.group[mask], self.token[mask])

    @classmethod
    def joined(cls, parts: Sequence[GroupTokenPairs]) -> GroupTokenPairs:
        return cls(
            np.concatenate([part.group for part in parts]),
            np.concatenate([part.token for part in parts]),
        )

    def grouped(self) -> GroupTokenPairs:
        """Group by group, each in the order that they have."""
        return self.where(np.argsort(self.group, kind="stable"))

    def portions(self, most: int) -> Iterator[tuple[int, slice]]:
        """Runs of one group, of at most `most` pairs: the group, and where they stand."""
        first = 0
        for end in (*(np.flatnonzero(np.diff(self.group)) + 1).tolist(), len(self)):
            for start in range(first, end, max(1, most)):
                yield int(self.group[start]), slice(start, min(start + most, end))
            first = end


@dataclass(eq=False)
class PendingCopy:
    """Tokens that are being copied."""

    target: Place  #: in DDR: where they will be stored, or come from
    pairs: GroupTokenPairs  #: in runs of one group
    blocks: BlockList  #: their rows on the host
    buffers: list[torch.Tensor]  #: what the rows are copied from, or to, on the device
    ticket: Ticket
    to_stage: bool = False  #: they come up

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(part.nbytes for part in self.buffers)

    def done(self) -> bool:
        return self.ticket.done()

    def any(self, moving: np.ndarray) -> bool:
        """Whether it has some of the tokens in bool ``[groups, tokens]``."""
        return bool(moving[self.pairs.group, self.pairs.token].any())

    def places(self, cache: CacheState) -> np.ndarray:
        """Where each token is read."""
        places: np.ndarray = cache.place.values[self.pairs.group, self.pairs.token]
        return places

    def contents(self, pool: HostPool, most: int) -> Iterator[GroupContent]:
        """The buffers' tokens as other pools store them, `most` of a group at a time."""
        for group, at in self.pairs.portions(most):
            yield group, self.pairs.token[at], partial(self._read, pool, at)

    def _read(self, pool: HostPool, at: slice) -> StoredTokens:
        parts = pool.content(self.buffers, self.blocks.at[:, at])
        return StoredTokens(parts[0].view(pool.codec.storage), *parts[1:])
