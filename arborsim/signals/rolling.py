"""Rolling statistics over a trailing window, bit for bit the same in one call or many.

A running sum over the whole sequence is fast, but its rounding depends on where it started, so a
live run (one token at a time) and a replay (a whole run at once) would disagree in the last bit
and, at a tie, in the decision.  Here every output sums its own window, always newest first,
whatever the number of windows.
"""

from __future__ import annotations

import numpy as np

_SHORT = 4  # runs of fewer windows than this are computed in whole tables


def rolling_mean_std(
    history: np.ndarray, new: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and population standard deviation over the trailing `window` values.

    Parameters
    ----------
    history : float64 ``[h]``
        Values before the first new one, oldest first; fewer than `window` - 1 means that the
        window is not yet full.
    new : float64 ``[n]``
    window : int
        Number of values in a full window, the current one included.

    Returns
    -------
    mean, std, count : float64 ``[n]``
        For each new value; `count` is the number of values in its window.
    """
    by_lag, count, known = _windows(history, new, window)
    mean = _mean(by_lag, count)
    if _is_short(by_lag):
        full = np.arange(window)[:, None] < count  # else the window reaches back too far
        squares = np.where(full, by_lag - mean, 0.0) ** 2
        return mean, np.sqrt(_sum_in_order(squares) / count), count
    total = np.zeros(len(new))
    for lag, values in enumerate(by_lag):
        square = (values - mean) ** 2
        square[: max(0, lag - known)] = 0.0  # the window reaches back too far here
        total += square
    return mean, np.sqrt(total / count), count


def rolling_mean(history: np.ndarray, new: np.ndarray, window: int) -> np.ndarray:
    """The mean alone, float64 ``[n]``; parameters as in `rolling_mean_std`."""
    by_lag, count, _ = _windows(history, new, window)
    return _mean(by_lag, count)


def _windows(
    history: np.ndarray, new: np.ndarray, window: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """The values of every window, how many are known, and how many came before the new ones.

    Row ``lag`` of the table ``[window, n]`` holds, for every output, the value that many tokens
    back; 0 where there is none.
    """
    history = history[max(0, len(history) - (window - 1)) :]
    padded = np.concatenate([np.zeros(window - 1 - len(history)), history, new])
    count = np.minimum(len(history) + 1 + np.arange(len(new)), window).astype(np.float64)
    size = padded.itemsize  # a view, as `sliding_window_view` makes at many times the cost
    by_lag: np.ndarray = np.ndarray(
        (window, len(new)), padded.dtype, padded, (window - 1) * size, (-size, size)
    )
    return by_lag, count, len(history)


def _is_short(by_lag: np.ndarray) -> bool:
    """Whether few calls matter more than memory."""
    return bool(by_lag.shape[1] < _SHORT * len(by_lag))


def _mean(by_lag: np.ndarray, count: np.ndarray) -> np.ndarray:
    if _is_short(by_lag):
        return np.asarray(_sum_in_order(by_lag) / count)
    mean = np.zeros(by_lag.shape[1])
    for values in by_lag:
        mean += values
    mean /= count
    return mean


def _sum_in_order(by_lag: np.ndarray) -> np.ndarray:
    """Sum over the first axis, added strictly in order (`numpy.sum` may add in pairs)."""
    return np.asarray(np.add.accumulate(by_lag, axis=0)[-1])


def rolling_z(history: np.ndarray, new: np.ndarray, window: int, epsilon: float) -> np.ndarray:
    """``(g - mean) / (std + epsilon)`` over the trailing window; 0 with fewer than two values."""
    mean, std, count = rolling_mean_std(history, new, window)
    return np.where(count < 2, 0.0, (new - mean) / (std + epsilon))
