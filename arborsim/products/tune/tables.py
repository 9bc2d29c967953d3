"""The front of a study in a terminal, and its trials as a data frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from arborsim.core.tables import check_columns, columns_of
from arborsim.products.tune.run import Figures, Trial, Tuned
from arborsim.report.table import (
    LABEL,
    UNKNOWN,
    Column,
    Table,
    name_column,
    print_tables,
    shown,
    terminal,
)
from arborsim.report.words import counted

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

_QUALITY = {"kept": ("Attention kept", ("attn.", "kept")), "error": ("Output error", ("error",))}
_MEMORY = {"peak": "HBM peak", "byte-seconds": "HBM byte-seconds"}


def front_table(tuned: Tuned) -> Table[Trial]:
    """The front from the least memory on: its settings, and its figures."""
    rows = tuned.front
    quality, head = _QUALITY[tuned.quality]
    memory = _MEMORY[tuned.memory]

    def figure(
        key: str, name: str, part: str, kind: str, title: str, lines: tuple[str, ...]
    ) -> Column[Trial]:
        def value(trial: Trial) -> float:
            found: Figures | None = getattr(trial, name)
            return math.nan if found is None else float(getattr(found, part))

        about = f"{title} on {'held-out' if name == 'held_out' else 'tuned'} episodes."
        return Column(key, title, kind, value, about, lines, hide=UNKNOWN)

    def columns(name: str, where: str) -> list[Column[Trial]]:
        return [
            figure(f"memory_{name}", name, "memory", "percent", f"{memory} of full, {where}",
                   (where, memory.lower().removeprefix("hbm "), "of full")),
            figure(f"time_{name}", name, "time", "factor", f"Time against full, {where}",
                   (where, "time", "vs full")),
            figure(f"quality_{name}", name, "quality", "percent", f"{quality}, {where}",
                   (where, *head)),
        ]  # fmt: skip

    def setting(name: str) -> Column[Trial]:
        return Column(f"set_{name}", name, LABEL, text=lambda trial: _said(trial.settings[name]),
                      about=f"Setting {name}.", head=tuple(name.split(".")))  # fmt: skip

    return Table(rows, (
        name_column("Trial", lambda trial: str(trial.number)),
        Column("budget", "Budget", LABEL, text=lambda trial: f"{trial.budget:g}",
               about="Share of what full retention holds.", head=("budget",)),
        *map(setting, tuned.varied),
        *shown([*columns("held_out", "held out"), *columns("tuned", "tuned")], rows),
    ))  # fmt: skip


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def notes(tuned: Tuned) -> list[str]:
    """What the table does not say."""
    failed = [trial for trial in tuned.trials if trial.reason]
    found = [
        f"{counted(len(tuned.trials), 'trial')}, {len(tuned.front)} on the front: no other trial "
        "beats one of these in a figure without losing in another, on the tuned episodes."
    ]
    if failed:
        found.append(f"{len(failed)} cannot run, the first because: {failed[0].reason}")
    if not any(trial.held_out for trial in tuned.trials):
        found.append("No trace has a second episode: nothing was held out, and these figures are "
                     "those that were tuned for.")  # fmt: skip
    return found


def print_front(tuned: Tuned, console: Console | None = None) -> None:
    """Print the front, at the width of the terminal, and what to know about it."""
    console = console or terminal()
    print_tables(console, [(f"{tuned.policy}: the front", front_table(tuned))])
    for line in notes(tuned):
        console.print(line, markup=False)


def to_frame(tuned: Tuned) -> pd.DataFrame:
    """One row per trial, in the order in which they began."""
    import pandas as pd

    nothing = Figures(math.nan, math.nan, math.nan)
    rows = []
    for trial in tuned.trials:
        row: dict[str, Any] = {"trial": trial.number, "budget": trial.budget, **trial.settings}
        for where, found in (("tuned", trial.tuned), ("held_out", trial.held_out)):
            for name, value in vars(found or nothing).items():
                row[f"{where}_{name}"] = value
        rows.append({**row, "front": trial.front, "reason": trial.reason})
    return pd.DataFrame(rows)


def from_frame(frame: pd.DataFrame, policy: str, memory: str, quality: str,
               varied: Sequence[str]) -> Tuned:  # fmt: skip
    """What `to_frame` made, without the question and the replay."""

    def figures(row: dict[str, Any], where: str) -> Figures | None:
        found = Figures(*(float(row[f"{where}_{each.name}"]) for each in fields(Figures)))
        return None if math.isnan(found.memory) else found

    figures_of = {f"{where}_{name}": kind for where in ("tuned", "held_out")
                  for name, kind in columns_of(Figures).items()}  # fmt: skip
    others = {"trial": "int", "budget": "float", "front": "bool", "reason": "str"}
    check_columns(frame, others | figures_of, missing=figures_of)
    trials = [
        Trial(
            int(row["trial"]), {name: row[name] for name in varied}, float(row["budget"]),
            figures(row, "tuned"), bool(row["front"]), figures(row, "held_out"), row["reason"],
        )
        for row in frame.to_dict("records")
    ]  # fmt: skip
    return Tuned(policy, memory, quality, tuple(varied), tuple(trials))
