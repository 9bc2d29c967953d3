"""The log of a live run: what was asked for and what ran it, then a line per search.

A line is on the disk before the next search begins: killing the process loses at most one search.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.documents import RecordLog
from arborsim.core.errors import UsageError
from arborsim.core.measurements import MemorySeries, thinned
from arborsim.core.records import convert
from arborsim.live.request import LiveFacts, LiveRequest, LiveResult
from arborsim.policies.registry import values_of

FORMAT, VERSION = "arborsim-live", 1
#: Samples that are kept of a memory series: what the page draws.
_POINTS = 600
_NS = 9  # decimals of a second


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


class LiveLog(RecordLog[LiveResult]):
    """A log to write to, and what an earlier run has left in it (`records`).

    Parameters
    ----------
    path : Path
    request : LiveRequest
    resume : bool
        Go on after the results that `path` holds, if it exists.
    overwrite : bool
        Replace `path`, but not before the new run has begun.

    Raises
    ------
    UsageError
        The file exists and neither option was given; it is damaged; or it holds the results of
        another request.
    """

    def __init__(
        self, path: Path, request: LiveRequest, *, resume: bool = False, overwrite: bool = False
    ) -> None:
        super().__init__(path, LiveResult, FORMAT, VERSION)
        self._request, self._command = describe(request), request.command
        self._facts: LiveFacts | None = None
        if path.exists() and not resume and not overwrite:
            raise UsageError(f"--out {path}: the file exists: --resume goes on, --overwrite redoes")
        if path.exists() and resume and (head := self.read()):
            self._compare("request", head.get("request", {}), self._request)
            self._facts = convert(LiveFacts, head.get("facts"), f"{path}: facts")

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """The model is there: open the file, behind the results that it holds.

        Raises
        ------
        UsageError
            The file cannot be written, or was made with another model, device or version.
        """
        if self._facts is not None:
            self._compare("model, device or version", asdict(self._facts), asdict(facts))
        self.open({
            "facts": facts, "episodes": episodes, "request": self._request,
            "command": self._command,
        })  # fmt: skip

    def add(self, record: Any) -> None:
        """Store a result, its memory series thinned; it is on the disk afterwards."""
        if isinstance(record, LiveResult):
            series = _thinned(record.measured.series)
            record = replace(record, measured=replace(record.measured, series=series))
        super().add(record)

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


def _thinned(series: MemorySeries) -> MemorySeries:
    keep = thinned(series, _POINTS)
    columns = {f.name: np.asarray(getattr(series, f.name))[keep] for f in fields(series)}
    columns["time_s"] = np.round(columns["time_s"].astype(float), _NS)
    return MemorySeries(**{name: column.tolist() for name, column in columns.items()})
