"""Runs of serving engines that were measured on GPUs: rows of a CSV file, one run each.

A run is a closed loop: `concurrency` clients, each with one request in flight.  ``published.csv``,
which ships with the package (`NOTICE` says where it is from), is one such file; others have the
same columns:

- what was served: ``model``, ``weights`` (`WEIGHTS`), ``gpu``, ``engine`` (`ENGINES`),
  ``engine_version``, ``tensor_parallel``, ``data_parallel``, ``expert_parallel``;
- the load: ``prompt_tokens``, ``output_tokens``, ``concurrency``, ``concurrency_client``;
- what was measured, means over requests: ``ttft_ms`` and ``tpot_ms``;
- ``id``, hexadecimal digits, and ``measured``, a date.

`OPTIONAL` columns may be missing or empty.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import read_text

#: Of the shipped runs.
SOURCE = "published.csv: selected rows and columns of AIConfigurator 0.12's silicon_sample.csv"
ENGINES = ("vllm", "sglang", "trtllm")
WEIGHTS = ("bfloat16", "fp8", "fp8_block", "nvfp4")
_PARALLEL = ("data_parallel", "expert_parallel")
OPTIONAL = ("id", "engine_version", *_PARALLEL, "concurrency_client", "measured")
_ID = re.compile(r"[0-9a-f]{8,}")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class ServingRun:
    """One run in a closed loop: `concurrency` requests are always in flight."""

    model: str
    gpu: str
    engine: str
    weights: str
    tensor_parallel: int
    expert_parallel: int  #: 0 if it is not said
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    id: str = ""
    engine_version: str = ""
    data_parallel: int = 0  #: 0 if it is not said
    concurrency_client: int = 0  #: as the clients were set, 0 if it is not said
    ttft_ms: float = math.nan  #: time to first token, mean over requests
    tpot_ms: float = math.nan  #: time per output token after the first, mean over requests
    measured: str = ""  #: date, "" if it is not said

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * max(1, self.data_parallel)

    @property
    def engine_name(self) -> str:
        """The engine with its version, if it is said."""
        return " ".join(filter(None, (self.engine, self.engine_version)))

    @property
    def name(self) -> str:
        """All that tells a run from others, for tables and messages."""
        return (
            f"{self.model} {self.weights}, {self.gpus} x {self.gpu}, {self.engine_name}, "
            f"{self.prompt_tokens} + {self.output_tokens} tokens, {self.concurrency} clients"
        )

    @property
    def nightly(self) -> bool:
        """Whether it is one of the dated runs of the public nightly benchmarks."""
        return self.data_parallel == 1 and bool(self.measured)

    @property
    def fitted(self) -> bool:
        """Whether constants may be fitted on it; it is not judged then.

        Half of the identified runs are, by their identifiers; a run without one is judged.
        """
        return bool(self.id) and int(self.id[:8], 16) % 2 == 0


def read_runs(path: Path | None = None) -> list[ServingRun]:
    """The runs of a CSV file, or of the one that ships with the package.

    Raises `UsageError` that names file, row (the first below the head is 1) and column, and says
    what is expected there.
    """
    if path is None:
        text = (resources.files("arborsim.products.validate") / "published.csv").read_text(
            encoding="utf-8"
        )
    else:
        text = read_text(path)
    origin = "published.csv" if path is None else str(path)
    lines = csv.reader(text.splitlines(), strict=True)
    found, number = [], 0
    try:
        head = [name.strip() for name in next(lines, [])]
        _check_head(head, origin)
        for number, cells in enumerate(filter(None, lines), 1):
            found.append(_run(head, cells, f"{origin}, row {number}"))
    except csv.Error as error:
        raise UsageError(f"{origin}, row {number + 1}: is not CSV: {error}") from None
    if not found:
        raise UsageError(f"{origin}: holds no run: a row for each is expected below the head")
    return found


def _check_head(head: list[str], origin: str) -> None:
    for name in head:
        if name not in _CELLS:
            raise UsageError(f"{origin}, head: {UnknownName('column', name, _CELLS)}")
        if head.count(name) > 1:
            raise UsageError(f"{origin}, head: column {name} is there twice: expected once")
    if missing := [name for name in _CELLS if name not in (*head, *OPTIONAL)]:
        raise UsageError(f"{origin}, head: column {missing[0]} is missing: expected by all runs")


def _run(head: list[str], cells: list[str], place: str) -> ServingRun:
    if len(cells) != len(head):
        raise UsageError(f"{place}: has {len(cells)} columns: expected {len(head)}, as the head")
    values: dict[str, Any] = {}
    for name, cell in zip(head, map(str.strip, cells), strict=True):
        if not cell and name in OPTIONAL:
            continue
        read, expected = _CELLS[name]
        value = read(cell)
        if value is None:
            raise UsageError(f"{place}, column {name}: expected {expected}, not '{cell:.40}'")
        values[name] = value
    values.setdefault("expert_parallel", 0)
    return ServingRun(**values)


def _whole(least: int) -> tuple[Callable[[str], int | None], str]:
    def read(cell: str) -> int | None:
        number = _float(cell)  # other tools write whole numbers next to empty cells as 4.0
        if number is None or number != int(number) or not least <= number < 1 << 40:
            return None
        return int(number)

    return read, f"a whole number of {least} or more"


def _float(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _positive(cell: str) -> float | None:
    number = _float(cell)
    return number if number is not None and number > 0 else None


def _text(expected: str, pattern: re.Pattern[str]) -> tuple[Callable[[str], str | None], str]:
    return lambda cell: cell if pattern.fullmatch(cell) else None, expected


def _one_of(known: tuple[str, ...]) -> tuple[Callable[[str], str | None], str]:
    return lambda cell: cell if cell in known else None, f"one of {', '.join(known)}"


_ANY = re.compile(r".+")
_MILLISECONDS = (_positive, "milliseconds above 0")
#: For each column how a cell is read (None if it is wrong), and what is expected there.
_CELLS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "model": _text("a model's name", _ANY),
    "gpu": _text("a GPU's name", _ANY),
    "engine": _text(f"an engine's name ({', '.join(ENGINES)})", _ANY),
    "weights": _one_of(WEIGHTS),
    "tensor_parallel": _whole(1),
    "expert_parallel": _whole(0),
    "prompt_tokens": _whole(1),
    "output_tokens": _whole(2),
    "concurrency": _whole(1),
    "id": _text("8 or more hexadecimal digits", _ID),
    "engine_version": _text("a version", _ANY),
    "data_parallel": _whole(1),
    "concurrency_client": _whole(1),
    "ttft_ms": _MILLISECONDS,
    "tpot_ms": _MILLISECONDS,
    "measured": _text("a date, as 2026-01-31", _DATE),
}
assert set(_CELLS) == {each.name for each in fields(ServingRun)}
