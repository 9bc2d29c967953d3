"""Numbers changed one at a time, and searches stretched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.machine.program import Op, SearchDemand
from arborsim.machine.serving import ServingEngine
from arborsim.policies.registry import build
from arborsim.products.generate.lengths import TreeSpec, fixed, write_generated
from arborsim.products.plan.demands import stretched
from arborsim.products.plan.evaluate import SHARES, evaluate, load_curve
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.results import MET, UNFIT, CandidateResult
from arborsim.products.plan.sensitivity import (
    ASSUMPTIONS,
    FACTORS,
    LENGTH,
    break_even,
    changed,
    scaled,
    server,
    without_effect,
)
from tests.helpers.demands import record_demands
from tests.plan.make import small_plan, small_workload
from tests.serving.make import chain, random_demand


def sensitivities(profile, demands, serve, factors=FACTORS):
    """A candidate under each assumption that matters, as reports show them."""
    base = serve(profile, demands)
    return [
        changed(profile, demands, serve, base, each, factors)
        for each in ASSUMPTIONS
        if not without_effect(each, demands, base)
    ]


BASE = CandidateResult(3, "h100", "full", "-", "stage", 1, None, MET)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(2, 5))
def test_a_stretched_chain_is_the_longer_chain(prompt: int, generated: int, factor: int) -> None:
    found = stretched(chain(prompt, generated), factor)
    longer = chain(factor * prompt, factor * generated)
    assert found.ops.tolist() == longer.ops.tolist()
    assert found.pieces.tolist() == longer.pieces.tolist()


@given(st.integers(0, 200), st.floats(0.1, 4))
def test_stretching_keeps_the_whole_length_and_nothing_negative(seed: int, factor: float) -> None:
    given_ = random_demand(np.random.default_rng(seed))
    found = stretched(given_, factor)
    assert abs(found.iterations - factor * given_.iterations) <= 0.5
    assert (found.pieces[:, 0] >= 0).all()
    runs = found.ops[found.ops[:, 0] == Op.DECODE, 1]
    assert (found.pieces[runs, 0] > 0).all()
    assert stretched(given_, 1.0) is given_


def recorded(folder: Path, policy: str, scale: int) -> list[SearchDemand]:
    """One generated tree with thoughts of 40 tokens, or `scale` times as many."""
    geometry = load_geometry("llama-3.1-8b")
    spec = TreeSpec(fixed(100 * scale), fixed(40 * scale), fixed(4), fixed(2), pruned=(0.5,))
    path = folder / f"{scale}.parquet"
    write_generated(spec, 1, 7, geometry, path, True)
    machine = Machine(load_profile("h100"), geometry, recall="stage")
    return list(record_demands(path, build(policy, {}), Budget.parse("0.5"), machine))


@pytest.mark.parametrize("policy", ["full", "random"])
def test_a_stretched_search_is_about_the_one_recorded_at_that_length(
    tmp_path: Path, policy: str
) -> None:
    (short,), (long,) = recorded(tmp_path, policy, 1), recorded(tmp_path, policy, 3)
    machine = load_profile("h100"), load_geometry("llama-3.1-8b")
    alone = ServingEngine([short, stretched(short, 3), long], *machine).alone
    assert alone[1].seconds == pytest.approx(alone[2].seconds, rel=0.01)
    assert alone[1].peak_hbm_bytes == pytest.approx(alone[2].peak_hbm_bytes, rel=0.02)
    assert alone[0].seconds < 0.5 * alone[2].seconds  # what the stretching has to bridge


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_only_what_is_named_is_scaled(factor: float) -> None:
    profile = load_profile("h100")
    for assumption in ASSUMPTIONS:
        moved = scaled(profile, assumption, factor)
        for name in assumption.fields:
            assert getattr(moved, name) == factor * getattr(profile, name)
        back = {name: getattr(profile, name) for name in assumption.fields}
        assert replace(moved, **back) == profile


def test_each_assumption_is_served_at_each_factor_but_one() -> None:
    profile, asked = load_profile("h100"), []

    def serve(machine, demands):
        asked.append((machine, demands[0].iterations))
        return replace(BASE, largest=float(len(asked)))

    found = sensitivities(profile, [chain(10, 20)], serve, factors=(2.0, 0.5, 1.0))
    keys = [each.assumption.key for each in found]
    assert keys == ["hbm", "bandwidth", "compute", "length"]  # nothing crosses PCIe
    assert [[v.factor for v in each.variants] for each in found] == [[0.5, 1.0, 2.0]] * 4
    assert all(each.variants[1].result.largest == 1 and each.candidate == 3 for each in found)
    assert [iterations for _, iterations in asked] == [20] * 7 + [40, 10]
    assert [machine.hbm_bytes for machine, _ in asked][:3] == [
        profile.hbm_bytes, 2 * profile.hbm_bytes, profile.hbm_bytes // 2]  # fmt: skip
    assert found[0].base == profile.hbm_bytes
    assert (found[-1].assumption, found[-1].base) == (LENGTH, 1)


def test_pcie_counts_where_something_crosses_it() -> None:
    demand = random_demand(np.random.default_rng(0))
    assert len(demand.legs)
    found = sensitivities(load_profile("h100"), [demand], lambda *_: BASE)
    assert "pcie" in [each.assumption.key for each in found]


@pytest.fixture(scope="module")
def served():
    """The small workload's recommended candidate, evaluated again with single numbers changed."""
    workload = small_workload()
    planner = Planner(workload)
    candidate = planner.candidates[0]
    demands, plan = planner.demands_of(0), small_plan().candidates[0]
    curve = load_curve(workload, candidate.hardware, demands, plan)
    serve = server(workload, candidate, demands)
    profile = candidate.hardware.profile
    found = sensitivities(profile, demands.demands, serve, factors=(0.5, 1.0, 2.0))
    return plan, curve, found


def test_the_largest_load_follows_what_is_changed(served) -> None:
    *_, found = served
    largest = {
        each.assumption.key: [variant.result.largest or 0.0 for variant in each.variants]
        for each in found
    }
    for key in ("hbm", "bandwidth", "compute"):
        assert largest[key] == sorted(largest[key])
    assert largest["length"] == sorted(largest["length"], reverse=True)
    assert largest["bandwidth"][0] < largest["bandwidth"][-1]
    assert largest["length"][0] > 2 * largest["length"][-1]
    half = next(each for each in found if each.assumption.key == "hbm").variants[0].result
    assert half.status == UNFIT  # 12 GB hold no 16 GB of weights
    assert not half.curve


def test_a_curve_leads_through_the_largest_load(served) -> None:
    plan, curve, found = served
    loads = [point.load for point in curve]
    stated = {plan.at_stated.load} if plan.at_stated is not None else set()
    assert loads == sorted({share * plan.largest for share in SHARES} | stated)
    assert plan.at_largest in curve
    times = [point.at_percentile.value for point in curve]
    assert times[0] < times[-1]
    alone = load_curve(small_workload(), None, None, replace(plan, largest=None))
    assert alone == ()
    assert all(len(v.result.curve) == 4 for each in found for v in each.variants
               if v.result.largest)  # fmt: skip


def test_the_break_even_price() -> None:
    plan = small_plan()
    chosen, other = plan.candidates[0], plan.candidates[2]
    assert (plan.recommendation.candidate, plan.recommendation.alternative) == (0, 2)
    assert (chosen.policy, chosen.hardware != other.hardware) == (other.policy, True)
    factor = sum(other.fleet.cost_per_1000) / sum(chosen.fleet.cost_per_1000)
    assert break_even(plan) == (other, pytest.approx(factor))
    for alternative in (None, 1):  # without one, and on the same GPU
        named = replace(plan.recommendation, alternative=alternative)
        assert break_even(replace(plan, recommendation=named)) == (other, pytest.approx(factor))
    assert break_even(replace(plan, candidates=plan.candidates[:2])) is None
    none = replace(plan.recommendation, candidate=None)
    assert break_even(replace(plan, recommendation=none)) is None


def test_a_curve_over_clients_has_whole_ones_once() -> None:
    workload = small_workload(
        ('kind = "poisson"\nrate_per_s = 20.0', 'kind = "closed-loop"\nclients = 4')
    ).with_run_length(24, 4, 1)
    planner = Planner(workload)
    candidate, demands = planner.candidates[0], planner.demands_of(0)
    result = evaluate(workload, candidate, demands, longer=False)
    curve = load_curve(workload, candidate.hardware, demands, result, (0.1, 0.11, 0.5, 1.0))
    clients = [point.load for point in curve]
    assert clients == sorted({max(1, round(s * result.largest)) for s in (0.1, 0.11, 0.5, 1.0)})
    assert curve[-1] is result.at_largest
