"""How far a policy's decisions agree between the shadow run, its replay and the live run.

The replay of a shadow run's own recording must repeat its moves (`replay_cells`).  A live run is
compared by the tokens that both keep in HBM, iteration by iteration (`agreement`): in the shadow
run nothing is removed, the live one really evicts.  Evicting changes what the model
computes, so the second run's signals drift away from the first one's even while both still generate
the same tokens; once a token differs they are different searches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.tiers import Tier
from arborsim.machine.machine import Machine
from arborsim.memory.moves import ALL_GROUPS
from arborsim.run.episode import Cell, play_episode
from arborsim.run.meters import MoveLog, Quality
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind

_IN_HBM = np.array([tier.in_hbm for tier in Tier])


@dataclass(frozen=True)
class Generated:
    """What a search generated."""

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
    needs = quality.reads().union(*(cell.policy.reads() for cell in cells))
    (episode,) = reader.episodes(tuple(sorted(needs)), who="the replay")
    columns = {"kind": episode.kind, "iteration": episode.iteration, "node": episode.node}
    token = np.full(episode.num_rows, -1, dtype=np.int32)
    token[episode.token_rows] = episode.token
    found = []
    for cell in cells:
        log, executor = MoveLog(), machine.executor(cell.policy, reader.info)
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
        self._born, self._moves, self._done = generated.born, moves, 0
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
