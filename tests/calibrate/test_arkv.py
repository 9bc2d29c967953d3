"""Tuning ARKV: a sampler that finds a planted optimum, and an objective that is the replay's."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.core.errors import MissingSignal, UsageError
from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.policies.registry import build
from arborsim.products.calibrate.arkv import (
    RANGES,
    episodes_of,
    published,
    replay_error,
    tune,
)
from arborsim.products.replay.run import Replay
from tests.helpers.traces import make_trace

VECTORS = Path(__file__).parents[2] / "traces" / "chain-vectors.parquet"


def nothing(what: str, done: int, total: int) -> None:
    pass


def valley(values: Any) -> np.ndarray:
    """Least where every setting is 2; two episodes that agree on that."""
    distance = sum(math.log(values[name] / 2) ** 2 for name in RANGES)
    return np.array([distance, distance + 1])


def test_the_sampler_goes_downhill_and_repeats() -> None:
    pytest.importorskip("optuna")
    found = tune(valley, None, trials=40, seed=3, on_progress=nothing)
    assert found.errors[0] == pytest.approx(valley(published()).mean())
    assert found.tuned_on == (found.errors[0], min(found.errors))
    assert valley(found.values).mean() == pytest.approx(found.tuned_on[1])
    assert found.tuned_on[1] < 0.5 * found.tuned_on[0]
    assert all(math.isnan(value) for value in found.held_out)
    assert tune(valley, None, trials=40, seed=3, on_progress=nothing).values == found.values


def test_without_a_gain_the_published_values_stay() -> None:
    pytest.importorskip("optuna")
    flat = lambda values: np.ones(2)  # noqa: E731
    found = tune(flat, valley, trials=5, seed=0, on_progress=nothing)
    assert found.values == pytest.approx(published())
    assert found.held_out[0] == pytest.approx(found.held_out[1])


def test_the_objective_is_the_output_error_of_a_replay() -> None:
    values = published() | {"tau1": 1.0, "tau2": 1.0, "tau3": 1.0}
    found = replay_error([(VECTORS, 1)], ["0.4", "0.8"])(values)
    policy = build("arkv", {"tau1": "1", "tau2": "1", "tau3": "1"})
    budgets = [Budget.parse("0.4"), Budget.parse("0.8")]
    replay = Replay([VECTORS], [policy], budgets, Machine(load_profile("h100")), first=1, count=1)
    expected = [result.output_error for result in replay.run().episodes]
    assert len(expected) == 2
    assert found == pytest.approx([np.mean(expected)])


def test_even_episodes_tune_and_odd_ones_are_held_out(tmp_path: Path) -> None:
    assert episodes_of([VECTORS], odd=False) == [(VECTORS, 0)]
    assert episodes_of([VECTORS, VECTORS], odd=True) == [(VECTORS, 1), (VECTORS, 1)]
    plain = make_trace(tmp_path / "t.parquet")
    with pytest.raises(MissingSignal, match="--capture qkv"):
        episodes_of([plain], odd=False)


def test_without_optuna_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def lacking(name: str, *rest: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(UsageError, match=r"pip install 'arborsim\[tune\]'"):
        tune(valley, None, trials=1, seed=0, on_progress=nothing)
