"""Notes on a simulated search: what it asked for, in order, until it becomes a `SearchDemand`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import simpy

from arborsim.machine.demand import LEG_COLUMNS, DemandInfo, Op, SearchDemand
from arborsim.machine.pieces import FIXED, LINEAR, cut

Levels = tuple[int, int, int]
_HBM, _PREFIX = LINEAR.index("hbm_bytes"), LINEAR.index("prefix_bytes")


@dataclass
class _Chain:
    """Transfers that follow each other in one background process."""

    legs: list[list[int]] = field(default_factory=list)
    ended: int = 0
    waited_for: bool = False
    begins_with: int = 0  # bytes of HBM taken before the first transfer is known

    @property
    def done(self) -> bool:
        return bool(self.legs) and self.ended == len(self.legs)


class Notes:
    """Phases of a search as they happen.

    Parameters
    ----------
    levels : callable
        Tells bytes of HBM in pages and buffers, of those the shared prefix, and of DDR.
    """

    def __init__(self, levels: Callable[[], Levels]) -> None:
        self._levels = levels
        self._shown: Levels | None = None
        self._ops: list[tuple[int, int, int, int]] = []
        self._fixed: list[np.ndarray] = []
        self._linear: list[np.ndarray] = []
        self._pieces: list[np.ndarray] = []
        self._num_pieces = 0
        self._chains: list[_Chain] = []
        self._chain_of: dict[simpy.Process, int] = {}
        self._closed = False

    def prefill(self, tokens: int) -> None:
        self._put(Op.PREFILL, tokens)

    def iterations(self, fixed: np.ndarray, linear: np.ndarray) -> None:
        """Decode iterations; the columns are those of `arborsim.machine.pieces.cut`."""
        self._fixed.append(fixed)
        self._linear.append(linear)

    def decides(self, examined_tokens: int) -> None:
        self._put(Op.DECIDE, examined_tokens)

    def turns(self, sequences: int) -> None:
        """What memory holds is left to the next iteration: most turns take no time at all."""
        self._flush()
        self._ops.append((Op.TURN, sequences, 0, 0))

    def copies(self, touched_bytes: int) -> None:
        if touched_bytes:
            self._put(Op.COPY, touched_bytes)

    def recomputes(self, tokens: int, present_tokens: int) -> None:
        self._put(Op.RECOMPUTE, tokens, present_tokens)

    def sync(self) -> None:
        """Note what memory holds now, if that has changed."""
        self._flush()
        levels = self._levels()
        if levels != self._shown:
            self._ops.append((Op.LEVEL, *levels))
            self._shown = levels

    def starts(self, process: simpy.Process) -> None:
        """A background process begins its transfers."""
        self._chain_of[process] = len(self._chains)
        self._put(Op.SEND, len(self._chains))
        self._chains.append(_Chain())

    def chain_of(self, process: simpy.Process | None) -> int:
        assert process is not None, "transfers run in the background"
        return self._chain_of[process]

    def leg_begins(self, chain: int, up: bool, size_bytes: int) -> None:
        noted = self._chains[chain]
        noted.legs.append([chain, int(up), size_bytes, noted.begins_with, 0])
        noted.begins_with = 0

    def leg_ends(self, chain: int) -> None:
        self._chains[chain].ended += 1

    def holds(self, process: simpy.Process | None, delta_bytes: int) -> None:
        """HBM beside the pages has changed, in a background process or in the search itself."""
        if process is not None and process in self._chain_of:
            chain = self._chains[self._chain_of[process]]
            if chain.done and delta_bytes < 0:
                chain.legs[-1][4] += delta_bytes
            else:
                chain.begins_with += delta_bytes
            return
        if delta_bytes < 0:
            self._wait_for_buffers()
        self._put(Op.HOLD, delta_bytes)

    def waits(self, processes: Iterable[simpy.Process] | None) -> None:
        if self._closed:
            return
        if processes is not None:
            chains = [self._chain_of[process] for process in processes]
            for chain in chains:
                self._put(Op.WAIT, chain)
        else:
            chains = list(range(len(self._chains)))
            if chains:
                self._put(Op.WAIT, -1)
        for chain in chains:
            self._chains[chain].waited_for = True

    def settle(self) -> None:
        """Tokens that came back while the search went on must be there from now on."""
        for number, chain in enumerate(self._chains):
            if not chain.waited_for and chain.done and chain.legs[0][1]:
                self._put(Op.WAIT, number)
                chain.waited_for = True

    def close(self) -> None:
        """The search is over: nobody waits for what is still under way."""
        self.sync()
        self._closed = True

    def demand(self, info: DemandInfo) -> SearchDemand:
        """Everything noted."""
        self.sync()
        legs = [leg for chain in self._chains for leg in chain.legs]
        for chain in self._chains:
            assert not chain.begins_with, "every change of HBM belongs to a transfer"
        width = 1 + len(FIXED) + 2 * len(LINEAR)
        pieces = np.concatenate([np.zeros((0, width), dtype=np.int64), *self._pieces])
        ops = np.array(self._ops, dtype=np.int64).reshape(-1, 4)
        return SearchDemand(
            info, ops, pieces, np.array(legs, dtype=np.int64).reshape(-1, len(LEG_COLUMNS))
        )

    def _put(self, op: Op, *numbers: int) -> None:
        self.sync()
        one, two, three = (*numbers, 0, 0, 0)[:3]
        self._ops.append((op, int(one), int(two), int(three)))

    def _flush(self) -> None:
        """Turn the iterations since the last phase into pieces."""
        if not self._fixed:
            return
        linear = np.concatenate(self._linear)
        pieces = cut(np.concatenate(self._fixed), linear)
        self._fixed, self._linear = [], []
        for row in range(len(pieces)):
            self._ops.append((Op.DECODE, self._num_pieces + row, 0, 0))
        self._num_pieces += len(pieces)
        self._pieces.append(pieces)
        ddr_bytes = self._shown[2] if self._shown else 0
        self._shown = int(linear[-1, _HBM]), int(linear[-1, _PREFIX]), ddr_bytes

    def _wait_for_buffers(self) -> None:
        """A buffer can only be given up once the transfer that fills it has begun."""
        begun = [n for n, chain in enumerate(self._chains) if chain.legs and chain.legs[-1][1]]
        if begun:
            self._put(Op.BEGUN, begun[-1])
