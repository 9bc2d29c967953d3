"""Replay of a recorded search under cells: its decisions, and the quality figures it promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.observations import Signal
from arborsim.live.request import LiveCell
from arborsim.run.controller import Controller, Meter
from arborsim.run.episode import Machine
from arborsim.run.meters import AttentionKept, MoveLog
from arborsim.run.output_error import OutputError
from arborsim.trace.play import play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import VECTORS
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
    trace: Path, cells: Sequence[LiveCell], budgets: Sequence[int], machine: Machine
) -> tuple[Course, list[Replayed]]:
    """Replay the one episode of `trace` under each cell with its budget in tokens.

    Raises
    ------
    MissingSignal
        A policy reads what the trace does not hold.
    """
    reader = TraceReader(trace)
    kept, error = reader.has(Signal.ATTENTION), all(reader.has(signal) for signal in VECTORS)
    needs = set().union(*(cell.policy.reads() for cell in cells))
    needs |= ({Signal.ATTENTION} if kept else set()) | (set(VECTORS) if error else set())
    (episode,) = reader.episodes(tuple(sorted(needs)), who="the replay")
    columns = {"kind": episode.kind, "iteration": episode.iteration, "node": episode.node}
    token = np.full(episode.num_rows, -1, dtype=np.int32)
    token[episode.token_rows] = episode.token
    found = []
    for cell, budget_tokens in zip(cells, budgets, strict=True):
        log = MoveLog()
        quality = AttentionKept() if kept else None, OutputError() if error else None
        meters: list[Meter] = [log, *(meter for meter in quality if meter is not None)]
        controller = Controller(
            cell.policy,
            machine.executor(cell.policy, reader.info),
            budget_tokens=budget_tokens,
            layers=reader.info.geometry.layers,
            vocabulary=reader.info.geometry.vocab,
            meters=meters,
        )
        try:
            controller.run(play(episode))
        except BudgetInfeasible as problem:
            found.append(Replayed(log.rows, infeasible=str(problem)))
            continue
        share = quality[0].share if quality[0] else float("nan")
        wrong = quality[1].error if quality[1] else float("nan")
        found.append(Replayed(log.rows, share, wrong))
    return Course.of({**columns, "token": token}), found
