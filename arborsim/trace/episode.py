"""One recorded search: decoded from the columns of its row group, and played as events.

Columns become NumPy views, checked on the way.  `play` yields the events that a live run of the
search would raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arborsim.core import events
from arborsim.core.observations import (
    AttentionRows,
    DenseRows,
    HiddenRows,
    LayerRows,
    Observations,
    Signal,
    SparseRows,
    VectorRows,
)
from arborsim.trace.columns import ends_of, kinds_of, lists_of, numbers_of, values_of
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
_AS_THEY_ARE = (
    "kind", "iteration", "node", "parent", "depth", "time_s", "entropy", "reward", "correct",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Episode(Observations):
    """One search: its event rows, and what was observed of its tokens, if it was asked for.

    Row arrays have shape ``[rows]``, token arrays ``[tokens]``; a *token* is a prefill or token
    row, numbered in row order.  Missing integers are -1, missing floats NaN.
    """

    index: int  # episode number in the trace
    info: TraceInfo
    kind: np.ndarray  # int8 [rows]: values of `arborsim.trace.schema.Kind`
    #: int32 [rows]
    iteration: np.ndarray
    node: np.ndarray
    parent: np.ndarray
    depth: np.ndarray
    time_s: np.ndarray  # float64 [rows]
    #: float32 [rows]
    entropy: np.ndarray
    reward: np.ndarray
    #: int8 [rows]: 1, 0, or -1 for "not judged".  Of the last row: the search's answer; of boundary
    #: rows: the thought's own.
    correct: np.ndarray
    #: int8 [rows]: values of `arborsim.trace.schema.End`; None if the trace does not distinguish
    #: thoughts that ended
    end: np.ndarray | None = None
    token_rows: np.ndarray  # int64 [tokens]: row of each token
    #: int32 [tokens]
    token: np.ndarray
    position: np.ndarray
    #: Texts, and what finished thoughts answer; one per row
    text: tuple[str | None, ...] | None = None
    answer: tuple[str | None, ...] | None = None
    #: int64 [k], float16 [k, size]: the rows (boundaries) that have an embedding, and those
    embedding_rows: np.ndarray | None = None
    embedding: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.kind)


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
        found["head_attention"] = VectorRows(
            _vectors(table, "queries", episode, where), found["keys"], episode.position,
            episode.token_rows, episode.node, episode.parent, info.rope,
        )  # fmt: skip
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
    values: dict[str, Any] = {name: row[name] for name in _AS_THEY_ARE}
    return Episode(
        len(token_rows),
        index=where.episode,
        info=info,
        **values,
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
        where.check(values_of(column.is_null()), f"{name} is null")
    if name in ("kind", "end"):
        return kinds_of(column) if name == "kind" else ends_of(column)
    numbers = numbers_of(column)
    # Of floats, nulls are NaN, too.
    if numbers.dtype.kind == "f" and np.isnan(numbers).sum() > column.null_count:
        what = f"{name} is nan: what was not recorded is null"
        where.check(np.isnan(numbers) & ~values_of(column.is_null()), what)
    return numbers


def checked_lists(
    column: pa.ChunkedArray, name: str, where: Where, rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """`lists_of` a column in which no list holds a null; `rows` are the rows of its entries."""
    if any(chunk.values.null_count for chunk in column.chunks):  # of the file's row group
        owner = values_of(pc.list_parent_indices(column))
        null = values_of(pc.list_flatten(column).is_null())
        where.check(null, f"{name} holds a null", rows=owner if rows is None else rows[owner])
    return lists_of(column)


def _token_lists(
    table: pa.Table, name: str, token_rows: np.ndarray, where: Where
) -> tuple[np.ndarray, np.ndarray]:
    """Flat values and offsets ``[tokens + 1]`` of a list column; other rows must have none."""
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


def play(episode: Episode) -> Iterator[events.Event]:
    """The events of one search in time order.

    One `Prefill`; one `Transition` per batch of transition rows; a `Decode` for every longest run
    of iterations in which the same leaves, in the same order, decode one token each; and a
    `Boundary`, `Prune` or `Answer` per row of that kind.  A run ends at any other row.
    """
    starts, widths = _segments(episode)
    stops = np.append(starts[1:], episode.num_rows).tolist()
    # Token number of each row that has one: runs are slices of the token arrays.
    token_of_row = np.searchsorted(episode.token_rows, starts).tolist()
    seen = 0  # nodes are numbered in order of opening, so this is the next new one
    for start, stop, width, first in zip(
        starts.tolist(), stops, widths.tolist(), token_of_row, strict=True
    ):
        kind, node = int(episode.kind[start]), int(episode.node[start])
        if kind == Kind.PREFILL:
            seen = 1
            yield events.Prefill(_run(episode, first, first + stop - start, (0,)))
        elif kind == Kind.TOKEN:
            leaves = tuple(episode.node[start : start + width].tolist())
            yield events.Decode(_run(episode, first, first + stop - start, leaves))
        elif kind == Kind.TRANSITION:
            turned = tuple(episode.node[start:stop].tolist())
            parents = episode.parent[start:stop].tolist()
            pairs = zip(turned, parents, strict=True)
            yield events.Transition(turned, tuple((leaf, up) for leaf, up in pairs if leaf >= seen))
            seen = max(seen, max(turned) + 1)
        elif kind == Kind.BOUNDARY:
            yield events.Boundary(node, float(episode.reward[start]), float(episode.entropy[start]))
        elif kind == Kind.PRUNE:
            yield events.Prune(node)
        else:
            verdict = int(episode.correct[start])
            yield events.Answer(None if verdict < 0 else bool(verdict))


def _run(episode: Episode, start: int, stop: int, leaves: tuple[int, ...]) -> events.TokenRun:
    return events.TokenRun(
        leaves=leaves,
        steps=(stop - start) // len(leaves),
        token=episode.token[start:stop],
        observed=episode.slice(start, stop),
    )


def _segments(episode: Episode) -> tuple[np.ndarray, np.ndarray]:
    """First row of each event, and for decode runs the number of leaves (else 1).

    Rows of one iteration are one batch.  A batch goes on with the run of the batch before it if
    that one lies directly before it and has the same nodes in the same order.
    """
    kind, node, iteration = episode.kind, episode.node, episode.iteration
    rows = np.arange(episode.num_rows)
    same_kind = np.concatenate([[False], kind[1:] == kind[:-1]])
    same_iteration = np.concatenate([[False], iteration[1:] == iteration[:-1]])
    is_token = kind == Kind.TOKEN

    # Batches: for rows other than tokens, a batch of one.
    batch_start = np.flatnonzero(~(is_token & same_kind & same_iteration))
    width = np.diff(batch_start, append=episode.num_rows)
    batch_of_row = np.repeat(np.arange(len(batch_start)), width)
    width_before = np.concatenate([[0], width[:-1]])
    alike = width == width_before
    # With equal widths, the row's counterpart in the batch before lies `width` rows up.
    counterpart = np.maximum(rows - width[batch_of_row], 0)
    alike &= np.logical_and.reduceat(node == node[counterpart], batch_start)

    goes_on = is_token[batch_start] & same_kind[batch_start] & alike
    together = np.isin(kind[batch_start], (Kind.PREFILL, Kind.TRANSITION))
    goes_on |= together & same_kind[batch_start]
    begins = ~goes_on
    return batch_start[begins], width[begins]
