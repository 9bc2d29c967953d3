"""Replay of a recorded search under cells: its decisions, and the quality figures it promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.machine.machine import Machine
from arborsim.run.episode import Cell, Quality, play_episode
from arborsim.run.meters import MoveLog
from arborsim.trace.reader import TraceReader
from arborsim.validate.agreement import Course


@dataclass(frozen=True)
class Replayed:
    """One cell of a replay.

    Attributes
    ----------
    moves : int64 ``[moves, 4]``
        See `MoveLog.rows`.
    attention_kept, output_error : float
        NaN if the trace lacks what they are made of.
    infeasible : str
        Why the budget cannot hold the search; empty if it can.
    """

    moves: np.ndarray
    attention_kept: float = float("nan")
    output_error: float = float("nan")
    infeasible: str = ""


def replay_cells(
    trace: Path, cells: Sequence[Cell], machine: Machine
) -> tuple[Course, list[Replayed]]:
    """Replay the one episode of `trace` under each cell.

    Raises
    ------
    MissingSignal
        A policy reads what the trace does not hold.
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
    return Course.of({**columns, "token": token}), found
