"""Turn the forward passes of a search into the columns of a trace.

Nothing is computed twice: attention rows come out of the attention function, hidden states from
hooks, keys and values from the cache.  An iteration only keeps references and one averaged row per
leaf; everything else is computed for many tokens at once when the batch is about to change
(`drain`), so recording costs little per token.

Tokens come out in the order in which they entered the cache: by iteration, then by sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from arborsim.core.errors import UsageError
from arborsim.core.observations import (
    AttentionRows,
    DenseRows,
    HiddenRows,
    LayerRows,
    Signal,
    SparseRows,
)
from arborsim.trace.columns import lists
from arborsim.trace.schema import PER_LAYER
from arborsim_torch.context import PassContext
from arborsim_torch.decoder import Observed
from arborsim_torch.token_signals import (
    ChunkExtremes,
    head_variance,
    key_norm,
    sketch_matrix,
    top_entries,
    value_norm,
)

_MAX_PENDING_VALUES = 1 << 24  # attention values (and hidden values) to hold before draining
_F16 = np.float16


def middle_layers(layers: int) -> tuple[int, ...]:
    """The two layers in the middle, whose vectors are recorded by default."""
    return tuple(sorted({max(0, layers // 2 - 1), layers // 2} & set(range(layers))))


#: Signals of tokens that a capture can take, by what they are made of.
_OF_KEYS = {
    Signal.KEY_VARIANCE: "key_variance", Signal.VALUE_VARIANCE: "value_variance",
    Signal.KEY_NORM: "key_norm", Signal.VALUE_NORM: "value_norm",
    Signal.LAG_KEY: "lag_key", Signal.LAG_VALUE: "lag_value", Signal.KEY_SKETCH: "key_sketch",
}  # fmt: skip
ALL_SIGNALS = frozenset({Signal.ATTENTION, Signal.HIDDEN_CHANGE, *_OF_KEYS})


class Capture:
    """Records the signals of one episode.

    Parameters
    ----------
    top : int
        Positions kept per attention row; 0 stores rows whole.
    vector_layers : tuple of int
        Layers whose queries, keys and values are kept (`qkv` level).
    row_layers : tuple of int
        Layers whose own attention rows are kept, whole: mean and variance over query heads.
    hidden_layers : tuple of int
        Layers whose outputs are kept.
    signals : set of Signal
        What else to take; all by default.
    embeddings : bool
        Whether complete nodes get an embedding.
    keep : bool
        Keep what `take` hands out, for `columns`.
    """

    def __init__(
        self,
        top: int = 0,
        vector_layers: Sequence[int] = (),
        row_layers: Sequence[int] = (),
        hidden_layers: Sequence[int] = (),
        *,
        signals: frozenset[Signal] = ALL_SIGNALS,
        embeddings: bool = True,
        keep: bool = True,
    ) -> None:
        self.query_layers = frozenset(vector_layers)
        self.row_layers = frozenset(row_layers)
        self.wants_attention = Signal.ATTENTION in signals or bool(row_layers)
        self.hidden_layers = tuple(hidden_layers)
        self.wants_hidden = Signal.HIDDEN_CHANGE in signals or bool(hidden_layers)
        self._signals = signals
        self.embeddings = embeddings
        self._vector_layers = tuple(vector_layers)
        self._row_layers = tuple(row_layers)
        self._top = top
        self._fresh = Captured()
        self.keeps = keep
        self.keeps_signals = keep and bool(signals)
        self._kept = Captured()
        self._last_hidden: dict[int, Tensor] = {}
        self._sums: dict[int, tuple[Tensor, int]] = {}
        self._extremes: dict[int, ChunkExtremes] = {}
        self._sketch: Tensor | None = None
        self._clear()

    def _clear(self) -> None:
        self._attention: list[Tensor] = []
        self._attention_layers: list[Tensor] = []
        self._hidden: list[list[Tensor]] = []
        self._last: list[Tensor] = []
        self._queries: list[list[Tensor]] = []
        self._held = 0
        self._tokens = 0

    def take(self) -> Captured:
        """What has been finished since the last call."""
        fresh, self._fresh = self._fresh, Captured()
        if self.keeps:
            self._kept.extend(fresh)
        return fresh

    def forward(
        self, decoder: Observed, state: PassContext, hidden: list[Tensor], last: Tensor
    ) -> None:
        """Take one forward pass (`arborsim_torch.decoder.Observer`)."""
        self._tokens += state.queries
        self._held += sum(h.numel() for h in hidden)
        if self.wants_attention:
            rows = state.attention()
            self._attention.append(rows)
            self._held += rows.numel()
        if self.wants_hidden:
            self._hidden.append(hidden)
        if self.embeddings:
            self._last.append(last)
        if self._vector_layers:
            self._queries.append([state.query_vectors[layer] for layer in self._vector_layers])
        if self._row_layers:
            apart = torch.stack([state.layer_rows[layer] for layer in self._row_layers])
            self._attention_layers.append(apart)  # [layers, 2, seqs, queries, positions]
            self._held += apart.numel()
        if state.queries > 1 or self._held > _MAX_PENDING_VALUES:
            self.drain(decoder)

    def drain(self, decoder: Observed) -> None:
        """Finish the pending tokens; needed before the decoder turns to other leaves."""
        tokens = self._tokens  # a pending pass holds one or more tokens of every sequence
        if not tokens:
            return
        cache, leaves = decoder.cache, decoder.cache.leaves
        starts = [cache.length(i) - tokens for i in range(len(leaves))]
        self._take_attention(starts)
        self._take_attention_layers(starts)
        if self.wants_hidden:
            layers = zip(*self._hidden, strict=True)
            hidden = torch.stack([torch.cat(parts, dim=1) for parts in layers])
            if self.hidden_layers:
                chosen = hidden[list(self.hidden_layers)].permute(2, 1, 0, 3)
                self._add("hidden", chosen.flatten(2))
            if Signal.HIDDEN_CHANGE in self._signals:
                self._take_change(decoder, leaves, hidden.float())  # [layers, seqs, tokens, size]
        if self.embeddings:
            last = torch.cat(self._last, dim=1).float()
            for own, leaf, start in zip(last, leaves, starts, strict=True):
                for node, first, stop in decoder.thoughts(leaf, start, start + tokens):
                    before, count = self._sums.get(node, (0.0, 0))
                    total = own[first - start : stop - start].sum(0)
                    self._sums[node] = (total + before, count + stop - first)
        if self._vector_layers or self._signals & _OF_KEYS.keys():
            self._take_vectors(decoder, starts, tokens)
        self._clear()

    def _add(self, column: str, values: Tensor) -> None:
        """Append values ``[tokens, seqs, n]`` in the order of the trace."""
        self._fresh.add(column, _float16(values.reshape(-1, values.shape[-1])))

    def _take_attention(self, starts: list[int]) -> None:
        offset = 0
        for rows in self._attention:
            host = rows.cpu().numpy() if self._top else _float16(rows)
            queries = host.shape[1]
            for q in range(queries):
                for seq, start in enumerate(starts):
                    self._add_row(host[seq, q, : start + offset + q + 1])
            offset += queries

    def _take_attention_layers(self, starts: list[int]) -> None:
        offset = 0
        for rows in self._attention_layers:
            host = _float16(rows)
            queries = host.shape[3]
            for q in range(queries):
                for seq, start in enumerate(starts):
                    own = host[:, :, seq, q, : start + offset + q + 1]
                    self._fresh.layer_rows.append(own.reshape(-1))  # layer by layer: mean, variance
            offset += queries

    def _add_row(self, row: np.ndarray) -> None:
        if not self._top:
            self._fresh.rows.append(row)
            return
        index, value, rest = top_entries(row, self._top)
        self._fresh.index.append(index)
        self._fresh.rows.append(value)
        self._fresh.rest.append(rest)

    def _take_change(self, decoder: Observed, leaves: list[int], hidden: Tensor) -> None:
        before = []
        for seq, leaf in enumerate(leaves):
            known = self._last_hidden.get(leaf)
            if known is None:
                known = self._last_hidden.get(decoder.cache.parent(leaf))
            # The first prompt token has none before it: it changes by 0.
            before.append(hidden[:, seq, 0] if known is None else known)
            self._last_hidden[leaf] = hidden[:, seq, -1].clone()
        path = torch.cat([torch.stack(before, dim=1)[:, :, None], hidden], dim=2)
        change = torch.linalg.vector_norm(path[:, :, 1:] - path[:, :, :-1], dim=-1)
        self._add("hidden_change", change.permute(2, 1, 0))

    def _take_vectors(self, decoder: Observed, starts: list[int], tokens: int) -> None:
        cache = decoder.cache
        kv = cache.newest(tokens)  # [layers, 2, seqs, kv_heads, tokens, head_dim]
        wanted = self._signals
        if wanted & {Signal.KEY_VARIANCE, Signal.VALUE_VARIANCE}:
            variance = head_variance(kv).permute(1, 3, 2, 0)  # [2, tokens, seqs, layers]
            self._add("key_variance", variance[0])
            self._add("value_variance", variance[1])
        if Signal.KEY_NORM in wanted:
            self._add("key_norm", key_norm(kv).permute(2, 1, 0))
        if Signal.VALUE_NORM in wanted:
            self._add("value_norm", value_norm(kv).permute(2, 1, 0))
        if wanted & {Signal.LAG_KEY, Signal.LAG_VALUE}:
            self._take_lag(decoder, kv, starts)
        if Signal.KEY_SKETCH in wanted:
            keys = kv[:, 0].float().permute(3, 1, 0, 2, 4).flatten(2)  # [tokens, seqs, features]
            if self._sketch is None:
                self._sketch = sketch_matrix(keys.shape[-1], keys.device)
            self._add("key_sketch", keys @ self._sketch)
        if self._vector_layers:
            chosen = kv[list(self._vector_layers)].permute(1, 4, 2, 0, 3, 5).flatten(3)
            self._add("keys", chosen[0])
            self._add("values", chosen[1])
            # [seqs, layers, heads, tokens, dim] -> [tokens, seqs, layers x heads x dim]
            queries = torch.cat([torch.stack(part, dim=1) for part in self._queries], dim=3)
            self._add("queries", queries.permute(3, 0, 1, 2, 4).flatten(2))

    def _take_lag(self, decoder: Observed, kv: Tensor, starts: list[int]) -> None:
        cache, lag = decoder.cache, []
        for seq, (leaf, start) in enumerate(zip(cache.leaves, starts, strict=True)):
            extremes = self._extremes.get(leaf)
            if extremes is None:
                extremes = self._extremes.get(cache.parent(leaf), ChunkExtremes()).copy()
                self._extremes[leaf] = extremes
            lag.append(extremes.deviations(kv[:, :, seq], start))
        by_token = torch.stack(lag, dim=2).permute(1, 3, 2, 0)  # [2, tokens, seqs, layers]
        self._add("lag_key", by_token[0])
        self._add("lag_value", by_token[1])

    def embedding(self, node: int) -> np.ndarray:
        """Mean normalised last hidden state of a complete node, float16 ``[size]``."""
        total, count = self._sums.pop(node)
        return _float16(total / count)

    def forget(self, node: int) -> None:
        """Free what was kept for the children of a node that will have none."""
        self._last_hidden.pop(node, None)
        self._extremes.pop(node, None)

    def columns(self) -> dict[str, Any]:
        """The signal columns, one entry per token in the order of entry."""
        assert self.keeps, "a capture that keeps nothing has no columns"
        self.take()
        return self._kept.trace_columns(len(self._row_layers))


def _float16(values: Tensor) -> np.ndarray:
    """Round to the trace's float16; what overflows becomes its largest number."""
    limit = float(np.finfo(_F16).max)
    rounded = values.clamp(-limit, limit).half().cpu().numpy()
    return np.asarray(rounded)


@dataclass
class Captured:
    """Signals of consecutive tokens, in the trace's types.

    Attributes
    ----------
    columns : dict of str to list of float16 array ``[tokens, n]``
        By column of the trace.
    rows : list of array ``[position + 1]``, or of the listed positions' values
    index : list of int32 array
        The listed positions, if rows are sparse.
    rest : list of float
        What sparse rows leave out.
    layer_rows : list of float16 array
        Per token mean and variance of each captured layer, one after the other.
    """

    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    rows: list[np.ndarray] = field(default_factory=list)
    index: list[np.ndarray] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    layer_rows: list[np.ndarray] = field(default_factory=list)

    def add(self, column: str, values: np.ndarray) -> None:
        """Append values ``[tokens, n]``."""
        self.columns.setdefault(column, []).append(values)

    def extend(self, later: Captured) -> None:
        """Append what came later."""
        for name, parts in later.columns.items():
            self.columns.setdefault(name, []).extend(parts)
        self.rows += later.rows
        self.index += later.index
        self.rest += later.rest
        self.layer_rows += later.layer_rows

    def values(self, column: str) -> np.ndarray:
        """A column, ``[tokens, n]``."""
        return np.concatenate(self.columns[column])

    def attention(self, lengths: np.ndarray) -> AttentionRows | None:
        """The rows as policies read them; `lengths` are the tokens' positions + 1."""
        if not self.rows:
            return None
        values, offsets = np.concatenate(self.rows), _offsets(self.rows)
        if not self.index:
            return DenseRows(values, offsets).widened()
        rest = np.asarray(self.rest, dtype=np.float32)
        index = np.concatenate(self.index)
        return SparseRows(index, values, offsets, rest, lengths.astype(np.int64))

    def per_layer(self, signals: Iterable[Signal]) -> dict[Signal, np.ndarray]:
        """Those of the signals that have a value per token and layer, and the key sketch."""
        plain = (*PER_LAYER, Signal.KEY_SKETCH)
        return {signal: self.values(signal.value) for signal in signals if signal in plain}

    def layer_attention(self, layers: tuple[int, ...]) -> LayerRows | None:
        """The rows of single layers as policies read them."""
        if not self.layer_rows:
            return None
        return LayerRows(layers, np.concatenate(self.layer_rows), _offsets(self.layer_rows))

    def hidden(self, layers: tuple[int, ...]) -> HiddenRows:
        """The outputs of layers as policies read them."""
        flat = self.values("hidden")
        return HiddenRows(layers, flat.reshape(len(flat), len(layers), -1))

    def trace_columns(self, layers: int) -> dict[str, Any]:
        """The columns as `TraceWriter` takes them; `layers` have rows of their own."""
        columns: dict[str, Any] = {name: self.values(name) for name in self.columns}
        offsets = _offsets(self.rows)
        values = np.concatenate(self.rows) if self.rows else np.empty(0, _F16)
        if offsets[-1] > np.iinfo(np.int32).max:
            columns["attention"] = self.rows  # the writer says what to do
        elif self.index:
            columns["attention_index"] = lists(np.concatenate(self.index), offsets)
            columns["attention_value"] = lists(values, offsets)
            columns["attention_rest"] = np.asarray(self.rest, dtype=np.float32)
        elif self.rows:
            columns["attention"] = lists(values, offsets)
        if layers:
            columns["attention_layers"] = self._attention_layers(2 * layers)
        return columns

    def _attention_layers(self, per_token: int) -> pa.Array:
        total = sum(len(rows) for rows in self.layer_rows)
        if total > np.iinfo(np.int32).max:
            raise UsageError(
                f"--attention-layers: {total} values do not fit one episode: record fewer layers"
            )
        lengths = [len(rows) // per_token for rows in self.layer_rows]
        offsets = np.concatenate([[0], np.cumsum(np.repeat(lengths, per_token))])
        inner = lists(np.concatenate(self.layer_rows), offsets)
        return pa.ListArray.from_arrays(
            pa.array(np.arange(len(lengths) + 1) * per_token, pa.int32()), inner
        )


def _offsets(rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
