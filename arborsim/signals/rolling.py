"""Rolling statistics over a trailing window, bit for bit the same in one call or many.

A running sum over the whole sequence is fast, but its rounding depends on where it started, so a
live run (one token at a time) and a replay (a whole run at once) would disagree in the last bit
and, at a tie, in the decision.  Here every output sums its own window, always newest first: a
cumulative sum along each window adds strictly in order, whatever the number of windows.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 1 << 14  # windows at a time, which bounds the memory


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
    history = history[max(0, len(history) - (window - 1)) :]
    missing = window - 1 - len(history)
    padded = np.concatenate([np.zeros(missing), history, new])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)[:, ::-1]
    count = np.minimum(len(history) + 1 + np.arange(len(new)), window).astype(np.float64)
    mean, std = np.empty(len(new)), np.empty(len(new))
    for start in range(0, len(new), _BLOCK):
        part = slice(start, start + _BLOCK)
        values, n = windows[part], count[part]
        mean[part] = _sum_in_order(values) / n
        # what is missing at the beginning of a sequence lies at the end of a window: zero it there
        known = np.arange(window) < n[:, None]
        squares = np.where(known, values - mean[part, None], 0.0) ** 2
        std[part] = np.sqrt(_sum_in_order(squares) / n)
    return mean, std, count


def _sum_in_order(rows: np.ndarray) -> np.ndarray:
    """Sum of each row, added strictly from left to right (`numpy.sum` adds in pairs)."""
    return np.asarray(np.cumsum(rows, axis=1)[:, -1])


def rolling_z(history: np.ndarray, new: np.ndarray, window: int, epsilon: float) -> np.ndarray:
    """``(g - mean) / (std + epsilon)`` over the trailing window; 0 with fewer than two values."""
    mean, std, count = rolling_mean_std(history, new, window)
    return np.where(count < 2, 0.0, (new - mean) / (std + epsilon))
