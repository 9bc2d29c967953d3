"""Fit the constants of inference engines to published serving runs: run it, copy what it prints.

    python benchmarks/fit_engines.py                  # all engines
    python benchmarks/fit_engines.py vllm trtllm-1.0

Only runs on the fitted side of `ServingRun.fitted` are looked at, without odd ones.  What is least
is the sum over runs of the absolute logarithms of simulated over measured: of the time per output
token, and a quarter of that of the time to first token.  Each round replaces the simulation by its
derivatives and solves a linear program.  Runs on B200 are fitted afterwards, by shares alone.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from scipy.optimize import linprog

from arborsim.core.errors import UsageError
from arborsim.machine.engine import EngineProfile
from arborsim.machine.lookup import load_engine
from arborsim.products.validate.published import engine_of, machine_of, oddness, play, profile_name
from arborsim.products.validate.serving import ServingRun, read_runs

ROUNDS = 3
FIRST_TOKEN_WEIGHT = 0.25
FACTOR = 2.0
B200 = "b200"
#: Constants with the least and the largest value, and a step for their derivatives.
CONSTANTS = {
    "step_s": (0.0, 5e-3, 3e-4), "sequence_s": (0.0, 2e-4, 1e-5),
    "layer_s": (-3e-5, 6e-5, 5e-6), "prefill_layer_s": (-6e-5, 3e-4, 2e-5),
    "request_s": (0.0, 0.2, 0.01), "product_share": (0.8, 1.3, 0.05),
    "quantised_share": (0.7, 1.3, 0.05), "expert_share": (0.5, 1.5, 0.05),
    "all_reduce_share": (0.5, 2.0, 0.1),
}  # fmt: skip
SHARES = (
    "layer_s", "prefill_layer_s", "request_s", "quantised_share", "expert_share",
    "all_reduce_share",
)  # fmt: skip


def played(constants: dict[str, float], run: ServingRun) -> tuple[float, float]:
    """Logarithms of the errors of time per output token and to first token."""
    machine = machine_of(run)
    engine = replace(machine.profile.engine, **constants)  # type: ignore[type-var]
    served = machine._replace(profile=replace(machine.profile, engine=engine))
    try:
        found = play(run, served)
    except UsageError:
        return math.nan, math.nan
    return math.log(1e3 * found.tpot_s / run.tpot_ms), math.log(1e3 * found.ttft_s / run.ttft_ms)


def errors(
    pool: ProcessPoolExecutor, runs: list[ServingRun], constants: dict[str, float]
) -> np.ndarray:
    """Of all runs, one after the other; float64 ``[2 runs]``."""
    pairs = np.array(list(pool.map(partial(played, constants), runs, chunksize=4)))
    pairs[:, 1] *= FIRST_TOKEN_WEIGHT
    return pairs.ravel()


def fit(
    pool: ProcessPoolExecutor,
    runs: list[ServingRun],
    start: dict[str, float],
    others: dict[str, float],
) -> dict[str, float]:
    """The constants of `start` that fit the runs best, with `others` as they are."""
    best, now = start, start
    found = errors(pool, runs, {**others, **now})
    # Runs that are off by a factor at the start tell of something else than these constants.
    near = np.abs(found[::2]) < math.log(FACTOR)
    runs, found = [r for r, n in zip(runs, near, strict=True) if n], found[near.repeat(2)]
    least = np.nansum(np.abs(found))
    for _ in range(ROUNDS):
        slopes = []
        for name, value in now.items():
            step = CONSTANTS[name][2]
            slopes.append(
                (errors(pool, runs, {**others, **now, name: value + step}) - found) / step
            )
        matrix = np.array(slopes).T
        known = np.isfinite(found) & np.isfinite(matrix).all(axis=1)
        rows, size = matrix[known], len(now)
        one = np.eye(len(rows))
        limits = ((CONSTANTS[name], value) for name, value in now.items())
        room = [(low - value, high - value) for (low, high, _), value in limits]
        solved = linprog(
            np.r_[np.zeros(size), np.ones(len(rows))],
            A_ub=np.block([[rows, -one], [-rows, -one]]),
            b_ub=np.r_[-found[known], found[known]],
            bounds=[*room, *[(0, None)] * len(rows)],
        )
        now = {n: float(v + d) for (n, v), d in zip(now.items(), solved.x[:size], strict=True)}
        found = errors(pool, runs, {**others, **now})
        total = np.nansum(np.abs(found))
        token, first = np.abs(np.expm1(found[::2])), np.abs(np.expm1(found[1::2] * 4))
        print(
            f"# token {np.nanmedian(token):.1%} {np.nanquantile(token, 0.9):.1%}, "
            f"first {np.nanmedian(first):.1%}, {total:.3f}: {now}", flush=True,
        )  # fmt: skip
        gained = least - total
        if gained > 0:
            best, least = now, total
        if gained < 0.01 * least:
            break
    return best


def main(names: list[str]) -> None:
    every = [run for run in read_runs() if run.fitted and not oddness(run)]
    by_engine: dict[str, list[ServingRun]] = {}
    for run in every:
        by_engine.setdefault(engine_of(run), []).append(run)
    with ProcessPoolExecutor(2) as pool:
        for name in names or sorted(by_engine):
            runs, engine = by_engine[name], load_engine(name)
            older = [run for run in runs if profile_name(run.gpu) != B200]
            newer = [run for run in runs if profile_name(run.gpu) == B200]
            kinds = {
                "product_share": any(run.weights == "bfloat16" for run in runs),
                "quantised_share": any(run.weights != "bfloat16" for run in runs),
                "expert_share": any(machine_of(run).geometry.experts for run in runs),
            }
            print(f"{name}: {len(older)} and {len(newer)} runs", flush=True)
            constants = [each for each in CONSTANTS if kinds.get(each, True)]
            base = fit(pool, older, _start(engine, constants), {})
            _show(base)
            if newer:
                print(f"[gpus.{B200}]")
                shares = [each for each in SHARES if kinds.get(each, True)]
                _show(fit(pool, newer, _start(engine.on(B200), shares), base))


def _start(engine: EngineProfile, names: list[str]) -> dict[str, float]:
    return {name: float(getattr(engine, name)) for name in names}


def _show(constants: dict[str, float]) -> None:
    for name, value in constants.items():
        print(f"{name} = {value:.4g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
