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
    """One search under one policy and budget; unknown numbers are NaN or -1."""

    episode: int
    policy: str
    budget: str
    budget_tokens: int
    full_tokens: int  #: length of the search under full retention
    #: Why the budget cannot hold the live search; nothing else was measured then.
    infeasible: str = ""
    #: (a) Moves of the shadow run; how many of them the replay repeats in their place; whether both
    #: lists are the same
    shadow_moves: int = -1
    equal_moves: int = -1
    parity: bool = False
    #: (b) Calls of the executor; after how many all bytes were equal; after how many some token was
    #: not in the same tier
    calls: int = 0
    equal_calls: int = 0
    tiers_differ: int = 0
    #: Largest difference by `arborsim.validate.dual.PARTS`, simulated less live
    off_bytes: tuple[int, ...] = ()
    #: By `PEAKS`
    live_peaks: tuple[int, ...] = ()
    simulated_peaks: tuple[int, ...] = ()
    #: By `COUNTERS`
    live_counters: tuple[float, ...] = ()
    simulated_counters: tuple[float, ...] = ()
    #: Largest size of the pools' tensors on the device, gaps included; largest memory of the
    #: framework's allocator (0 on the CPU); the weights
    allocated_bytes: int = 0
    device_peak_bytes: int = 0
    weight_bytes: int = 0
    #: Rows of `BytesOverTime.thinned`, one after the other; empty for searches that are not drawn
    bytes_over_time: tuple[int, ...] = ()
    #: (c) By `TERMS`
    live_s: tuple[float, ...] = ()
    simulated_s: tuple[float, ...] = ()
    #: CPU seconds of the live search where one thread computes it all: what other processes on a
    #: busy machine hardly change
    thread_s: float = _NAN
    generated_tokens: int = 0
    iterations: int = 0
    #: (d) Iterations for which the live run generated the tokens of the shadow run
    same_iterations: int = -1
    shadow_iterations: int = -1
    #: Jaccard index of the tokens in HBM of both: mean until then and after it, and over time
    jaccard_before: float = _NAN
    jaccard_after: float = _NAN
    jaccard_iteration: tuple[int, ...] = ()
    jaccard: tuple[float, ...] = ()
    #: (e) In the replay of the full-retention trace
    attention_kept: float = _NAN
    output_error: float = _NAN
    correct: int = -1  #: 1, 0 or -1 for "not judged", of the live run

    @property
    def key(self) -> tuple[int, str, str]:
        return self.episode, self.policy, self.budget


@dataclass(frozen=True)
class Validation:
    """All that was compared."""

    checks: tuple[CellCheck, ...]  #: in order of problem
    #: What made the numbers: model, task, search, device, profile, versions, command, dates
    about: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  #: policies that no live search can run, and why


def write_results(result: Validation, request: Mapping[str, Any], path: Path) -> None:
    """Write the file, or a `UsageError`; the old one stays until the new one is complete."""
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
    """The results in a file, and the request that made them; or a `UsageError`."""
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
    rows: list[dict[str, Any]] = [
        {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        for row in table.to_pylist()
    ]
    checks = tuple(CellCheck(**row) for row in rows)
    return Validation(checks, about["about"], tuple(about["left_out"])), about["request"]


def merged(old: Iterable[CellCheck], new: Iterable[CellCheck]) -> tuple[CellCheck, ...]:
    """Both, one per search, policy and budget, in order of problem."""
    found = {check.key: check for check in (*old, *new)}
    return tuple(sorted(found.values(), key=lambda check: check.episode))


def _schema() -> Any:
    import pyarrow as pa

    kinds = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}

    def arrow(hint: Any) -> Any:
        inner: Sequence[Any] = typing.get_args(hint)
        return pa.list_(kinds[inner[0]]) if inner else kinds[hint]

    hints = typing.get_type_hints(CellCheck)
    return pa.schema([pa.field(f.name, arrow(hints[f.name])) for f in fields(CellCheck)])
