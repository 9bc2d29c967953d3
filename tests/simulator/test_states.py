"""Recurrent states are charged: memory for each active path, and bytes of each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arborsim.core.tiers import Budget
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine, ServingOptions
from arborsim.machine.price import Price
from arborsim.policies.registry import build
from arborsim.products.generate.lengths import TreeSpec, fixed, write_generated
from arborsim.products.validate.published import request
from tests.helpers.demands import record_demands

PLAIN = replace(load_geometry("llama-3.1-8b"), cacheless_layers=24)
STATE = 40_000_000
HYBRID = replace(PLAIN, state_bytes=STATE)


@pytest.mark.parametrize("engine", ["", "vllm"])
def test_a_step_reads_and_writes_the_state_of_each_sequence(engine: str) -> None:
    profile = load_profile("h100", engine=engine) if engine else load_profile("h100")
    for gpus in (1, 2):
        priced = [
            Price(CostModel(profile, each), ServingOptions(tensor_parallel=gpus))
            for each in (PLAIN, HYBRID)
        ]
        demands = [request(each, 500, 100) for each in (PLAIN, HYBRID)]
        terms = [
            dict(each.iteration_terms(demand.info, demand.pieces))
            for each, demand in zip(priced, demands, strict=True)
        ]
        speed = profile.hbm_bytes_per_s * profile.mbu * gpus
        added_s = 99 * 2 * STATE / speed
        assert terms[0]["decode: recurrent states"].seconds == 0
        assert terms[1]["decode: recurrent states"].seconds == pytest.approx(added_s)


def test_requests_hold_their_states() -> None:
    plain, hybrid = (request(each, 500, 100) for each in (PLAIN, HYBRID))
    more = hybrid.column("hbm_bytes") - plain.column("hbm_bytes")
    assert np.unique(more).tolist() == [STATE]
    assert hybrid.ops[0, 1] - plain.ops[0, 1] == STATE


def test_every_active_path_of_a_tree_has_a_state(tmp_path: Path) -> None:
    trace = tmp_path / "tree.parquet"
    spec = TreeSpec(fixed(64), fixed(20), first=fixed(4))
    write_generated(spec, 1, 0, PLAIN, trace)
    found = []
    for geometry in (PLAIN, HYBRID):
        machine = Machine(load_profile("h100"), geometry)
        (demand,) = record_demands(trace, build("full", {}), Budget.parse("1"), machine)
        found.append(demand)
    more = found[1].column("hbm_bytes") - found[0].column("hbm_bytes")
    assert (more == STATE * found[0].column("sequences")).all()
    assert 4 in found[0].column("sequences").tolist()
