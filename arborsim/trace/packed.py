"""Packed traces (format version 2): a row may stand for a run of tokens, and episodes share groups.

For logs of requests, which know lengths only: a row per token and a row group per request would be
millions of rows that say nothing.  An episode stays in one piece within one row group, so a reader
still has one at a time: `EpisodeIndex` says where each lies, and `expand` makes it what version 1
stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from arborsim.core.errors import TraceError
from arborsim.trace.columns import kinds_of, nulls_of, numbers_of
from arborsim.trace.schema import RUN, Kind
from arborsim.trace.validate import Where

#: Most rows of one episode; more is a damaged run, and would not fit the memory.
MOST_ROWS = 1 << 23

#: Columns that say the same of every token of a run, and those that count.  Any other column has
#: its value at the first token and is null at those that follow.
_ALIKE = frozenset({"episode", "time_s", "kind", "node", "parent", "depth"})
_COUNTING = frozenset({"seq", "iteration", "position"})

#: Columns that tell how a row is expanded.
NEEDED = ("kind", RUN.name)


@dataclass(frozen=True)
class EpisodeIndex:
    """Where each episode lies, int64 ``[episodes]``."""

    group: np.ndarray  # row group of its first row
    last: np.ndarray  # and of its last one: other tools part episodes
    first: np.ndarray  # its first row, counted from the beginning of the group
    stored: np.ndarray  # rows as they are stored
    rows: np.ndarray  # rows when expanded

    @classmethod
    def of(cls, table: pa.Table, group_rows: np.ndarray, file: str, first_episode: int = 0) -> Self:
        """From the columns `episode` and perhaps `run` of row groups one after another.

        `group_rows` int64 ``[groups]`` counts their rows.  Rows that are not whole episodes in
        order are a `TraceError`.
        """
        episode, counts = numbers_of(table["episode"]).astype(np.int64), _counts(table)
        rises = np.diff(episode, prepend=first_episode - 1)
        wrong = (rises != 0) & (rises != 1)
        wrong[:1] |= rises[:1] != 1
        if wrong.any():
            at = int(np.argmax(wrong))
            before = int(episode[at] - rises[at])
            raise TraceError(
                f"{file}: row {at} of the file is of episode {episode[at]}, after those of "
                f"{before}; the file is damaged or was written by a broken recorder"
            )
        starts = np.flatnonzero(rises)
        stored = np.diff(starts, append=len(episode))
        ends = np.cumsum(group_rows)
        group = np.searchsorted(ends, starts, side="right")
        last = np.searchsorted(ends, starts + stored - 1, side="right")
        rows = np.add.reduceat(counts, starts)
        if (large := rows > MOST_ROWS).any():
            what = f"its runs make more than {MOST_ROWS} rows"
            raise Where(file, first_episode + int(np.argmax(large))).error(what)
        return cls(group, last, starts - (ends - group_rows)[group], stored, rows)


def _counts(table: pa.Table) -> np.ndarray:
    """Rows that each row stands for, int64, with what is no count left for `expand` to name."""
    if RUN.name not in table.column_names:
        return np.ones(len(table), dtype=np.int64)
    run = table[RUN.name]
    counts = numbers_of(run).astype(np.int64)
    return np.where(nulls_of(run) | (counts < 1), 1, counts)


def expand(table: pa.Table, where: Where) -> pa.Table:
    """One episode with a row for each token: its rows as version 1 would store them.

    The table has the columns `NEEDED`, the result no column `run`.
    """
    kind, counts = kinds_of(table["kind"]), _counts(table)
    run = numbers_of(table[RUN.name])
    given = ~nulls_of(table[RUN.name])
    where.check(given & (run < 1), "run is {}, not at least 1", run)
    counted = (kind == Kind.PREFILL) | (kind == Kind.TOKEN)
    where.check((counts > 1) & ~counted, "a row without a token stands for {} rows", counts)
    if len(counts) == counts.sum():
        return table.drop_columns([RUN.name])
    source = np.repeat(np.arange(len(counts)), counts)
    import pyarrow.compute as pc  # slow to import

    step = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    every, first = pa.array(source), pa.array(source, mask=step > 0)
    iteration = np.where(kind[source] == Kind.TOKEN, step, 0)  # a prompt is of one iteration
    columns = {}
    for name in table.column_names:
        column = table[name]
        if column.null_count == len(column) and name != RUN.name:
            columns[name] = pa.nulls(len(source), column.type)
        elif name in _COUNTING:
            added = iteration if name == "iteration" else step
            columns[name] = pc.add(column.take(every), pa.array(added.astype(np.int32)))
        elif name != RUN.name:
            columns[name] = column.take(every if name in _ALIKE else first)
    return pa.table(columns)
