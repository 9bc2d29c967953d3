"""Memories next to HBM: how much each holds, and the link that tokens cross to it and back.

A link carries both directions at once, each first come, first served.  The bytes of a memory below
DDR cross its own link only: they also pass PCIe, of which they take a small share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from arborsim.core.errors import UsageError
from arborsim.core.records import Whole, check_ranges
from arborsim.core.sourced import Rate, Seconds, Sourced, meant
from arborsim.core.tiers import BELOW_DDR, MEMORIES

Direction = Literal["h2d", "d2h"]


@dataclass(frozen=True)
class Memory(Sourced):
    """One memory, as ``[[memories]]`` of a profile lists those below DDR."""

    name: str  # one of `MEMORIES`
    bytes: Annotated[Whole, Meta(gt=0), meant("memory that offloading may use", "GB", 1e9)]
    read_bytes_per_s: Annotated[Rate, meant("its link to the GPU: large blocks", "GB/s", 1e9)]
    write_bytes_per_s: Annotated[Rate, meant("its link from the GPU: large blocks", "GB/s", 1e9)]
    latency_s: Annotated[Seconds, meant("latency of each transfer", "us", 1e-6)] = 0.0
    block_bytes: Annotated[
        tuple[float, ...], meant("contiguous block sizes of its link's curve", "KiB", 1024)
    ] = (1.0,)
    block_efficiency: Annotated[tuple[float, ...], meant("of its bandwidth at these sizes")] = (
        1.0,
    )
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, f"memory {self.name}")
        check_curve(self.block_bytes, self.block_efficiency)

    @property
    def number(self) -> int:
        """Which of `MEMORIES` it is."""
        return MEMORIES.index(self.name)

    def bytes_per_s(self, block_bytes: np.ndarray | float, direction: Direction) -> np.ndarray:
        """Bandwidth of one direction for contiguous blocks of `block_bytes` each.

        Between the curve's points the share is linear in the logarithm of the block size; beyond
        them it stays what it is at the ends.
        """
        peak = self.read_bytes_per_s if direction == "h2d" else self.write_bytes_per_s
        size = np.log2(np.maximum(block_bytes, 1.0))
        return np.asarray(peak * np.interp(size, np.log2(self.block_bytes), self.block_efficiency))


def check_curve(sizes: tuple[float, ...], shares: tuple[float, ...]) -> None:
    """Raise `UsageError` unless these are a curve of shares by block size."""
    rising = all(a < b for a, b in zip((0.0, *sizes), sizes, strict=False))
    if not (len(sizes) == len(shares) >= 1 and rising and all(0 < s <= 1 for s in shares)):
        raise UsageError(
            "block_bytes must rise, with a block_efficiency in (0, 1] for each, not "
            f"{sizes!r} and {shares!r}"
        )


def check_memories(memories: tuple[Memory, ...]) -> None:
    """Raise `UsageError` unless these can be listed: memories below DDR, each once."""
    names = [each.name for each in memories]
    for at, name in enumerate(names):
        if name not in BELOW_DDR:
            raise UsageError(
                f"[[memories]] name must be one of {', '.join(BELOW_DDR)}, not {name!r}: HBM and "
                "DDR have keys of their own"
            )
        if name in names[:at]:
            raise UsageError(f"[[memories]] lists {name} twice: give each memory once")
