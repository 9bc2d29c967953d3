"""A live search compared with its simulation: bytes call by call, decisions iteration by iteration.

Bytes: the controller drives a live and a simulated executor with the same calls (`DualExecutor`),
so every byte that the simulator accounts for has a counterpart that the live machine really holds.
After each call both are asked what they hold (`BytesOverTime`).

Decisions: the replay of a shadow run's own recording must repeat its moves (`replay_cells`).  A
live run is compared by the tokens that both keep in HBM, iteration by iteration (`agreement`): in
the shadow run nothing is removed, the live one really evicts.  Evicting changes what the model
computes, so the second run's signals drift away from the first one's even while both still generate
the same tokens; once a token differs they are different searches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import TokenRun
from arborsim.core.tiers import Tier, by_tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.memory.moves import ALL_GROUPS, Moves
from arborsim.play.controller import Executor
from arborsim.play.episode import Cell, play_episode
from arborsim.play.meters import Quality
from arborsim.play.move_log import MoveLog
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind

#: What is counted on both sides, in bytes; staging buffers are copies in HBM of tokens in DDR.
PARTS = ("hbm", "hbm_quantised", "ddr", "ddr_quantised", "staging")

#: Bytes held now, by `PARTS`.
Held = tuple[int, int, int, int, int]

_SMALL = ((Tier.HBM_QUANTISED, Tier.HBM_COARSE), (Tier.DDR_QUANTISED, Tier.DDR_COARSE))
_STORED = ((Tier.HBM,), _SMALL[0], (Tier.DDR,), _SMALL[1])
_IN_HBM = by_tier(lambda tier: tier.in_hbm)
_TIERS = [int(tier) for tier in Tier]


def held_by(simulated: SimulatedExecutor) -> Held:
    """Bytes by `PARTS` in the ledger of a simulated executor."""
    ledger = simulated.ledger
    size = ledger.bytes_by_tier.tolist()
    hbm, small, ddr, small_ddr = (
        sum(ledger.held[tier] * size[tier] for tier in tiers) for tiers in _STORED
    )
    return hbm, small, ddr, small_ddr, simulated.staging_bytes


class DualExecutor:
    """An `arborsim.play.controller.Executor` that forwards every call to two others.

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

    def advance(self, run: TokenRun, moves: Moves) -> None:
        self._iteration += run.steps
        self.live.advance(run, moves)
        self._apart(
            lambda: self.simulated.advance(run, moves),
            lambda: self.log.ran(run, self._tree, self.tier, moves),
        )

    def activate(self, leaves: tuple[int, ...]) -> None:
        self.live.activate(leaves)
        self._apart(lambda: self.simulated.activate(leaves))

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        self.live.apply(moves, examined_tokens, reads)
        self._apart(
            lambda: self.simulated.apply(moves, examined_tokens, reads),
            lambda: self.log.moved(moves, self.tier, reads),
        )

    def finish(self) -> None:
        self.live.finish()
        self._apart(self.simulated.finish)

    def bytes_over_time(self) -> BytesOverTime:
        """Bytes that both held after each call."""
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
    """Bytes that a live machine and its simulation held, call by call."""

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


@dataclass(frozen=True)
class Generated:
    """The tokens that a search generated."""

    #: Of every token in order of arrival, the prompt first: int32 ``[tokens]``
    node: np.ndarray
    token: np.ndarray
    #: Tokens there were after each iteration, those of the prompt after iteration 0:
    #: int64 ``[iterations + 1]``
    born: np.ndarray

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Generated:
        """From the columns of an episode: ``kind, iteration, node, token``, each ``[rows]``."""
        kind = np.asarray(columns["kind"])
        rows = np.flatnonzero((kind == Kind.PREFILL) | (kind == Kind.TOKEN))
        node, token = (np.asarray(columns[name])[rows] for name in ("node", "token"))
        iteration = np.asarray(columns["iteration"])[rows][kind[rows] == Kind.TOKEN]
        _, last = np.unique(iteration[::-1], return_index=True)
        prompt = len(rows) - len(iteration)
        return cls(node, token, np.concatenate([[prompt], len(rows) - last]))

    @property
    def iterations(self) -> int:
        return len(self.born) - 1

    def same_iterations(self, other: Generated) -> int:
        """How many iterations both searches did alike from the start, token by token."""
        shorter = min(len(self.token), len(other.token))
        differ = (self.token[:shorter] != other.token[:shorter]) | (
            self.node[:shorter] != other.node[:shorter]
        )
        first = int(np.argmax(differ)) if differ.any() else shorter
        return min(int(np.searchsorted(c.born, first, side="right")) - 1 for c in (self, other))


@dataclass(frozen=True)
class Replayed:
    """One cell of a replay."""

    moves: np.ndarray  #: int64 ``[moves, 4]``, see `MoveLog.rows`
    #: NaN if the trace lacks what they are made of
    attention_kept: float = float("nan")
    output_error: float = float("nan")
    infeasible: str = ""  #: why the budget cannot hold the search; empty if it can


def replay_cells(
    trace: Path, cells: Sequence[Cell], machine: Machine
) -> tuple[Generated, list[Replayed]]:
    """Replay the one episode of `trace` under each cell.

    Raises `MissingSignal` if a policy reads what the trace does not hold.
    """
    reader = TraceReader(trace)
    quality = Quality.of(reader)
    needs = quality.reads(cell.policy.grouping for cell in cells).union(
        *(cell.policy.reads() for cell in cells)
    )
    (episode,) = reader.episodes(tuple(sorted(needs)), who="the replay")
    columns = {"kind": episode.kind, "iteration": episode.iteration, "node": episode.node}
    token = np.full(episode.num_rows, -1, dtype=np.int32)
    token[episode.token_rows] = episode.token
    found = []
    for cell in cells:
        log, executor = MoveLog(), SimulatedExecutor.of(machine, cell.policy, reader.info)
        try:
            played = play_episode(episode, cell, executor, quality=quality, meters=[log])
        except BudgetInfeasible as problem:
            found.append(Replayed(log.rows, infeasible=str(problem)))
            continue
        found.append(Replayed(log.rows, played.attention_kept, played.output_error))
    return Generated.of({**columns, "token": token}), found


@dataclass(frozen=True)
class Agreement:
    """Jaccard index of the tokens in HBM, in [0, 1], at some iterations."""

    iteration: np.ndarray  #: int64 ``[points]``
    jaccard: np.ndarray  #: float64 ``[points]``
    same: int  #: iterations for which both searches generated the same tokens

    @property
    def before(self) -> float:
        """Mean while both generated the same tokens; NaN if they never did."""
        return _mean(self.jaccard[self.iteration <= self.same])

    @property
    def after(self) -> float:
        """Mean after that, tokens matched by order of arrival; NaN if they stayed the same."""
        return _mean(self.jaccard[self.iteration > self.same])


def agreement(
    shadow: Generated,
    shadow_moves: np.ndarray,
    live: Generated,
    live_moves: np.ndarray,
    groups: int,
    points: int = 64,
) -> Agreement:
    """Compare what two runs keep in HBM, at either precision.

    Moves are int64 ``[moves, 4]`` (`MoveLog.rows`).  Each (cache group, token) is an element of the
    sets compared, at no more than `points` iterations, evenly spread over the shorter run.
    """
    last = min(shadow.iterations, live.iterations)
    same = shadow.same_iterations(live)
    spread = np.linspace(0, last, min(points, last + 1)).round().astype(np.int64)
    at = np.unique([*spread.tolist(), min(same, last)])
    sides = _Kept(shadow, shadow_moves, groups), _Kept(live, live_moves, groups)
    found = []
    for iteration in at.tolist():
        one, other = (side.after(iteration) for side in sides)
        width = max(one.shape[1], other.shape[1])
        one, other = (np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in (one, other))
        either = int((one | other).sum())
        found.append(int((one & other).sum()) / either if either else 1.0)
    return Agreement(at, np.array(found), same)


class _Kept:
    """Follows which cells of a run are in HBM."""

    def __init__(self, generated: Generated, moves: np.ndarray, groups: int) -> None:
        changes = np.isin(moves[:, 3], _TIERS)  # others are of what is read
        self._born, self._moves, self._done = generated.born, moves[changes], 0
        self._in_hbm = np.ones((groups, int(generated.born[-1])), dtype=bool)

    def after(self, iteration: int) -> np.ndarray:
        """Bool ``[groups, tokens]`` after an iteration, which is none before the last asked for."""
        stop = int(np.searchsorted(self._moves[:, 0], iteration, side="right"))
        # Moves of one token come in order of iteration; within one iteration the last one counts.
        for _, group, token, target in self._moves[self._done : stop].tolist():
            self._in_hbm[slice(None) if group == ALL_GROUPS else group, token] = _IN_HBM[target]
        self._done = stop
        return self._in_hbm[:, : int(self._born[iteration])]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
