"""Two runs side by side: the searches that both hold, and what differs.

Searches are matched one by one, and figures are aggregated over those that both runs hold, so that
a run of more problems does not look like another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.units import Scale
from arborsim.play.results import BASELINE, ReplayResult, aggregate
from arborsim.products.live import tables as live
from arborsim.products.live.tables import live_rows
from arborsim.products.plan import words as plan_words
from arborsim.products.plan.results import CandidateResult
from arborsim.products.provenance import parameters
from arborsim.products.replay import tables as replay
from arborsim.products.search import tables as search
from arborsim.products.search.results import rows_of
from arborsim.report.table import Column

#: Kinds of columns whose differences are in percentage points.
SHARES = ("percent", "points")
#: Parts of metadata that are compared, and settings that follow from others.
_SHOWN = ("settings", "facts", "versions")
_SILENT = ("simulated on", "versions", "seconds", "error of seconds")
_DIGEST = re.compile(r"sha256 (\w+)")


@dataclass(frozen=True)
class Pair:
    """The rows of two runs for a policy and budget, a search, or a candidate of a plan."""

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
        return [c for c in self.columns if any(change(c, p) or turns(c, p) for p in self.pairs)]

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
    if column.kind in SHARES:
        return b - a
    return b / a - 1 if a else math.inf


def turns(column: Column[Any], pair: Pair) -> bool:
    """Whether problems changed sides, even if as many were gained as lost."""
    return column.key == "accuracy" and pair.gained + pair.lost > 0


def compare(
    kind: str,
    first: Any,
    second: Any,
    first_said: Mapping[str, Any],
    second_said: Mapping[str, Any],
) -> Comparison:
    """Compare two results of one kind, each a record that `plot.plots` draws, with metadata.

    Raises `UsageError`: there is no comparison of such results, or the two have nothing in common.
    """
    if kind not in _KINDS:
        raise UsageError(f"{kind} results cannot be compared: {', '.join(_KINDS)} can")
    own = _KINDS[kind]
    if kind == "replay":
        second = _renamed(first, second)
        if len({each.trace for run in (first, second) for each in run.episodes}) == 1:
            own = replace(own, said=_KINDS["live"].said)  # the name of the trace says nothing
    pairs, only_first, only_second = own.match(first, second)
    if not pairs:
        names = [", ".join(each[:3]) or "nothing" for each in (only_first, only_second)]
        raise UsageError(
            f"the two runs have nothing in common: one holds {names[0]}; the other {names[1]}"
        )
    differing = _differing(first_said, second_said)
    alone = tuple(only_first), tuple(only_second)
    return Comparison(kind, own.heads, own.columns, tuple(pairs), *alone, differing)


_Matched = tuple[list[Pair], list[str], list[str]]


def _budget(text: str) -> str:
    """``"0.50"`` is ``"0.5"``."""
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


@dataclass(frozen=True)
class _Kind:
    """How two results of one kind are matched: `records` one by one, then their rows."""

    heads: tuple[str, ...]
    columns: tuple[Column[Any], ...]
    records: Callable[[Any], Sequence[Any]]
    rows: Callable[[Any, Sequence[Any]], Iterable[Any]]  #: of a run and some of its records
    cell: Callable[[Any], tuple[Any, ...]]  #: what a record, or a row, is of
    lead: Callable[[Any], str]  #: what leads the table of a row; "" where there is one table
    names: Callable[[Any], tuple[str, ...]]  #: of a row, under `heads`
    said: Callable[[Any], str]  #: what a record is of, in words

    def match(self, first: Any, second: Any) -> _Matched:
        """Pairs of rows over the records that both runs hold, and what only one holds."""
        runs = self.records(first), self.records(second)
        keys = [{self._key(each) for each in own} for own in runs]
        both = keys[0] & keys[1]
        common = [[each for each in own if self._key(each) in both] for own in runs]
        a, b = (
            {self.cell(row): row for row in self.rows(run, own)}
            for run, own in zip((first, second), common, strict=True)
        )
        pairs = [
            Pair(
                self.lead(row),
                self.names(row),
                getattr(row, "searches", 0),
                row,
                b[cell],
                *self._turned(cell, common),
            )
            for cell, row in a.items()
            if cell in b
        ]
        said = [dict.fromkeys(map(self.said, own)) for own in runs]
        alone = [[s for s in said[k] if s not in said[1 - k]] for k in range(2)]
        return pairs, alone[0], alone[1]

    def _key(self, record: Any) -> Hashable:
        return getattr(record, "episode", 0), self.cell(record)

    def _turned(self, cell: tuple[Any, ...], common: Sequence[Sequence[Any]]) -> tuple[int, int]:
        """Problems that only the second run got right, and only the first."""
        own = (
            {
                each.episode: each.correct
                for each in records
                if self.cell(each) == cell and hasattr(each, "correct")
            }
            for records in common
        )
        before, after = own
        known = [(verdict, after[episode]) for episode, verdict in before.items()]
        return known.count((False, True)), known.count((True, False))


def _renamed(first: ReplayResult, second: ReplayResult) -> ReplayResult:
    """The second run with the first's name of each trace that it knows by another."""

    def digests(run: ReplayResult) -> dict[str, str]:
        names = dict.fromkeys(each.trace for each in run.episodes)
        found = {name: _DIGEST.search(run.settings.get(f"trace {name}", "")) for name in names}
        return {name: made[1] for name, made in found.items() if made}

    ours = {digest: name for name, digest in digests(first).items()}
    here = {each.trace for each in first.episodes}
    known = {name: ours[digest] for name, digest in digests(second).items() if digest in ours}
    theirs = (
        each if each.trace in here else replace(each, trace=known.get(each.trace, each.trace))
        for each in second.episodes
    )
    return replace(second, episodes=tuple(theirs))


def _under(each: Any, before: str = "") -> str:
    """Policy and budget; "" for full retention."""
    if each.policy == BASELINE:
        return ""
    return f"{before}{each.policy} {_budget(each.budget)}"


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


def _largest(row: CandidateResult) -> float:
    return math.nan if row.largest is None else row.largest


def _latency(row: CandidateResult) -> float:
    return row.at_largest.at_percentile.value if row.at_largest else math.nan


_PLAN = (
    _candidate("cost", "count", ("cost of", "1,000"), plan_words.cost),
    _candidate("largest", "count", ("largest", "load"), _largest),
    _candidate("latency", "seconds", ("time per", "search"), _latency),
    _candidate("kept", "percent", ("attn.", "kept"), plan_words.kept),
)
_REPLAY = ("peak_hbm", "peak_ddr", "total", "kept", "error")
_MOVES = ("evicted", "offloaded", "rehydrated", "moved")
_SEARCH = ("kv", "hbm", "ddr", "time", "calls", "tokens", "kept")
_SEARCHES = (*search.ANSWERS, *search.MEMORY, *search.WORK)
_LIVES = (*live.MEMORY, *live.TIME)
_POLICIES = ("Policy", "Budget")
_KINDS = {
    "replay": _Kind(
        _POLICIES,
        _of(replay.COLUMNS.values(), *_REPLAY, *_MOVES),
        lambda run: run.episodes,
        lambda run, own: aggregate(own),
        lambda each: (each.trace, each.policy, _budget(each.budget)),
        lambda row: row.trace,
        lambda row: (row.label, _budget(row.budget_label)),
        lambda each: f"{_under(each) or each.policy} on {each.trace}",
    ),
    "search": _Kind(
        ("Search", "Width"),
        (_right(_of(_SEARCHES, "accuracy")[0]), *_of(_SEARCHES, *_SEARCH)),
        lambda run: run,
        lambda run, own: rows_of(own),
        lambda each: (each.label, each.width, each.policy, _budget(each.budget)),
        _under,
        lambda row: (row.label, str(row.width)),
        lambda each: f"{each.label} at width {each.width}{_under(each, ' under ')}",
    ),
    "live": _Kind(
        _POLICIES,
        (_right(_of(live.ANSWERS, "accuracy")[0]), *_of(_LIVES, "peak_hbm", "total", "evicted")),
        lambda run: run.results,
        lambda run, own: live_rows(replace(run, results=tuple(own))),
        lambda each: (each.policy, _budget(each.budget)),
        lambda row: "",
        lambda row: (row.label, _budget(row.budget_label)),
        lambda each: _under(each) or each.policy,
    ),
    "plan": _Kind(
        _POLICIES,
        _PLAN,
        lambda run: run.candidates,
        lambda run, own: own,
        lambda c: (c.hardware, c.policy, _budget(c.budget), c.recall, c.gpus),
        lambda row: row.hardware,
        lambda row: (row.policy, _budget(row.budget)),
        lambda each: each.name,
    ),
}


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Settings that differ between the runs; of lists the parts that only one has."""
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
    """The parts of two lists by comma that only one of them has."""
    parts, others = a.split(", "), b.split(", ")
    left = [part for part in parts if part not in others]
    right = [part for part in others if part not in parts]
    return (", ".join(left) or "-", ", ".join(right) or "-") if left or right else (a, b)
