"""What `needed` and needed steps add to the quality tables: the bound, and partial credit.

`needed` keeps what the task says later tokens read (`arborsim.policies.methods.baselines.Needed`).
How far an arm is from it, on the same problems and with as much memory, is what better eviction
could still gain; full retention alone cannot tell that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from arborsim.core.statistics import bootstrap

Row = dict[str, Any]
_SEED = 0
ALONE = "needed, nothing else"


def signed(points: float) -> str:
    """A difference in whole points; 0 has no sign."""
    return f"{round(points):+d}" if round(points) else "0"


def steps_right(rows: Iterable[Row]) -> tuple[float, float, float] | None:
    """Mean share of needed steps that are right, and its 95% interval; None if not counted.

    The interval is a bootstrap over problems.
    """
    counted = [row for row in rows if row.get("steps")]
    if not counted:
        return None
    shares = np.array([row["steps_right"] / row["steps"] for row in counted])
    low, high = bootstrap(lambda chosen: float(shares[chosen].mean()), len(shares), _SEED)
    return float(shares.mean()), float(low), float(high)


def steps_text(rows: Iterable[Row]) -> str:
    """``72% (65 to 79)``, with their number if only some are counted; empty if none is."""
    rows = list(rows)
    found = steps_right(rows)
    if found is None:
        return ""
    mean, low, high = (f"{100 * value:.0f}" for value in found)
    counted = sum(bool(row.get("steps")) for row in rows)
    return f"{mean}% ({low} to {high})" + (f", n = {counted}" if counted < len(rows) else "")


class Bound:
    """The `needed` arms of a search.

    Parameters
    ----------
    arms, rows
        Of all experiments that search the same: each row has its arm's number in ``arm``.
    """

    def __init__(self, arms: list[dict[str, Any]], rows: Iterable[Row]) -> None:
        self._by_budget: dict[float, dict[int, Row]] = {}
        self.alone: dict[int, Row] = {}
        for row in rows:
            arm = arms[row["arm"]]
            if arm["policy"] != "needed" or row["infeasible"]:
                continue
            own = self.alone
            if arm["label"] != ALONE:
                own = self._by_budget.setdefault(float(arm["budget"]), {})
            own[row["episode"]] = row

    def __bool__(self) -> bool:
        return bool(self._by_budget or self.alone)

    def at(self, budget: str) -> tuple[str, dict[int, Row]]:
        """Of arms at this share: the budget that stands for it, and its rows by problem.

        The same budget; else the largest below, which `needed` can only improve on; else the
        smallest at which it was run; else needed tokens alone.
        """
        share = float(budget)
        below = [each for each in self._by_budget if each <= share]
        chosen = max(below) if below else min(self._by_budget, default=None)
        if chosen is None or (chosen != share and self.alone):
            return "alone", self.alone
        return f"{chosen:g}", self._by_budget[chosen]

    def distance(self, budget: str, rows: Iterable[Row]) -> str:
        """Points of right answers that `needed` has more, on the same problems; "" if unknown.

        In brackets the budget of `needed`, where that is another one.
        """
        used, theirs = self.at(budget)
        both = [(row, theirs[row["episode"]]) for row in rows if row["episode"] in theirs]
        if not both:
            return ""
        points = 100 * np.mean([bool(t["correct"]) - bool(row["correct"]) for row, t in both])
        other = "" if used == f"{float(budget):g}" else f" ({used})"
        return f"{signed(points)}{other}"

    @property
    def peak(self) -> str:
        """What needed tokens alone take at their peak, as a share of a whole search."""
        shares = [row["peak_tokens"] / row["full_tokens"] for row in self.alone.values()]
        return f"{np.mean(shares):.2f}" if shares else ""


Find = Callable[[str, str], list[Row]]
"""The rows of an arm that could be searched, by label and budget."""


def differences(pairs: Iterable[tuple[str, str]], budgets: Iterable[str], find: Find) -> list[str]:
    """What one arm has more than another, of right answers and needed steps, budget by budget.

    Only on problems that both could search; nothing where either was not run.
    """
    found = []
    for budget in budgets:
        for one, other in pairs:
            theirs = {row["episode"]: row for row in find(other, budget)}
            both = [(r, theirs[r["episode"]]) for r in find(one, budget) if r["episode"] in theirs]
            if not both:
                continue
            right = [bool(a["correct"]) - bool(b["correct"]) for a, b in both]
            said = (
                f"at {budget}, {one} less {other}: {signed(100 * np.mean(right))} points of answers"
            )
            pairs_of_steps = [(a, b) for a, b in both if a.get("steps") and b.get("steps")]
            if pairs_of_steps:
                gains = np.array([
                    a["steps_right"] / a["steps"] - b["steps_right"] / b["steps"]
                    for a, b in pairs_of_steps
                ])  # fmt: skip
                low, high = bootstrap(_mean_of(gains), len(gains), _SEED)
                said += (
                    f", {signed(100 * gains.mean())} of needed steps "
                    f"[{signed(100 * low)}, {signed(100 * high)}]"
                )
            found.append(f"{said} (n = {len(both)})")
    return found


def _mean_of(values: np.ndarray) -> Callable[[np.ndarray], float]:
    return lambda chosen: float(values[chosen].mean())
