"""The candidates that a plan has finished, as JSON lines that survive an interruption.

The first line says which plan it is, every further one is a `CandidateResult`.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.plan.provenance import settings_of
from arborsim.plan.results import CandidateResult
from arborsim.plan.workload import Workload

FORMAT, VERSION = "arborsim-plan", 1


def fingerprint(workload: Workload) -> str:
    """A digest of everything that a candidate's result depends on."""
    moments = getattr(workload.arrivals, "moments_s", ())
    everything = [repr(workload), repr(settings_of(workload)), repr(moments)]
    return hashlib.sha256("\n".join(everything).encode()).hexdigest()


class PlanLog:
    """A log to add to.

    Parameters
    ----------
    path : Path
    workload : Workload
    """

    def __init__(self, path: Path, workload: Workload) -> None:
        self.path = path
        self._head = {"format": FORMAT, "version": VERSION, "plan": fingerprint(workload)}

    def read(self) -> dict[int, CandidateResult]:
        """The candidates that are in it, by number.

        Raises
        ------
        UsageError
            There is no such file, it is damaged, or it is of another plan.
        """
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            raise UsageError(
                f"--resume: there is no {self.path}: nothing was interrupted there after a "
                "candidate was finished; run without --resume"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"--resume: cannot read {self.path}: {reason}") from None
        found = {}
        for number, line in enumerate(lines[:-1], 1):  # what follows the last end is a torn line
            try:
                value = json.loads(line)
                if number == 1:
                    self._check(value)
                    continue
                result = from_json(CandidateResult, value)
            except ValueError as error:
                raise UsageError(
                    f"--resume: {self.path}, line {number}: {error}: the file is damaged; delete "
                    "the line"
                ) from None
            found[result.number] = result
        return found

    def _check(self, head: Any) -> None:
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise UsageError(f"--resume: {self.path} was not left by an interrupted plan")
        if head != self._head:
            raise UsageError(
                f"--resume: {self.path} is of another workload or version of arborsim: delete it"
            )

    def write(self, results: Iterable[CandidateResult]) -> None:
        """Replace the file by one with these candidates.

        Raises
        ------
        UsageError
            It cannot be written.
        """
        lines = [self._head, *(asdict(result) for result in results)]
        self._put("w", "".join(f"{json.dumps(line)}\n" for line in lines))

    def add(self, result: CandidateResult) -> None:
        """Append a candidate to the file that `write` made."""
        self._put("a", f"{json.dumps(asdict(result))}\n")

    def _put(self, mode: str, text: str) -> None:
        try:
            with self.path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror}") from None


def from_json(kind: type[Any], value: Any) -> Any:
    """A dataclass from what `dataclasses.asdict` and JSON made of it.

    Raises
    ------
    ValueError
        A field is missing, unknown, or of another type.
    """
    hints = typing.get_type_hints(kind)
    if not isinstance(value, dict) or set(value) != set(hints):
        raise ValueError(f"this is no {kind.__name__}")
    return kind(**{name: _of_type(hint, value[name], name) for name, hint in hints.items()})


def _of_type(hint: Any, value: Any, name: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _of_type(inner[0], value, name)
    if is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value)
    if origin in (tuple, list) and isinstance(value, list):
        kinds = inner[:1] * len(value) if origin is list or inner[1:] == (...,) else inner
        if len(kinds) == len(value):
            return origin(_of_type(k, v, name) for k, v in zip(kinds, value, strict=True))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _of_type(inner[1], each, name) for key, each in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{name} is {json.dumps(value)[:40]}")
