"""Intervals of repeats, without SciPy, which bundles for GPU machines leave out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from arborsim.core.statistics import LEVEL


def mean_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """Mean of repeats and both ends of its interval (Student's t), which are NaN for one repeat."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, float("nan"), float("nan")
    reach = student_reach(len(x) - 1, level) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return mean, mean - reach, mean + reach


def student_reach(degrees: int, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t with whole `degrees` of freedom.

    By bisection on its distribution (Abramowitz and Stegun 26.7.3 and 26.7.4): machines with a GPU
    need not have SciPy.
    """
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        angle = (low + high) / 2
        square, odd = math.cos(angle) ** 2, degrees % 2
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for k in range(odd, degrees - 1, 2):
            total += term
            term *= square * (k + 1) / (k + 2)
        within = math.sin(angle) * total
        if odd:
            within = (angle + within) * 2 / math.pi
        low, high = (angle, high) if within < level else (low, angle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)
