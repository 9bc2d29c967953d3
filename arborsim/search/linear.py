"""One chain of thoughts, never branching: what ordinary decoding does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from arborsim.search.base import Expansion, Leaf


@dataclass
class Linear:
    """Continue the newest thought until it is finished."""

    name: ClassVar[str] = "linear"
    synchronous: ClassVar[bool] = True

    @property
    def slots(self) -> int:
        return 1

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        leaf = frontier[-1]
        return Expansion({leaf.node: 1}) if leaf.expandable else Expansion(done=True)

    def answer(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return (frontier[-1].node,)
