"""The results of a live run, collected as they come, and their log on disk.

The log holds what was asked for and what ran it, then a line per search, or per document of a
fidelity run.  A line is on the disk before the next search begins: killing the process loses at
most one search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from arborsim.core.documents import RecordLog
from arborsim.core.errors import UsageError
from arborsim.core.measurements import Measurements, MemorySeries, TimeSplit, thinned
from arborsim.core.records import MOST_FLOAT, convert
from arborsim.core.settings import default_of
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult, RewardChoice
from arborsim.policies.registry import values_of

if TYPE_CHECKING:
    from arborsim.play.episode import Cell

FORMAT, VERSION = "arborsim-live", 1


class Logged(Protocol):
    """A result: there is one of an episode, policy and budget."""

    @property
    def episode(self) -> int: ...

    @property
    def policy(self) -> str: ...

    @property
    def budget(self) -> str: ...


R = TypeVar("R", bound=Logged)
#: Samples that are kept of a memory series: what the page draws.
_POINTS = 600
_NS = 9  # decimals of a second


#: Fields of a request that are described in another way, or determine no result.
_APART = {"cells", "command", "machine", "prompts", "texts", "trace"}


def describe(request: LiveRequest) -> dict[str, Any]:
    """Everything that determines the results of `request`, as JSON, without paths of outputs."""
    names = [each.name for each in fields(request) if each.name not in _APART]
    found: dict[str, Any] = {name: getattr(request, name) for name in names}
    found["reward"] = asdict(request.reward)
    found["cells"] = [
        {"policy": c.policy.name, "budget": c.budget.text, "settings": values_of(c.policy)}
        for c in request.cells
    ]
    if request.problems is not None and request.problems.path is None:
        found["prompts"] = request.problems.source
    elif request.prompts is not None:
        found["prompts_sha256"] = _sha256("--prompts", request.prompts)
    if texts := getattr(request, "texts", ()):
        found["texts"] = {each.name: _sha256("--text", each) for each in texts}
    if request.machine is not None:
        profile = request.machine.profile
        found["gpu"] = {"name": profile.name, "sha256": profile.digest}
    return dict(json.loads(json.dumps(found, default=str)))


def completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored request with the defaults of options that it does not know."""
    known: dict[str, Any] = {}
    for each in fields(LiveRequest):
        if each.name not in _APART:
            value = default_of(each)
            known[each.name] = asdict(value) if isinstance(value, RewardChoice) else value
    return {**json.loads(json.dumps(known, default=str)), **stored}


def _sha256(option: str, path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from error


@dataclass(frozen=True)
class LoggedCell:
    """A policy under a budget, as `describe` has it."""

    policy: str
    budget: str
    settings: Mapping[str, Any]


def request_of(head: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The request in a log's head, or a `UsageError` if the head is damaged."""
    place, table = f"{path}, line 1: request", dict[str, Any]
    convert(table, head.get("facts", {}), f"{path}, line 1: facts", finite=False)
    request = convert(table, head.get("request", {}), place, finite=False)
    convert(tuple[LoggedCell, ...], request.get("cells", []), f"{place} cells", finite=False)
    for name in ("gpu", "task_options", "search_options"):
        if name in request:
            convert(table, request[name], f"{place} {name}", finite=False)
    for each in fields(LiveRequest):
        if each.name in request and (kind := _PLAIN.get(str(each.type))):
            convert(kind, request[each.name], f"{place} {each.name}", finite=False)
    return request


_PLAIN: dict[str, type[Any]] = {"int": int, "float": float, "bool": bool, "str": str}


class LiveRecords(RecordLog[R]):
    """The log of results of a `kind`, whose numbers are all known."""

    def __init__(self, path: Path, kind: Any = LiveResult) -> None:
        name = FORMAT if kind is LiveResult else f"{FORMAT}-{kind.__name__}"
        super().__init__(path, kind, name, VERSION)

    def read(self) -> dict[str, Any]:
        head = super().read()
        for line, record in enumerate(self.records, 2):
            for name, value in _numbers(vars(record)):
                if not abs(value) <= MOST_FLOAT:
                    raise UsageError(
                        f"{self.path}, line {line}: {name} must be a finite number, not {value!r}: "
                        "the log is damaged; delete the line to go on without it"
                    )
        return head


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and numbers of a result, those of its parts too."""
    for name, value in record.items():
        if isinstance(value, Measurements | TimeSplit):
            yield from _numbers(vars(value))
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, float):
                yield name, each


class LiveLog(LiveRecords[R]):
    """A log to write to, with the results of an earlier run (`records`).

    `resume` goes on after the results of `path`, if it exists.  `overwrite` replaces `path`,
    but not before the new run has begun.

    Raises `UsageError` if the file exists and neither option was given, or it is damaged or of
    another request.
    """

    def __init__(
        self,
        path: Path,
        request: LiveRequest,
        kind: Any = LiveResult,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        super().__init__(path, kind)
        self._request, self._command = describe(request), request.command
        self._facts: LiveFacts | None = None
        if path.exists() and not resume and not overwrite:
            raise UsageError(f"--out {path}: the file exists: --resume goes on, --overwrite redoes")
        if path.exists() and resume and (head := self.read()):
            self._compare("request", completed(request_of(head, path)), self._request)
            self._facts = convert(LiveFacts, head.get("facts"), f"{path}: facts")

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """The model is there: open the file, behind the results that it holds.

        Raises `UsageError` if that cannot be written, or comes from another model or version.
        """
        if self._facts is not None:
            there, here = (asdict(replace(each, conditions={})) for each in (self._facts, facts))
            for name in {*there["software"]} ^ {*here["software"]}:  # one version does not say it
                there["software"].pop(name, None)
                here["software"].pop(name, None)
            self._compare("model, device or version", there, here)
        head = {"facts": facts, "episodes": episodes, "request": self._request}
        self.open(head | {"command": self._command})

    def add(self, record: Any) -> None:
        """Store a result, its memory series thinned.  It is on the disk afterwards."""
        if isinstance(record, LiveResult):
            series = record.measured.series
            keep = thinned(series, _POINTS)
            columns = {f.name: np.asarray(getattr(series, f.name))[keep] for f in fields(series)}
            columns["time_s"] = np.round(columns["time_s"].astype(float), _NS)
            series = MemorySeries(**{name: kept.tolist() for name, kept in columns.items()})
            record = replace(record, measured=replace(record.measured, series=series))
        super().add(record)

    def _compare(self, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Results of different kinds must not stand in one log."""
        for key in sorted({*there, *here}):
            if there.get(key) == here.get(key):
                continue
            said = f"{key.replace('_', ' ')} {there.get(key)!r} there, {here.get(key)!r} here"
            if key == "cells":
                said = "other policies, settings or budgets"
            raise UsageError(
                f"--out {self.path}: holds results of another {what} ({said}): choose another "
                "name, or --overwrite"
            )


class Collector(Generic[R]):
    """A `LiveObserver` that keeps all results, those of an earlier run in `log` first.

    `facts` are None until the model is loaded.  `episodes` are the problems of the whole run.
    """

    def __init__(self, log: LiveLog[R] | None = None) -> None:
        self.facts: LiveFacts | None = None
        self.episodes = 0
        self._log = log
        self._results: dict[tuple[int, str, str], R] = {}
        for result in log.records if log else ():
            self._results.setdefault(key_of(result), result)

    @property
    def results(self) -> tuple[R, ...]:
        """In the order in which they came."""
        return tuple(self._results.values())

    def began(self, facts: LiveFacts, episodes: int) -> None:
        self.facts, self.episodes = facts, episodes
        if self._log is not None:
            self._log.began(facts, episodes)

    def wants(self, episode: int, cell: Cell) -> bool:
        return (episode, cell.policy.name, cell.budget.text) not in self._results

    def full_tokens(self, episode: int) -> int:
        of_episode = (r for r in self._results.values() if r.episode == episode)
        known = (r.full_tokens for r in of_episode if isinstance(r, LiveResult))
        return max(known, default=0)

    def running(self, episode: int, what: str, tokens: int) -> None:
        pass

    def finished(self, result: R) -> None:
        # One shadow search serves all cells: it hands over again what a resumed run has already.
        if key_of(result) in self._results:
            return
        if self._log is not None:
            self._log.add(result)
        self._results[key_of(result)] = result


def key_of(result: Logged) -> tuple[int, str, str]:
    """Problem, policy and budget: what there is one result of."""
    return result.episode, result.policy, result.budget
