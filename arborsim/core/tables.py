"""Tables of results in files: Parquet that says what made it, or CSV.

A results file is a Parquet table whose file metadata holds, under the key ``arborsim``, one JSON
object: what kind of results these are and what made them (`made_by`).  Nothing in a file depends on
when or where it was written: the same results give the same bytes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core import __version__
from arborsim.core.documents import strict
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.outputs import whole
from arborsim.core.records import MOST_FLOAT

if TYPE_CHECKING:
    import pandas as pd

#: Key of the file metadata of a results Parquet.
KEY = b"arborsim"
#: Version of the metadata: grows when a key changes its meaning or goes.
VERSION = 1
#: Endings of result files.  JSON is the document that ``--json`` prints.
FORMATS = (".parquet", ".csv", ".json")
#: Spreadsheets take a text that begins so for a formula.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_RULES = {
    "int": "a whole number of at least 0",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a text",
}
#: What other files of arborsim's say in their metadata, and what reads them.
_OTHERS = {
    b"arborsim.trace": "a trace, not results: open_trace or arborsim inspect shows it",
    b"arborsim.validation": "results of arborsim validate: load_results reads them",
    b"arborsim.kernels": "measured kernels of a GPU, not results",
}


def made_by(kind: str, command: str, *libraries: str, **more: Any) -> dict[str, Any]:
    """The metadata of results of `kind`: command, versions, and `more` of what made them.

    `libraries` are the packages whose versions matter, besides Python.
    """
    from arborsim.core.installed import versions  # slow to import

    made_with = {**versions(*libraries), "python": platform.python_version()}
    del made_with["arborsim"]
    head = {"format": VERSION, "kind": kind, "version": __version__, "command": command}
    return {**head, "versions": made_with, **strict(more)}


def check_format(path: Path) -> None:
    """Refuse a name from which no format follows, and files whose place results never take.

    Those are traces, and cells of sweeps.

    Raises `UsageError`.
    """
    if path.suffix not in FORMATS:
        raise UnknownName("format of --out", path.suffix or path.name, FORMATS)
    said = _said(path) if path.is_file() else {}
    cell = b'"kind": "cell"' in said.get(KEY, b"")
    if cell or b"arborsim.trace" in said:
        what = "a cell of a sweep" if cell else "a trace"
        raise UsageError(f"{path} is {what}, which results would replace: choose another name")


def write_table(frame: pd.DataFrame, path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a table as the name's ending says: ``.csv``, which holds no metadata, or Parquet.

    Raises `UsageError`: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with whole(path) as part:
        if path.suffix == ".csv":
            part.write_text(csv_text(frame), encoding="utf-8")
            return
        table = pa.Table.from_pandas(frame, preserve_index=False)
        said = json.dumps(strict(metadata), sort_keys=True, allow_nan=False).encode()
        table = table.replace_schema_metadata({**table.schema.metadata, KEY: said})
        pq.write_table(
            table, part, compression="zstd", compression_level=9, write_page_checksum=True
        )


def csv_text(frame: pd.DataFrame) -> str:
    """The table as CSV, in which no text of a file's is a formula to a spreadsheet."""
    texts = frame.select_dtypes(["object", "string", "category"]).columns
    safe = frame.assign(**{name: frame[name].astype(object).map(_no_formula) for name in texts})
    text: str = safe.to_csv(index=False, lineterminator="\n")
    return text


def _no_formula(value: object) -> object:
    if isinstance(value, str) and value.startswith(_FORMULAS) and value != "-":
        return f"'{value}"
    return value


def with_left_out(
    ran: pd.DataFrame, left_out: Sequence[Mapping[str, Any]], texts: Sequence[str] = ()
) -> pd.DataFrame:
    """`ran`, followed by rows that know only some columns: what could not run, and why.

    Whole numbers stay whole: their columns take nullable types.  Columns of `texts` are empty in
    these rows, not missing.
    """
    import pandas as pd

    if not left_out:
        return ran
    empty = dict.fromkeys(texts, "")
    added = pd.DataFrame([{**empty, **each} for each in left_out]).reindex(columns=ran.columns)
    kinds = {"int64": "Int64", "bool": "boolean"}
    types = ran.dtypes.map(lambda kind: kinds.get(str(kind), kind)).to_dict()
    return pd.concat([ran.astype(types), added.astype(types)], ignore_index=True)


def read_table(path: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table and the metadata in a file that `write_table` wrote as Parquet.

    Raises `UsageError`: the file cannot be read, is damaged, or is something else, such as a trace.
    """
    import pyarrow as pa

    from arborsim.core.parquet import ParquetTables

    check_parquet(path)
    file = ParquetTables(path)
    metadata = _metadata(file.schema.metadata or {}, path)
    table = file.read(range(file.metadata.num_row_groups))
    try:
        return table.to_pandas(), metadata
    # By what it says of types:
    except (pa.ArrowException, ValueError, LookupError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())[:160]
        raise UsageError(f"{path}: the file is damaged ({why}); copy it or make it again") from None


def columns_of(*kinds: type[Any]) -> dict[str, str]:
    """The fields of records that are columns of a table, with their types as they are written."""
    found = {each.name: str(each.type) for kind in kinds for each in fields(kind)}
    return {name: each for name, each in found.items() if each.removesuffix(" | None") in _RULES}


def check_columns(
    frame: pd.DataFrame, columns: Mapping[str, str], missing: Collection[str] = ()
) -> None:
    """Refuse a table in a file whose values are none that results can have.

    `columns` are the types that columns must have (`columns_of`), if they are there.  Only those of
    `missing`, and those that may be None, can lack a value.  Rows with a reason in a column
    `left_out` have no figures, and are not checked.

    Raises `UsageError`: a value is of another type, negative where it is a whole number, infinite,
    or missing.
    """
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise UsageError(f"its table is damaged: there are two columns {twice[0]}")
    ran = frame
    if "left_out" in frame:
        _check_column(frame["left_out"], "str", False)
        ran = frame[frame["left_out"] == ""]
    for name, kind in columns.items():
        if name in frame:
            plain = kind.removesuffix(" | None")
            _check_column(ran[name], plain, plain != kind or name in missing)


def _check_column(values: pd.Series[Any], kind: str, may_be_missing: bool) -> None:
    """Refuse a column that holds anything but values of this type."""
    import numpy as np
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    known = values[values.notna()] if may_be_missing else values
    if kind == "str":
        good = known.map(lambda value: isinstance(value, str))
    elif kind == "bool" or is_bool_dtype(known) or not is_numeric_dtype(known):
        good = known.map(lambda value: kind == "bool" and isinstance(value, bool | np.bool_))
    else:
        numbers = known.astype(float) if kind == "float" else known
        good = abs(numbers) <= MOST_FLOAT
        if kind == "int":
            good = good & (numbers >= 0) & (numbers % 1 == 0)
    wrong = np.flatnonzero(~good.fillna(False).astype(bool))
    if len(wrong):
        row, value = known.index[wrong[0]] + 1, known.tolist()[wrong[0]]
        raise UsageError(
            f"{values.name} of row {row} must be {_RULES[kind]}, not {value!r:.40}: the file is "
            "damaged; make it again with --out"
        )


def holds_key(path: Path, key: bytes) -> bool:
    """Whether a file is Parquet whose metadata has this key. No, if it cannot be read."""
    return key in _said(path)


def _said(path: Path) -> Mapping[bytes, bytes]:
    """The metadata of a Parquet file. None if it cannot be read."""
    from arborsim.core.parquet import ParquetTables

    try:
        return ParquetTables(path).schema.metadata or {}
    except UsageError:
        return {}


def check_parquet(path: Path) -> None:
    """Refuse what is not there, is no Parquet file, or was cut off.

    Raises `UsageError`.
    """
    from arborsim.core.parquet import ends_of

    try:
        begins, ends, size = ends_of(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    if not begins:
        raise UsageError(
            f"{path}: this is not a Parquet file: give what --out FILE.parquet or save() wrote"
        )
    if not ends:
        raise UsageError(f"{path}: the file is truncated after {size} bytes; copy it again")


def _metadata(stored: Mapping[bytes, bytes], path: Path) -> dict[str, Any]:
    for key, what in _OTHERS.items():
        if key in stored and KEY not in stored:
            raise UsageError(f"{path}: the file holds {what}")
    if KEY not in stored:
        raise UsageError(
            f"{path}: a Parquet file, but no results of arborsim's: it lacks the metadata that "
            "says what made it; make it again with --out"
        )
    try:
        found = json.loads(stored[KEY])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise UsageError(f"{path}: its metadata is damaged; make the file again with --out")
    if found["kind"] in ("cell", "sweep"):
        raise UsageError(
            f"{path}: rows of a sweep: arborsim results FOLDER, of sweep --out, shows, plots "
            "(--report) and compares them; any Parquet tool reads this file"
        )
    if found.get("format") != VERSION:
        raise UsageError(
            f"{path}: results of format {found.get('format')!r}, but this arborsim reads format "
            f"{VERSION}: take the arborsim that made it ({found.get('version')}), or make it again"
        )
    return found
