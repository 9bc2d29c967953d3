"""Intervals of proportions."""

from __future__ import annotations


def clopper_pearson(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Exact confidence interval of a proportion (Clopper and Pearson, 1934)."""
    from scipy.special import betaincinv  # slow to import

    tail = (1 - level) / 2
    low = betaincinv(successes, trials - successes + 1, tail) if successes else 0.0
    high = betaincinv(successes + 1, trials - successes, 1 - tail) if successes < trials else 1.0
    return float(low), float(high)
