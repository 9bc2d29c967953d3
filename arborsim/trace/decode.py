"""From the columns of one row group to an `Episode`: NumPy views, checked on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from arborsim.core.observations import AttentionRows, DenseRows, Signal, SparseRows
from arborsim.trace.columns import (
    ends_of,
    floats_of,
    integers_of,
    kinds_of,
    lists_of,
    strings_of,
)
from arborsim.trace.episode import Episode
from arborsim.trace.layer_rows import layer_rows_of
from arborsim.trace.layout import ROW_COLUMNS
from arborsim.trace.paths import paths_of
from arborsim.trace.schema import LATER, PER_LAYER, Kind, TraceInfo
from arborsim.trace.validate import validate
from arborsim.trace.validate_attention import check_attention
from arborsim.trace.vectors import VectorRows, vectors_of
from arborsim.trace.where import Where

_NEVER_NULL = ("episode", "seq", "time_s", "kind", "iteration", "node", "parent", "depth")


def check_table(table: pa.Table, info: TraceInfo, path: Path, index: int) -> None:
    """Refuse an episode that a reader would refuse, before it is written; as `decode_episode`."""
    layers = "attention_layers" in table.column_names
    decode_episode(table, info, str(path), index, attention_layers=layers)


def decode_episode(
    table: pa.Table,
    info: TraceInfo,
    file: str,
    index: int,
    needs: frozenset[Signal] | None = None,
    text: bool = False,
    embedding: bool = False,
    attention_layers: bool = False,
) -> Episode:
    """One validated episode from the columns that `columns_for` names.

    Parameters
    ----------
    table : pyarrow.Table
    info : TraceInfo
    file : str
        For error messages.
    index : int
        Episode number.
    needs : set of Signal, optional
        The observations to decode; all that the table holds by default.
    text, embedding, attention_layers : bool
        Also decode these columns.

    Raises
    ------
    TraceError
    """
    where = Where(file, index)
    if table.num_rows == 0:
        raise where.error("it has no rows")
    try:
        episode = _decode(table, info, where, needs, text, embedding)
    except UnicodeDecodeError as error:  # Arrow does not look into strings when it reads them
        raise where.error(f"a text is not UTF-8 ({error.reason})") from error
    if not (attention_layers or Signal.LAYER_ATTENTION in (needs or ())):
        return episode
    rows = layer_rows_of(
        table["attention_layers"], info.attention_layer_ids, episode.token_rows, episode.position,
        where,
    )  # fmt: skip
    return replace(episode, attention_layers=rows)


def _decode(
    table: pa.Table,
    info: TraceInfo,
    where: Where,
    needs: frozenset[Signal] | None,
    text: bool,
    embedding: bool,
) -> Episode:
    needs = _present(table) if needs is None else needs
    names = set(table.column_names) - ({"end"} if not info.knows_ends else set())
    later = {name for name in LATER if name not in names}
    row = {name: _row_column(table, name, where) for name in ROW_COLUMNS if name not in later}
    wrong = row["episode"] != where.episode
    where.check(wrong, lambda r: f"is of episode {row['episode'][r]}: a row group holds one")
    wrong = row["seq"] != np.arange(table.num_rows)
    where.check(wrong, lambda r: f"seq is {row['seq'][r]}, expected {r}")
    where.check(row["kind"] < 0, lambda r: "unknown kind of row")
    token_rows = np.flatnonzero((row["kind"] == Kind.PREFILL) | (row["kind"] == Kind.TOKEN))
    bare = Episode(
        index=where.episode,
        info=info,
        kind=row["kind"],
        iteration=row["iteration"],
        node=row["node"],
        parent=row["parent"],
        depth=row["depth"],
        time_s=row["time_s"],
        entropy=row["entropy"],
        reward=row["reward"],
        correct=row["correct"],
        token_rows=token_rows,
        token=row["token"][token_rows],
        position=row["position"][token_rows],
        attention=None,
        per_layer={},
        text=strings_of(table["text"]) if text else None,
        end=row.get("end"),
        answer=strings_of(table["answer"]) if text and "answer" in names else None,
    )
    # Structure first: a wrong kind or position would make the signals look wrong.
    validate(bare, where)
    attention = None
    if needs & {Signal.ATTENTION, Signal.EVICTION_TIME}:
        attention = _attention(table, token_rows, bare.position, where)
        check_attention(attention, bare.position, token_rows, where)
        attention = attention.widened() if isinstance(attention, DenseRows) else attention
    vectors = _embeddings(table, where) if embedding else (None, None)
    per_layer = {
        signal: _per_layer(table, signal, token_rows, info, where)
        for signal in PER_LAYER
        if signal in needs
    }
    if Signal.KEY_SKETCH in needs:
        per_layer[Signal.KEY_SKETCH] = _sketch(table, token_rows, where)
    return replace(
        bare,
        attention=attention,
        per_layer=per_layer,
        **_captured(table, bare, needs, where),
        embedding_rows=vectors[0],
        embedding=vectors[1],
    )


def _present(table: pa.Table) -> frozenset[Signal]:
    """The token signals for which the table has values."""
    names = set(table.column_names)
    found = {
        signal
        for signal in PER_LAYER
        if signal.value in names and table[signal.value].null_count < table.num_rows
    }
    if names & {"attention", "attention_value"}:
        found.add(Signal.ATTENTION)
    return frozenset(found)


def _row_column(table: pa.Table, name: str, where: Where) -> np.ndarray:
    column = table[name]
    if column.null_count and name in _NEVER_NULL:
        missing = column.is_null().to_numpy()
        where.check(missing, lambda r: f"{name} is null")
    if name in ("kind", "end"):
        return kinds_of(column) if name == "kind" else ends_of(column)
    return floats_of(column) if pa.types.is_floating(column.type) else integers_of(column)


def _token_lists(
    table: pa.Table, name: str, token_rows: np.ndarray, where: Where
) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and offsets ``[tokens + 1]`` of a list column; other rows must have none."""
    values, offsets = lists_of(table[name])
    lengths = np.diff(offsets)
    lengths[token_rows] = 0
    where.check(lengths > 0, lambda r: f"a row without a token holds {name}")
    return values, np.append(offsets[token_rows], offsets[-1])


def _per_layer(
    table: pa.Table, signal: Signal, token_rows: np.ndarray, info: TraceInfo, where: Where
) -> np.ndarray:
    values, offsets = _token_lists(table, signal.value, token_rows, where)
    layers = info.geometry.layers
    lengths = np.diff(offsets)
    where.check(
        lengths != layers,
        lambda t: f"{signal.value} has {lengths[t]} values, but the model has {layers} layers",
        token_rows,
    )
    return values.reshape(len(token_rows), layers)


def _attention(
    table: pa.Table, token_rows: np.ndarray, position: np.ndarray, where: Where
) -> AttentionRows:
    if "attention" in table.column_names:
        return DenseRows(*_token_lists(table, "attention", token_rows, where))
    index, offsets = _token_lists(table, "attention_index", token_rows, where)
    value, value_offsets = _token_lists(table, "attention_value", token_rows, where)
    where.check(
        np.diff(offsets) != np.diff(value_offsets),
        lambda t: "attention_index and attention_value differ in length",
        token_rows,
    )
    rest = floats_of(table["attention_rest"])[token_rows]
    return SparseRows(index, value, offsets, rest, position.astype(np.int64) + 1)


def _sketch(table: pa.Table, token_rows: np.ndarray, where: Where) -> np.ndarray:
    """Key sketches, float16 ``[tokens, size]``."""
    values, offsets = _token_lists(table, "key_sketch", token_rows, where)
    lengths = np.diff(offsets)
    where.check(
        (lengths != lengths[0]) | (lengths == 0),
        lambda t: f"key_sketch has {lengths[t]} values, the first one had {lengths[0]}",
        token_rows,
    )
    return values.reshape(len(token_rows), -1)


def _captured(
    table: pa.Table, episode: Episode, needs: frozenset[Signal], where: Where
) -> dict[str, Any]:
    """The vectors of the captured layers that are asked for, as fields of an `Episode`."""

    def read(name: str) -> np.ndarray:
        return vectors_of(table, name, episode.token_rows, episode.info, where)

    found: dict[str, Any] = {}
    if needs & {Signal.HEAD_ATTENTION, Signal.KEYS}:
        found["keys"] = read("keys")
    if Signal.VALUES in needs:
        found["values"] = read("values")
    if Signal.HEAD_ATTENTION in needs:
        paths = paths_of(episode.token_rows, episode.node, episode.parent)
        found["head_attention"] = VectorRows(
            read("queries"), found["keys"], episode.position, paths
        )
    return found


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
