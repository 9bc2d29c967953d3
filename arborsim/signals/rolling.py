"""Rolling statistics over a trailing window, bit for bit the same in one call or many.

A cumulative sum is fast but its rounding depends on where it started, so a live run (one token at
a time) and a replay (a whole run at once) would disagree in the last bit and, at a tie, in the
decision.  Here every output is summed over its own window in a fixed order, newest first; the loop
runs over the window, the arithmetic over all outputs, and it works on NumPy and torch alike.
"""

from __future__ import annotations

import numpy as np


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
    padded = np.concatenate([np.zeros(window - 1 - len(history)), history, new])
    known = np.concatenate([np.zeros(window - 1 - len(history)), np.ones(len(history) + len(new))])
    n = len(new)

    def lagged(array: np.ndarray, lag: int) -> np.ndarray:
        start = window - 1 - lag
        return array[start : start + n]

    count = np.zeros(n)
    total = np.zeros(n)
    for lag in range(window):
        count += lagged(known, lag)
        total += lagged(padded, lag)
    mean = total / count
    squares = np.zeros(n)
    for lag in range(window):
        squares += lagged(known, lag) * (lagged(padded, lag) - mean) ** 2
    return mean, np.sqrt(squares / count), count


def rolling_z(history: np.ndarray, new: np.ndarray, window: int, epsilon: float) -> np.ndarray:
    """``(g - mean) / (std + epsilon)`` over the trailing window; 0 with fewer than two values."""
    mean, std, count = rolling_mean_std(history, new, window)
    return np.where(count < 2, 0.0, (new - mean) / (std + epsilon))
