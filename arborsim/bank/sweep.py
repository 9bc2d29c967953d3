"""The paper's way to choose lambda_b: the largest value that costs no accuracy against REBASE.

ETS (Hooper et al. 2025, section 5.1) takes the largest lambda_b in [1, 2] whose accuracy is within
0.2 points of REBASE's.  On few problems that says little, so the interval stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arborsim.bank.arms import REFERENCE
from arborsim.bank.results import SearchResult
from arborsim.core.statistics import clopper_pearson

OPTION = "lambda_b"
LOW, HIGH = 1.0, 2.0
MARGIN = 0.002


@dataclass(frozen=True)
class Paired:
    """A search against REBASE, on the problems that were judged for both.

    Attributes
    ----------
    judged, right, reference_right : int
    gained, lost : int
        Problems that only this search, and only REBASE, got right.
    kv_times : float
        The KV size as a multiple of REBASE's, over the same problems.
    """

    judged: int
    right: int
    reference_right: int
    gained: int
    lost: int
    kv_times: float = math.nan

    @property
    def difference(self) -> float:
        """Accuracy less REBASE's."""
        return (self.gained - self.lost) / self.judged

    def interval(self) -> tuple[float, float]:
        """Interval that holds the difference of accuracies at 95 % at least.

        From those of the shares gained and lost, each Clopper-Pearson at 97.5 % (Bonferroni): wide,
        but right for few problems, and for none that tells the two apart.
        """
        gained = clopper_pearson(self.gained, self.judged, 0.975)
        lost = clopper_pearson(self.lost, self.judged, 0.975)
        return gained[0] - lost[1], gained[1] - lost[0]


def paired(mine: Iterable[SearchResult], reference: Iterable[SearchResult]) -> Paired | None:
    """Compare problem by problem; None if none was judged for both."""
    theirs = {r.episode: r for r in reference if r.correct is not None}
    pairs = [(r, theirs[r.episode]) for r in mine if r.correct is not None and r.episode in theirs]
    if not pairs:
        return None
    their_kv = sum(b.kv_tokens for _, b in pairs)
    return Paired(
        len(pairs),
        sum(a.correct is True for a, _ in pairs),
        sum(b.correct is True for _, b in pairs),
        sum(a.correct is True and b.correct is False for a, b in pairs),
        sum(b.correct is True and a.correct is False for a, b in pairs),
        sum(a.kv_tokens for a, _ in pairs) / their_kv if their_kv else math.nan,
    )


def verdicts(results: Sequence[SearchResult]) -> list[str]:
    """A line for each algorithm, width, policy and budget that `OPTION` was swept for."""
    groups: dict[tuple[str, int, str, str], dict[str, list[SearchResult]]] = {}
    for r in results:
        key = (r.algorithm, r.width, r.policy, r.budget)
        groups.setdefault(key, {}).setdefault(r.swept, []).append(r)
    lines = []
    for (algorithm, width, policy, budget), swept in groups.items():
        values = [name for name in swept if name.startswith(f"{OPTION}=")]
        reference = groups.get((REFERENCE, width, policy, budget), {}).get("", [])
        if values and reference:
            found = {_value(name): paired(swept[name], reference) for name in values}
            under = "" if policy == "full" else f" under {policy} at budget {budget}"
            lines.append(f"{algorithm} at width {width}{under}: {_chosen(found)}")
    return lines


def _value(name: str) -> float:
    return float(name.partition("=")[2])


def _chosen(found: dict[float, Paired | None]) -> str:
    """In words."""
    judged = {v: p for v, p in found.items() if p is not None and LOW <= v <= HIGH}
    if not judged:
        return f"no {OPTION} in [{LOW:g}, {HIGH:g}] has answers that were judged"
    fine = [v for v, p in judged.items() if p.difference >= -MARGIN - 1e-12]
    value = max(fine) if fine else max(judged, key=lambda v: (judged[v].difference, v))
    p = judged[value]
    low, high = p.interval()
    against = (
        f"{p.right} right against {p.reference_right} of {p.judged}; {p.gained} gained, {p.lost} "
        f"lost, difference {100 * p.difference:+.1f} points, 95% interval {100 * low:+.1f} to "
        f"{100 * high:+.1f}; one problem is {100 / p.judged:.1f}; KV size {p.kv_times:.2f} times "
        "REBASE's"
    )
    if fine:
        return f"{OPTION} {value:g} is the largest within 0.2 points of REBASE ({against})"
    return f"no {OPTION} is within 0.2 points of REBASE; {value:g} comes closest ({against})"
