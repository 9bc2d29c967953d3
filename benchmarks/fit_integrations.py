"""Fit what methods take in engines to published runs, on the rows that may be fitted on.

    python benchmarks/fit_integrations.py vllm
    python benchmarks/fit_integrations.py operations

Prints each constant of `PARAMETERS` with which the logarithms of simulated over measured ratios are
least.
Rows with an odd identifier are judged, and never seen here.  `operations` plays all rows of the
fitted builds without their fitted seconds, from their operations alone, and prints how far off they
are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import least_squares

from arborsim.core.errors import UsageError
from arborsim.machine.engine import EngineProfile
from arborsim.products.validate.policies import SMALLEST_EFFECT, Setting
from arborsim.products.validate.policy_runs import PolicyRun, read_policy_runs

#: By engine, constants as ``method.field``, ``graph.piecewise`` or a field of the engine, in the
#: order of their printing, with the value that the search begins from.
PARAMETERS = {
    "vllm": {
        "synchronous_step_s": 1.2e-2, "graph.piecewise": 8.5e-5, "rkv.decision_layer_s": 6e-5,
    },
    "sglang": {"rkv.layer_s": 2e-5, "rkv.decision_layer_s": 1.5e-4},
    "flashinfer": {"rkv.layer_s": 6e-5, "rkv.decision_layer_s": 6.5e-4},
    "transformers": {"launch_s": 9e-6, "cache_passes": 2.0},
}  # fmt: skip
_DECLARED = ("rkv",)  # methods with fitted builds, whose operations are declared
_SOFT = 0.1  # errors beyond this count less than by their squares: no row decides alone
_OTHER_FLAGS = 0.3  # the weight of rows whose arms had different flags


def changed(engine: EngineProfile, names: Sequence[str], values: Sequence[float]) -> EngineProfile:
    """The engine with these constants."""
    for name, value in zip(names, values, strict=True):
        where, _, field = name.rpartition(".")
        if not where:
            engine = replace(engine, **{field: value})
        elif where == "graph":
            engine = replace(engine, graph_layer_s={**engine.graph_layer_s, field: value})
        elif built := engine.integrations.get(where):
            built = replace(built, **{field: value})
            engine = replace(engine, integrations={**engine.integrations, where: built})
    return engine


def error(run: PolicyRun, names: Sequence[str], values: Sequence[float]) -> float:
    """Logarithm of simulated over measured ratio; NaN if the row cannot be played."""
    try:
        setting = Setting(run)
        assert setting.profile.engine is not None
        engine = changed(setting.profile.engine, names, values)
        setting.profile = replace(setting.profile, engine=engine)
        policy, baseline = setting.play(False), setting.play(True)
    except UsageError:
        return math.nan
    return math.log(policy.tokens_per_s / baseline.tokens_per_s / run.ratio)


def fit(engine: str) -> None:
    runs = [run for run in read_policy_runs() if run.text("engine") == engine and run.fitted]
    runs = [run for run in runs if not math.isnan(run.ratio)]
    names = list(PARAMETERS[engine])
    runs = [run for run in runs if not math.isnan(error(run, [], []))]
    start = np.array(list(PARAMETERS[engine].values()))
    weights = np.array([1.0 if run.same_setting else _OTHER_FLAGS for run in runs])

    def errors(logs: np.ndarray) -> np.ndarray:
        values = (start * np.exp(logs - 1)).tolist()
        return weights * np.array([error(run, names, values) for run in runs])

    first = np.ones(len(start))  # one more than the logarithm of a factor: steps are relative
    before = errors(first)
    found = least_squares(errors, first, diff_step=0.2, loss="soft_l1", f_scale=_SOFT, max_nfev=8)
    sizes = [float(np.median(np.abs(each / weights))) for each in (before, found.fun)]
    print(f"{engine}: {len(runs)} rows, median error {sizes[0]:.1%} -> {sizes[1]:.1%}")
    for name, value in zip(names, (start * np.exp(found.x - 1)).tolist(), strict=True):
        print(f"  {name} = {value:.3g}", flush=True)


def from_operations() -> None:
    """Print signs and errors of ratios, of fitted and of judged rows, priced from operations."""
    runs = [run for run in read_policy_runs() if run.same_setting and run.policy in _DECLARED]
    runs = [run for run in runs if not math.isnan(run.ratio)]
    errors = np.array([error(run, ["rkv.from_operations"], [True]) for run in runs])
    for side in ("fitted", "judged"):
        found = [
            (run.ratio, math.exp(each))
            for run, each in zip(runs, errors, strict=True)
            if run.fitted == (side == "fitted") and not math.isnan(each)
        ]
        signs = [(m > 1) == (m * off > 1) for m, off in found if abs(m - 1) > SMALLEST_EFFECT]
        sizes = [abs(off - 1) for _, off in found]
        print(
            f"{side}: {sum(signs)} of {len(signs)} signs, ratio off by {np.median(sizes):.1%} in "
            f"the median, {np.quantile(sizes, 0.9):.1%} at the 90th percentile (n {len(sizes)})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="+", choices=(*PARAMETERS, "operations"))
    for each in parser.parse_args().engines:
        if each == "operations":
            from_operations()
        else:
            fit(each)
