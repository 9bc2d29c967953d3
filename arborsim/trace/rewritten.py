"""Traces that other tools wrote again: other types of the same values, and metadata next to them.

DuckDB has no float16, pandas no whole numbers with nulls, polars writes large lists and texts; most
drop the file's metadata.  Row groups other than a search each are what `packed` reads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from arborsim.core.errors import TraceError
from arborsim.trace.schema import METADATA_KEY, VERSION_KEY


def with_metadata(schema: pa.Schema, path: Path) -> pa.Schema:
    """The schema with the metadata of ``NAME.json`` next to ``NAME.parquet``, if it has none.

    The JSON is an object of the two keys, as ``pyarrow.parquet.read_schema(path).metadata`` has
    them; the metadata itself may be an object or a text.
    """
    sidecar = path.with_suffix(".json")
    if METADATA_KEY in (schema.metadata or {}) or not sidecar.is_file():
        return schema
    try:
        found = json.loads(sidecar.read_text(encoding="utf-8"))
        version, info = (found[key.decode()] for key in (VERSION_KEY, METADATA_KEY))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(
            f"{sidecar}: no metadata of a trace: an object with {VERSION_KEY.decode()} and "
            f"{METADATA_KEY.decode()} ({type(error).__name__})"
        ) from None
    text = info if isinstance(info, str) else json.dumps(info)
    return schema.with_metadata({VERSION_KEY: str(version).encode(), METADATA_KEY: text.encode()})


def says_the_same(expected: pa.DataType, found: pa.DataType) -> bool:
    """Whether values of type `found` can be those of an expected column."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_dictionary(expected):
        expected = expected.value_type
    if pa.types.is_list(expected):
        listed = pa.types.is_list(found) or pa.types.is_large_list(found)
        return bool(listed) and says_the_same(expected.value_type, found.value_type)
    if pa.types.is_string(expected):
        return found in (pa.string(), pa.large_string(), pa.string_view())
    if pa.types.is_boolean(expected):
        return bool(pa.types.is_boolean(found))
    return bool(pa.types.is_integer(found) or pa.types.is_floating(found))


def as_recorded(table: pa.Table, types: dict[str, pa.DataType]) -> pa.Table:
    """The table with the columns of `types` in these types."""
    for name in types.keys() & {*table.column_names}:
        at, column = table.column_names.index(name), table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_integer(types[name]) and pa.types.is_floating(column.type):
            import pyarrow.compute as pc  # slow to import

            column = pc.if_else(pc.is_nan(column), None, column)  # what pandas makes of null
        kind = types[name]
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        try:
            table = table.set_column(at, name, column.cast(kind))
        except pa.ArrowException as error:
            raise TraceError(f"column {name} holds {column.type}, not {kind} ({error})") from None
    return table
