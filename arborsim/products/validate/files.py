"""The file of a validation: a row per search, policy and budget, and what made the numbers.

It is written anew after every problem, under another name first, so that an interruption leaves
what was done before.
"""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import whole
from arborsim.core.records import convert, located
from arborsim.core.tables import KEY, made_by
from arborsim.products.validate.results import COUNTERS, PEAKS, TERMS, CellCheck, Validation

METADATA_KEY = b"arborsim.validation"
VERSION = 1
#: What the numbers of these columns are.
_SIDES, _NAMED = ("live", "simulated"), (("s", TERMS), ("counters", COUNTERS), ("peaks", PEAKS))
_COMPARED = {f"{side}_{name}": parts for side in _SIDES for name, parts in _NAMED}


def write_results(result: Validation, request: Mapping[str, Any], path: Path) -> None:
    """Write the file, or a `UsageError`. The old one stays until the new one is complete."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {"version": VERSION, "about": dict(result.about), "request": request}
    about["left_out"] = result.left_out
    stored = {METADATA_KEY: about, KEY: metadata_of(result)}
    schema = _schema().with_metadata(
        {key: json.dumps(said, sort_keys=True).encode() for key, said in stored.items()}
    )
    rows = [{f.name: getattr(check, f.name) for f in fields(check)} for check in result.checks]
    with whole(path) as part:
        table = pa.Table.from_pylist(rows, schema=schema)
        pq.write_table(table, part, compression="zstd", write_page_checksum=True)


def metadata_of(result: Validation) -> dict[str, Any]:
    """The metadata of the results, in the form of all results files."""
    about = dict(result.about)
    return made_by(
        "validate",
        about.get("command", ""),
        gpu=about.get("GPU profile", ""),
        model=about.get("model", ""),
        kv_dtype=about.get("dtype", ""),
        settings=about,
        assumed=[about["assumed in the profile"]] if "assumed in the profile" in about else [],
        notes=[],
        left_out=result.left_out,
        does_not_fit=[],
    )


def read_results(path: Path) -> tuple[Validation, dict[str, Any]]:
    """The results in a file, and the request that made them, or a `UsageError`.

    Columns that an earlier version did not know have their defaults.
    """
    from arborsim.core.parquet import ParquetTables, ends_of

    try:
        begins, ends, _ = ends_of(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not (begins and ends):
        raise UsageError(f"{path} is no Parquet file, or was cut off: choose another --out")
    file = ParquetTables(path, remedy="choose another --out")
    try:
        about = json.loads((file.schema.metadata or {}).get(METADATA_KEY, b""))
    except (ValueError, RecursionError):
        about = {}
    complete = isinstance(about, dict) and {"about", "left_out", "request"} <= about.keys()
    if not complete or about.get("version") != VERSION:
        raise UsageError(f"{path} holds no validation (version {VERSION}): choose another --out")
    table = file.read(range(file.metadata.num_row_groups))
    known = _schema()
    required = {each.name for each in fields(CellCheck) if each.default is MISSING}
    if any(each not in list(known) for each in table.schema) or required - set(table.column_names):
        raise UsageError(f"{path} has other columns than a validation: choose another --out")
    with located(str(path)):
        checks = tuple(
            _check(row, f"row {number}") for number, row in enumerate(table.to_pylist(), 1)
        )
        told, left_out = convert(dict[str, str], about["about"]), tuple[str, ...]
        found = Validation(checks, told, convert(left_out, about["left_out"]))
        return found, convert(dict[str, Any], about["request"], finite=False)


def _check(row: Mapping[str, Any], where: str) -> CellCheck:
    """A row of the file, or a `UsageError` if it holds what no validation writes."""
    check = convert(CellCheck, row, where, finite=False)
    for name, value in vars(check).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(each, float) and math.isinf(each) for each in numbers):
            raise UsageError(f"{where} {name} is infinite: the file is damaged")
        wanted = len(_COMPARED.get(name, ()))
        if wanted and len(value) != wanted and not (check.infeasible and not value):
            raise UsageError(
                f"{where} {name} has {len(value)} numbers, not {wanted}: the file is damaged"
            )
    return check


def merged(old: Iterable[CellCheck], new: Iterable[CellCheck]) -> tuple[CellCheck, ...]:
    """Both, one per search, policy and budget, in order of problem."""
    found = {(check.episode, check.policy, check.budget): check for check in (*old, *new)}
    return tuple(sorted(found.values(), key=lambda check: check.episode))


def _schema() -> Any:
    import pyarrow as pa

    kinds = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}

    def arrow(hint: Any) -> Any:
        inner: Sequence[Any] = typing.get_args(hint)
        return pa.list_(kinds[inner[0]]) if inner else kinds[hint]

    hints = typing.get_type_hints(CellCheck)
    return pa.schema([pa.field(f.name, arrow(hints[f.name])) for f in fields(CellCheck)])
