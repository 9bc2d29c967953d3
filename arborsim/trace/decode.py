"""Decoding an episode from the columns of its row group: NumPy views, checked on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from arborsim.core.head_rows import VectorRows
from arborsim.core.observations import (
    AttentionRows,
    DenseRows,
    HiddenRows,
    LayerRows,
    Signal,
    SparseRows,
)
from arborsim.trace.columns import ends_of, kinds_of, lists_of, nulls_of, numbers_of, values_of
from arborsim.trace.episode import Episode
from arborsim.trace.schema import LATER, PER_LAYER, ROW_COLUMNS, Kind, TraceInfo
from arborsim.trace.validate import (
    Where,
    check_attention,
    check_finite,
    check_layer_rows,
    check_sums,
    validate,
)

_NEVER_NULL = ("episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth")
#: Columns of which an `Episode` holds something else, or under another condition
_OWN = ("episode", "seq", "position", "token", "end")


def decode_episode(
    table: pa.Table,
    info: TraceInfo,
    file: str,
    index: int,
    needs: frozenset[Signal] | None = None,
    text: bool = False,
    embedding: bool = False,
) -> Episode:
    """One episode from the columns that `columns_for` names, or a `TraceError` of one line.

    Decodes the observations in `needs`, by default all that the table holds but for vectors, and
    `text` and `embedding` if asked for.  Messages name `file` and the episode's number `index`.
    """
    where = Where(file, index)
    needs = _present(table) if needs is None else needs
    if table.num_rows == 0:
        raise where.error("it has no rows")
    try:
        episode = _structure(table, info, where, text)
    except UnicodeDecodeError as error:  # Arrow does not look into strings when it reads them
        raise where.error(f"a text is not UTF-8 ({error.reason})") from error
    # Structure first: a wrong kind or position would make the signals look wrong.
    validate(episode, where)
    found: dict[str, Any] = {}
    if Signal.ATTENTION in needs:
        attention = _attention(table, episode, where)
        check_attention(attention, episode.position, episode.token_rows, where)
        if isinstance(attention, DenseRows):
            attention = attention.widened()
        attention = attention.summed()
        assert attention.sums is not None
        check_sums(attention.sums, episode.token_rows, where)
        found["attention"] = attention
    if embedding:
        found["embedding_rows"], found["embedding"] = _embeddings(table, where)
    found["per_layer"] = {
        signal: _per_layer(table, signal, episode, where)
        for signal in (*PER_LAYER, Signal.KEY_SKETCH)
        if signal in needs
    }
    if Signal.READERS in needs:
        found["per_layer"][Signal.READERS] = _readers(table, episode, where)
    if needs & {Signal.HEAD_ATTENTION, Signal.KEYS}:
        found["keys"] = _vectors(table, "keys", episode, where)
    if Signal.VALUES in needs:
        found["values"] = _vectors(table, "values", episode, where)
    if Signal.HEAD_ATTENTION in needs:
        queries = _vectors(table, "queries", episode, where)
        places = episode.position, episode.token_rows, episode.node, episode.parent
        found["head_attention"] = VectorRows(queries, found["keys"], *places, info.rope)
    if Signal.HIDDEN in needs:
        vectors = _vectors(table, "hidden", episode, where)
        found["hidden"] = HiddenRows(info.hidden_layers, vectors)
    if Signal.LAYER_ATTENTION in needs:
        found["layer_attention"] = _layer_rows(table, episode, where)
    return replace(episode, **found)


def _present(table: pa.Table) -> frozenset[Signal]:
    """The token signals for which the table has values, but for vectors."""
    names = set(table.column_names)
    found = {
        signal
        for signal in PER_LAYER
        if signal.value in names and table[signal.value].null_count < table.num_rows
    }
    if names & {"attention", "attention_value"}:
        found.add(Signal.ATTENTION)
    if "attention_layers" in names:
        found.add(Signal.LAYER_ATTENTION)
    return frozenset(found)


def _structure(table: pa.Table, info: TraceInfo, where: Where, text: bool) -> Episode:
    """The episode without signals, its row numbers checked."""
    names = set(table.column_names) - ({"end"} if not info.knows_ends else set())
    absent = LATER - names
    row = {name: _row_column(table, name, where) for name in ROW_COLUMNS if name not in absent}
    wrong = row["episode"] != where.episode
    where.check(wrong, "is of episode {}: a row group holds one", row["episode"])
    seq, expected = row["seq"], np.arange(table.num_rows)
    where.check(seq != expected, "seq is {}, expected {}", seq, expected)
    where.check(row["kind"] < 0, "unknown kind of row")
    token_rows = np.flatnonzero((row["kind"] == Kind.PREFILL) | (row["kind"] == Kind.TOKEN))
    same: dict[str, Any] = {name: row[name] for name in row if name not in _OWN}
    return Episode(
        len(token_rows),
        index=where.episode,
        info=info,
        **same,
        token_rows=token_rows,
        token=row["token"][token_rows],
        position=row["position"][token_rows],
        text=tuple(table["text"].to_pylist()) if text else None,
        end=row.get("end"),
        answer=tuple(table["answer"].to_pylist()) if text and "answer" in names else None,
    )


def _row_column(table: pa.Table, name: str, where: Where) -> np.ndarray:
    column = table[name]
    if column.null_count and name in _NEVER_NULL:
        where.check(nulls_of(column), f"{name} is null")
    if name in ("kind", "end"):
        return kinds_of(column) if name == "kind" else ends_of(column)
    numbers = numbers_of(column)
    # Of floats, nulls are NaN, too.
    if numbers.dtype.kind == "f" and np.isnan(numbers).sum() > column.null_count:
        what = f"{name} is nan: what was not recorded is null"
        where.check(np.isnan(numbers) & ~nulls_of(column), what)
    return numbers


def checked_lists(
    column: pa.ChunkedArray, name: str, where: Where, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """`lists_of` a column in which no list holds a null.  `rows` are the rows of its entries."""
    if any(chunk.values.null_count for chunk in column.chunks):  # of the file's row group
        import pyarrow.compute as pc  # slow to import

        owner = values_of(pc.list_parent_indices(column))
        null = values_of(pc.list_flatten(column).is_null())
        where.check(null, f"{name} holds a null", rows=owner if rows is None else rows[owner])
    return lists_of(column)


def _token_lists(
    table: pa.Table, name: str, token_rows: np.ndarray, where: Where
) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and offsets ``[tokens + 1]`` of a list column.  Other rows must have none."""
    values, offsets = checked_lists(table[name], name, where)
    lengths = np.diff(offsets)
    lengths[token_rows] = 0
    where.check(lengths > 0, f"a row without a token holds {name}")
    return values, np.append(offsets[token_rows], offsets[-1])


def _per_layer(table: pa.Table, signal: Signal, episode: Episode, where: Where) -> np.ndarray:
    """Float16 ``[tokens, layers]``, or ``[tokens, sketch size]`` of the key sketch."""
    values, offsets = _token_lists(table, signal.value, episode.token_rows, where)
    lengths = np.diff(offsets)
    sketch, layers = signal is Signal.KEY_SKETCH, episode.info.geometry.layers
    width = int(lengths[0]) if sketch else layers
    expected = f"the first one had {width}" if sketch else f"but the model has {layers} layers"
    off, what = (lengths != width) | (lengths == 0), f"{signal.value} has {{}} values, {expected}"
    where.check(off, what, lengths, rows=episode.token_rows)
    found = values.reshape(episode.num_tokens, -1)
    check_finite(found, signal.value, episode.token_rows, where, signed=sketch)
    return found


def _readers(table: pa.Table, episode: Episode, where: Where) -> np.ndarray:
    """Int32 ``[tokens, 1 + most readers]``, filled up with -1."""
    values, offsets = _token_lists(table, Signal.READERS.value, episode.token_rows, where)
    lengths = np.diff(offsets)
    where.check(lengths == 0, "readers has no step", rows=episode.token_rows)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    wrong = np.zeros(len(lengths), dtype=bool)
    wrong[owner[values < 0]] = True
    where.check(wrong, "readers has a negative step", rows=episode.token_rows)
    found = np.full((len(lengths), int(lengths.max(initial=1))), -1, dtype=np.int32)
    found[owner, np.arange(len(values)) - np.repeat(offsets[:-1] - offsets[0], lengths)] = values
    return found


def _attention(table: pa.Table, episode: Episode, where: Where) -> AttentionRows:
    token_rows = episode.token_rows
    if "attention" in table.column_names:
        return DenseRows(*_token_lists(table, "attention", token_rows, where))
    index, offsets = _token_lists(table, "attention_index", token_rows, where)
    value, value_offsets = _token_lists(table, "attention_value", token_rows, where)
    off = np.diff(offsets) != np.diff(value_offsets)
    where.check(off, "attention_index and attention_value differ in length", rows=token_rows)
    rest = numbers_of(table["attention_rest"])[token_rows]
    return SparseRows(index, value, offsets, rest, episode.position.astype(np.int64) + 1)


def _layer_rows(table: pa.Table, episode: Episode, where: Where) -> LayerRows:
    """The column ``attention_layers``: per row of the episode a list of lists."""
    import pyarrow.compute as pc  # slow to import

    column, token_rows, position = table["attention_layers"], episode.token_rows, episode.position
    layers = episode.info.attention_layer_ids
    per_token = 2 * len(layers)
    counts = values_of(pc.fill_null(pc.list_value_length(column), 0))
    expected = np.zeros(len(counts), dtype=np.int64)
    expected[token_rows] = per_token
    what = "attention_layers has {} lists, expected {}"
    where.check(counts != expected, what, counts, expected)
    rows = np.repeat(token_rows, per_token)
    values, bounds = checked_lists(pc.list_flatten(column), "attention_layers", where, rows)
    lengths = np.diff(bounds)
    expected = np.repeat(position + 1, per_token)
    what = "attention_layers has a list of {} values, expected {} (one per position on the path)"
    where.check(lengths != expected, what, lengths, expected, rows=rows)
    check_layer_rows(values, bounds, rows, where)
    return LayerRows(layers, values, bounds[::per_token])


def _vectors(table: pa.Table, name: str, episode: Episode, where: Where) -> np.ndarray:
    """Float16 ``[tokens, captured layers, heads or KV heads, head_dim]``, all of it finite.

    Hidden vectors are ``[tokens, captured layers, size]``.
    """
    info, token_rows = episode.info, episode.token_rows
    g = info.geometry
    shape: tuple[int, ...] = (len(info.hidden_layers), g.hidden)
    if name != "hidden":
        heads = g.heads if name == "queries" else g.kv_heads
        shape = (len(info.qkv_layers), heads, g.head_dim)
    values, offsets = _token_lists(table, name, token_rows, where)
    lengths = np.diff(offsets)
    width = int(np.prod(shape))
    what = f"{name} has {{}} values, expected {width}"
    where.check(lengths != width, what, lengths, rows=token_rows)
    vectors = values.reshape(-1, *shape)
    check_finite(vectors, name, token_rows, where)
    return vectors


def _embeddings(table: pa.Table, where: Where) -> tuple[np.ndarray, np.ndarray]:
    """Rows that have an embedding, and the embeddings ``[rows with one, size]``."""
    values, offsets = checked_lists(table["embedding"], "embedding", where)
    lengths = np.diff(offsets)
    rows = np.flatnonzero(lengths)
    if len(rows) == 0:
        return rows, np.empty((0, 0), dtype=np.float16)
    size = int(lengths[rows[0]])
    what = f"embedding has {{}} values, the first one had {size}"
    where.check((lengths != size) & (lengths > 0), what, lengths)
    found = values.reshape(len(rows), size)
    check_finite(found, "embedding", rows, where)
    return rows, found
