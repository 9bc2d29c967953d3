"""From the columns of one row group to an `Episode`: NumPy views, checked on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arborsim.core.observations import (
    AttentionRows,
    DenseRows,
    LayerRows,
    Signal,
    SparseRows,
    VectorRows,
)
from arborsim.trace.columns import (
    ends_of,
    kinds_of,
    lists_of,
    numbers_of,
)
from arborsim.trace.episode import Episode
from arborsim.trace.schema import LATER, PER_LAYER, ROW_COLUMNS, Kind, TraceInfo
from arborsim.trace.validate import Where, check_attention, check_layer_rows, validate

_NEVER_NULL = ("episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth")
_AS_THEY_ARE = (
    "kind", "iteration", "node", "parent", "depth", "time_s", "entropy", "reward", "correct",
)  # fmt: skip


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

    Decodes the observations in `needs`, by default all that the table holds but for vectors; `text`
    and `embedding` if asked for.  Messages name `file` and the episode's number `index`.
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
    if needs & {Signal.ATTENTION, Signal.EVICTION_TIME}:
        attention = _attention(table, episode, where)
        check_attention(attention, episode.position, episode.token_rows, where)
        if isinstance(attention, DenseRows):
            attention = attention.widened()
        found["attention"] = attention
    if embedding:
        found["embedding_rows"], found["embedding"] = _embeddings(table, where)
    found["per_layer"] = {
        signal: _per_layer(table, signal, episode, where)
        for signal in (*PER_LAYER, Signal.KEY_SKETCH)
        if signal in needs
    }
    if needs & {Signal.HEAD_ATTENTION, Signal.KEYS}:
        found["keys"] = _vectors(table, "keys", episode, where)
    if Signal.VALUES in needs:
        found["values"] = _vectors(table, "values", episode, where)
    if Signal.HEAD_ATTENTION in needs:
        found["head_attention"] = VectorRows(
            _vectors(table, "queries", episode, where), found["keys"], episode.position,
            episode.token_rows, episode.node, episode.parent,
        )  # fmt: skip
    if Signal.LAYER_ATTENTION in needs:
        found["attention_layers"] = _layer_rows(table, episode, where)
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
    where.check(wrong, lambda r: f"is of episode {row['episode'][r]}: a row group holds one")
    wrong = row["seq"] != np.arange(table.num_rows)
    where.check(wrong, lambda r: f"seq is {row['seq'][r]}, expected {r}")
    where.check(row["kind"] < 0, lambda r: "unknown kind of row")
    token_rows = np.flatnonzero((row["kind"] == Kind.PREFILL) | (row["kind"] == Kind.TOKEN))
    values: dict[str, Any] = {name: row[name] for name in _AS_THEY_ARE}
    return Episode(
        index=where.episode,
        info=info,
        **values,
        token_rows=token_rows,
        token=row["token"][token_rows],
        position=row["position"][token_rows],
        attention=None,
        per_layer={},
        text=tuple(table["text"].to_pylist()) if text else None,
        end=row.get("end"),
        answer=tuple(table["answer"].to_pylist()) if text and "answer" in names else None,
    )


def _row_column(table: pa.Table, name: str, where: Where) -> np.ndarray:
    column = table[name]
    if column.null_count and name in _NEVER_NULL:
        where.check(column.is_null().to_numpy(), lambda r: f"{name} is null")
    if name in ("kind", "end"):
        return kinds_of(column) if name == "kind" else ends_of(column)
    return numbers_of(column)


def _token_lists(
    table: pa.Table, name: str, token_rows: np.ndarray, where: Where
) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and offsets ``[tokens + 1]`` of a list column; other rows must have none."""
    values, offsets = lists_of(table[name])
    lengths = np.diff(offsets)
    lengths[token_rows] = 0
    where.check(lengths > 0, lambda r: f"a row without a token holds {name}")
    return values, np.append(offsets[token_rows], offsets[-1])


def _per_layer(table: pa.Table, signal: Signal, episode: Episode, where: Where) -> np.ndarray:
    """Float16 ``[tokens, layers]``, or ``[tokens, sketch size]`` of the key sketch."""
    values, offsets = _token_lists(table, signal.value, episode.token_rows, where)
    lengths = np.diff(offsets)
    sketch, layers = signal is Signal.KEY_SKETCH, episode.info.geometry.layers
    width = int(lengths[0]) if sketch else layers
    expected = f"the first one had {width}" if sketch else f"but the model has {layers} layers"
    where.check(
        (lengths != width) | (lengths == 0),
        lambda t: f"{signal.value} has {lengths[t]} values, {expected}",
        episode.token_rows,
    )
    return values.reshape(episode.num_tokens, -1)


def _attention(table: pa.Table, episode: Episode, where: Where) -> AttentionRows:
    token_rows = episode.token_rows
    if "attention" in table.column_names:
        return DenseRows(*_token_lists(table, "attention", token_rows, where))
    index, offsets = _token_lists(table, "attention_index", token_rows, where)
    value, value_offsets = _token_lists(table, "attention_value", token_rows, where)
    where.check(
        np.diff(offsets) != np.diff(value_offsets),
        lambda t: "attention_index and attention_value differ in length",
        token_rows,
    )
    rest = numbers_of(table["attention_rest"])[token_rows]
    return SparseRows(index, value, offsets, rest, episode.position.astype(np.int64) + 1)


def _layer_rows(table: pa.Table, episode: Episode, where: Where) -> LayerRows:
    """The column ``attention_layers``: per row of the episode a list of lists."""
    column, token_rows, position = table["attention_layers"], episode.token_rows, episode.position
    layers = episode.info.attention_layer_ids
    per_token = 2 * len(layers)
    counts = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
    expected = np.zeros(len(counts), dtype=np.int64)
    expected[token_rows] = per_token
    where.check(
        counts != expected,
        lambda r: f"attention_layers has {counts[r]} lists, expected {expected[r]}",
    )
    values, bounds = lists_of(pc.list_flatten(column))
    lengths, rows = np.diff(bounds), np.repeat(token_rows, per_token)
    where.check(
        lengths != np.repeat(position + 1, per_token),
        lambda i: (
            f"attention_layers has a list of {lengths[i]} values, expected "
            f"{position[i // per_token] + 1} (one per position on the path)"
        ),
        rows,
    )
    check_layer_rows(values, bounds, rows, where)
    return LayerRows(layers, values, bounds[::per_token])


def _vectors(table: pa.Table, name: str, episode: Episode, where: Where) -> np.ndarray:
    """Float16 ``[tokens, captured layers, heads or KV heads, head_dim]``, all of it finite."""
    g, token_rows = episode.info.geometry, episode.token_rows
    heads = g.heads if name == "queries" else g.kv_heads
    shape = (len(episode.info.qkv_layers), heads, g.head_dim)
    values, offsets = lists_of(table[name])
    lengths = np.diff(offsets)[token_rows]
    width = int(np.prod(shape))
    where.check(
        lengths != width,
        lambda t: f"{name} has {lengths[t]} values, expected {width}",
        token_rows,
    )
    vectors = values.reshape(len(token_rows), *shape)
    broken = ~np.isfinite(vectors).all(axis=(1, 2, 3))
    where.check(broken, lambda t: f"{name} holds a value that is not finite", token_rows)
    return vectors


def _embeddings(table: pa.Table, where: Where) -> tuple[np.ndarray, np.ndarray]:
    """Rows that have an embedding, and the embeddings ``[rows with one, size]``."""
    values, offsets = lists_of(table["embedding"])
    lengths = np.diff(offsets)
    rows = np.flatnonzero(lengths)
    if len(rows) == 0:
        return rows, np.empty((0, 0), dtype=np.float16)
    size = int(lengths[rows[0]])
    where.check(
        (lengths != size) & (lengths > 0),
        lambda r: f"embedding has {lengths[r]} values, the first one had {size}",
    )
    return rows, values.reshape(len(rows), size)
