"""Policies that others measured on engines: rows of a CSV file, each next to full retention.

``policies.csv``, which ships with the package (`NOTICE` says where it is from), is one such file.
Others have the same columns, of which `NEEDED` must be there.  Cells may be empty: an empty cell is
not known.  All other columns are kept as they are.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.core.records import read_text

SOURCE = "policies.csv: measurements by others, each with its source and commit"
NEEDED = ("policy", "engine", "model", "gpu")
_NUMBERS = (
    "budget_tokens", "buffer_tokens", "gpus", "tensor_parallel", "kv_pool_tokens",
    "baseline_kv_pool_tokens", "requests", "concurrency", "prompt_tokens", "output_tokens",
    "tokens_per_s", "baseline_tokens_per_s", "ratio", "peak_concurrency",
    "baseline_peak_concurrency", "peak_mem_gib", "baseline_peak_mem_gib", "avg_output_tokens",
    "baseline_avg_output_tokens", "time_s", "baseline_time_s", "compactions",
)  # fmt: skip
#: How an engine writes that it launches kernels one by one, and without asynchronous scheduling
_SYNCHRONOUS = re.compile(r"\bsync\b")
_PREFIXES = re.compile(r"prefix cach\w* (left )?on\b|cache on\b")
_SHOTS = re.compile(r"\b(\d+)-shot\b")
_FIXED = re.compile(r"ignore-eos|forced|synthetic|random|->", re.IGNORECASE)
_BITS = re.compile(r"(\d)[- ]?bit|\btq(\d)")


@dataclass(frozen=True)
class PolicyRun:
    """One row: a policy on an engine, and full retention in the same setting."""

    cells: Mapping[str, str]  #: by column, as the file has them
    numbers: Mapping[str, float]  #: of the columns in numbers that are known

    def text(self, column: str) -> str:
        """A cell; "" if it is empty or the column is missing."""
        return self.cells.get(column, "")

    def number(self, *columns: str) -> float:
        """The first number that is known of the columns; NaN if none is."""
        return next((self.numbers[name] for name in columns if name in self.numbers), math.nan)

    @property
    def policy(self) -> str:
        return self.cells["policy"]

    @property
    def fitted(self) -> bool:
        """Whether constants may be fitted on it, by its identifier; without one it is judged."""
        digits = self.text("id")[:8]
        return bool(re.fullmatch(r"[0-9a-f]{8}", digits)) and int(digits, 16) % 2 == 0

    @property
    def same_setting(self) -> bool:
        """Whether both arms ran with the same flags and load; so if the file does not say."""
        return self.text("pairing") in ("", "same-setting")

    @cached_property
    def ratio(self) -> float:
        """Measured throughput of the policy over that of full retention; NaN if not known."""
        rates = self.number("tokens_per_s") / self.number("baseline_tokens_per_s")
        times = self.number("baseline_time_s") / self.number("time_s")
        known = (each for each in (self.number("ratio"), rates, times) if not math.isnan(each))
        return next(known, math.nan)

    @property
    def name(self) -> str:
        """All that tells a row from others."""
        engine = f"{self.text('engine')} {self.text('engine_version')}".strip()
        settings = self.text("variant").strip()
        load = f"{self.number('concurrency', 'requests'):g} at once"
        pool = self.number("baseline_kv_pool_tokens", "kv_pool_tokens")
        memory = "" if math.isnan(pool) else f", pool of {pool:,.0f} tokens"
        model = self.text("model").rpartition("/")[2]
        return (
            f"{self.policy} ({settings}), {engine}, {model} on {self.text('gpu')}, {load}{memory}"
        )

    def graphs(self, baseline: bool) -> str:
        """CUDA graphs of an arm; "" for the engine's own."""
        own, said = self.text("graphs"), self.text("baseline_kind")
        if not baseline:
            return own
        if own == "eager" or "same flags" in said:
            return own
        return next((each for each in ("eager", "piecewise") if each in said), "")

    def synchronous(self, baseline: bool) -> bool:
        """Whether an arm schedules a step only once the one before it has ended."""
        if not baseline and self.text("pairing") == "unequal-flags":
            return True  # full retention kept it, and the policy lost it
        return bool(_SYNCHRONOUS.search(self.text("baseline_kind" if baseline else "variant")))

    def caches_prefixes(self, baseline: bool) -> bool:
        """Whether an arm computes what prompts have in common once."""
        if not baseline:
            return self.text("prefix_cache") == "on"
        return bool(_PREFIXES.search(self.text("baseline_kind")))

    @property
    def shared(self) -> float:
        """Share of each prompt that all have in common: its examples, as long as the question."""
        found = _SHOTS.search(self.text("task"))
        return int(found[1]) / (int(found[1]) + 1) if found else 0.0

    @property
    def fixed_lengths(self) -> bool:
        """Whether outputs are of one length; else they are answers that end by themselves."""
        return not self.text("task") or bool(_FIXED.search(self.text("task")))

    @property
    def bits(self) -> float:
        """Bits of a number in the policy's cache; NaN if it is the model's own type."""
        if self.policy == "fp8-kv":
            return 8.0
        found = _BITS.search(self.text("variant"))
        if self.policy != "turboquant" or found is None:
            return math.nan
        return float(next(filter(None, found.groups())))


def read_policy_runs(path: Path | None = None) -> list[PolicyRun]:
    """The rows of a CSV file, or of the one that ships with the package.

    Raises `UsageError` that names file, row (the first below the head is 1) and column.
    """
    if path is None:
        file = resources.files("arborsim.products.validate") / "policies.csv"
        text, origin = file.read_text(encoding="utf-8"), "policies.csv"
    else:
        text, origin = read_text(path), str(path)
    lines = csv.reader(text.splitlines(), strict=True)
    head = [name.strip() for name in next(lines, [])]
    for name in NEEDED:
        if name not in head:
            raise UsageError(f"{origin}, head: column {name} is missing: expected by all rows")
    if twice := next((name for name in head if head.count(name) > 1), ""):
        raise UsageError(f"{origin}, head: column {twice} is there twice: expected once")
    found: list[PolicyRun] = []
    try:
        for row in filter(None, lines):
            found.append(_row(head, row, f"{origin}, row {len(found) + 1}"))
    except csv.Error as error:
        raise UsageError(f"{origin}, row {len(found) + 1}: is not CSV: {error}") from None
    if not found:
        raise UsageError(f"{origin}: holds no row: one for each policy is expected below the head")
    return found


def _row(head: list[str], row: list[str], place: str) -> PolicyRun:
    if len(row) != len(head):
        raise UsageError(f"{place}: has {len(row)} columns: expected {len(head)}, as the head")
    cells = dict(zip(head, map(str.strip, row), strict=True))
    numbers = {}
    for name in _NUMBERS:
        if not (cell := cells.get(name, "")):
            continue
        try:
            numbers[name] = float(cell)
        except ValueError:
            numbers[name] = math.nan
        if not (math.isfinite(numbers[name]) and numbers[name] >= 0):
            raise UsageError(
                f"{place}, column {name}: expected a number of 0 or more, not '{cell:.40}'"
            )
    return PolicyRun(cells, numbers)
