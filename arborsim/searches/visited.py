"""A walked search as an episode of its own, so that everything that works on traces works on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from arborsim.core.head_rows import VectorRows
from arborsim.core.observations import DenseRows, LayerRows, SparseRows
from arborsim.searches.walk import Step, Walk
from arborsim.trace.episode import Episode
from arborsim.trace.schema import Kind

_NO_ROW = -1


def visited(walk: Walk, episode: Episode) -> Episode:
    """The rows of the nodes that `walk` visited, renumbered, with this search's own events.

    `episode` is the one whose bank was walked.  Its signals are carried along, token by token.  The
    new one has prefill, transitions, decode iterations, boundaries, prunes and the answer of this
    search, in the order in which a live recording has them.  Seconds were not measured: `time_s` is
    0.
    """
    rows = _Rows(walk, episode)
    for step in walk.steps:
        rows.step(step)
    rows.event(Kind.ANSWER, walk.answer)
    kind, node, iteration, source = rows.columns()
    parents = np.asarray(walk.parent, dtype=np.int32)
    depths = np.asarray(walk.depth, dtype=np.int32)
    token_rows = np.flatnonzero((kind == Kind.PREFILL) | (kind == Kind.TOKEN))
    is_token = np.isin(episode.kind, (Kind.PREFILL, Kind.TOKEN))
    token = np.cumsum(is_token)[source[token_rows]] - 1  # its number in the bank
    correct = _picked(episode.correct, source, -1)
    correct[-1] = -1 if walk.correct is None else walk.correct
    new = Episode(
        len(token),
        index=episode.index,
        info=replace(episode.info, search=walk.search, search_parameters={}),
        kind=kind,
        iteration=iteration,
        node=node,
        parent=parents[node],
        depth=depths[node],
        time_s=np.zeros(len(kind)),
        entropy=_picked(episode.entropy, source, np.nan),
        reward=_picked(episode.reward, source, np.nan),
        correct=correct,
        token_rows=token_rows,
        token=episode.token[token],
        position=episode.position[token],
        attention=_attention(episode.attention, token),
        per_layer={signal: values[token] for signal, values in episode.per_layer.items()},
        text=_texts(walk, episode, source),
        layer_attention=_attention(episode.layer_attention, token),
        keys=None if episode.keys is None else episode.keys[token],
        values=None if episode.values is None else episode.values[token],
        hidden=None if episode.hidden is None else episode.hidden[token],
        end=None if episode.end is None else _picked(episode.end, source, 0),
        answer=_strings(episode.answer, source),
        **_embeddings(episode, source),
    )
    heads = episode.head_attention
    if isinstance(heads, VectorRows) and new.keys is not None:  # computed over the new paths
        paths = (new.keys, new.position, new.token_rows, new.node, new.parent, heads.rope)
        new = replace(new, head_attention=VectorRows(heads.queries[token], *paths))
    return new


class _Rows:
    """Collects rows: kind, node, iteration, and the bank's row (or `_NO_ROW`), in chunks."""

    def __init__(self, walk: Walk, episode: Episode) -> None:
        self._iteration = 0
        self._pending: list[tuple[int, int, int, int]] = []
        self._turns = False
        node = episode.node[episode.token_rows]
        order = np.argsort(node, kind="stable")
        # Rows of the tokens of node n: token_rows[first[n]:first[n + 1]].
        self._token_rows = episode.token_rows[order]
        count = int(episode.node.max()) + 1
        self._first = np.searchsorted(node[order], np.arange(count + 1))
        self._boundary = np.full(count, _NO_ROW)
        closing = np.flatnonzero(episode.kind == Kind.BOUNDARY)
        self._boundary[episode.node[closing]] = closing
        self._bank_node = np.asarray(walk.bank_node)
        self._next = self._first[self._bank_node].copy()  # of each visited node, its next token
        prompt = np.flatnonzero(episode.kind == Kind.PREFILL)
        zeros = np.zeros(len(prompt), dtype=np.int64)
        self._chunks = [(zeros + int(Kind.PREFILL), zeros, zeros, prompt)]

    def event(self, kind: Kind, node: int, row: int = _NO_ROW) -> None:
        self._pending.append((int(kind), node, self._iteration, row))

    def step(self, step: Step) -> None:
        """The search's decisions, and what was decoded then."""
        for node in step.dropped:
            self.event(Kind.PRUNE, node)
        self._turns = self._turns or bool(step.opened)
        for run in step.runs:
            if self._turns:  # the batch that goes on with the new ones, in order of number
                for node in sorted(run.leaves):
                    self.event(Kind.TRANSITION, node)
                self._turns = False
            if run.iterations:
                self._decode(np.asarray(run.leaves), run.iterations)
            for node in run.ended:
                self.event(Kind.BOUNDARY, node, int(self._boundary[self._bank_node[node]]))

    def _decode(self, leaves: np.ndarray, iterations: int) -> None:
        self._flush()
        width = len(leaves)
        steps = np.arange(iterations)
        tokens = (self._next[leaves] + steps[:, None]).ravel()
        self._next[leaves] += iterations
        kinds, nodes = np.full(iterations * width, int(Kind.TOKEN)), np.tile(leaves, iterations)
        numbers = np.repeat(self._iteration + 1 + steps, width)
        self._chunks.append((kinds, nodes, numbers, self._token_rows[tokens]))
        self._iteration += iterations

    def _flush(self) -> None:
        if self._pending:
            self._chunks.append(tuple(np.asarray(self._pending).T))
            self._pending = []

    def columns(self) -> list[np.ndarray]:
        """Kind int8, node and iteration int32, row of the bank int64, all ``[rows]``."""
        self._flush()
        columns = [np.concatenate(parts) for parts in zip(*self._chunks, strict=True)]
        types = (np.int8, np.int32, np.int32, np.int64)
        return [column.astype(kind) for column, kind in zip(columns, types, strict=True)]


def _picked(values: np.ndarray, source: np.ndarray, missing: float) -> np.ndarray:
    """The values of the bank's rows, `missing` for rows that it does not hold."""
    return np.where(source == _NO_ROW, missing, values[source]).astype(values.dtype)


def _strings(
    values: tuple[str | None, ...] | None, source: np.ndarray
) -> tuple[str | None, ...] | None:
    if values is None:
        return None
    return tuple(None if row == _NO_ROW else values[row] for row in source.tolist())


def _texts(walk: Walk, episode: Episode, source: np.ndarray) -> tuple[str | None, ...] | None:
    """The recorded texts, and for the answer the texts of all thoughts that lead to it."""
    texts = _strings(episode.text, source)
    if texts is None or episode.text is None:
        return None
    closing = np.flatnonzero(episode.kind == Kind.BOUNDARY)
    said = dict(zip(episode.node[closing].tolist(), closing.tolist(), strict=True))
    parts, node = [], walk.answer
    while node > 0:
        row = said.get(walk.bank_node[node])
        parts.append((episode.text[row] if row is not None else None) or "")
        node = walk.parent[node]
    return (*texts[:-1], "".join(reversed(parts)))


def _embeddings(episode: Episode, source: np.ndarray) -> dict[str, Any]:
    if episode.embedding_rows is None or episode.embedding is None:
        return {}
    number = np.full(episode.num_rows, -1)
    number[episode.embedding_rows] = np.arange(len(episode.embedding_rows))
    found = np.where(source == _NO_ROW, -1, number[source])
    rows = np.flatnonzero(found >= 0)
    return {"embedding_rows": rows, "embedding": episode.embedding[found[rows]]}


def _attention(rows: DenseRows | SparseRows | LayerRows | None, token: np.ndarray) -> Any:
    """The same kind of rows, of these tokens."""
    if rows is None:
        return None
    lengths = np.diff(rows.offsets)[token]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    # Positions count along the path, and a path is the same whichever search visits it.
    at = np.repeat(rows.offsets[:-1][token], lengths) + within
    match rows:
        case DenseRows():
            return DenseRows(rows.values[at], offsets)
        case SparseRows():
            whole = rows.rest[token], rows.lengths[token]
            return SparseRows(rows.index[at], rows.value[at], offsets, *whole)
    return LayerRows(rows.layers, rows.values[at], offsets)
