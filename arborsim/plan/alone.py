"""Searches by themselves on a machine: whether they fit, and whether they meet the target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from arborsim.machine.cost import CostModel
from arborsim.machine.demand import SearchDemand
from arborsim.machine.options import ClosedLoop
from arborsim.machine.pricing import Pricing
from arborsim.plan.demands import VariantDemands
from arborsim.plan.results import Alone
from arborsim.plan.runs import Bench
from arborsim.plan.terms import cost_terms
from arborsim.plan.workload import Hardware, Workload


def weights_too_large(workload: Workload, hardware: Hardware) -> str:
    """Why the model's weights alone leave no memory, which needs no search to know; "" if not."""
    geometry, gpus = workload.geometry, hardware.gpus
    usable = gpus * hardware.profile.usable_hbm_bytes
    if geometry.weight_bytes < usable:
        return ""
    return (
        f"{geometry.name} does not fit: its weights take {geometry.weight_bytes / 1e9:.2f} GB, and "
        f"{usable / 1e9:.2f} GB are usable; take larger or more GPUs"
    )


def too_large(workload: Workload, hardware: Hardware, found: VariantDemands) -> str:
    """What the model and the smallest search need, against what the GPUs have."""
    geometry = workload.geometry
    options = replace(workload.serving, tensor_parallel=hardware.gpus)
    pricing = Pricing(CostModel(hardware.profile, geometry), options)
    workspace = hardware.gpus * pricing.workspace_bytes(found.demands, options.prefill_chunk)
    least, usable = (
        _least_kv_bytes(found.demands),
        hardware.gpus * hardware.profile.usable_hbm_bytes,
    )
    return (
        f"{geometry.name} does not fit: {geometry.weight_bytes / 1e9:.2f} GB of weights + "
        f"{workspace / 1e9:.2f} GB of activations + at least {least / 1e9:.2f} GB of keys and "
        f"values for one search, and {usable / 1e9:.2f} GB are usable; take larger or more GPUs"
    )


def _least_kv_bytes(demands: list[SearchDemand]) -> int:
    """HBM for keys and values of the search that needs the least."""

    def peak(demand: SearchDemand) -> int:
        last = demand.column("iterations") - 1
        held = demand.column("hbm_bytes") + last * demand.column("hbm_bytes_growth")
        return int(held.max(initial=0))

    return min((peak(demand) for demand in demands), default=0)


def too_many_refused(workload: Workload, bench: Bench) -> str:
    """Why too many searches can never be served; "" if enough can."""
    engine = bench.engine
    ddr_bytes = engine.pricing.cost.profile.ddr_bytes + workload.serving.nvme_bytes
    hbm = np.array([each.peak_hbm_bytes for each in engine.alone])
    ddr = np.array([priced.source.peak_ddr_bytes for priced in engine.demands])
    refused = (hbm > engine.kv_bytes) | (ddr > ddr_bytes)
    worst = max(int(refused[drawn[workload.warm_up :]].sum()) for drawn in bench.drawn.values())
    if worst <= bench.allowed:
        return ""
    share = worst / (workload.searches - workload.warm_up)
    what, most, room = ("HBM", hbm.max(), engine.kv_bytes)
    if hbm.max() <= engine.kv_bytes:
        what, most, room = "DDR", ddr.max(), ddr_bytes
    return (
        f"{share:.1%} of the searches never fit: the largest needs {most / 1e9:.2f} GB of {what} "
        f"for its keys and values, and there are {room / 1e9:.2f} GB; a smaller budget or more "
        "memory would serve them"
    )


def served_alone(workload: Workload, bench: Bench) -> tuple[Alone, bool]:
    """Searches one after the other, and whether enough of them are within the limits."""
    engine, target = bench.engine, workload.target
    report = engine.run(ClosedLoop(1, tuple(range(len(engine.demands)))))
    drawn = np.concatenate([each[workload.warm_up :] for each in bench.drawn.values()])
    weights = np.bincount(drawn, minlength=len(engine.demands)) / len(drawn)
    served = np.array([not s.refused for s in report.searches])
    latency = np.array([each.seconds for each in engine.alone])
    token = np.array([s.per_token_s for s in report.searches])
    within = served & (latency <= (np.inf if target.search_s is None else target.search_s))
    within &= token <= (np.inf if target.token_s is None else target.token_s)
    terms: dict[str, float] = {}
    for weight, priced, seconds in zip(weights, engine.demands, latency, strict=True):
        for name, value in cost_terms(priced, engine.pricing, float(seconds)).items():
            terms[name] = terms.get(name, 0.0) + float(weight * value)

    def mean(values: list[float]) -> float:
        return float(weights @ np.array(values, dtype=np.float64))

    sources = [priced.source for priced in engine.demands]
    alone = Alone(
        mean([each.seconds for each in engine.alone]),
        mean([each.peak_hbm_bytes for each in engine.alone]),
        mean([each.peak_ddr_bytes for each in sources]),
        mean([each.prompt_tokens for each in sources]),
        mean([each.generated_tokens for each in sources]),
        float(np.percentile(latency[drawn], target.percentile)),
        float(np.percentile(token[drawn], target.percentile)),
        terms,
    )
    return alone, float(weights @ within) >= target.percentile / 100 - 1e-9


def too_slow_alone(workload: Workload, alone: Alone) -> str:
    """By how much the target is missed, and what would be met."""
    target, missed = workload.target, []
    if target.search_s is not None and alone.at_percentile_s > target.search_s:
        missed.append(f"{alone.at_percentile_s:.3g} s per search, not {target.search_s:.3g} s")
    if target.token_s is not None and alone.token_at_percentile_s > target.token_s:
        missed.append(
            f"{1e3 * alone.token_at_percentile_s:.3g} ms per token, not "
            f"{1e3 * target.token_s:.3g} ms"
        )
    what = " and ".join(missed) or "a search that meets one limit misses the other"
    return f"even alone on the machine, {target.percentile:g}% of the searches take up to {what}"
