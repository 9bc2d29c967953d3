"""Observations: what a forward pass reveals about the tokens it computes.

One class serves the replay of a trace and a live run: both hand the controller the same arrays,
rounded to the trace's float16, so that the same bits lead to the same decisions in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise

import numpy as np

from arborsim.core.head_rows import HeadRows, ShiftedRows
from arborsim.core.row_uses import ReducedRows, RowUse


class Signal(StrEnum):
    """An observation a policy can ask for.  The value is the trace column that holds it, if any."""

    ATTENTION = "attention"
    """One row per token: attention to each position of its path, mean over layers and heads."""
    HIDDEN_CHANGE = "hidden_change"
    """``||h_l(t) - h_l(t-1)||_2`` per layer (EpiKV, Eq. 1)."""
    KEY_VARIANCE = "key_variance"
    """Variance of the key over the head dimension, mean over heads, per layer."""
    VALUE_VARIANCE = "value_variance"
    """Variance of the value over the head dimension, mean over heads, per layer."""
    LAG_KEY = "lag_key"
    """Standard deviation of the lag-normalised key over channels, mean over heads, per layer."""
    LAG_VALUE = "lag_value"
    """The same for the value."""
    KEY_NORM = "key_norm"
    """L2 norm of the key, mean over heads, per layer."""
    VALUE_NORM = "value_norm"
    """L1 norm of the value, mean over heads, per layer."""
    KEY_SKETCH = "key_sketch"
    """Random projection of the keys of all layers and heads; cosines survive it, roughly."""
    LAYER_ATTENTION = "attention_layers"
    """Attention rows of single layers: mean and variance over their query heads."""
    HEAD_ATTENTION = "queries"
    """Attention rows of single query heads of the captured layers (from queries and keys)."""
    KEYS = "keys"
    """Post-RoPE keys of the captured layers."""
    VALUES = "values"
    """Values of the captured layers."""
    HIDDEN = "hidden"
    """Output of the chosen layers: the residual stream behind each of them."""
    ROPE = "rope"
    """How queries and keys were rotated by their positions; in a trace's metadata."""
    EVICTION_TIME = "eviction_time"
    """Iteration after which the offline optimum evicts the token; known to replays only."""
    READERS = "readers"
    """Step the reasoning is at after the token, then the steps that read it, as its task knows."""
    ENTROPY = "entropy"
    """Entropy of the next-token distribution, nats."""
    REWARD = "reward"
    """Search value of a node, given at its boundary, in [0, 1]."""


# Rows are widened from float16 in blocks: a block converts far faster than single rows, and it
# bounds the memory (32 MiB).  An episode of up to 64 MiB is widened once, for
# all policies and meters that read it.
_BLOCK_VALUES = 1 << 22
_WIDEN_VALUES = 1 << 23
_SUMMED_VALUES = 1 << 16  # values to add up at once
_LISTED_VALUES = 1 << 16  # listed positions of sparse rows: they stay in the processor's cache


def _blocks(offsets: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """First row and last + 1 of blocks of at most `most` values, or of one row."""
    first, rows = 0, len(offsets) - 1
    while first < rows:
        last = int(np.searchsorted(offsets, offsets[first] + most, side="right")) - 1
        last = min(max(last, first + 1), rows)
        yield first, last
        first = last


@cache
def _doubles() -> np.ndarray:
    """Every float16 in float64, by its bits."""
    with np.errstate(invalid="ignore"):  # NaN with a payload
        return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64)


def in_float64(values: np.ndarray) -> np.ndarray:
    """Float16 or float64 numbers in float64. By table, as NumPy takes five times as long."""
    if values.dtype != np.float16:
        return values.astype(np.float64, copy=False)
    return _doubles().take(values.view(np.uint16))


def _row_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Float64 ``[rows]``: the sum of each row's own `values`, 0 without any."""
    sums = np.zeros(len(offsets) - 1)
    for first, last in _blocks(offsets, _SUMMED_VALUES):
        own, start = offsets[first : last + 1], int(offsets[first])
        held = np.flatnonzero(own[1:] > own[:-1])  # `reduceat` has no sum of nothing
        if len(held):
            block = in_float64(values[start : int(own[-1])])
            sums[first + held] = np.add.reduceat(block, own[held] - start)
    return sums


@dataclass(frozen=True)
class DenseRows:
    """Rows stored whole."""

    values: np.ndarray  # float16 or float64 [sum of lengths]
    offsets: np.ndarray  # int64 [rows + 1]: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``
    sums: np.ndarray | None = None  # float64 [rows]; None before they are added up

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> np.ndarray:
        """Float64 row of token `i`. Its length is the token's position + 1."""
        return self.values[self.offsets[i] : self.offsets[i + 1]].astype(np.float64, copy=False)

    def widened(self) -> DenseRows:
        """The same rows in float64, if they are few enough to keep that way."""
        if len(self.values) > _WIDEN_VALUES:
            return self
        return DenseRows(in_float64(self.values), self.offsets, self.sums)

    def summed(self) -> DenseRows:
        """The same rows with their `sums`: about 1, as far as float16 can say it."""
        if self.sums is not None:
            return self
        return replace(self, sums=_row_sums(self.values, self.offsets))

    def __iter__(self) -> Iterator[np.ndarray]:
        for first, last in _blocks(self.offsets, _BLOCK_VALUES):
            start = self.offsets[first]
            block = in_float64(self.values[start : self.offsets[last]])
            for a, b in pairwise((self.offsets[first : last + 1] - start).tolist()):
                yield block[a:b]

    def __getitem__(self, tokens: slice) -> DenseRows:
        start, stop, _ = tokens.indices(len(self))
        sums = None if self.sums is None else self.sums[start:stop]
        return DenseRows(self.values, self.offsets[start : stop + 1], sums)


@dataclass(frozen=True)
class SparseRows:
    """Rows that keep their top positions. The rest of the mass is spread evenly over the others."""

    index: np.ndarray  # int32 [sum of kept]
    value: np.ndarray  # float16 [sum of kept]
    offsets: np.ndarray  # int64 [rows + 1]
    rest: np.ndarray  # float32 [rows]: mass on the positions that are not listed
    lengths: np.ndarray  # int64 [rows]: full length of each row
    sums: np.ndarray | None = None  # float64 [rows], rest included; None where not yet added up

    def __len__(self) -> int:
        return len(self.lengths)

    def summed(self) -> SparseRows:
        """The same rows with their `sums`: about 1, as far as float16 can say it."""
        if self.sums is not None:
            return self
        listed = _row_sums(self.value, self.offsets)
        # Where a row lists all of its positions, its rest is spread over none.
        rest = np.where(self.lengths > np.diff(self.offsets), self.rest, 0.0)
        return replace(self, sums=listed + rest)

    def row(self, i: int) -> np.ndarray:
        a, b, n = self.offsets[i], self.offsets[i + 1], int(self.lengths[i])
        others = n - int(b - a)
        dense = np.full(n, float(self.rest[i]) / others if others else 0.0)
        dense[self.index[a:b]] = self.value[a:b]
        return dense

    def __iter__(self) -> Iterator[np.ndarray]:
        for n, index, value, share in self.listed():
            dense = np.empty(n)
            dense.fill(share)
            dense[index] = value
            yield dense

    def listed(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, float]]:
        """Each row as it is stored, in types that NumPy computes with fast.

        Its length, its index int64 ``[listed]`` and value float64 ``[listed]``, and the weight of
        every position that is not listed.
        """
        listed = np.diff(self.offsets)
        others = np.maximum(self.lengths - listed, 1)
        shares = np.where(self.lengths > listed, self.rest / others, 0.0).tolist()
        lengths = self.lengths.tolist()
        for first, last in _blocks(self.offsets, _LISTED_VALUES):
            start = self.offsets[first]
            index = self.index[start : self.offsets[last]].astype(np.int64)
            value = in_float64(self.value[start : self.offsets[last]])
            bounds = (self.offsets[first : last + 1] - start).tolist()
            for i, (a, b) in enumerate(pairwise(bounds), first):
                yield lengths[i], index[a:b], value[a:b], shares[i]

    def __getitem__(self, tokens: slice) -> SparseRows:
        start, stop, _ = tokens.indices(len(self))
        return SparseRows(
            self.index,
            self.value,
            self.offsets[start : stop + 1],
            self.rest[start:stop],
            self.lengths[start:stop],
            None if self.sums is None else self.sums[start:stop],
        )


#: Attention rows of consecutive tokens: iterated, sliced, and by `row`, float64 of position + 1.
AttentionRows = DenseRows | SparseRows


@dataclass(frozen=True)
class LayerRows:
    """Attention of some layers, each on its own. One entry per token.

    Notes
    -----
    float16 has no steps below 6e-8: where the heads' standard deviation is less than 1.7e-4 (in a
    row of a thousand positions most are), the variance is stored as 0.  Rows are NaN where the
    layer's softmax was.  The mean over layers in `Observations.attention` leaves such layers out.
    """

    layers: tuple[int, ...]  # the captured layers, as in `TraceInfo.attention_layer_ids`
    values: np.ndarray  # float16 [sum over tokens of layers x 2 x (position + 1)]
    offsets: np.ndarray  # int64 [tokens + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, tokens: slice) -> LayerRows:
        start, stop, _ = tokens.indices(len(self))
        return LayerRows(self.layers, self.values, self.offsets[start : stop + 1])

    def of(self, token: int) -> np.ndarray:
        """One token's rows, float16 ``[layers, 2, position + 1]``: a view.

        The second axis is the mean over the query heads, then their population variance.
        """
        own = self.values[self.offsets[token] : self.offsets[token + 1]]
        return own.reshape(len(self.layers), 2, -1)


@dataclass(frozen=True)
class HiddenRows:
    """Hidden vectors of some layers, one entry per token."""

    layers: tuple[int, ...]  # as in `TraceInfo.hidden_layers`
    values: np.ndarray  # float16 [tokens, layers, size]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, tokens: slice | np.ndarray) -> HiddenRows:
        return HiddenRows(self.layers, self.values[tokens])

    def nearest(self, layer: int) -> np.ndarray:
        """Float16 ``[tokens, size]`` of the layer nearest to `layer`. Of two, the shallower."""
        return self.values[:, int(np.argmin(np.abs(np.asarray(self.layers) - layer)))]


@dataclass(frozen=True)
class Observations:
    """Observations of a run of consecutive tokens. Row ``i`` is the run's token ``i``."""

    num_tokens: int
    attention: AttentionRows | None = None
    #: mapping of Signal to float16 [num_tokens, layers]: the signals that have one value per token
    #: and layer; the key sketch ``[num_tokens, sketch size]``, eviction times, float64
    #: ``[num_tokens, groups]``, and readers, int32 ``[num_tokens, 1 + most readers]`` filled up
    #: with -1, are here too
    per_layer: Mapping[Signal, np.ndarray] = field(default_factory=dict)
    layer_attention: LayerRows | None = None
    head_attention: HeadRows | None = None
    #: float16 [num_tokens, captured layers, KV heads, head_dim]
    keys: np.ndarray | None = None
    values: np.ndarray | None = None
    hidden: HiddenRows | None = None
    reduced: Mapping[RowUse, ReducedRows] = field(default_factory=dict)  # in place of rows
    #: L1 norms in place of keys or values, float64 [num_tokens, captured layers, KV heads]
    sizes: Mapping[Signal, np.ndarray] = field(default_factory=dict)

    def slice(self, start: int, stop: int) -> Observations:
        """The same observations for the run's tokens ``start`` to ``stop``."""
        if self.reduced and (start, stop) != (0, self.num_tokens):
            raise ValueError("rows were reduced over the whole run: it cannot be cut")
        span = slice(start, stop)
        return Observations(
            stop - start,
            None if self.attention is None else self.attention[span],
            {signal: values[span] for signal, values in self.per_layer.items()},
            None if self.layer_attention is None else self.layer_attention[span],
            None if self.head_attention is None else ShiftedRows(self.head_attention, start),
            None if self.keys is None else self.keys[span],
            None if self.values is None else self.values[span],
            None if self.hidden is None else self.hidden[span],
            self.reduced,
            {signal: values[span] for signal, values in self.sizes.items()},
        )
