"""Answers counted live: how many are right under a policy with its settings and a budget.

Live runs remove tokens for real, so they alone say what a policy does to answers.  Those of the
reference models come with the package (``answers.csv``). Logs of ``arborsim live --out`` add
others.  A row is found by what was searched and how, by the policy with all its settings, and by
the budget. Where only a near one was counted, `Match.differs` says what is not the same.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from arborsim.core.errors import ArborsimError, UsageError
from arborsim.core.statistics import Score
from arborsim.core.tiers import Budget
from arborsim.play.results import ANY, BASELINE, ORACLES, Answered, ReplayResult
from arborsim.policies.registry import changed, defaults_of, titled

#: Budgets further apart than this share of a search are not compared.
NEAR = 0.1
_DECIMALS = 9  # to which shares are compared
_TASK_OPTION = "task."  # how a trace marks options of its task among those of the search


@dataclass(frozen=True)
class Searched:
    """The problems of a search, its options and its model.

    `options` are those of the task (``{"lines": 32}`` of chain), as they were given.
    `search_options` are all that the search has.
    """

    task: str
    search: str
    model: str  #: as the backend calls it: that of the recording, whatever model is charged
    options: Mapping[str, Any]
    search_options: Mapping[str, Any]
    temperature: float

    @classmethod
    def of_recording(cls, recording: Mapping[str, Any]) -> Searched:
        """The problems, search and model that a trace was recorded from (`TraceInfo.recording`)."""
        given = recording["search_parameters"]
        options = {
            name.removeprefix(_TASK_OPTION): value
            for name, value in given.items()
            if name.startswith(_TASK_OPTION)
        }
        task, name, model = (str(recording[key]) for key in ("task", "search", "model"))
        known = _defaults_of_search(name)
        search = {key: given.get(key, value) for key, value in known.items()}
        temperature = float(given.get("temperature", math.nan))
        return cls(task, name, model, options, search, temperature)

    @classmethod
    def of_request(cls, request: Mapping[str, Any], task: str, model: str) -> Searched:
        """The same of a live run, from its request (`arborsim.play.live_log.describe`)."""
        name = str(request.get("search", ""))
        search = _defaults_of_search(name) | _typed(request.get("search_options", {}))
        options = dict(request.get("task_options", {}))
        temperature = float(request.get("temperature", math.nan))
        return cls(task, _name_of_search(name), model, options, search, temperature)

    @property
    def family(self) -> tuple[str, str, str]:
        """Task, search and model: answers are never carried across them."""
        return self.task, self.search, self.model

    @property
    def problems(self) -> str:
        """``"chain (lines 32)"``."""
        options = ", ".join(f"{name} {value}" for name, value in sorted(self.options.items()))
        return f"{self.task} ({options})" if options else self.task

    def differs(self, other: Searched) -> tuple[str, ...]:
        """The parts that are not the same in `other`, of one family, as ``"lines 32"``."""
        pairs = ((self.options, other.options), (self.search_options, other.search_options))
        return tuple(
            f"{name} {own.get(name, 'default')}"
            for own, there in pairs
            for name in sorted({*own, *there})
            if own.get(name) != there.get(name)
        )


@dataclass(frozen=True, kw_only=True)
class Counted(Score):
    """Answers under one policy with its settings and one budget, over the same problems."""

    searched: Searched
    policy: str
    settings: Mapping[str, Any]  #: every one, as `arborsim.policies.registry.values_of` gives them
    budget: str  #: as it was given; `ANY` of a policy that knows no budgets
    attention_kept: float = math.nan  #: in replays of the same problems, where those were made

    @property
    def share(self) -> float:
        """The budget as a share of the search. NaN where it is in tokens or there is none."""
        return _share(self.budget)

    @property
    def label(self) -> str:
        """``"h2o per=shared"``: the policy with the settings that are not its authors'."""
        return titled(self.policy, self.settings)


@dataclass(frozen=True)
class Match:
    """Answers counted for a setting, and in what it is not the same."""

    counted: Counted
    #: ``("budget 0.87", "lines 32")``, of what was counted; empty if all is the same
    differs: tuple[str, ...] = ()
    own_budget: bool = True  #: whether the budget is that which was asked for

    @property
    def exact(self) -> bool:
        return not self.differs

    @property
    def answered(self) -> Answered:
        """As rows of a replay hold it."""
        found = self.counted
        return Answered(
            found.right, found.n, found.infeasible, found.full_right, found.source,
            budget=found.budget, problems=found.searched.problems, differs=self.differs,
            own_budget=self.own_budget,
        )  # fmt: skip


@dataclass(frozen=True)
class Answers:
    """Everything that was counted. Of equals the first is taken."""

    rows: tuple[Counted, ...] = ()

    def of(self, searched: Searched) -> tuple[Counted, ...]:
        """Answers counted with this task, search and model, under any policy."""
        return tuple(row for row in self.rows if row.searched.family == searched.family)

    def for_(
        self, searched: Searched, policy: str, settings: Mapping[str, Any], budget: str
    ) -> Match | None:
        """Answers counted for a policy with these settings under a budget, or None.

        Task, search, model, policy and settings are the same. Settings that are not given have
        their defaults.  Of several rows the nearest is taken: the same budget first, then the same
        options of task and search, then most problems.  A share that was not counted is stood for
        by the nearest that was, up to `NEAR` away, the smaller of two. `Match.differs` says so.
        """
        mine = complete(policy, settings)
        found = [
            (apart(row.budget, budget), row.searched.differs(searched), row)
            for row in self.of(searched)
            if row.policy == policy and row.n and complete(policy, row.settings) == mine
        ]
        near = [each for each in found if each[0] <= NEAR]
        if not near:
            return None
        away, differs, row = min(
            near, key=lambda each: (each[0], each[2].share, len(each[1]), -each[2].n)
        )
        own = away == 0
        return Match(row, differs if own else (f"budget {row.budget}", *differs), own)

    def others(
        self, searched: Searched, policy: str, settings: Mapping[str, Any]
    ) -> tuple[Counted, ...]:
        """Answers counted for the policy with other settings."""
        mine = complete(policy, settings)
        return tuple(
            row
            for row in self.of(searched)
            if row.policy == policy and row.n and complete(policy, row.settings) != mine
        )


def answered(result: ReplayResult, known: Answers | None = None) -> ReplayResult:
    """A replay with what was counted live for each policy, with its settings, and budget.

    `known` are those that come with the package unless others are given.  The model is the recorded
    one, whatever model is charged.
    """
    known = known or shipped()
    traces = {trace: Searched.of_recording(each) for trace, each in result.recordings.items()}
    found = {}
    cells = dict.fromkeys((each.trace, each.policy, each.budget) for each in result.episodes)
    equal = result.found()
    for trace, policy, budget in cells:
        if trace in traces and policy in result.policies and policy not in ORACLES:
            own = equal.get((trace, policy, budget))
            held = own.found if own else budget
            match = known.for_(traces[trace], policy, result.policies[policy], held)
            if match is not None:
                found[trace, policy, budget] = match.answered
    for trace, searched in traces.items():
        _same_run(found, trace, known.of(searched), searched)
        ran = {policy for there, policy, _ in cells if there == trace} - {BASELINE, *ORACLES}
        # Answers of full retention to other problems, and none to compare them with, say nothing.
        if ran and {policy for there, policy, _ in found if there == trace} == {BASELINE}:
            found = {
                cell: each for cell, each in found.items() if cell[0] != trace or not each.differs
            }
    return replace(result, answers=found)


def _same_run(
    found: dict[tuple[str, str, str], Answered],
    trace: str,
    rows: Sequence[Counted],
    searched: Searched,
) -> None:
    """Full retention is that of the run that most others are from: runs have their own problems."""
    others = [each.source for key, each in found.items() if key[0] == trace and key[1] != BASELINE]
    key = (trace, BASELINE, ANY)
    if key in found and others and found[key].source not in others:
        most = max(others, key=others.count)
        full = [row for row in rows if row.source == most and row.policy == BASELINE]
        del found[key]
        for row in full:
            found[key] = Match(row, row.searched.differs(searched)).answered


@cache
def shipped() -> Answers:
    """Those that come with the package, made by ``python benchmarks/answers.py``."""
    text = (resources.files("arborsim.products.replay") / "answers.csv").read_text(encoding="utf-8")
    return Answers(tuple(from_csv(text)))


_PLAINLY = 4  # times as many right answers


@cache
def disagreement() -> tuple[Counted, Counted] | None:
    """Two settings of one run, of which the one that keeps less attention is far more right.

    That is: visibly, and several times as often.  Of those that come with the package, as their
    authors run them: the first keeps the most attention of all for which there is such another, the
    second has the most right answers of these.
    """
    known = [
        row
        for row in shipped().rows
        if not (math.isnan(row.attention_kept) or row.policy == BASELINE)
        and not changed(row.policy, row.settings)
    ]
    for more in sorted(known, key=lambda row: -row.attention_kept):
        others = [
            r
            for r in known
            if r.attention_kept < more.attention_kept
            and r.beats(more)
            and r.right >= _PLAINLY * more.right
        ]
        if others:
            return more, max(others, key=lambda row: row.right)
    return None


_COLUMNS = (
    "source", "task", "options", "search", "search_options", "temperature", "model", "policy",
    "settings", "budget", "right", "n", "infeasible", "full_right", "attention_kept",
)  # fmt: skip


def to_csv(rows: Iterable[Counted]) -> str:
    """The file's text. Options and settings are JSON, what is unknown is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        whole = {**vars(row), **vars(row.searched)}
        for name in ("options", "search_options", "settings"):
            whole[name] = json.dumps(whole[name], sort_keys=True)
        kept = row.attention_kept
        writer.writerow({**whole, "attention_kept": "" if math.isnan(kept) else f"{kept:.6f}"})
    return text.getvalue()


def from_csv(text: str) -> Iterator[Counted]:
    """The rows of `to_csv`."""
    for row in csv.DictReader(text.splitlines()):
        searched = Searched(
            row["task"], row["search"], row["model"], json.loads(row["options"]),
            json.loads(row["search_options"]), float(row["temperature"]),
        )  # fmt: skip
        yield Counted(
            int(row["right"]), int(row["n"]), int(row["infeasible"]),
            int(row["full_right"]) if row["full_right"] else None, row["source"],
            searched=searched, policy=row["policy"], settings=json.loads(row["settings"]),
            budget=row["budget"], attention_kept=float(row["attention_kept"] or math.nan),
        )  # fmt: skip


def complete(policy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """With defaults for what is not said: logs of earlier versions lack newer settings."""
    return {**defaults_of(policy), **json.loads(json.dumps(dict(settings), default=str))}


def apart(counted: str, wanted: str) -> float:
    """How far apart two budgets are, as shares. Infinite where they cannot be compared."""
    if counted == wanted:
        return 0.0
    away = abs(_share(counted) - _share(wanted))
    return math.inf if math.isnan(away) else round(away, _DECIMALS)


def _share(budget: str) -> float:
    try:
        share = None if budget == ANY else Budget.parse(budget).share
    except UsageError:
        share = None
    return math.nan if share is None else share


def _defaults_of_search(name: str) -> dict[str, Any]:
    from arborsim.searches import search_options

    try:
        return search_options(name, code=False)
    except ArborsimError:
        return {}


def _name_of_search(name: str) -> str:
    """The name of a search in traces: one given by its class goes by the class's name."""
    from arborsim.searches import find_search

    try:
        return find_search(name, code=False).name
    except ArborsimError:
        return name


def _typed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the command line are text."""
    found = {}
    for name, value in options.items():
        try:
            found[name] = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            found[name] = value
    return found
