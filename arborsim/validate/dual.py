"""Two executors driven as one: a live one that decides what happens, and a simulated one.

The controller drives both with the same calls, so every byte that the simulator accounts for has a
counterpart that the live machine really holds.  After each call both are asked what they hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.memory.moves import Moves
from arborsim.run.controller import Executor
from arborsim.run.meters import MoveLog

#: What is counted on both sides, in bytes; staging buffers are copies in HBM of tokens in DDR.
PARTS = ("hbm", "hbm_quantised", "ddr", "ddr_quantised", "staging")

#: Bytes held now, by `PARTS`.
Held = tuple[int, int, int, int, int]

_STORED = (Tier.HBM, Tier.HBM_QUANTISED, Tier.DDR, Tier.DDR_QUANTISED)


def held_by(simulated: SimulatedExecutor) -> Held:
    """Bytes by `PARTS` in the ledger of a simulated executor."""
    ledger = simulated.ledger
    size = ledger.bytes_by_tier.tolist()
    hbm, small, ddr, small_ddr = (ledger.held[tier] * size[tier] for tier in _STORED)
    return hbm, small, ddr, small_ddr, simulated.staging_bytes


class DualExecutor:
    """An `arborsim.run.controller.Executor` that forwards every call to two others.

    The controller sees the tiers of `live`.  `held` says which bytes the live machine holds now, by
    `PARTS`.  `log` has the moves that really were carried out; `overhead_s` and `overhead_thread_s`
    are seconds that went into the simulator and the comparison, on the clock and of this thread's
    CPU time: not the search's.
    """

    def __init__(
        self, live: Executor, simulated: SimulatedExecutor, held: Callable[[], Held]
    ) -> None:
        self.live, self.simulated = live, simulated
        self.clock, self.measurements = live.clock, live.measurements
        self.log = MoveLog()
        self.overhead_s = self.overhead_thread_s = 0.0
        self._held = held
        self._iteration = 0
        self._tiers_differ = 0
        self._samples: list[tuple[int, Held, Held]] = []

    @property
    def tier(self) -> np.ndarray:
        return self.live.tier

    def bind(self, tree: ThoughtTree) -> None:
        self._tree = tree
        self.live.bind(tree)
        self.simulated.bind(tree)

    def prefill(self, run: TokenRun) -> None:
        self.live.prefill(run)
        self._apart(lambda: self.simulated.prefill(run))

    def advance(self, run: TokenRun, moves: Moves, decided_from: int | None) -> None:
        self._iteration += run.steps
        self.live.advance(run, moves, decided_from)
        self._apart(
            lambda: self.simulated.advance(run, moves, decided_from),
            lambda: self.log.ran(run, self._tree, self.tier, moves),
        )

    def activate(self, leaves: tuple[int, ...]) -> None:
        self.live.activate(leaves)
        self._apart(lambda: self.simulated.activate(leaves))

    def apply(self, moves: Moves, examined_tokens: int) -> None:
        self.live.apply(moves, examined_tokens)
        self._apart(
            lambda: self.simulated.apply(moves, examined_tokens),
            lambda: self.log.moved(moves, self.tier),
        )

    def finish(self) -> None:
        self.live.finish()
        self._apart(self.simulated.finish)

    def bytes_over_time(self) -> BytesOverTime:
        """What both held after each call."""
        iteration = np.array([iteration for iteration, _, _ in self._samples], np.int64)
        live = np.array([live for _, live, _ in self._samples], np.int64)
        simulated = np.array([simulated for *_, simulated in self._samples], np.int64)
        return BytesOverTime(iteration, live, simulated, self._tiers_differ)

    def _apart(self, *steps: Callable[[], None]) -> None:
        """Do what is not part of the search, then look at both sides."""
        begun, begun_thread = time.perf_counter(), time.thread_time()
        for step in steps:
            step()
        self._samples.append((self._iteration, self._held(), held_by(self.simulated)))
        self._tiers_differ += not np.array_equal(self.live.tier, self.simulated.tier)
        self.overhead_s += time.perf_counter() - begun
        self.overhead_thread_s += time.thread_time() - begun_thread


@dataclass(frozen=True, eq=False)
class BytesOverTime:
    """What a live machine and its simulation held, call by call."""

    iteration: np.ndarray  #: int64 ``[calls]``, decode iterations done by then
    #: Bytes by `PARTS`, int64 ``[calls, parts]``
    live: np.ndarray
    simulated: np.ndarray
    #: Calls after which some token was not in the same tier on both sides
    tiers_differ: int

    def __len__(self) -> int:
        return len(self.iteration)

    @property
    def equal(self) -> int:
        """Calls after which all parts were equal to the byte."""
        return int((self.live == self.simulated).all(axis=1).sum())

    @property
    def off(self) -> tuple[int, ...]:
        """Largest difference of each part at any moment, simulated less live."""
        difference = self.simulated - self.live
        worst = np.abs(difference).argmax(axis=0)
        return tuple(difference[worst, np.arange(len(PARTS))].tolist())

    def thinned(self, points: int) -> np.ndarray:
        """At most `points` rows, int64 ``[rows, 1 + 2 * parts]``: iteration, live, simulated.

        The last call of each iteration is kept where there is room.
        """
        last = np.flatnonzero(np.diff(self.iteration, append=self.iteration[-1:] + 1))
        if len(last) > points:
            last = last[np.linspace(0, len(last) - 1, points).round().astype(int)]
        return np.concatenate(
            [self.iteration[last, None], self.live[last], self.simulated[last]], axis=1
        )
