"""Between NumPy arrays, Arrow columns and Parquet, without a Python step per row.

`encode` makes the table of one episode from what a recorder has, and `parquet_writer` stores it.
The `*_of` functions read columns back, as views of Arrow's buffers where they can.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.core.errors import UsageError
from arborsim.trace.schema import ENDS, KINDS, Kind, TraceInfo, arrow_schema

#: Columns a recorder must give; the others default to null, `episode` and `seq` to one episode's.
REQUIRED = ("kind", "iteration", "node", "parent", "depth", "position", "token", "time_s")

# Written as null where negative: -1 stands for "none" in memory, but must not look like a value
# to other tools that open the file.  (-1 in `parent` is a value: the root's parent.)
_NEGATIVE_IS_NULL = {"position", "token", "correct", "run"}
#: Few labels, many rows.
_DICTIONARY = ["kind", "end", "answer"]
#: Counters, whose differences need a bit or none.  The other integers repeat in patterns that zstd
#: finds by itself, and that differences hide (`attention_index`: a fifth more).
_RISING = {"seq", "iteration", "node", "position", "prefix_blocks"}


def encode(
    columns: Mapping[str, Any], info: TraceInfo, index: int, schema: pa.Schema | None = None
) -> pa.Table:
    """The Arrow table of one episode, or of several that are packed.

    Parameters
    ----------
    columns : mapping of str to sequence, ndarray or pyarrow.Array
        By column name.  A column has one entry per row, or one per token (prefill and token rows,
        while the other rows are null).  List columns take a 2-D array, a sequence of 1-D arrays
        (or None), or an Arrow list array (`lists`).  `kind` and `end` take numbers or labels.
        None, NaN, and in `position`, `token`, `correct` and `run` negative numbers are stored as
        null.
    index : int
        Episode number, of several that of the first.
    schema : pyarrow.Schema, optional
        `arrow_schema` of `info`, for callers that write many episodes, or pack them.

    Raises `UsageError`: columns are missing, unknown to this capture level, or of the wrong length.
    """
    schema = arrow_schema(info) if schema is None else schema
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise UsageError(f"episode {index}: the recorder gave no column {', '.join(missing)}")
    known = schema.names  # made anew whenever it is asked for
    unknown = [name for name in columns if name not in known]
    if unknown:
        raise UsageError(
            f"episode {index}: column {', '.join(unknown)} is not part of a trace with capture "
            f"level '{info.capture}' and {info.attention} attention"
        )
    kinds = _kind_array(columns["kind"], index)
    rows = len(kinds)
    codes = values_of(kinds.indices)
    is_token = (codes == Kind.PREFILL) | (codes == Kind.TOKEN)
    given = {
        "episode": np.full(rows, index, dtype=np.int32),
        "seq": np.arange(rows, dtype=np.int32),
        **columns,
        "kind": kinds,
        "end": _end_array(columns.get("end"), index),
    }
    arrays = []
    for field in schema:
        values = given.get(field.name)
        try:
            arrays.append(_encode_column(field, values, rows, is_token))
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise UsageError(f"episode {index}: column {field.name}: {error}") from error
    return pa.Table.from_arrays(arrays, schema=schema)


def lists(values: np.ndarray, offsets: np.ndarray, null: np.ndarray | None = None) -> pa.Array:
    """A list column over one flat array ``[sum of lengths]``, with int offsets ``[rows + 1]``.

    Rows that are `null`, bool ``[rows]``, have no list and length 0.  More values than one episode
    can hold are a `UsageError`.
    """
    if offsets[-1] > np.iinfo(np.int32).max:
        raise UsageError(
            f"{offsets[-1]} values do not fit one episode: store attention sparsely, or vectors of "
            "fewer layers"
        )
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.array(values),
        mask=None if null is None else pa.array(null),
    )


def _kind_array(kinds: Any, index: int) -> pa.DictionaryArray:
    try:
        codes = _numbers(kinds, {label: i for i, label in enumerate(KINDS)})
    except KeyError as error:
        raise UsageError(f"episode {index}: unknown kind of row {error}") from None
    if len(codes) == 0 or codes.min() < 0 or codes.max() >= len(KINDS):
        raise UsageError(f"episode {index}: it has no rows, or rows of a kind beyond {KINDS}")
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int8)), pa.array(KINDS))


def _end_array(ends: Any, index: int) -> pa.DictionaryArray | None:
    """Null stands for NONE."""
    if ends is None or isinstance(ends, pa.Array | pa.ChunkedArray):
        return ends
    try:
        codes = _numbers(ends, {None: 0, **{label: i for i, label in enumerate(ENDS, 1)}})
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"episode {index}: unknown end of a thought ({error})") from None
    if len(codes) and (codes.min() < 0 or codes.max() > len(ENDS)):
        raise UsageError(f"episode {index}: an end of a thought beyond {ENDS}")
    indices = pa.array((codes - 1).astype(np.int8), mask=codes == 0)
    return pa.DictionaryArray.from_arrays(indices, pa.array(ENDS))


def _numbers(values: Any, number: Mapping[str | None, int]) -> np.ndarray:
    """Labels as their numbers.  Numbers stay.  An unknown label is a `KeyError`."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        values = values.to_pylist()
    if not (isinstance(values, np.ndarray) and values.dtype.kind in "iu"):  # a step per row: slow
        values = [number[v] if v is None or isinstance(v, str) else int(v) for v in values]
    return np.asarray(values, dtype=np.int64)


def _encode_column(
    field: pa.Field, values: Any, rows: int, is_token: np.ndarray
) -> pa.Array | pa.ChunkedArray:
    if values is None:
        return pa.nulls(rows, field.type)
    if len(values) != rows and len(values) != is_token.sum():
        raise ValueError(
            f"{len(values)} entries for {rows} rows, {int(is_token.sum())} of them tokens"
        )
    if isinstance(values, pa.Array | pa.ChunkedArray):
        array = values if values.type == field.type else values.cast(field.type)
    elif pa.types.is_list(field.type) and not pa.types.is_list(field.type.value_type):
        array = _encode_lists(field, values)
    elif isinstance(values, np.ndarray):
        null = values < 0 if field.name in _NEGATIVE_IS_NULL else None
        if pa.types.is_boolean(field.type):
            values = values == 1
        array = pa.array(values, field.type, mask=null, from_pandas=True)
    else:
        array = pa.array(values, field.type, from_pandas=True)
        if field.name in _NEGATIVE_IS_NULL and pa.types.is_integer(field.type):
            import pyarrow.compute as pc  # slow to import

            array = pc.if_else(pc.less(array, 0), None, array)
    if len(array) == rows:
        return array
    number = pa.array(np.cumsum(is_token) - 1, pa.int64(), mask=~is_token)  # of each row's token
    return array.take(number)


def _encode_lists(field: pa.Field, values: Any) -> pa.Array:
    """A column of lists from a 2-D array or a sequence of 1-D arrays."""
    dtype = field.type.value_type.to_pandas_dtype()
    if isinstance(values, np.ndarray) and values.ndim == 2:
        flat = np.ascontiguousarray(values, dtype=dtype).reshape(-1)
        return lists(flat, np.arange(len(values) + 1) * values.shape[1])
    kept = [None if v is None else np.asarray(v, dtype=dtype) for v in values]
    lengths = [0 if v is None else len(v) for v in kept]
    flat = np.concatenate([np.empty(0, dtype=dtype), *(v for v in kept if v is not None)])
    null = np.array([v is None for v in kept])
    return lists(flat, np.concatenate([[0], np.cumsum(lengths)]), null)


def parquet_writer(file: Any, schema: pa.Schema, level: int | None = None) -> pq.ParquetWriter:
    """A Parquet writer with the encodings of a trace.

    Counters are stored as differences, the other columns plainly, or with a dictionary.  Signals
    were split by the significance of their bytes before, which DuckDB and fastparquet do not read;
    plain ones take 2% more (-5% to 6.5% of the shipped traces).  Page checksums let a reader notice
    damage.  `level` is zstd's, 1 to 22: higher ones take longer to write, not to read.
    """
    encodings = {
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name: (
            "DELTA_BINARY_PACKED"
        )
        for field in schema
        if field.name in _RISING
    }
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=level,
        use_dictionary=_DICTIONARY,
        column_encoding=encodings,
        write_page_checksum=True,
    )


def values_of(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Numbers or truth values, a view of Arrow's buffer where there are no nulls.

    `to_numpy` does the same, but imports pandas first, which takes longer than many a command.
    """
    array = _one_chunk(column) if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_boolean(array.type):
        return _bits(array.buffers()[1], array)
    if array.null_count or not pa.types.is_primitive(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    return _stored(array)


def nulls_of(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """Where a column is null, bool ``[rows]``.

    `is_null` says the same, but imports all of Arrow's functions first.
    """
    array = _one_chunk(column) if isinstance(column, pa.ChunkedArray) else column
    valid = array.buffers()[0] if array.null_count else None
    return np.full(len(array), array.null_count > 0) if valid is None else ~_bits(valid, array)


def _bits(buffer: pa.Buffer, array: pa.Array) -> np.ndarray:
    """One of an array's buffers of bits; bool ``[rows]``."""
    last = array.offset + len(array)
    if not len(array):
        return np.empty(0, dtype=bool)
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), count=last, bitorder="little")
    return bits[array.offset :].view(np.bool_)


def _stored(array: pa.Array) -> np.ndarray:
    """An array of numbers as a view, with any value where it is null."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def numbers_of(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers or truth values, in which null becomes NaN (floats) or -1 (others)."""
    if pa.types.is_boolean(column.type):
        return np.where(nulls_of(column), np.int8(-1), values_of(column).view(np.int8))
    if column.null_count:
        null = float("nan") if pa.types.is_floating(column.type) else -1
        if column.null_count == len(column):  # as many columns are, and faster
            return np.full(len(column), null, column.type.to_pandas_dtype())
        array = _one_chunk(column)
        values = _stored(array)
        return np.where(nulls_of(array), values.dtype.type(null), values)
    return values_of(column)


def kinds_of(column: pa.ChunkedArray) -> np.ndarray:
    """`Kind` numbers as int8, -1 where the label is null or unknown."""
    return _codes_of(column, KINDS)[0]


def ends_of(column: pa.ChunkedArray) -> np.ndarray:
    """`End` numbers as int8: 0 where it is null, -1 where the label is unknown."""
    codes, null = _codes_of(column, ENDS)
    return np.where(null, np.int8(0), np.where(codes < 0, codes, codes + np.int8(1)))


def _codes_of(column: pa.ChunkedArray, known: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Number of each label in `known` as int8 (-1 if it is null or unknown), and which are null."""
    array = _one_chunk(column)
    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    labels = array.dictionary.to_pylist()
    number = [known.index(label) if label in known else -1 for label in labels] + [-1]
    null = nulls_of(array)
    codes = np.where(null, np.int8(-1), _stored(array.indices))
    # Arrow does not check the indices of a damaged file against the dictionary.
    valid = (codes >= 0) & (codes < len(labels))
    found = np.asarray(number, dtype=np.int8).take(np.where(valid, codes, len(labels)))
    return found, null


def lists_of(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and int64 offsets ``[rows + 1]`` of a list column.  Null counts as empty."""
    chunks = [_list_chunk(chunk) for chunk in column.chunks]
    if not chunks:
        return np.empty(0, dtype=np.float16), np.zeros(1, dtype=np.int64)
    offsets = np.zeros(1 + sum(len(lengths) for _, lengths in chunks), dtype=np.int64)
    np.cumsum(np.concatenate([lengths for _, lengths in chunks]), out=offsets[1:])
    flat = [values for values, _ in chunks]
    return (flat[0] if len(flat) == 1 else np.concatenate(flat)), offsets


def _list_chunk(chunk: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and lengths, a view unless something hides under a null list."""
    bounds = values_of(chunk.offsets)  # of a slice: its own, into the unsliced values
    lengths = np.diff(bounds)
    if chunk.null_count and lengths[nulls_of(chunk)].any():
        # flatten() would copy here even when nothing hides, hence the test.
        return values_of(chunk.flatten()), np.where(nulls_of(chunk), 0, lengths)
    values = values_of(chunk.values)
    return values[bounds[0] : bounds[-1]], lengths


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
