"""Fit what methods take in engines to published runs, on the rows that may be fitted on.

    python benchmarks/fit_integrations.py vllm

Prints each constant of `PARAMETERS` with which the logarithms of simulated over measured ratios are
least.
Rows with an odd identifier are judged, and never seen here.
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
from arborsim.products.validate.policies import Setting
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
        else:
            built = replace(engine.integrations[where], **{field: value})
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="+", choices=PARAMETERS)
    for each in parser.parse_args().engines:
        fit(each)
