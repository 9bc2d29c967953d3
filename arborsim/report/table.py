"""`arborsim replay` in a terminal, as a data frame, and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from arborsim.measurements import Measurements, TimeSplit
from arborsim.report.aggregate import Row, aggregate
from arborsim.report.columns import MEMORY, TIME, Column, scales, shown
from arborsim.report.results import EpisodeResult, ReplayResult

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

#: From this width on, memory and time stand in one table.
WIDE = 140
_LONGEST_NAME = 16
_NOTHING = EpisodeResult("", 0, "", "", 0, Measurements(), math.nan)  # for its column names


def print_tables(result: ReplayResult, console: Console | None = None) -> None:
    """Print the comparison, one block per trace, at the width of the terminal.

    Below `WIDE` columns a trace takes two tables (memory and moves; time and quality), which fit
    80 columns; above it they are one.
    """
    from rich.console import Console

    console = console or Console(highlight=False)
    rows = aggregate(result.episodes)
    if not rows:
        console.print("Nothing was replayed.")
        return
    for trace in dict.fromkeys(row.trace for row in rows):
        of_trace = [row for row in rows if row.trace == trace]
        _heading(console, of_trace[0])
        memory, time = shown(MEMORY, of_trace), shown(TIME, of_trace)
        if console.width >= WIDE:
            _show(console, "", of_trace, (*memory, *time))
            continue
        # Speed relative to full is the inverse of time relative to full: no room to say it twice.
        time = tuple(column for column in time if column.key != "speed_vs_full")
        _show(console, "Memory and moves", of_trace, memory)
        _show(console, "Time and quality", of_trace, time)
    _notes(console, result, rows)


def _heading(console: Console, row: Row) -> None:
    from rich.text import Text

    searches = "1 search" if row.searches == 1 else f"{row.searches:,} searches"
    text = Text(_plain(row.trace), style="bold")
    text.append(
        f"  {searches}, {row.prompt_tokens:,} prompt + {row.generated_tokens:,} generated tokens",
        style="not bold",
    )
    console.print(text)


def _show(console: Console, title: str, rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print with as much air between the columns as fits."""
    unbounded = console.options.update(max_width=10_000)
    tables = [_table(title, rows, columns, padding) for padding in (2, 1, 0)]
    fitting = (t for t in tables if console.measure(t, options=unbounded).maximum <= console.width)
    console.print(next(fitting, tables[-1]))


def _table(title: str, rows: Sequence[Row], columns: Sequence[Column], padding: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, padding, 0, 0),
        pad_edge=False,
    )
    table.add_column(
        "policy", vertical="bottom", overflow="fold", max_width=_LONGEST_NAME,
        min_width=min(_LONGEST_NAME, max(len(_plain(row.policy)) for row in rows)),
    )  # fmt: skip
    table.add_column("bud-\nget", vertical="bottom", justify="right", no_wrap=True)
    units = scales(columns, rows)
    for column in columns:
        unit = units[column.key].unit
        lines = (*column.head, *(unit.split(" ") if len(unit) > 5 else [unit]))
        head = "\n".join(line for line in lines if line)
        table.add_column(head, justify="right", vertical="bottom", no_wrap=True)
    before = rows[0].budget_label
    for row in rows:
        if row.budget_label != before:
            table.add_section()
        before = row.budget_label
        cells = [units[column.key].show(column.value(row)) for column in columns]
        table.add_row(Text(_plain(row.policy)), row.budget_label, *cells)
    return table


def _notes(console: Console, result: ReplayResult, rows: Sequence[Row]) -> None:
    """What a reader needs in order not to misread the numbers."""
    notes = []
    if any(not math.isnan(row.attention_kept) for row in rows):
        notes.append("attn. kept: recorded attention that fell on readable tokens; not accuracy.")
    else:
        notes.append("attn. kept is n/a: not measured, or the trace holds no attention.")
    notes.append("Peaks are the largest of any search; tokens moved and times are sums.")
    if result.assumed:
        count = len(result.assumed)
        notes.append(
            f"{count} number{'s' if count > 1 else ''} of the hardware profile "
            f"{'are' if count > 1 else 'is'} assumed, not measured (see --report)."
        )
    for note in notes:
        console.print(note, style="dim", markup=False)


def _plain(text: str) -> str:
    """Names come from files: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def to_frame(result: ReplayResult) -> pd.DataFrame:
    """One row per search, policy and budget; names carry their units.

    Returns
    -------
    pandas.DataFrame
        In the order of `result.episodes`.
    """
    import pandas as pd

    columns = None if result.episodes else list(_flat(_NOTHING))
    return pd.DataFrame([_flat(episode) for episode in result.episodes], columns=columns)


def _flat(result: EpisodeResult) -> dict[str, Any]:
    measured = result.measured
    names = [f.name for f in fields(measured) if f.name not in ("time", "series")]
    return {
        "trace": result.trace,
        "episode": result.episode,
        "policy": result.policy,
        "budget": result.budget,
        "budget_tokens": result.budget_tokens,
        **{name: getattr(measured, name) for name in names},
        **{part.name: getattr(measured.time, part.name) for part in fields(TimeSplit)},
        "total_s": measured.time.total_s,
        "tokens_per_s": measured.tokens_per_s,
        "attention_kept": result.attention_kept,
    }


def to_json(result: ReplayResult) -> str:
    """Settings, aggregated rows and searches as strict JSON (unknown numbers are null).

    The same result gives the same bytes.
    """
    document = {
        "settings": result.settings,
        "assumed": list(result.assumed),
        "rows": [
            {**asdict(row), "moved_bytes": row.moved_bytes, "tokens_per_s": row.tokens_per_s,
             "total_s": row.time.total_s}
            for row in aggregate(result.episodes)
        ],
        "episodes": [_flat(episode) for episode in result.episodes],
    }  # fmt: skip
    return json.dumps(strict(document), indent=2, sort_keys=True, allow_nan=False)


def strict(value: Any) -> Any:
    """`value` with NumPy scalars as Python numbers, and what JSON cannot say as None."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if hasattr(value, "tolist"):
        return strict(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
