"""Signals that a capture has handed to the host: of consecutive tokens, in a trace's types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from arborsim.core.errors import UsageError
from arborsim.core.observations import (
    AttentionRows,
    DenseRows,
    HiddenRows,
    LayerRows,
    Signal,
    SparseRows,
)
from arborsim.core.row_uses import RowUse
from arborsim.trace.columns import lists
from arborsim.trace.schema import PER_LAYER


@dataclass
class Captured:
    """Signals of consecutive tokens, in the trace's types."""

    #: dict of str to list of float16 ``[tokens, n]``: by column of the trace
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    #: array ``[position + 1]``, or of the listed positions' values
    rows: list[np.ndarray] = field(default_factory=list)
    #: the listed positions, if rows are sparse
    index: list[np.ndarray] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)  #: what sparse rows leave out
    #: per token mean and variance of each captured layer, one after the other
    layer_rows: list[np.ndarray] = field(default_factory=list)
    #: rows of the run, reduced, ``[seqs, groups, positions]``; not part of a trace
    reduced: dict[RowUse, np.ndarray] = field(default_factory=dict)

    def add(self, column: str, values: np.ndarray) -> None:
        """Append values ``[tokens, n]``."""
        self.columns.setdefault(column, []).append(values)

    def extend(self, later: Captured) -> None:
        """Append what came later, as a trace holds it."""
        for name, parts in later.columns.items():
            self.columns.setdefault(name, []).extend(parts)
        self.rows += later.rows
        self.index += later.index
        self.rest += later.rest
        self.layer_rows += later.layer_rows

    def in_order(self, order: np.ndarray) -> Captured:
        """The same tokens in another order, which lists their numbers."""
        columns = {name: [self.values(name)[order]] for name in self.columns}
        found = Captured(columns)
        for name in ("rows", "index", "rest", "layer_rows"):
            own = getattr(self, name)
            setattr(found, name, [own[i] for i in order] if own else [])
        return found

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
        values = np.concatenate(self.rows) if self.rows else np.empty(0, np.float16)
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
