"""Differences between two runs, in a terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from arborsim.core import documents
from arborsim.products.compare.match import SHARES, Comparison, Pair, change, turns
from arborsim.report.report import Listed, Printed, Report, Section, Shown
from arborsim.report.table import LABEL, Column, Table, name_column
from arborsim.report.words import counted

_MOST_NAMED = 8
_MOST_LED = 3  # figures that the answer names


def report_of(found: Comparison, names: tuple[str, str], commands: tuple[str, str]) -> Report:
    """Make the report of what differs: B's figures, and by how much they differ.

    `names` and `commands` are the files of the two runs, A and B, and what made them.
    """
    changed = found.changed()

    def printed(width: int) -> Iterator[Printed]:
        for trace in dict.fromkeys(pair.trace for pair in found.pairs if changed):
            own = [pair for pair in found.pairs if pair.trace == trace]
            about = counted(own[0].searches, "search") + " in both" if own[0].searches else ""
            yield trace or ("All" if about else ""), about, _tables(found, own, changed)

    whole = Table(found.pairs, ())
    made = [
        f"{side} {name}  {command}"
        for side, name, command in zip("AB", names, commands, strict=True)
    ]
    sections = (
        Section("answer", "The answer", (Listed([*_notes(found, changed), *made]),)),
        Section("table", "Differences", (Shown(whole, printed=printed),)),
    )
    settings = "; ".join(f"{key}: {a} -> {b}" for key, (a, b) in found.settings.items())
    return Report(
        "compare",
        "Two runs compared",
        settings or "No setting differs.",
        sections,
        leading=_leading(found, changed),
    )


def _leading(found: Comparison, changed: Sequence[Column[Any]]) -> list[str]:
    """Say which figures differ most, and between which rows."""
    what = counted(len(found.pairs), {"plan": "candidate"}.get(found.kind, "setting"))
    if not changed:
        return [f"No figure differs: {what} compared by {_listed(found.columns)}."]
    far = {column.key: _farthest(column, found) for column in changed}
    order = sorted(changed, key=lambda column: -abs(change(column, far[column.key])))
    named = [
        f"{_listed([column])} {said(column, far[column.key])} "
        f"under {' '.join(far[column.key].names)}"
        for column in order[:_MOST_LED]
    ]
    more = len(changed) - len(named)
    others = f", and {counted(more, 'other figure')}" if more else ""
    return [f"B differs from A in {'; '.join(named)}{others} (most of {what})."]


def _farthest(column: Column[Any], found: Comparison) -> Pair:
    """Where a figure differs most; of the oracle only if there is nothing else."""
    able = [pair for pair in found.pairs if not getattr(pair.first, "is_oracle", False)]
    return max(able or found.pairs, key=lambda pair: abs(change(column, pair)))


def _tables(
    found: Comparison, pairs: Sequence[Pair], changed: Sequence[Column[Any]]
) -> list[tuple[str, Table[Pair]]]:
    """A group of columns per figure: what B has, and the difference."""
    name, label = found.heads
    leading: tuple[Column[Pair], ...] = (
        name_column(name, lambda pair: pair.names[0]),
        Column(label, label, LABEL, text=lambda pair: pair.names[1], head=(label.lower(),)),
    )
    return [("", Table(pairs, (*leading, *_both(column)))) for column in changed]


def _both(column: Column[Any]) -> tuple[Column[Pair], Column[Pair]]:
    text = column.text
    second: Column[Pair] = replace(
        column,
        value=lambda pair: column.value(pair.second),
        about="",
        text=None if text is None else lambda pair: text(pair.second),
        words=lambda pair: "",
        hide="",
    )
    against: Column[Pair] = Column(
        f"{column.key}_change",
        "vs A",
        "count",
        lambda pair: change(column, pair),
        head=("", "vs A"),
        text=lambda pair: said(column, pair),
    )
    return second, against


def said(column: Column[Any], pair: Pair) -> str:
    """``"+12.0%"``, ``"-0.3 pp"``; problems gained and lost where answers are compared."""
    if turns(column, pair):
        return f"+{pair.gained} -{pair.lost}"
    found = change(column, pair)
    if not found:
        return "="
    if math.isinf(found):
        return "gone" if math.isnan(column.value(pair.second)) else "new"
    unit = " pp" if column.kind in SHARES else "%"
    text = f"{100 * found:+.1f}"
    return f"{'+' if found > 0 else '-'}<0.1{unit}" if text[1:] == "0.0" else f"{text}{unit}"


def _notes(found: Comparison, changed: Sequence[Column[Any]]) -> Iterator[str]:
    if changed and (same := [column for column in found.columns if column not in changed]):
        yield f"The same in both: {_listed(same)}."
    if any(pair.gained or pair.lost for pair in found.pairs):
        yield "+ and - of right answers: problems that only B, and only A, got right."
    for sign, names in (("A", found.only_first), ("B", found.only_second)):
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            yield f"Only in {sign}: {', '.join(names[:_MOST_NAMED])}{more}."


def _listed(columns: Iterable[Column[Any]]) -> str:
    """Titles within a sentence: only their first letter was large."""
    titles = (column.title.replace("\u00ad", "") for column in columns)
    return ", ".join(t if t[:2].isupper() else t[:1].lower() + t[1:] for t in titles)


def to_json(found: Comparison, names: tuple[str, str], commands: tuple[str, str]) -> str:
    """Everything as strict JSON; differences are shares, null where one run lacks the figure."""
    heads = [head.lower() for head in found.heads]
    rows = [
        {
            "trace": pair.trace,
            **dict(zip(heads, pair.names, strict=True)),
            **{name: getattr(pair, name) for name in ("searches", "gained", "lost")},
            "figures": {c.key: _figures(c, pair) for c in found.columns},
        }
        for pair in found.pairs
    ]
    sides = zip("ab", names, commands, strict=True)
    return documents.to_json(
        {
            "kind": found.kind,
            **{side: {"file": name, "command": command} for side, name, command in sides},
            "settings": {key: {"a": a, "b": b} for key, (a, b) in found.settings.items()},
            "rows": rows,
            "only_in_a": found.only_first,
            "only_in_b": found.only_second,
        }
    )


def _figures(column: Column[Any], pair: Pair) -> dict[str, float]:
    a, b = column.value(pair.first), column.value(pair.second)
    return {"a": a, "b": b, "difference": change(column, pair)}
