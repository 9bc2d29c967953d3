"""Recorded searches made longer or shorter, without a trace of that length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from arborsim.machine.demand import LEG_COLUMNS, Op, SearchDemand
from arborsim.machine.pieces import LINEAR, PIECE_COLUMNS

_ITERATIONS = PIECE_COLUMNS.index("iterations")
#: How many numbers of each phase grow with the length of a search.
_SCALED = {
    Op.PREFILL: (1,), Op.DECIDE: (1,), Op.COPY: (1,), Op.RECOMPUTE: (1, 2), Op.HOLD: (1,),
    Op.LEVEL: (1, 2, 3),
}  # fmt: skip


def stretched(demand: SearchDemand, factor: float) -> SearchDemand:
    """The same search with every thought, and the prompt, `factor` times as long.

    Each run of iterations becomes so much longer and begins with so many more tokens; what an
    iteration adds stays.  Branches, prunings and everything moved or dropped keep their place and
    their share of the search, which is what a budget that is a share of the search asks for.  Not
    exact for a policy that keeps a fixed number of tokens, or a model with sliding windows.

    Parameters
    ----------
    demand : SearchDemand
    factor : float
        Above 0.
    """
    if factor == 1:
        return demand
    pieces, ops, legs = demand.pieces.copy(), demand.ops.copy(), demand.legs.copy()
    decodes = np.flatnonzero(ops[:, 0] == Op.DECODE)
    order = ops[decodes, 1]
    # Rounding the running sums, so that searches of many short runs keep their whole length.
    ends = np.rint(factor * np.cumsum(pieces[order, _ITERATIONS])).astype(np.int64)
    pieces[order, _ITERATIONS] = np.diff(ends, prepend=0)
    for name in ("streamed_bytes", "remote_bytes"):
        _multiply(pieces, [PIECE_COLUMNS.index(name)], factor)
    for name in LINEAR:
        first, growth = (PIECE_COLUMNS.index(each) for each in (name, f"{name}_growth"))
        # What the first iteration adds is in `first` already, and is not multiplied.
        before = np.maximum(pieces[:, first] - pieces[:, growth], 0)
        added = pieces[:, first] - before
        pieces[:, first] = np.rint(factor * before) + added
    for kind, columns in _SCALED.items():
        rows = ops[:, 0] == kind
        ops[rows] = _multiply(ops[rows], columns, factor)
    _multiply(legs, range(LEG_COLUMNS.index("bytes"), len(LEG_COLUMNS)), factor)
    emptied = decodes[pieces[order, _ITERATIONS] == 0]
    info = replace(demand.info, prefix_tokens=round(factor * demand.info.prefix_tokens))
    return SearchDemand(info, np.delete(ops, emptied, axis=0), pieces, legs)


def _multiply(table: np.ndarray, columns: Iterable[int], factor: float) -> np.ndarray:
    for column in columns:
        table[:, column] = np.rint(factor * table[:, column])
    return table
