"""The front of a study in a terminal, and its trials as a data frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from arborsim.core.tables import check_columns, columns_of
from arborsim.products.tune.run import Figures, Trial, Tuned
from arborsim.report.report import Answer, Facts, Report, Section, Shown
from arborsim.report.table import (
    LABEL,
    UNKNOWN,
    Column,
    Table,
    name_column,
    shown,
)
from arborsim.report.words import counted, nats, percent

if TYPE_CHECKING:
    import pandas as pd

#: Of each quality its name, its head, its kind and what its best is called.
_QUALITY = {
    "kept": ("Attention kept", ("attn.", "kept"), "percent", "most attention kept"),
    "error": ("Output error", ("error",), "percent", "least error"),
    "fidelity": ("KL to full", ("KL",), "count", "least divergence"),
}
_MEMORY = {"peak": "HBM peak", "byte-seconds": "HBM byte-seconds"}


def front_table(tuned: Tuned) -> Table[Trial]:
    """The front from the least memory on: its settings, and its figures."""
    rows = tuned.front
    quality, head, kind_of_quality, _ = _QUALITY[tuned.quality]
    memory = _MEMORY[tuned.memory]

    def figure(
        key: str, name: str, part: str, kind: str, title: str, lines: tuple[str, ...]
    ) -> Column[Trial]:
        def value(trial: Trial) -> float:
            found: Figures | None = getattr(trial, name)
            return math.nan if found is None else float(getattr(found, part))

        about = f"{title} on {'held-out' if name == 'held_out' else 'tuned'} episodes."
        text = (lambda trial: nats(value(trial))) if kind == "count" else None
        return Column(key, title, kind, value, about, lines, text=text, hide=UNKNOWN)

    parts = (
        (
            "memory",
            "percent",
            f"{memory} of full",
            (memory.lower().removeprefix("hbm "), "of full"),
        ),
        ("time", "factor", "Time against full", ("time", "vs full")),
        ("quality", kind_of_quality, quality, head),
    )
    figures = [
        figure(f"{part}_{name}", name, part, kind, f"{title}, {where}", (where, *lines))
        for name, where in (("held_out", "held out"), ("tuned", "tuned"))
        for part, kind, title, lines in parts
    ]

    def label(name: str, title: str, about: str, read: Callable[[Trial], str]) -> Column[Trial]:
        heads = tuple(title.lower().split("."))
        return Column(name, title, LABEL, text=read, about=about, head=heads)

    def setting(name: str) -> Column[Trial]:
        said = f"Setting {name}."
        return label(f"set_{name}", name, said, lambda trial: _said(trial.settings[name]))

    share = "Share of what full retention holds."
    names: tuple[Column[Trial], ...] = (
        name_column("Trial", lambda trial: str(trial.number)),
        label("budget", "Budget", share, lambda trial: f"{trial.budget:g}"),
    )
    return Table(rows, (*names, *map(setting, tuned.varied), *shown(figures, rows)))


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def summarise(tuned: Tuned) -> list[str]:
    """Sentences: how many are on the front, and what its two ends are."""
    of = f"{len(tuned.front)} of {counted(len(tuned.trials), 'trial')}"
    found = [f"{tuned.policy}: {of} are on the front, which no other beats in every figure."]
    known = [(trial, trial.held_out or trial.tuned) for trial in tuned.front]
    rows = [(trial, figures) for trial, figures in known if figures is not None]
    if not rows:
        return found
    name, _, kind, most = _QUALITY[tuned.quality]
    best, say = max if tuned.quality == "kept" else min, nats if kind == "count" else percent
    ends = {
        "The least memory": min(rows, key=lambda row: row[1].memory),
        f"The {most}": best(rows, key=lambda row: row[1].quality),
    }
    for what, (trial, figures) in ends.items():
        settings = [f"{each} {_said(trial.settings[each])}" for each in tuned.varied]
        named = ", ".join([f"budget {trial.budget:g}", *settings])
        found.append(
            f"{what}: trial {trial.number} ({named}), with {percent(figures.memory)} of full "
            f"retention's memory, {figures.time:.2f} times its time and "
            f"{name if kind == 'count' else name.lower()} {say(figures.quality)}."
        )
    return found


def notes(tuned: Tuned) -> list[str]:
    """Notes below the table."""
    failed = [trial for trial in tuned.trials if trial.reason]
    found = []
    if failed:
        found.append(f"{len(failed)} cannot run, the first because: {failed[0].reason}")
    held = any(trial.held_out for trial in tuned.trials)
    found.append(
        "Figures are of the odd episodes, which no trial has seen; trials were tuned on the even."
        if held
        else "No trace has a second episode: nothing was held out, and these figures are those "
        "that were tuned for."
    )
    return found


def report_of(tuned: Tuned) -> Report:
    """Make the report of the front."""
    table, said, known = front_table(tuned), summarise(tuned), notes(tuned)
    keys = [column.key for column in table.columns]
    where = "tuned" if any(key.endswith("_held_out") for key in keys) else ""
    sections = (
        Section("answer", "The answer", (Answer(said), *known)),
        Section(
            "table",
            "The front",
            (Shown(table, deciding=[key for key in keys if not where or where not in key]),),
        ),
    )
    columns = Facts("Columns", table.definitions())
    return Report(
        "tune",
        f"{tuned.policy}: the front",
        "",
        sections,
        appendix=(columns,),
        leading=said,
        telling=known,
    )


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


def from_frame(
    frame: pd.DataFrame, policy: str, memory: str, quality: str, varied: Sequence[str]
) -> Tuned:
    """Read what `to_frame` made, without the question and the replay."""

    def figures(row: dict[str, Any], where: str) -> Figures | None:
        found = Figures(*(float(row[f"{where}_{each.name}"]) for each in fields(Figures)))
        return None if math.isnan(found.memory) else found

    kinds = columns_of(Figures).items()
    sides = ("tuned", "held_out")
    figures_of = {f"{where}_{name}": kind for where in sides for name, kind in kinds}
    others = {"trial": "int", "budget": "float", "front": "bool", "reason": "str"}
    check_columns(frame, others | figures_of, missing=figures_of)
    trials = []
    for row in frame.to_dict("records"):
        tuned, held_out = (figures(row, where) for where in sides)
        settings = {name: row[name] for name in varied}
        tried = int(row["trial"]), settings, float(row["budget"])
        trials.append(Trial(*tried, tuned, bool(row["front"]), held_out, row["reason"]))
    return Tuned(policy, memory, quality, tuple(varied), tuple(trials))
