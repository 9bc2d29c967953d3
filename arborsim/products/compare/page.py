"""Two runs side by side: the searches that both hold, and what differs.

Searches are matched one by one, and figures are aggregated over those that both runs hold, so that
a run of more problems does not look like another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.errors import UsageError
from arborsim.core.units import Scale
from arborsim.play.backends import LiveResult
from arborsim.play.results import BASELINE, ReplayResult, aggregate
from arborsim.products.live import tables as live
from arborsim.products.live.tables import LiveReport, live_rows
from arborsim.products.plan import words as plan_words
from arborsim.products.plan.results import CandidateResult, PlanResult
from arborsim.products.provenance import parameters
from arborsim.products.replay import tables as replay
from arborsim.products.search import tables as search
from arborsim.products.search.results import SearchResult, rows_of
from arborsim.report.table import (
    LABEL,
    Column,
    Table,
    grid,
    name_column,
    print_heading,
    print_tables,
    terminal,
)
from arborsim.report.words import counted, plain

if TYPE_CHECKING:
    from rich.console import Console

#: Kinds of columns whose differences are in percentage points.
_SHARES = ("percent", "points")
#: Parts of metadata that are compared, and settings that follow from others.
_SHOWN = ("settings", "facts", "versions")
_SILENT = ("simulated on", "versions", "seconds", "error of seconds")
_MOST_NAMED = 8
_DIGEST = re.compile(r"sha256 (\w+)")


@dataclass(frozen=True)
class Pair:
    """What two runs say of one thing: a policy and budget, a search, or a candidate of a plan."""

    trace: str  #: what leads the table it stands in; "" where there is one table
    names: tuple[str, ...]  #: under the heads of `Comparison.heads`
    searches: int  #: that both runs hold; 0 for what is not made of searches
    first: Any  #: rows of the kind's own type
    second: Any
    #: Problems that only the second run got right, and only the first
    gained: int = 0
    lost: int = 0


@dataclass(frozen=True)
class Comparison:
    """Two runs of one kind."""

    kind: str
    heads: tuple[str, ...]
    columns: tuple[Column[Any], ...]
    pairs: tuple[Pair, ...]
    only_first: tuple[str, ...]  #: names of what only one run holds
    only_second: tuple[str, ...]
    settings: dict[str, tuple[str, str]]  #: what made the runs, where it differs

    def changed(self) -> list[Column[Any]]:
        """Figures that differ anywhere."""
        return [c for c in self.columns if any(change(c, p) or _turns(c, p) for p in self.pairs)]

    def largest(self) -> float:
        """The largest difference, as a share; infinite where one run lacks something."""
        if self.only_first or self.only_second:
            return math.inf
        return max((abs(change(c, p)) for c in self.columns for p in self.pairs), default=0.0)


def change(column: Column[Any], pair: Pair) -> float:
    """By how much the second run's figure differs: a share of the first, or of one for shares.

    Infinite if only one of them is known, or the first is zero.
    """
    a, b = column.value(pair.first), column.value(pair.second)
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if math.isnan(a) or math.isnan(b):
        return math.inf
    if column.kind in _SHARES:
        return b - a
    return b / a - 1 if a else math.inf


def _turns(column: Column[Any], pair: Pair) -> bool:
    """Whether problems changed sides, even if as many were gained as lost."""
    return column.key == "accuracy" and pair.gained + pair.lost > 0


# --- matching ---


def compare(
    kind: str, first: Any, second: Any, first_said: Mapping[str, Any],
    second_said: Mapping[str, Any],
) -> Comparison:  # fmt: skip
    """Compare two results of one kind, each a record that `plot.plots` draws, with metadata.

    Raises
    ------
    UsageError
        There is no comparison of such results, or the two have nothing in common.
    """
    if kind not in _KINDS:
        raise UsageError(f"{kind} results cannot be compared: {', '.join(_KINDS)} can")
    match, heads, columns = _KINDS[kind]
    pairs, only_first, only_second = match(first, second)
    if not pairs:
        names = [", ".join(each[:3]) or "nothing" for each in (only_first, only_second)]
        raise UsageError(
            f"the two runs have nothing in common: one holds {names[0]}; the other {names[1]}"
        )
    return Comparison(
        kind, heads, columns, tuple(pairs), tuple(only_first), tuple(only_second),
        _differing(first_said, second_said),
    )  # fmt: skip


_Matched = tuple[list[Pair], list[str], list[str]]


def _common(
    first: Iterable[Any], second: Iterable[Any], key: Callable[[Any], Hashable]
) -> tuple[list[Any], list[Any]]:
    """The records that both hold, in the order of each."""
    a, b = {key(each): each for each in first}, {key(each): each for each in second}
    return [v for k, v in a.items() if k in b], [v for k, v in b.items() if k in a]


def _lacking(
    first: Iterable[Any], second: Iterable[Any], name: Callable[[Any], str]
) -> tuple[list[str], list[str]]:
    """Names of what only the one holds, and only the other."""
    a, b = dict.fromkeys(map(name, first)), dict.fromkeys(map(name, second))
    return [each for each in a if each not in b], [each for each in b if each not in a]


def _budget(text: str) -> str:
    """``"0.50"`` is ``"0.5"``."""
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _replays(first: ReplayResult, second: ReplayResult) -> _Matched:
    known = _first_names(first, second)
    theirs = tuple(replace(e, trace=known.get(e.trace, e.trace)) for e in second.episodes)
    several = len({each.trace for each in (*first.episodes, *theirs)}) > 1

    def cell(each: Any) -> tuple[str, str, str]:
        return each.trace, each.policy, _budget(each.budget)

    def name(each: Any) -> str:
        label = each.policy if each.policy == BASELINE else f"{each.policy} {_budget(each.budget)}"
        return f"{label} on {each.trace}" if several else label

    both = _common(first.episodes, theirs, lambda each: (each.episode, *cell(each)))
    a, b = ({cell(row): row for row in aggregate(own)} for own in both)
    pairs = [
        Pair(row.trace, (row.label, _budget(row.budget_label)), row.searches, row, b[place])
        for place, row in a.items()
    ]
    return pairs, *_lacking(first.episodes, theirs, name)


def _first_names(first: ReplayResult, second: ReplayResult) -> dict[str, str]:
    """The first run's name of each trace that the second knows by another: equal content."""

    def digests(run: ReplayResult) -> dict[str, str]:
        names = dict.fromkeys(each.trace for each in run.episodes)
        found = {name: _DIGEST.search(run.settings.get(f"trace {name}", "")) for name in names}
        return {name: made[1] for name, made in found.items() if made}

    ours = {digest: name for name, digest in digests(first).items()}
    here = {each.trace for each in first.episodes}
    return {name: ours[digest] for name, digest in digests(second).items()
            if digest in ours and name not in here}  # fmt: skip


def _searches(first: Sequence[SearchResult], second: Sequence[SearchResult]) -> _Matched:
    def cell(each: Any) -> tuple[str, ...]:
        return each.label, str(each.width), each.policy, _budget(each.budget)

    def name(each: Any) -> str:
        under = "" if each.policy == BASELINE else f" under {each.policy} {_budget(each.budget)}"
        return f"{each.label} at width {each.width}{under}"

    both = _common(first, second, lambda each: (each.episode, *cell(each)))
    a, b = ({cell(row): row for row in rows_of(own)} for own in both)
    pairs = []
    for place, row in a.items():
        verdicts = zip(*([r for r in own if cell(r) == place] for own in both), strict=True)
        under = "" if row.policy == BASELINE else f"{row.policy} {_budget(row.budget)}"
        pairs.append(Pair(under, (row.label, str(row.width)), row.searches, row, b[place],
                          *_turned(verdicts)))  # fmt: skip
    return pairs, *_lacking(first, second, name)


def _lives(first: LiveReport, second: LiveReport) -> _Matched:
    def cell(each: Any) -> tuple[str, str]:
        return each.policy, _budget(each.budget)

    def name(each: Any) -> str:
        return each.policy if each.policy == BASELINE else " ".join(cell(each))

    both = _common(first.results, second.results, lambda each: (each.episode, *cell(each)))
    reports = (replace(run, results=tuple(own)) for run, own in zip((first, second), both,
                                                                   strict=True))  # fmt: skip
    a, b = ({cell(row): row for row in live_rows(report)} for report in reports)
    pairs = []
    for place, row in a.items():
        if place not in b:
            continue
        verdicts = zip(*([r for r in own if cell(r) == place] for own in both), strict=True)
        names = (row.label, _budget(row.budget_label))
        pairs.append(Pair("", names, row.searches, row, b[place], *_turned(verdicts)))
    return pairs, *_lacking(first.results, second.results, name)


def _turned(verdicts: Iterable[tuple[SearchResult | LiveResult, ...]]) -> tuple[int, int]:
    """Problems that only the second run got right, and only the first."""
    known = [(a.correct, b.correct) for a, b in verdicts]
    return known.count((False, True)), known.count((True, False))


def _plans(first: PlanResult, second: PlanResult) -> _Matched:
    def key(each: CandidateResult) -> tuple[str, ...]:
        return each.hardware, each.policy, _budget(each.budget), each.recall, str(each.gpus)

    a, b = _common(first.candidates, second.candidates, key)
    others = {key(each): each for each in b}
    pairs = [Pair(row.hardware, (row.policy, _budget(row.budget)), 0, row, others[key(row)])
             for row in a]  # fmt: skip
    return pairs, *_lacking(first.candidates, second.candidates, lambda each: each.name)


def _right(column: Column[Any]) -> Column[Any]:
    """Accuracy, shown as right answers of those judged."""

    def text(row: Any) -> str:
        right = row.right if hasattr(row, "right") else row.correct
        return f"{right}/{row.judged}" if row.judged else "n/a"

    return replace(column, head=("right",), text=text, scale=lambda values: Scale("", 1.0, 0))


def _of(columns: Iterable[Column[Any]], *keys: str) -> tuple[Column[Any], ...]:
    known = {column.key: column for column in columns}
    return tuple(known[key] for key in keys)


def _candidate(
    key: str, kind: str, head: tuple[str, ...], value: Callable[[CandidateResult], float]
) -> Column[Any]:
    return Column(key, " ".join(head), kind, value, head=head)


_PLAN = (
    _candidate("cost", "count", ("cost of", "1,000"), plan_words.cost),
    _candidate("largest", "count", ("largest", "load"),
               lambda row: math.nan if row.largest is None else row.largest),
    _candidate("latency", "seconds", ("time per", "search"),
               lambda row: row.at_largest.at_percentile.value if row.at_largest else math.nan),
    _candidate("kept", "percent", ("attn.", "kept"), plan_words.kept),
)  # fmt: skip
_KINDS: dict[str, tuple[Callable[[Any, Any], _Matched], tuple[str, ...], tuple[Column[Any], ...]]]
_KINDS = {
    "replay": (_replays, ("Policy", "Budget"), _of(
        replay.COLUMNS.values(), "peak_hbm", "peak_ddr", "total", "kept", "error", "evicted",
        "offloaded", "rehydrated", "moved")),
    "search": (_searches, ("Search", "Width"), (
        _right(_of(search.ANSWERS, "accuracy")[0]), *_of(search.ANSWERS, "kv"),
        *_of((*search.MEMORY, *search.WORK), "hbm", "ddr", "time", "calls", "tokens", "kept"))),
    "live": (_lives, ("Policy", "Budget"), (
        _right(_of(live.ANSWERS, "accuracy")[0]),
        *_of((*live.MEMORY, *live.TIME), "peak_hbm", "total", "evicted"))),
    "plan": (_plans, ("Policy", "Budget"), _PLAN),
}  # fmt: skip


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What made the runs, where it differs: of lists the parts that only one has."""
    a, b = dict(_facts(first)), dict(_facts(second))
    found = {}
    for key in dict.fromkeys((*a, *b)):
        alone = (key not in a or key not in b) and key.startswith(("policy ", "trace "))
        if a.get(key) != b.get(key) and not alone:
            found[key] = _other_parts(a.get(key, "-"), b.get(key, "-"))
    return found


def _facts(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of all that determines results."""
    for cell in metadata.get("request", {}).get("cells", ()):
        yield f"policy {cell['policy']}", parameters(cell["settings"])
    for part in _SHOWN:
        for key, value in _flat(metadata.get(part, {})):
            name = key.replace("software.", "version of ")
            name = f"version of {key}" if part == "versions" else name
            if name not in _SILENT:
                yield name, value
    yield "version of arborsim", str(metadata.get("version", "-"))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _other_parts(a: str, b: str) -> tuple[str, str]:
    """Of two lists by comma what only one of them has."""
    parts, others = a.split(", "), b.split(", ")
    left = [part for part in parts if part not in others]
    right = [part for part in others if part not in parts]
    return (", ".join(left) or "-", ", ".join(right) or "-") if left or right else (a, b)


# --- showing ---


def print_comparison(
    found: Comparison, names: tuple[str, str], commands: tuple[str, str],
    console: Console | None = None,
) -> None:  # fmt: skip
    """Print what differs, at the width of the terminal: B's figures, and by how much they differ.

    `names` and `commands` are the files of the two runs, A and B, and what made them.
    """
    console = console or terminal()
    rows = [[sign, name, command] for sign, name, command in
            zip("AB", map(plain, names), map(plain, commands), strict=True)]  # fmt: skip
    console.print(grid(rows, dim={2}))
    if found.settings:
        console.print()
    for key, (before, after) in found.settings.items():
        console.print(plain(f"{key}: {before} -> {after}"), markup=False)
    changed = found.changed()
    for trace in dict.fromkeys(pair.trace for pair in found.pairs):
        own = [pair for pair in found.pairs if pair.trace == trace]
        if changed:
            console.print()
            about = counted(own[0].searches, "search") + " in both" if own[0].searches else ""
            if trace or about:
                print_heading(console, trace or "All", about)
            print_tables(console, _tables(found, own, changed))
    console.print()
    for line in _notes(found, changed):
        console.print(plain(line), markup=False)


def _tables(
    found: Comparison, pairs: Sequence[Pair], changed: Sequence[Column[Any]]
) -> list[tuple[str, Table[Pair]]]:
    """A group of columns per figure: what B has, and the difference."""
    leading: tuple[Column[Pair], ...] = (
        name_column(found.heads[0], lambda pair: pair.names[0]),
        Column(found.heads[1], found.heads[1], LABEL, text=lambda pair: pair.names[1],
               head=(found.heads[1].lower(),)),
    )  # fmt: skip
    return [("", Table(pairs, (*leading, *_both(column)))) for column in changed]


def _both(column: Column[Any]) -> tuple[Column[Pair], Column[Pair]]:
    text = column.text
    second: Column[Pair] = Column(
        column.key, column.title, column.kind, lambda pair: column.value(pair.second),
        head=column.head, family=column.family, scale=column.scale, per=column.per,
        text=None if text is None else lambda pair: text(pair.second),
    )  # fmt: skip
    against: Column[Pair] = Column(
        f"{column.key}_change", "vs A", "count", lambda pair: change(column, pair),
        head=("", "vs A"), text=lambda pair: said(column, pair),
    )  # fmt: skip
    return second, against


def said(column: Column[Any], pair: Pair) -> str:
    """``"+12.0%"``, ``"-0.3 pp"``; problems gained and lost where answers are compared."""
    if _turns(column, pair):
        return f"+{pair.gained} -{pair.lost}"
    found = change(column, pair)
    if not found:
        return "="
    if math.isinf(found):
        return "gone" if math.isnan(column.value(pair.second)) else "new"
    unit = " pp" if column.kind in _SHARES else "%"
    text = f"{100 * found:+.1f}"
    return f"{'+' if found > 0 else '-'}<0.1{unit}" if text[1:] == "0.0" else f"{text}{unit}"


def _notes(found: Comparison, changed: Sequence[Column[Any]]) -> Iterator[str]:
    what = counted(len(found.pairs), {"plan": "candidate"}.get(found.kind, "setting"))
    same = [column for column in found.columns if column not in changed]
    if not changed:
        yield f"No figure differs: {what} compared by {_listed(same)}."
    elif same:
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
    return documents.to_json({
        "kind": found.kind,
        "a": {"file": names[0], "command": commands[0]},
        "b": {"file": names[1], "command": commands[1]},
        "settings": {key: {"a": a, "b": b} for key, (a, b) in found.settings.items()},
        "rows": [
            {
                "trace": pair.trace, **dict(zip(map(str.lower, found.heads), pair.names,
                                                strict=True)),
                "searches": pair.searches, "gained": pair.gained, "lost": pair.lost,
                "figures": {
                    c.key: {"a": c.value(pair.first), "b": c.value(pair.second),
                            "difference": change(c, pair)}
                    for c in found.columns
                },
            }
            for pair in found.pairs
        ],
        "only_in_a": found.only_first,
        "only_in_b": found.only_second,
    })  # fmt: skip
