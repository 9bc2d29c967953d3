"""Attention rows of single layers: mean and variance over query heads, as the trace holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from arborsim.trace.columns import lists_of
from arborsim.trace.where import Where

_HIGH = np.float16(1.1)
_SUM_LOW, _SUM_HIGH = 0.9, 1.1  # float16 rounds each weight by up to 0.05 %


@dataclass(frozen=True)
class LayerRows:
    """Attention of some layers, each on its own; one entry per token.

    Parameters
    ----------
    layers : tuple of int
        The captured layers, as in `TraceInfo.attention_layer_ids`.
    values : float16 ``[sum over tokens of layers x 2 x (position + 1)]``
    offsets : int64 ``[tokens + 1]``

    Notes
    -----
    float16 has no steps below 6e-8: where the heads' standard deviation is less than 1.7e-4 (in a
    row of a thousand positions most are), the variance is stored as 0.  Rows are NaN where the
    layer's softmax was; the mean over layers in `Episode.attention` leaves such layers out.
    """

    layers: tuple[int, ...]
    values: np.ndarray
    offsets: np.ndarray

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


def layer_rows_of(
    column: pa.ChunkedArray,
    layers: tuple[int, ...],
    token_rows: np.ndarray,
    position: np.ndarray,
    where: Where,
) -> LayerRows:
    """Decode and check the column ``attention_layers`` of one episode.

    Parameters
    ----------
    column : pyarrow.ChunkedArray
        Lists of lists, one per row of the episode.
    layers : tuple of int
    token_rows, position : int ``[tokens]``
    where : Where

    Raises
    ------
    TraceError
        A row's lists have the wrong number or lengths, or hold what is no probability.
    """
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
    wrong = (values < 0) | (values > _HIGH)  # false for NaN
    if wrong.any():
        first = int(np.argmax(wrong))
        row = rows[np.searchsorted(bounds, first, side="right") - 1]
        raise where.error(f"attention_layers holds {values[first]}, not a probability", int(row))
    sums = np.add.reduceat(values, bounds[:-1], dtype=np.float32)[::2]
    where.check(
        (sums < _SUM_LOW) | (sums > _SUM_HIGH),
        lambda i: f"a mean row of attention_layers sums to {sums[i]:.4g} instead of 1",
        rows[::2],
    )
    return LayerRows(layers, values, bounds[::per_token])
