"""Cells (group, token) of a cache, and blocks of them on their way between tiers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from arborsim_torch.cache.places import Place
from arborsim_torch.cache.pool import Block
from arborsim_torch.tiers.lane import Ticket


@dataclass
class Cells:
    """Cells (group, token) of the cache; int64 arrays ``[m]``."""

    group: np.ndarray
    token: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    def where(self, mask: np.ndarray) -> Cells:
        return Cells(self.group[mask], self.token[mask])

    def by_group(self) -> Iterator[tuple[int, np.ndarray]]:
        """Each group that has cells, and its tokens."""
        for group in np.unique(self.group).tolist():
            yield group, self.token[self.group == group]


@dataclass
class Flight:
    """Blocks on their way, per group; `lands` is their home when they arrive."""

    lands: Place
    parts: list[tuple[int, np.ndarray, Block]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    to_stage: bool = False

    def done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> float:
        return sum(ticket.wait() for ticket in self.tickets)
