"""Turn the forward passes of a search into the columns of a trace, and what policies read.

Nothing is computed twice: attention rows come out of the attention function, hidden states from
hooks, keys and values from the cache.  What a pass leaves behind is brought to its final form on
the device at once, or, where many tokens can be computed together, when the batch is about to
change (`drain`); nothing of the pass itself is kept.  All of it crosses to the host in one copy,
when it is asked for (`take`).

Tokens come out in the order in which they entered the cache: by iteration, then by sequence.

Device memory: what waits for `take`, at most `MAX_PENDING_BYTES` and a block of the prompt (2
bytes for each value of a signal, 2 n for a row that is wanted whole), and what
`arborsim_torch.row_reducer` needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.observations import Signal
from arborsim.core.row_uses import ALL_QUERIES, RowUse
from arborsim.trace.schema import VECTORS
from arborsim_torch.cache.forward import AttentionMetadata, Span
from arborsim_torch.captured import Captured
from arborsim_torch.context import PassContext
from arborsim_torch.decoder import Observed, ObservedCache
from arborsim_torch.hidden_states import HiddenStates
from arborsim_torch.row_reducer import RowReducer, RowSpan
from arborsim_torch.token_signals import (
    ChunkExtremes,
    TokenBuffer,
    float16,
    head_sizes,
    head_variance,
    key_norm,
    sketch_matrix,
    to_host,
    top_entries,
    value_norm,
)
from arborsim_torch.window_rows import WindowRows

MAX_PENDING_BYTES = 1 << 26  # on the device, before they are taken to the host unasked


def middle_layers(layers: int) -> tuple[int, ...]:
    """The two layers in the middle, whose vectors are recorded by default."""
    return tuple(sorted({max(0, layers // 2 - 1), layers // 2} & set(range(layers))))


#: Signals of tokens that a capture can take, by what they are made of.
_LAGS = frozenset({Signal.LAG_KEY, Signal.LAG_VALUE})
_VARIANCES = (Signal.KEY_VARIANCE, Signal.VALUE_VARIANCE)
_OF_KEYS = _LAGS | {*_VARIANCES, Signal.KEY_NORM, Signal.VALUE_NORM, Signal.KEY_SKETCH}
ALL_SIGNALS = _OF_KEYS | {Signal.ATTENTION, Signal.HIDDEN_CHANGE}


class Capture:
    """Records the signals of one episode.

    Of each attention row `top` positions are kept, or with 0 all.  `vector_layers` have their
    queries, keys and values kept (`qkv` level, all layers where `uses` name rows of single query
    heads), `row_layers` their own attention rows, whole: mean and variance over query heads,
    `hidden_layers` their outputs, in order.  `signals` says what else to take, `vectors` which of
    queries, keys and values, `sizes` of which of the latter two to take L1 norms alone,
    `embeddings` whether complete nodes get one.  `keep` keeps what `take` hands out, for `columns`.
    `uses` says what policies need of attention: rows are reduced on the device where that is
    enough, and rows and queries are taken where they count.  Without any, all of them are taken.
    """

    def __init__(
        self,
        top: int = 0,
        vector_layers: Sequence[int] = (),
        row_layers: Sequence[int] = (),
        hidden_layers: Sequence[int] = (),
        *,
        signals: frozenset[Signal] = ALL_SIGNALS,
        vectors: frozenset[Signal] = frozenset(VECTORS),
        sizes: frozenset[Signal] = frozenset(),
        embeddings: bool = True,
        keep: bool = True,
        uses: frozenset[RowUse] = frozenset(),
    ) -> None:
        wants_rows = Signal.ATTENTION in signals or bool(row_layers)
        self._rows_of = RowSpan.of(uses, "shared") if wants_rows else RowSpan(0, False)
        wants_queries = bool(vector_layers) and Signal.HEAD_ATTENTION in vectors
        self._queries_of = RowSpan.of(uses, "head") if wants_queries else RowSpan(0, False)
        self.reduces = tuple(use for use in uses if use.reduced)
        self._reducer = RowReducer(use for use in self.reduces if not use.of_heads)
        self._window = WindowRows(use for use in self.reduces if use.of_heads)
        self._of_window: dict[RowUse, Tensor] = {}
        # Queries of a run's last iterations, float16 [seqs, n] each, if others do not count.
        newest = self._queries_of.newest
        self._newest = None if newest == ALL_QUERIES else deque[Tensor](maxlen=newest)
        self.wants_attention = wants_rows or wants_queries or bool(self.reduces)
        changes = Signal.HIDDEN_CHANGE in signals
        self._hidden = HiddenStates(tuple(hidden_layers), changes, self._add)
        self.hidden_layers, self.wants_hidden = self._hidden.layers, self._hidden.wanted
        self._signals, self._vectors, self._sizes = signals, vectors, sizes
        self.embeddings = embeddings
        self._vector_layers = tuple(vector_layers)
        self._row_layers = tuple(row_layers)
        self._top = top
        self._prompt = 0
        self._fresh = Captured()
        self.keeps = keep
        self.keeps_signals = keep and bool(signals)
        self._kept = Captured()
        self._sums: dict[int, tuple[Tensor, int]] = {}
        self._extremes: dict[int, ChunkExtremes] = {}
        self._sketch: Tensor | None = None
        # What waits for `take`: columns of the trace, rows and rows of layers by pass.
        self._columns: dict[str, TokenBuffer] = {}
        self._rows: list[tuple[list[Sequence[int]], Tensor]] = []
        self._rows_apart: list[tuple[list[Sequence[int]], Tensor]] = []
        # What waits for `drain`:
        self._last: list[Tensor] = []
        self._tokens = 0
        self._spans: Sequence[Span] = ()  # of a block

    def expect(self, prompt_tokens: int) -> None:
        """The prompt that comes next has `prompt_tokens` tokens."""
        self._prompt = prompt_tokens

    def context(self, metadata: AttentionMetadata) -> PassContext:
        """The `PassContext` that a pass is to fill (`arborsim_torch.decoder.Observer`)."""
        queries, prompt = metadata.queries, self._prompt
        first_row = self._reducer.first("rows", metadata, prompt)
        if self._rows_of.first(metadata, prompt) < queries:
            first_row = 0
        first_of_groups = self._reducer.first("groups", metadata, prompt)
        first_counted = self._reducer.first("counts", metadata, prompt)
        takers = (self._queries_of, self._window)
        vectors = any(taker.first(metadata, prompt) < queries for taker in takers)
        if self.wants_hidden and queries > 1:
            self._hidden.begin_block(metadata)
        return PassContext(
            metadata,
            first_row if first_row < queries else None,
            self._reducer.groups if first_of_groups < queries else None,
            first_of_groups,
            self._reducer.recent(prompt),
            self._reducer.part if first_counted < queries else None,
            first_counted,
            frozenset(self._vector_layers if vectors else ()),
            frozenset(self._row_layers),
            self._hidden.take_output if self.wants_hidden and queries > 1 else None,
        )

    @torch.inference_mode()
    def take(self) -> Captured:
        """All that has been finished since the last call, in one copy to the host."""
        reduced, self._of_window = self._of_window, {}
        if self._newest:
            self._add("queries", torch.stack(tuple(self._newest)))
            self._newest.clear()
        self._cross({**self._reducer.finish(), **reduced})
        fresh, self._fresh = self._fresh, Captured()
        if self.keeps:
            self._kept.extend(fresh)
        return fresh

    def forward(
        self, decoder: Observed, state: PassContext, hidden: list[Tensor], last: Tensor
    ) -> None:
        """Take one forward pass (`arborsim_torch.decoder.Observer`)."""
        self._tokens += state.queries
        self._spans = state.metadata.spans
        lengths = state.metadata.lengths
        rows = None
        if state.first_row is not None:
            whole = state.attention()
            rows = whole.half()
            if self._rows_of.first(state.metadata, self._prompt) < state.queries:
                self._rows.append((lengths, whole if self._top else rows))
        cache, readable = decoder.cache, list[np.ndarray | None]()
        if state.queries == 1 and self._reducer.wants_readable:
            readable = [cache.readable(seq) for seq in range(len(cache.leaves))]
        self._reducer.take(state, rows, self._prompt, readable)
        if self._row_layers:
            apart = torch.stack([state.layer_rows[layer] for layer in self._row_layers])
            self._rows_apart.append((lengths, float16(apart)))
        if state.take_output is not None:
            self._hidden.end_block(cache)
        elif self.wants_hidden:
            self._hidden.take(cache, hidden)
        if self.embeddings:
            self._last.append(last.clone())
        if state.query_layers:
            self._take_queries(state)
        if state.queries > 1 or self._pending_bytes > MAX_PENDING_BYTES:
            self.drain(decoder)

    def _take_queries(self, state: PassContext) -> None:
        vectors = [state.query_vectors[layer] for layer in self._vector_layers]
        first = self._window.first(state.metadata, self._prompt)
        if first < state.queries:
            self._window.add(vectors, first)
        first = self._queries_of.first(state.metadata, self._prompt)
        if first < state.queries:
            queries = torch.stack([each[:, :, first:] for each in vectors])
            by_token = queries.permute(3, 1, 0, 2, 4).flatten(2)
            if self._newest is None:
                self._add("queries", by_token)
            else:
                self._newest.extend(float16(by_token))

    @torch.inference_mode()
    def drain(self, decoder: Observed) -> None:
        """Finish the pending tokens; needed before the decoder turns to other leaves."""
        tokens, self._tokens = self._tokens, 0  # of every sequence
        if not tokens:
            return
        cache, leaves = decoder.cache, decoder.cache.leaves
        spans = (
            [self._spans]
            if self._spans
            else [
                [Span(leaf, 0, tokens, cache.length(seq) - tokens)]
                for seq, leaf in enumerate(leaves)
            ]
        )
        self._hidden.settle(leaves)
        if self.embeddings:
            last = torch.cat(self._last, dim=1).float()
            self._last.clear()
            for own, parts in zip(last, spans, strict=True):
                for span in parts:
                    before, count = self._sums.get(span.node, (0.0, 0))
                    total = own[span.first : span.stop].sum(0)
                    self._sums[span.node] = (total + before, count + span.stop - span.first)
        kept = (self._vectors | self._sizes) & {Signal.KEYS, Signal.VALUES}
        if self._signals & _OF_KEYS or (self._vector_layers and kept):
            self._take_vectors(decoder, spans, tokens)
        if self._window.waits and cache.length(0) == self._prompt:
            self._of_window = self._window.finish(cache.kv_heads, cache.keys)
        if self.keeps or self._pending_bytes > MAX_PENDING_BYTES:
            self._cross({})

    @property
    def _pending_bytes(self) -> int:
        rows = (*self._rows, *self._rows_apart)
        held = sum(values.numel() * values.element_size() for _, values in rows)
        return held + sum(column.nbytes for column in self._columns.values())

    def _cross(self, reduced: dict[RowUse, Tensor]) -> None:
        """Take everything that is finished to the host, in one copy."""
        columns = [(name, part) for name, own in self._columns.items() for part in own.take()]
        rows, self._rows = self._rows, []
        apart, self._rows_apart = self._rows_apart, []
        waiting = [values for _, values in (*columns, *rows, *apart)]
        arrived = iter(to_host([*waiting, *reduced.values()]))
        for name, _ in columns:
            self._fresh.add(name, next(arrived))
        for lengths, _ in rows:
            self._add_rows(lengths, next(arrived))
        for lengths, _ in apart:
            self._add_rows_apart(lengths, next(arrived))
        for use in reduced:
            self._fresh.reduced[use] = next(arrived)

    def _add(self, column: str, values: Tensor) -> None:
        """Append values ``[tokens, seqs, n]`` in the order of the trace."""
        own = self._columns.setdefault(column, TokenBuffer())
        own.append(float16(values.reshape(-1, values.shape[-1])))

    def _add_rows(self, lengths: list[Sequence[int]], rows: np.ndarray) -> None:
        for q in range(rows.shape[1]):
            for seq, own in enumerate(lengths):
                row = rows[seq, q, : own[q]]
                if not self._top:
                    self._fresh.rows.append(row)
                    continue
                index, value, rest = top_entries(row, self._top)
                self._fresh.index.append(index)
                self._fresh.rows.append(value)
                self._fresh.rest.append(rest)

    def _add_rows_apart(self, lengths: list[Sequence[int]], rows: np.ndarray) -> None:
        for q in range(rows.shape[3]):
            for seq, own in enumerate(lengths):
                of_token = rows[:, :, seq, q, : own[q]]
                self._fresh.layer_rows.append(of_token.reshape(-1))  # by layer: mean, variance

    def _take_vectors(
        self, decoder: Observed, spans: Sequence[Sequence[Span]], tokens: int
    ) -> None:
        cache = decoder.cache
        kv = cache.newest(tokens)  # [layers, 2, seqs, kv_heads, tokens, head_dim]
        wanted = self._signals
        for part, signal in enumerate(_VARIANCES):
            if signal in wanted:
                variance = head_variance(kv[:, part : part + 1])[:, 0]  # [layers, seqs, tokens]
                self._add(signal.value, variance.permute(2, 1, 0))
        if Signal.KEY_NORM in wanted:
            self._add("key_norm", key_norm(kv).permute(2, 1, 0))
        if Signal.VALUE_NORM in wanted:
            self._add("value_norm", value_norm(kv).permute(2, 1, 0))
        if wanted & _LAGS:
            self._take_lag(decoder.cache, kv, spans)
        if Signal.KEY_SKETCH in wanted:
            keys = kv[:, 0].float().permute(3, 1, 0, 2, 4).flatten(2)  # [tokens, seqs, features]
            if self._sketch is None:
                self._sketch = sketch_matrix(keys.shape[-1], keys.device)
            self._add("key_sketch", keys @ self._sketch)
        if self._vector_layers:
            for part, signal in enumerate((Signal.KEYS, Signal.VALUES)):
                if not {signal} & (self._vectors | self._sizes):
                    continue
                chosen = torch.stack([kv[layer, part] for layer in self._vector_layers])
                by_token = chosen.permute(3, 1, 0, 2, 4)  # [tokens, seqs, layers, heads, head_dim]
                if signal in self._vectors:
                    self._add(signal.value, by_token.flatten(2))
                else:
                    found = head_sizes(by_token).flatten(0, 1).flatten(1)
                    self._columns.setdefault(f"{signal.value} sizes", TokenBuffer()).append(found)

    def _take_lag(self, cache: ObservedCache, kv: Tensor, spans: Sequence[Sequence[Span]]) -> None:
        lag = []
        for seq, parts in enumerate(spans):
            found = []
            for span in parts:
                extremes = self._extremes.get(span.node)
                if extremes is None:
                    above = self._extremes.get(cache.parent(span.node), ChunkExtremes())
                    extremes = self._extremes[span.node] = above.copy()
                own = kv[:, :, seq, :, span.first : span.stop]
                found.append(extremes.deviations(own, span.position))
            lag.append(found[0] if len(found) == 1 else torch.cat(found, dim=-1))
        by_token = torch.stack(lag, dim=2).permute(1, 3, 2, 0)  # [2, tokens, seqs, layers]
        self._add("lag_key", by_token[0])
        self._add("lag_value", by_token[1])

    def embedding(self, node: int) -> np.ndarray:
        """Mean normalised last hidden state of a complete node, float16 ``[size]``."""
        total, count = self._sums.pop(node)
        return to_host([float16(total / count)])[0]

    def forget(self, node: int) -> None:
        """Free what was kept for the children of a node that will have none."""
        self._hidden.forget(node)
        self._extremes.pop(node, None)

    def columns(self, order: np.ndarray | None = None) -> dict[str, Any]:
        """The signal columns, one entry per token in the order of entry, or in another `order`."""
        assert self.keeps, "a capture that keeps nothing has no columns"
        self.take()
        if order is not None:
            self._kept = self._kept.in_order(order)
        return self._kept.trace_columns(len(self._row_layers))
