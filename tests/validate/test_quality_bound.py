"""The distance to `needed` and partial credit, as the quality tables show them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality_arms import EXPERIMENTS
from benchmarks.quality_bound import Bound, differences, steps_right, steps_text

ARMS = [
    {"label": "needed, nothing else", "policy": "needed", "budget": "1"},
    {"label": "needed", "policy": "needed", "budget": "0.5"},
    {"label": "needed", "policy": "needed", "budget": "0.2"},
    {"label": "h2o", "policy": "h2o", "budget": "0.5"},
]


def row(arm: int, episode: int, correct: bool, steps: int | None = None, **others: Any) -> Any:
    counted = {"steps_right": steps, "steps": None if steps is None else 4}
    sizes = {"peak_tokens": 20, "full_tokens": 100, "infeasible": False}
    return {"arm": arm, "episode": episode, "correct": correct, **counted, **sizes, **others}


def test_the_bound_is_that_of_the_same_problems_at_the_same_or_a_smaller_budget() -> None:
    right = {0: (0, 1, 2, 3), 1: (0, 1, 2), 2: (0,)}
    rows = [row(arm, e, e in right[arm]) for arm in right for e in range(4)]
    bound = Bound(ARMS, [*rows, row(1, 9, False, infeasible=True)])
    arm = [row(3, e, e == 0) for e in range(4)]
    assert bound.distance("0.5", arm) == "+50"
    assert bound.distance("0.5", arm[:1]) == "0"
    assert bound.distance("0.2", arm) == "0"
    assert bound.distance("0.7", arm) == "+75 (alone)"
    assert bound.distance("0.5", [row(3, 9, True)]) == ""
    assert bound.peak == "0.20"
    without = Bound(ARMS, [each for each in rows if each["arm"] != 0])
    assert without.distance("0.7", arm) == "+50 (0.5)"
    assert without.distance("0.1", arm) == "0 (0.2)"
    assert without.peak == ""
    assert not Bound(ARMS, [row(3, 0, True)])


def test_steps_are_a_mean_over_problems_that_count_them() -> None:
    assert steps_right([row(3, 0, True)]) is None
    assert steps_text([{"correct": True}]) == ""
    mean, low, high = steps_right([row(3, e, False, e) for e in range(5)])  # type: ignore[misc]
    assert mean == pytest.approx(0.5)
    assert 0 <= low < mean < high <= 1
    assert steps_text([row(3, 0, True, 4)] * 3) == "100% (100 to 100)"


def test_differences_are_paired() -> None:
    found = {
        "raas": [row(0, e, e < 2, 4) for e in range(4)],
        "h2o": [row(0, e, False, 3) for e in range(2)],
    }
    said = differences(
        [("raas", "h2o"), ("tova", "h2o")], ["0.5"], lambda label, _: found.get(label, [])
    )
    assert said == [
        "at 0.5, raas less h2o: +100 points of answers, +25 of needed steps [+25, +25] (n = 2)"
    ]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_arms_are_told_apart_and_can_be_built(name: str) -> None:
    experiment = EXPERIMENTS[name]()
    known = [(arm.label, arm.budget) for arm in experiment.arms]
    assert len(set(known)) == len(known)
    for arm in experiment.arms:
        arm.cell()
