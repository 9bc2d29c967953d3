"""The log of a live run: JSON lines that survive an interruption.

The first line says what was asked for and what ran it, every further one is a result.  A line is on
the disk before the next search begins, so killing the process loses at most the running search.
"""

from __future__ import annotations

import hashlib
import json
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.measurements import MemorySeries
from arborsim.live.request import LiveFacts, LiveRequest, LiveResult
from arborsim.policies.registry import values_of

FORMAT, VERSION = "arborsim-live", 1
#: How the first line begins, even if no more of it reached the disk.
_HEAD = f'{{"format":"{FORMAT}",'.encode()
#: Samples that are kept of a memory series: what the page draws.
_POINTS = 600
_NS = 9  # decimals of a second
_T = TypeVar("_T")


def describe(request: LiveRequest) -> dict[str, Any]:
    """Everything that determines the results of `request`, as JSON; paths of outputs are not."""
    others = {"cells", "command", "embed", "machine", "prompts", "reward", "trace"}
    plain = sorted({f.name for f in fields(LiveRequest)} - others)
    found: dict[str, Any] = {name: getattr(request, name) for name in plain}
    found["cells"] = [
        {"policy": c.policy.name, "budget": c.budget.text, "settings": values_of(c.policy)}
        for c in request.cells
    ]
    if request.reward.name:  # logs from before there was a choice hold the default
        found["reward"] = asdict(request.reward)
    if request.embed:
        found["embed"] = request.embed
    if request.prompts is not None:
        try:
            found["prompts_sha256"] = _digest(request.prompts.read_bytes())
        except OSError as error:
            raise UsageError(f"--prompts {request.prompts}: {error.strerror}") from error
    if request.machine is not None:
        profile = request.machine.profile
        content = str([getattr(profile, f.name) for f in fields(profile)])
        found["gpu"] = {"name": profile.name, "sha256": _digest(content.encode())}
    return dict(json.loads(json.dumps(found, default=str)))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class LiveLog:
    """A log to write to, and what an earlier run has left in it.

    Parameters
    ----------
    path : Path
    request : LiveRequest
    resume : bool
        Go on after the results that `path` holds, if it exists.
    overwrite : bool
        Replace `path`, but not before the new run has begun.

    Attributes
    ----------
    results : list of LiveResult
        Of the earlier run.

    Raises
    ------
    UsageError
        The file exists and neither option was given; it is damaged; or it holds the results of
        another request.
    """

    def __init__(
        self, path: Path, request: LiveRequest, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        self.path = path
        self.results: list[LiveResult] = []
        self._request, self._command = describe(request), request.command
        self._facts: LiveFacts | None = None
        self._file: IO[bytes] | None = None
        self._kept_bytes = 0
        if path.exists() and not resume and not overwrite:
            raise UsageError(f"--out {path}: the file exists: --resume goes on, --overwrite redoes")
        if path.exists() and resume:
            self._read()

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """The model is there: open the file, behind the results that it holds.

        Raises
        ------
        UsageError
            The file cannot be written, or was made with another model, device or version.
        """
        if self._facts is not None:
            self._compare("model, device or version", asdict(self._facts), asdict(facts))
        try:
            self._file = self.path.open("r+b" if self._kept_bytes else "wb")
            self._file.truncate(self._kept_bytes)
            self._file.seek(self._kept_bytes)
        except OSError as error:
            raise UsageError(f"--out {self.path}: cannot write: {error.strerror}") from error
        if self._facts is None:
            self._write({
                "format": FORMAT, "version": VERSION, "facts": asdict(facts),
                "episodes": episodes, "request": self._request, "command": self._command,
            })  # fmt: skip

    def add(self, result: LiveResult) -> None:
        """Store a result; it is on the disk afterwards."""
        self._write(to_json(result))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None, "add before began"
        try:
            text = json.dumps(line, allow_nan=False, separators=(",", ":"))
            self._file.write(f"{text}\n".encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UsageError(f"--out {self.path}: cannot write: {error.strerror}") from error

    def _read(self) -> None:
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise UsageError(f"--out {self.path}: cannot read: {error.strerror}") from error
        # What follows the last line's end was being written when the process died.
        *lines, rest = content.split(b"\n")
        if not lines and _HEAD.startswith(rest[: len(_HEAD)]):
            return
        if not lines or not lines[0].startswith(_HEAD):
            raise self._no_log()
        head = self._parsed(1, lines[0])
        if head.get("version") != VERSION:
            raise self._no_log()
        self._compare("request", head.get("request", {}), self._request)
        try:
            self._facts = from_json(LiveFacts, head.get("facts"))
            for number, line in enumerate(lines[1:], 2):
                self.results.append(from_json(LiveResult, self._parsed(number, line)))
        except ValueError as error:
            line_number = len(self.results) + 1 + (self._facts is not None)
            raise self._damaged(line_number, str(error)) from error
        self._kept_bytes = sum(len(line) + 1 for line in lines)

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError as error:
            raise self._damaged(number, "no JSON") from error
        if not isinstance(found, dict):
            raise self._damaged(number, "no JSON object")
        return found

    def _no_log(self) -> UsageError:
        return UsageError(
            f"--out {self.path}: not a log of live runs (version {VERSION}): choose another name"
        )

    def _damaged(self, number: int, what: str) -> UsageError:
        return UsageError(
            f"--out {self.path}, line {number}: {what}: the log is damaged; delete the line, or "
            "--overwrite redoes all"
        )

    def _compare(self, what: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        """Results of different kinds must not stand in one log."""
        for key in sorted({*there, *here}):
            if there.get(key) == here.get(key):
                continue
            if key == "cells":
                said = "other policies, settings or budgets"
            else:
                said = f"{key.replace('_', ' ')} {there.get(key)!r} there, {here.get(key)!r} here"
            raise UsageError(
                f"--out {self.path}: holds results of another {what} ({said}): choose another "
                "name, or --overwrite"
            )


def to_json(result: LiveResult) -> dict[str, Any]:
    """A result as JSON values; its memory series is thinned."""
    found = asdict(result)
    found["measured"]["series"] = _thinned(result.measured.series)
    return found


def _thinned(series: MemorySeries) -> dict[str, list[float]]:
    from arborsim.core.measurements import thinned

    keep = thinned(series, _POINTS)
    columns = {f.name: np.asarray(getattr(series, f.name))[keep] for f in fields(series)}
    columns["time_s"] = np.round(columns["time_s"].astype(float), _NS)
    return {name: column.tolist() for name, column in columns.items()}


def from_json(kind: type[_T], value: Any, where: str = "") -> _T:
    """A dataclass from what `dataclasses.asdict` made of it.

    Raises
    ------
    ValueError
        A field is missing, unknown, or of another type.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the line'} is no object")
    hints = typing.get_type_hints(kind)
    for name in {*value, *hints}:
        if name not in value or name not in hints:
            raise ValueError(f"{where}{name} is {'missing' if name in hints else 'unknown'}")
    return kind(**{name: _of_type(hint, value[name], where + name) for name, hint in hints.items()})


def _of_type(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value, f"{where}.")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is list and isinstance(value, list):
        return [_of_type(inner[0], item, where) for item in value]
    if origin is dict and isinstance(value, dict):
        return {str(key): _of_type(inner[1], item, where) for key, item in value.items()}
    if origin is types.UnionType and value is None:
        return None
    if origin is types.UnionType:
        hint = inner[0]
    # A whole number may stand for a float; a bool is an int to Python, not here.
    kinds = (int, float) if hint is float else hint
    plain = isinstance(hint, type) and origin in (None, types.UnionType)
    if not plain or not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{where} is {json.dumps(value)[:40]}")
    return value
