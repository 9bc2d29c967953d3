"""ARKV's temperatures and gamma, tuned by replaying recorded searches (Optuna's TPE sampler).

The published values were tuned the same way, on other models and for answers. Here the objective is
the relative error of the attention output, which a trace with vectors gives without any model.
Even episodes are tuned on, odd ones are held out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arborsim.core.settings import default_of, settings_of
from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.policies.registry import build, find
from arborsim.products.calibrate.backend import OnProgress
from arborsim.products.calibrate.documents import (
    MAIN,
    MUTED,
    Calibration,
    figure,
    recordings,
    rounded,
    software,
)
from arborsim.products.replay.run import Replay
from arborsim.products.tune.study import optuna_for
from arborsim.trace.reader import open_trace
from arborsim.trace.schema import VECTORS

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

POLICY = "arkv"
#: Searched range of each setting, on a logarithmic scale; all hold the published value.
RANGES = dict.fromkeys(("tau1", "tau2", "tau3"), (0.5, 20.0)) | {"gamma": (0.1, 1000.0)}

Values = Mapping[str, float]
#: The error of a setting on some episodes, one number per episode.
Objective = Callable[[Values], np.ndarray]


@dataclass(frozen=True)
class Tuning:
    """The outcome."""

    values: dict[str, float]  # the best settings found
    errors: tuple[float, ...]  # mean error of every trial, in order; the first is the published one
    tuned_on: tuple[float, float]  # mean error on the episodes that were tuned on: published, best
    held_out: tuple[float, float]  # the same on the other episodes; NaN without any


def published() -> dict[str, float]:
    """The defaults of the policy, which are the paper's."""
    fields = {field.name: field for field, _ in settings_of(find(POLICY))}
    return {name: default_of(fields[name]) for name in RANGES}


def tune(
    objective: Objective,
    held_out: Objective | None,
    trials: int,
    seed: int,
    on_progress: OnProgress,
) -> Tuning:
    """Minimise the mean of `objective`. The published values are the first of the `trials`.

    Raises `UsageError` if Optuna is not installed.
    """
    optuna = optuna_for("calibrate arkv")
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.enqueue_trial(published())

    def trial_error(trial: Any) -> float:
        values = {
            name: trial.suggest_float(name, low, high, log=True)
            for name, (low, high) in RANGES.items()
        }
        error = float(np.mean(objective(values)))
        on_progress("tuning arkv", trial.number + 1, trials)
        return error

    study.optimize(trial_error, n_trials=trials)
    errors = tuple(trial.value for trial in study.trials if trial.value is not None)
    # `study.best_params` of equals is the first, so that nothing changes without a gain.
    best = {name: float(value) for name, value in study.best_params.items()}
    others = (float("nan"), float("nan"))
    if held_out is not None:
        others = float(np.mean(held_out(published()))), float(np.mean(held_out(best)))
    return Tuning(best, errors, (errors[0], study.best_value), others)


def episodes_of(paths: Sequence[Path], odd: bool) -> list[tuple[Path, int]]:
    """Even or odd episodes of the traces, counted through all of them.

    Raises `MissingSignal` if a trace holds no vectors.
    """
    readers = [open_trace(path) for path in paths]
    for reader in readers:
        reader.require(VECTORS, "calibrating arkv")
    found = [(reader.path, i) for reader in readers for i in range(reader.num_episodes)]
    return found[int(odd) :: 2]


def replay_error(episodes: Sequence[tuple[Path, int]], budgets: Sequence[str]) -> Objective:
    """Mean output error over the budgets, for every episode."""
    machine = Machine(load_profile("h100"))  # bytes and seconds are not looked at
    parsed = [Budget.parse(text) for text in budgets]

    def errors(values: Values) -> np.ndarray:
        policy = build(POLICY, {name: repr(value) for name, value in values.items()})
        found = []
        for path, episode in episodes:
            result = Replay([path], [policy], parsed, machine, first=episode, count=1).run()
            found.append(np.mean([each.output_error for each in result.episodes]))
        return np.array(found)

    return errors


def arkv_calibration(
    tuning: Tuning,
    traces: Sequence[Path],
    tuned_on: int,
    held_out: int,
    budgets: Sequence[str],
    seed: int,
    command: str,
) -> Calibration:
    """ARKV's temperatures and gamma. `tuned_on` and `held_out` count episodes."""
    readers = [open_trace(path) for path in traces]
    before, after = tuning.held_out if held_out else tuning.tuned_on
    where = "held out" if held_out else "tuned on"
    return Calibration(
        kind="arkv",
        model=readers[0].info.model,
        layers=readers[0].info.geometry.layers,
        traces=tuned_on,
        tokens=sum(each.num_tokens for reader in readers for each in reader.episodes()),
        seed=seed,
        command=command,
        policies={"arkv": {name: rounded(value) for name, value in tuning.values.items()}},
        finding=(
            f"output error {after:.4f} against {before:.4f} with the published values, "
            f"on the episodes {where}"
        ),
        protocol={
            "objective": "relative error of the attention output, mean over budgets and episodes",
            "budgets": list(budgets),
            "trials": len(tuning.errors),
            "episodes_held_out": held_out,
            "recordings": recordings(readers),
        },
        versions=software("numpy", "optuna"),
        evidence={
            name: rounded(getattr(tuning, name)) for name in ("tuned_on", "held_out", "errors")
        },
    )


def arkv_figure(tuning: Tuning, title: str) -> Figure:
    """Error of every trial, and the least so far."""
    from plotly.graph_objects import Scatter

    trials, least = np.arange(1, len(tuning.errors) + 1), np.minimum.accumulate(tuning.errors)
    every = Scatter(x=trials, y=tuning.errors, mode="markers", marker_color=MUTED, name="trial")
    best = Scatter(x=trials, y=least, mode="lines", line_color=MAIN, name="least so far")
    x = {"title": "trial (1: published values)"}
    return figure(title, [every, best], x, "relative error of the attention output")
