"""A made-up plan with the shapes of a real one: queueing curves by formula, no simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from arborsim.machine.machine import KvPool
from arborsim.machine.report import BusySeconds, PrefixTokens, ServingSeries, Utilisation
from arborsim.products.plan.costs import fleet_for
from arborsim.products.plan.results import (
    INFEASIBLE,
    MET,
    MISSED,
    UNFIT,
    Alone,
    CandidateResult,
    LoadPoint,
    Percentiles,
    PlanResult,
    Quality,
    Recommendation,
    Slice,
    Timeline,
)
from arborsim.products.plan.sensitivity import ASSUMPTIONS, FACTORS, Sensitivity, Variant
from arborsim.products.plan.statistics import Estimate

#: name: (capacity under full retention in searches/s, seconds alone, lowest and highest price, HBM)
GPUS = {
    "rtx4090": (0.35, 21.0, (0.35, 0.70), 24e9),
    "h100": (1.6, 9.0, (2.0, 3.5), 80e9),
    "h200": (2.5, 8.0, (2.8, 4.5), 141e9),
}
#: policy, budget: (capacity factor, attention kept, share evicted, share offloaded)
POLICIES = {
    ("full", "-"): (1.0, 1.0, 0.0, 0.0),
    ("hierarchy", "0.5"): (1.25, 1.0, 0.0, 0.5),
    ("arborkv", "0.5"): (1.6, 0.97, 0.3, 0.1),
    ("arborkv", "0.25"): (2.1, 0.9, 0.6, 0.1),
    ("streaming-llm", "0.5"): (1.7, 0.8, 0.5, 0.0),
    ("streaming-llm", "0.25"): (2.2, 0.64, 0.75, 0.0),
}
LIMIT_S = 60.0
STATED = 5.9  # searches/s


def point(load: float, capacity: float, alone_s: float, price, solved: float = 0.6) -> LoadPoint:
    """An open queue with one server, roughly."""
    busy = min(load / capacity, 0.99)
    p95 = alone_s * (1 + 0.7 * busy / (1 - busy))
    served = min(load, capacity)
    cost = None if price is None else tuple(each / 3.6 / served for each in price)
    cents = None if cost is None else tuple(
        Estimate(each / 1000 / solved, each / 1000 / 0.68, each / 1000 / 0.52, 100)
        for each in cost
    )  # fmt: skip
    total = 900 / load
    return LoadPoint(
        load=load,
        runs=3,
        meets=p95 <= LIMIT_S * (1 + 1e-9),
        at_percentile=Estimate(p95, 0.93 * p95, 1.09 * p95, 2700),
        served_per_s=Estimate(served, 0.98 * served, 1.02 * served, 3),
        search_s=Percentiles(0.6 * p95, p95, 1.4 * p95),
        first_token_s=Percentiles(0.1 * p95, 0.3 * p95, 0.6 * p95),
        token_s=Percentiles(0.02, 0.02 + 0.03 * busy, 0.03 + 0.05 * busy),
        waiting_s=Percentiles(0.0, 0.2 * p95, 0.5 * p95),
        concurrency=load * 0.6 * p95,
        queue=0.2 * load * p95,
        peak_concurrency=math.ceil(2 * load * p95),
        used=Utilisation(busy, 0.3 * busy, 0.7 * busy, 0.95 * busy, 0.1 * busy, 0.05, 0.08),
        busy=BusySeconds(0.1 * total * busy, 0.0, 0.75 * total * busy, 0.05 * total * busy, 0.02),
        prefixes=PrefixTokens(900, 300, 100),
        total_s=total,
        saturated="hbm" if busy > 0.7 else "memory",
        preemptions_per_1000=120 * max(0.0, busy - 0.7),
        refused_per_1000=0.0,
        refusal="",
        cost_per_1000=cost,
        cost_per_solved=cents,
    )


def candidate(
    number: int, gpu: str, policy: str, budget: str, faster: float = 1.0, attention: bool = True,
    curve: bool = True,
) -> CandidateResult:  # fmt: skip
    capacity, alone_s, price, hbm = GPUS[gpu]
    factor, kept, evicted, offloaded = POLICIES[policy, budget]
    capacity *= factor * faster
    largest = capacity * (1 - 0.7 / (LIMIT_S / alone_s - 0.3))
    loads = [share * largest for share in (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.05, 1.1)]
    made = CandidateResult(
        number=number,
        hardware=gpu,
        policy=policy,
        budget=budget,
        recall="stage",
        gpus=1,
        price_per_hour=price,
        status=MET,
        quality=Quality(
            kept if attention else None, 1 - evicted - offloaded, evicted, 0.0, offloaded, 0.0
        ),
        alone=Alone(alone_s, 3e9 * (1 - evicted), 1e9 * offloaded, 640, 4200, 1.2 * alone_s, 0.02,
                    {"weights": 0.6 * alone_s, "kv": 0.3 * alone_s}),
        pool=KvPool(int(hbm), int(0.05 * hbm), int(16e9), int(1e9)),
        largest=largest,
        largest_by_seed=(largest, 1.03 * largest, 1.05 * largest),
        spread=Estimate(1.027 * largest, 0.97 * largest, 1.08 * largest, 3),
        refuted=1.02 * largest,
        limited_by="target",
        at_largest=point(largest, capacity, alone_s, price),
        at_stated=point(0.2, capacity, alone_s, price),
        curve=tuple(point(load, capacity, alone_s, price) for load in loads) if curve else (),
    )  # fmt: skip
    return replace(made, fleet=fleet_for(made, STATED))


def timeline(number: int) -> Timeline:
    """Thirty searches that decode together."""
    rng = np.random.default_rng(0)
    slices, now = [], 0.0
    for search in range(30):
        arrival = now
        admitted = arrival + float(rng.uniform(0, 0.8))
        slices.append(Slice(arrival, admitted, "waiting", search))
        slices.append(Slice(admitted, admitted + 0.15, "prefill", search, 600))
        slices.append(Slice(admitted + 0.15, admitted + 3.0, "decode", search, 2000))
        if search % 5 == 0:
            slices.append(Slice(admitted + 1.0, admitted + 1.2, "down", search, 200_000_000))
        now += float(rng.exponential(0.6))
    slices += [Slice(0.4 * i, 0.4 * i + 0.35, "decode", -1, 8) for i in range(50)]
    times = np.linspace(0, 120, 400)
    held = 30e9 + 20e9 * np.sin(times / 7) ** 2
    series = ServingSeries(
        times.tolist(), held.astype(int).tolist(), (0.1 * held).astype(int).tolist(),
        (10 + 5 * np.sin(times)).astype(int).tolist(),
    )  # fmt: skip
    return Timeline(number, 1.2, 0, 20.0, tuple(sorted(slices, key=lambda s: s.start_s)), series)


def plan(
    attention: bool = True, prices: bool = True, name: str = "reasoning service"
) -> PlanResult:
    """Three GPUs, six policies, and one candidate of each way to fail."""
    found = [
        candidate(0, gpu, policy, budget, attention=attention, curve=policy != "streaming-llm")
        for gpu in GPUS
        for policy, budget in POLICIES
    ]
    reasons = {
        MISSED: "a search alone takes 210 s at the 95th percentile, 3.5 times the target of 60 s",
        INFEASIBLE: "the prompt of search 7 alone needs 812 tokens, the budget gives 400",
        UNFIT: "llama-3.1-70b: 141.1 GB of weights do not fit 24.0 GB",
    }
    found += [
        CandidateResult(0, "rtx4090", "lag-kv", budget, "stream", 1, None, status, reason)
        for budget, (status, reason) in zip(("0.5", "0.25", "0.1"), reasons.items(), strict=True)
    ]
    if not prices:
        found = [_unpriced(each) for each in found]
    numbered = tuple(replace(each, number=number) for number, each in enumerate(found))
    chosen, other = 9, 3  # arborkv at 0.25 on h100; arborkv at 0.25 on rtx4090
    return PlanResult(
        workload=name,
        unit="searches/s",
        stated_load=STATED,
        percentile=95,
        search_limit_s=LIMIT_S,
        token_limit_s=0.1,
        currency="USD",
        searches=1000,
        warm_up=100,
        runs=3,
        seed=0,
        candidates=numbered,
        recommendation=Recommendation(
            chosen,
            f"Rent {numbered[chosen].hardware} with {numbered[chosen].policy} at budget 0.25: it "
            "serves 2.8 searches/s within 60 s, for the lowest cost per search of all candidates "
            f"that keep 0.85 of the attention. Next best is {numbered[other].name}.",
            other,
            ("How many answers stay correct under arborkv at 0.25: attention kept is no accuracy.",
             "What your provider charges: prices are listed ones."),
        ),
        solved=Estimate(0.6, 0.52, 0.68, 100),
        timeline=timeline(chosen),
        settings={"workload file": "plan.toml, sha256 0123456789abcdef", "seeds": "0 to 2",
                  "versions": "arborsim 0.2.0, numpy 2.4.6"},
        assumed=("h100 mfu 0.6", "rtx4090 kv_read_efficiency 0.8"),
        notes=("Generated searches carry no attention.",) if not attention else (),
    )  # fmt: skip


def _unpriced(each: CandidateResult) -> CandidateResult:
    def bare(shown: LoadPoint | None) -> LoadPoint | None:
        return shown and replace(shown, cost_per_1000=None, cost_per_solved=None)

    return replace(
        each, price_per_hour=None, at_largest=bare(each.at_largest),
        at_stated=bare(each.at_stated), curve=tuple(filter(None, map(bare, each.curve))),
        fleet=each.fleet and replace(each.fleet, price_per_hour=None, cost_per_1000=None),
    )  # fmt: skip


def sensitivities(result: PlanResult) -> list[Sensitivity]:
    """The recommended candidate and its alternative under every assumption."""
    effect = {"hbm": 0.9, "bandwidth": 0.6, "compute": 0.1, "pcie": 0.02, "length": -1.3}
    found = []
    numbers = (result.recommendation.candidate, result.recommendation.alternative)
    for base in (result.candidates[number] for number in numbers if number is not None):
        for assumption in ASSUMPTIONS:
            variants = []
            for factor in FACTORS:
                moved = candidate(base.number, base.hardware, base.policy, base.budget,
                                  factor ** effect[assumption.key])  # fmt: skip
                if assumption.key == "hbm" and factor < 0.75 and base.hardware == "rtx4090":
                    moved = replace(
                        base, status=UNFIT, reason="no room for keys and values", largest=None,
                        at_largest=None, curve=(), fleet=None,
                    )  # fmt: skip
                variants.append(Variant(factor, base if factor == 1 else moved))
            found.append(Sensitivity(base.number, assumption, 80e9, tuple(variants)))
    return found
