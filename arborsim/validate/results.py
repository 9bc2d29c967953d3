"""What one search under one policy and budget came to, simulated and measured, and its file.

The file is Parquet: a row per search, policy and budget; what made the numbers is in its metadata.
It is written anew after every problem, under another name first, so an interruption leaves what was
done before.
"""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError

METADATA_KEY = b"arborsim.validation"
VERSION = 1

#: Terms of the time that are compared (`arborsim.core.measurements.TimeSplit`, and their sum).
TERMS = ("prefill_s", "decode_s", "policy_s", "exposed_transfer_s", "rehydration_s", "total_s")
#: Counters that both sides keep (`arborsim.core.measurements.Measurements`).
COUNTERS = (
    "decisions", "evicted_tokens", "offloaded_tokens", "quantised_tokens", "rehydrated_tokens",
    "rehydrations", "to_ddr_bytes", "from_ddr_bytes",
)  # fmt: skip
#: Peaks that both sides keep, in bytes.
PEAKS = (
    "peak_hbm_kv_bytes", "peak_ddr_bytes", "peak_quantised_bytes", "peak_staging_bytes",
)  # fmt: skip
_NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class CellCheck:
    """One search under one policy and budget; unknown numbers are NaN or -1.

    Attributes
    ----------
    episode : int
    policy, budget : str
    budget_tokens, full_tokens : int
        The budget, and the length of the search under full retention.
    infeasible : str
        Why the budget cannot hold the live search; nothing else was measured then.
    shadow_moves, equal_moves, parity : int, int, bool
        (a) moves of the shadow run; how many of them the replay repeats in their place; whether
        both lists are the same.
    calls, equal_calls, tiers_differ : int
        (b) calls of the executor; after how many all bytes were equal; after how many some token
        was not in the same tier.
    off_bytes : tuple of int
        Largest difference by `arborsim.validate.dual.PARTS`, simulated less live.
    live_peaks, simulated_peaks : tuple of int
        By `PEAKS`.
    live_counters, simulated_counters : tuple of float
        By `COUNTERS`.
    allocated_bytes, device_peak_bytes, weight_bytes : int
        Largest size of the pools' tensors on the device, gaps included; largest memory of the
        framework's allocator (0 on the CPU); the weights.
    bytes_over_time : tuple of int
        Rows of `BytesOverTime.thinned`, one after the other; empty for searches that are not drawn.
    live_s, simulated_s : tuple of float
        (c) by `TERMS`.
    thread_s : float
        CPU seconds of the live search where one thread computes it all: what other processes on a
        busy machine hardly change.
    generated_tokens, iterations : int
    same_iterations, shadow_iterations : int
        (d) iterations for which the live run generated the tokens of the shadow run.
    jaccard_before, jaccard_after : float
        Tokens in HBM of both, mean until then and after it.
    jaccard_iteration, jaccard : tuple
        The same over time.
    attention_kept, output_error : float
        (e) in the replay of the full-retention trace.
    correct : int
        1, 0 or -1 for "not judged", of the live run.
    """

    episode: int
    policy: str
    budget: str
    budget_tokens: int
    full_tokens: int
    infeasible: str = ""
    shadow_moves: int = -1
    equal_moves: int = -1
    parity: bool = False
    calls: int = 0
    equal_calls: int = 0
    tiers_differ: int = 0
    off_bytes: tuple[int, ...] = ()
    live_peaks: tuple[int, ...] = ()
    simulated_peaks: tuple[int, ...] = ()
    live_counters: tuple[float, ...] = ()
    simulated_counters: tuple[float, ...] = ()
    allocated_bytes: int = 0
    device_peak_bytes: int = 0
    weight_bytes: int = 0
    bytes_over_time: tuple[int, ...] = ()
    live_s: tuple[float, ...] = ()
    simulated_s: tuple[float, ...] = ()
    thread_s: float = _NAN
    generated_tokens: int = 0
    iterations: int = 0
    same_iterations: int = -1
    shadow_iterations: int = -1
    jaccard_before: float = _NAN
    jaccard_after: float = _NAN
    jaccard_iteration: tuple[int, ...] = ()
    jaccard: tuple[float, ...] = ()
    attention_kept: float = _NAN
    output_error: float = _NAN
    correct: int = -1

    @property
    def key(self) -> tuple[int, str, str]:
        return self.episode, self.policy, self.budget


@dataclass(frozen=True)
class Validation:
    """All that was compared.

    Attributes
    ----------
    checks : tuple of CellCheck
        In order of problem.
    about : mapping of str to str
        What made the numbers: model, task, search, device, profile, versions, command, dates.
    left_out : tuple of str
        Policies that no live search can run, and why.
    """

    checks: tuple[CellCheck, ...]
    about: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def write_results(result: Validation, request: Mapping[str, Any], path: Path) -> None:
    """Write the file; the old one stays until the new one is complete.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {
        "version": VERSION, "about": dict(result.about), "request": request,
        "left_out": result.left_out,
    }  # fmt: skip
    schema = _schema().with_metadata({METADATA_KEY: json.dumps(about, sort_keys=True).encode()})
    rows = [{f.name: getattr(check, f.name) for f in fields(check)} for check in result.checks]
    part = path.with_name(path.name + ".part")
    try:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), part, compression="zstd")
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def read_results(path: Path) -> tuple[Validation, dict[str, Any]]:
    """The results in a file, and the request that made them.

    Raises
    ------
    UsageError
        It cannot be read, or holds something else.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except pa.ArrowInvalid:
        raise UsageError(f"{path} is no Parquet file: choose another --out") from None
    kept = (table.schema.metadata or {}).get(METADATA_KEY)
    if kept is None or json.loads(kept).get("version") != VERSION:
        raise UsageError(f"{path} holds no validation (version {VERSION}): choose another --out")
    about = json.loads(kept)
    if not table.schema.equals(_schema()):
        raise UsageError(f"{path} has other columns than a validation: choose another --out")
    checks = tuple(CellCheck(**_row(row)) for row in table.to_pylist())
    return Validation(checks, about["about"], tuple(about["left_out"])), about["request"]


def merged(old: Iterable[CellCheck], new: Iterable[CellCheck]) -> tuple[CellCheck, ...]:
    """Both, one per search, policy and budget, in order of problem."""
    found = {check.key: check for check in (*old, *new)}
    return tuple(sorted(found.values(), key=lambda check: check.episode))


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def _schema() -> Any:
    import pyarrow as pa

    kinds = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}

    def arrow(hint: Any) -> Any:
        inner: Sequence[Any] = typing.get_args(hint)
        return pa.list_(kinds[inner[0]]) if inner else kinds[hint]

    hints = typing.get_type_hints(CellCheck)
    return pa.schema([pa.field(f.name, arrow(hints[f.name])) for f in fields(CellCheck)])
