"""Are these attention rows?  Lengths, finite weights and sums, at the speed of memory."""

from __future__ import annotations

import numpy as np

from arborsim.core.observations import AttentionRows, DenseRows, SparseRows
from arborsim.trace.where import Where

# float16 rounds each weight by up to 0.05 %, and flushes the smallest to zero.
_SUM_LOW, _SUM_HIGH = 0.9, 1.1
_HIGH_F16 = int(np.float16(_SUM_HIGH).view(np.uint16))

#: Row sums are checked on all rows up to this many values, beyond that on evenly spaced rows.
SUM_CHECK_VALUES = 1 << 17


def check_attention(
    attention: AttentionRows,
    position: np.ndarray,
    token_rows: np.ndarray,
    where: Where,
    all_sums: bool = False,
) -> None:
    """Rows have the right lengths, hold finite weights, and sum to about 1.

    Parameters
    ----------
    attention : DenseRows or SparseRows
        One row per token.
    position, token_rows : int ``[tokens]``
    where : Where
    all_sums : bool
        Check every row's sum, however many values there are.
    """
    if isinstance(attention, SparseRows):
        _check_sparse(attention, token_rows, where)
        values, offsets, rest = attention.value, attention.offsets, attention.rest
    else:
        assert isinstance(attention, DenseRows)
        values, offsets, rest = attention.values, attention.offsets, None
        lengths = np.diff(offsets)
        where.check(
            lengths != position + 1,
            lambda t: (
                f"attention has {lengths[t]} values, expected {position[t] + 1} "
                "(one per position on the path)"
            ),
            token_rows,
        )
    _check_weights(values, offsets, token_rows, where)
    _check_sums(values, offsets, rest, token_rows, where, all_sums)


def _check_sparse(attention: SparseRows, token_rows: np.ndarray, where: Where) -> None:
    index, offsets, lengths = attention.index, attention.offsets, attention.lengths
    falls = np.empty(len(index), dtype=bool)
    falls[:1] = False
    np.less_equal(index[1:], index[:-1], out=falls[1:])
    held = np.flatnonzero(np.diff(offsets))
    falls[offsets[held]] = False  # the first of a row may be below the last of the row before
    first, last = index[offsets[held]], index[offsets[held + 1] - 1]
    if falls.any() or (first < 0).any() or (last >= lengths[held]).any():
        row = np.repeat(np.arange(len(lengths)), np.diff(offsets))
        beyond = (index < 0) | (index >= lengths[row])
        where.check(
            beyond,
            lambda i: f"attention_index {index[i]} lies beyond the token's own position",
            token_rows[row],
        )
        where.check(
            falls,
            lambda i: f"attention_index {index[i]} is not above the one before it",
            token_rows[row],
        )
    rest = attention.rest
    where.check(
        ~((rest >= 0) & (rest <= _SUM_HIGH)),
        lambda t: f"attention_rest is {rest[t]:.6g}, not a probability",
        token_rows,
    )


def _check_weights(
    values: np.ndarray, offsets: np.ndarray, token_rows: np.ndarray, where: Where
) -> None:
    # As an unsigned integer, a float16 above this one is greater, infinite, NaN or negative: one
    # integer maximum over the array, at the speed of memory, sees all of it.
    if len(values) == 0 or values.view(np.uint16).max() <= _HIGH_F16:
        return
    wrong = ~((values >= 0) & (values <= np.float16(_SUM_HIGH)))
    if wrong.any():
        first = int(np.argmax(wrong))
        token = int(np.searchsorted(offsets, first, side="right")) - 1
        raise where.error(
            f"attention is {values[first]} at entry {first - int(offsets[token])}, "
            "not a probability",
            int(token_rows[token]),
        )


def _check_sums(
    values: np.ndarray,
    offsets: np.ndarray,
    rest: np.ndarray | None,
    token_rows: np.ndarray,
    where: Where,
    all_sums: bool,
) -> None:
    rows = len(offsets) - 1
    step = 1 if all_sums else max(1, -(-len(values) // SUM_CHECK_VALUES))
    sums = np.zeros(rows)
    tested = range(0, rows, step)
    if step == 1 and len(values) <= SUM_CHECK_VALUES:
        running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        sums = running[offsets[1:]] - running[offsets[:-1]]
    else:
        for t in tested:
            sums[t] = values[offsets[t] : offsets[t + 1]].sum(dtype=np.float32)
    if rest is not None:
        sums = sums + rest
    wrong = np.zeros(rows, dtype=bool)
    wrong[tested.start : tested.stop : step] = True
    wrong &= ~((sums >= _SUM_LOW) & (sums <= _SUM_HIGH))
    where.check(wrong, lambda t: f"attention sums to {sums[t]:.4g} instead of 1", token_rows)
