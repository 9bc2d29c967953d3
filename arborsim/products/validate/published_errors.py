"""Errors of published runs, simulated against measured: by group, targets, and the worst runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from arborsim.machine.fidelity import Fidelity, weights_kind
from arborsim.products.validate.published import (
    PlayedRun,
    engine_of,
    far,
    machine_of,
    profile_name,
)
from arborsim.products.validate.serving import ServingRun


@dataclass(frozen=True)
class Errors:
    """Errors of one figure over some runs, as shares; NaN without runs."""

    n: int
    median: float  #: of the sizes of the errors
    high: float  #: their 90th percentile
    signed: float  #: median with signs: above 0, simulated is more than measured

    @classmethod
    def of(cls, values: Iterable[float]) -> Errors:
        """Summarise the errors that are known."""
        known = np.array([value for value in values if not math.isnan(value)])
        if not len(known):
            return cls(0, math.nan, math.nan, math.nan)
        sizes = np.abs(known)
        high, signed = float(np.quantile(sizes, 0.9)), float(np.median(known))
        return cls(len(known), float(np.median(sizes)), high, signed)


@dataclass(frozen=True)
class ErrorLine:
    """How far off a group of runs is."""

    group: str  #: what the runs of the section's lines differ in
    name: str
    tpot: Errors
    ttft: Errors  #: of runs in which little queues
    throughput: Errors
    other: Errors  #: AIConfigurator's time per output token ...
    ours: Errors  #: ... and ours on the same runs

    @classmethod
    def of(cls, group: str, name: str, runs: Sequence[PlayedRun]) -> ErrorLine:
        shared = [each for each in runs if not math.isnan(each.other_error)]
        return cls(
            group,
            name,
            Errors.of(each.tpot_error for each in runs),
            Errors.of(each.ttft_error for each in runs if not each.queues),
            Errors.of(each.throughput_error for each in runs),
            Errors.of(each.other_error for each in shared),
            Errors.of(each.tpot_error for each in shared),
        )


def error_lines(runs: Sequence[PlayedRun]) -> list[ErrorLine]:
    """A line for all judged runs, the fitted ones, and the judged ones by what was served."""
    played = [each for each in runs if each.simulated]
    judged = [each for each in played if not each.run.fitted]
    sane = [each for each in judged if not each.odd]
    fitted = [each for each in played if each.run.fitted]
    found = [ErrorLine.of("", "all judged", judged)]
    if len(sane) < len(judged):
        found.append(ErrorLine.of("", "without odd runs", sane))
    if 0 < len(known := near(judged)) < len(judged):
        found.append(ErrorLine.of("", NEAR, known))
    if fitted:
        found.append(ErrorLine.of("", "fitted, for comparison", fitted))
    for group, key in _GROUPS.items():
        for name in sorted({key(each.run) for each in judged}, key=_order):
            own = [each for each in judged if key(each.run) == name]
            found.append(ErrorLine.of(group, name, own))
    return found


ONE, SEVERAL = "one GPU", "several GPUs"
NEAR = "of versions near the fitted ones"


def _some_gpus(run: ServingRun) -> str:
    return ONE if run.gpus == 1 else SEVERAL


_GROUPS: dict[str, Callable[[ServingRun], str]] = {
    "GPUs": _some_gpus,
    "model": lambda run: run.model,
    "GPU": lambda run: run.gpu,
    "engine": lambda run: run.engine,
    "number of GPUs": lambda run: f"{run.gpus} x",
}


def _order(name: str) -> tuple[float, str]:
    first = name.split()[0]
    return (float(first) if first.isdecimal() else 0.0), name


@dataclass(frozen=True)
class Target:
    """An error that is aimed at, and what was reached on judged runs."""

    name: str
    limit: float
    reached: float
    n: int

    @property
    def met(self) -> bool:
        return self.reached <= self.limit


def targets(runs: Sequence[PlayedRun]) -> list[Target]:
    """The targets, and whether each is met; without those that no run says anything about."""
    lines = {line.name: line for line in error_lines(runs)}
    every = lines["all judged"]
    found = []
    for name, median, high in ((ONE, 0.05, 0.20), (SEVERAL, 0.05, 0.20)):
        if name in lines:
            errors, what = lines[name].tpot, f"time per output token on {name}"
            found.append(Target(f"{what}, median", median, errors.median, errors.n))
            found.append(Target(f"{what}, 90th percentile", high, errors.high, errors.n))
    first, rate = every.ttft, every.throughput
    for what, limit, reached, n in (
        ("time to first token where little queues, median", 0.10, first.median, first.n),
        ("output tokens per second, median", 0.05, rate.median, rate.n),
        ("output tokens per second, bias", 0.02, abs(rate.signed), rate.n),
    ):
        found.append(Target(what, limit, reached, n))
    return [target for target in found if target.n]


def worst(runs: Sequence[PlayedRun], most: int = 10) -> list[PlayedRun]:
    """The judged runs whose time per output token is off by the largest factor."""
    judged = [each for each in runs if each.simulated and not each.run.fitted]
    return sorted(judged, key=lambda each: -abs(math.log1p(each.tpot_error)))[:most]


def by_kind(runs: Sequence[PlayedRun]) -> tuple[Fidelity, ...]:
    """Errors of judged runs by GPU, engine, type of weights, and one GPU or several."""
    judged = [each for each in runs if each.simulated and not each.run.fitted]
    kinds = {each: _kind(each.run) for each in judged}
    found = []
    for kind in sorted(set(kinds.values())):
        errors = Errors.of(each.tpot_error for each in judged if kinds[each] == kind)
        shares = (round(share, 4) for share in (errors.median, errors.high, errors.signed))
        found.append(Fidelity(*kind, errors.n, *shares))
    return tuple(found)


def overall(runs: Sequence[PlayedRun]) -> tuple[int, float, float]:
    """How many runs judge, the median of the sizes of their errors and the 90th percentile."""
    errors = Errors.of(each.tpot_error for each in runs if each.simulated and not each.run.fitted)
    return (errors.n, round(errors.median, 4), round(errors.high, 4)) if errors.n else (0, 0.0, 0.0)


def near(runs: Sequence[PlayedRun]) -> list[PlayedRun]:
    """Those of versions that constants were fitted to, or of which it is not said."""
    return [each for each in runs if not far(each.run)]


def _kind(run: ServingRun) -> tuple[str, str, str, bool]:
    weights = weights_kind(machine_of(run).geometry)
    return profile_name(run.gpu), engine_of(run), weights, run.gpus > 1
