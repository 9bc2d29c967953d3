"""Every term of the time: they add up to the total, whatever the policy and the recall mode."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.core.errors import ResultError
from arborsim.core.tiers import RECALLS, Budget, Tier
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.machine.price import Price
from arborsim.machine.program import DemandInfo, Op
from arborsim.machine.reading import PAGE_TOKENS, PAGES_TOP
from arborsim.machine.serving import ServingEngine
from arborsim.machine.terms import Term, check_explained, names, total
from arborsim.policies.registry import build
from arborsim.products.explain import explained
from arborsim.products.plan.evaluate import HIDDEN, cost_terms
from arborsim.products.replay.run import Replay
from tests.helpers.demands import record_demands
from tests.helpers.traces import make_trace
from tests.simulator.bench import GEOMETRY, KV, PROFILE, Bench, profile

SETTINGS = {
    "h2o": {"per": "shared"},
    "hierarchy": {"interval": "8", "recent": "16"},
    "arborkv": {"margin": "4"},
}
POLICIES = ("full", "random", "h2o", "hierarchy", "arborkv")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(
        tmp_path_factory.mktemp("t") / "tree.parquet", kind="tree", prompt=24, nodes=16,
        block=(4, 16), episodes=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recall", "overlap", "model"),
    [(recall, 1.0, "llama-3.1-8b") for recall in RECALLS]
    + [("stage", 0.4, "gemma-3-1b"), ("ondemand", 0.4, "gemma-3-1b")],
)
def test_terms_add_up(tree: Path, recall: str, overlap: float, model: str) -> None:
    """Invariant 14: for every recall mode."""
    machine = Machine(
        replace(load_profile("h100"), overlap=overlap), load_geometry(model), recall, explain=True
    )
    policies = [build(name, SETTINGS.get(name)) for name in POLICIES]
    result = Replay([tree], policies, [Budget.parse("0.6")], machine, quality=False).run()
    assert len(result.episodes) >= 4
    for episode in result.episodes:
        time = episode.measured.time
        parts = {term.name: term for term in episode.terms}
        assert sum(term.seconds for term in episode.terms) == pytest.approx(time.total_s, rel=1e-9)
        for head, seconds in (
            ("prefill", time.prefill_s), ("decode", time.decode_s), ("policy", time.policy_s),
            ("transfers", time.exposed_transfer_s), ("rehydration", time.rehydration_s),
        ):  # fmt: skip
            own = sum(term.seconds for name, term in parts.items() if name.startswith(head))
            assert own == pytest.approx(seconds, rel=1e-9, abs=1e-15), head
        busy_s = sum(t.hidden_s for name, t in parts.items() if name.startswith("link busy"))
        moved = episode.measured.to_ddr_bytes and recall in ("stage", "stream")
        assert (busy_s > 0) == bool(moved) or recall in ("near", "ondemand")
        hidden_s = sum(t.hidden_s for name, t in parts.items() if name.startswith("transfers"))
        assert hidden_s == pytest.approx(time.hidden_transfer_s, rel=1e-9, abs=1e-15)
        assert list(parts) == [name for name in names() if name in parts]
    for terms in explained(result.episodes).values():
        assert all(isinstance(term, Term) for term in terms)


def test_not_explained_unless_asked(tree: Path) -> None:
    job = Replay(
        [tree], [build("full")], [Budget.parse("1")], Machine(load_profile("h100")), quality=False
    )
    assert all(not episode.terms for episode in job.run().episodes)


def test_what_is_bound_by_memory_hides_its_flops() -> None:
    cost = CostModel(load_profile("h100"), load_geometry("llama-3.1-8b"))
    prefill = cost.prefill(10_000)  # bound by compute
    info = DemandInfo("", 0, "full", "1", "stage", "", 1)
    parts = {term.name: term for term in Price(cost).op_terms(info, (Op.PREFILL, 10_000, 0, 0))}
    assert parts["prefill: matrix products"].seconds == prefill.matrices_s
    assert parts["prefill: weights and KV read"].seconds == 0
    assert parts["prefill: weights and KV read"].hidden_s == prefill.memory_s


def test_terms_of_several_searches() -> None:
    one = (Term("decode: FLOPs", 1.0, 2.0), Term("rehydration", 0.5))
    two = (Term("decode: FLOPs", 3.0),)
    assert total([one, two]) == (Term("decode: FLOPs", 4.0, 2.0), Term("rehydration", 0.5))


def test_on_the_command_line(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(tree), "--policy", "random", "--no-quality", "--explain"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("random  budget"))) :]
    table = table[2 : table.index("") if "" in table else None]
    rows = (re.match(r"  (.+?) +([-\d.,]+) +[-\d.]+%", line) for line in table)
    cells = {row[1]: row[2] for row in rows if row}
    whole = float(cells.pop("total").replace(",", ""))
    shown = [float(text.replace(",", "")) for text in cells.values() if text[0].isdigit()]
    assert len(shown) >= 5
    assert sum(shown) == pytest.approx(whole, rel=1e-4)
    assert main([*command, "--json"]) == 2
    assert "leave --json out" in capsys.readouterr().err


# Fetching on demand: 64 bytes per token and layer, two layers, pages of 16.


BOUNDS = 2 * 2 * 16 * 2  # of a page: two keys in two layers


def ondemand(tokens: int, in_ddr: int, heads: int = 1) -> Bench:
    bench = Bench(geometry=replace(GEOMETRY, kv_heads=heads), recall="ondemand")
    bench.prefill(tokens)
    bench.turn(1)
    bench.move(range(in_ddr), Tier.DDR)
    bench.executor.finish()
    bench.decode(1)
    return bench


def test_few_pages_are_all_fetched() -> None:
    bench = ondemand(400, PAGE_TOKENS * PAGES_TOP)
    measured = bench.executor.measurements()
    assert measured.from_ddr_bytes == PAGE_TOKENS * PAGES_TOP * KV
    # Everything is read: what is fetched from a buffer of one layer, after it has been fetched.
    # Bounds of 16 pages are in HBM, and read there.
    bounds = 16 * BOUNDS
    assert bench.us("decode_s") == pytest.approx(2000 + 401 * KV + bounds)
    assert measured.peak_staging_bytes == PAGE_TOKENS * PAGES_TOP * KV // 2 + bounds


def test_of_many_pages_some_are_fetched() -> None:
    bench = ondemand(1000, PAGE_TOKENS * 60)
    assert bench.executor.measurements().from_ddr_bytes == PAGE_TOKENS * PAGES_TOP * KV
    local = 1001 - PAGE_TOKENS * 60
    assert bench.us("decode_s") == pytest.approx(2000 + (local + 256) * KV + 60 * BOUNDS)
    # Per layer: pages up, less the attention to what is local.
    waited = 2 * (256 * KV / 2 - local * KV / 2)
    assert bench.us("exposed_transfer_s") == pytest.approx(waited, rel=1e-6)


def test_more_heads_want_more_pages() -> None:
    cost = CostModel(PROFILE, replace(GEOMETRY, kv_heads=2))
    per_head, fetched = cost.ondemand_tokens(np.array([16 * 64.0]), PAGE_TOKENS, PAGES_TOP)
    assert per_head == 256
    assert fetched == pytest.approx(1024 * (1 - (1 - 0.25) ** 2))
    latent = replace(GEOMETRY, kv_heads=2, latent_dim=8, rope_dim=4, value_dim=8)
    assert CostModel(PROFILE, latent).ondemand_tokens(np.array([1024.0]), 16, 16)[1] == 256


def test_nothing_in_ddr_costs_nothing() -> None:
    plain, other = (Bench(profile(), recall=recall) for recall in ("stage", "ondemand"))
    for bench in (plain, other):
        bench.prefill(50)
        bench.turn(1, 2)
        bench.decode(7)
    assert plain.us("total_s") == other.us("total_s")
    assert other.executor.measurements().from_ddr_bytes == 0


def test_the_device_tells_the_host_which_pages_once_a_layer() -> None:
    """Nothing hides that, whatever else there is to compute; DDR's speed plays no part."""
    cost = CostModel(replace(PROFILE, pcie_latency_s=1e-5), GEOMETRY)
    sizes = np.array([0.0, 64.0, 6400.0])
    told_s = GEOMETRY.layers * 1e-5
    wanted = [0.0, told_s + cost.copy_s(64.0), told_s + cost.copy_s(6400.0)]
    np.testing.assert_allclose(cost.page_choice_s(sizes), wanted)
    slow = CostModel(replace(cost.profile, ddr_bytes_per_s=1.0), GEOMETRY)
    np.testing.assert_array_equal(slow.page_choice_s(sizes), cost.page_choice_s(sizes))
    np.testing.assert_array_equal(slow.ondemand_s(sizes), cost.ondemand_s(sizes))


#: The host's work on a transfer, on a cache group in it, and on a byte; microseconds.
MOVING = {"move_s": 50e-6, "move_group_s": 7e-6, "move_byte_s": 3e-6}


@pytest.mark.parametrize("recall", ["stage", "stream", "near", "ondemand"])
def test_the_host_works_on_every_transfer(recall: str) -> None:
    """Down and up into staging at once, or down alone; then back to HBM.  Nothing else changes."""
    plain, priced = Bench(profile(), recall=recall), Bench(profile(**MOVING), recall=recall)
    for bench in (plain, priced):
        bench.prefill(100)
        bench.turn(1)
        bench.move(range(10), Tier.DDR)
        bench.executor.finish()
        bench.move(range(10), Tier.HBM)
        bench.decode(2)
    transfers = 2  # what is staged is not fetched again
    wanted = transfers * (50 + 7 + 3 * 10 * KV)
    for name in ("prefill_s", "decode_s", "policy_s"):
        assert priced.us(name) == pytest.approx(plain.us(name))
    worked = priced.us("total_s") - plain.us("total_s")
    assert worked == pytest.approx(wanted)
    exposed = priced.us("exposed_transfer_s") - plain.us("exposed_transfer_s")
    assert exposed == pytest.approx(wanted)
    one, other = (bench.executor.measurements().time.hidden_transfer_s for bench in (plain, priced))
    assert one == pytest.approx(other)


def test_pages_are_those_of_the_live_backend() -> None:
    remote = pytest.importorskip("arborsim_torch.cache.ondemand")
    assert (remote.PAGE_TOKENS, remote.PAGES_TOP) == (PAGE_TOKENS, PAGES_TOP)


@pytest.mark.parametrize("off", [0.9, 1.1])
def test_terms_that_leave_time_unexplained_are_an_error(
    tree: Path, off: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a replay and of a plan's search: the total is not made of the terms."""
    original = Price.iteration_terms

    def wrong(*given: Any) -> list[tuple[str, Term]]:
        found = original(*given)
        return [(plan, replace(term, seconds=off * term.seconds)) for plan, term in found]

    machine = Machine(load_profile("h100"), load_geometry("llama-3.1-8b"))
    (demand,) = record_demands(tree, build("full"), Budget.parse("1"), machine)
    engine = ServingEngine([demand], machine.profile, load_geometry("llama-3.1-8b"))
    right = cost_terms(engine, 0)
    assert sum(right.values()) == pytest.approx(engine.alone[0].seconds, rel=1e-9)
    assert right[HIDDEN] < 0
    monkeypatch.setattr(Price, "iteration_terms", wrong)
    with pytest.raises(ResultError, match=r"full, .*: cost terms explain .* and leave .* unexpl"):
        cost_terms(engine, 0)
    command = ["replay", str(tree), "--policy", "random", "--no-quality", "--explain"]
    assert main(command) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "cost terms explain" in said
    assert "report it" in said


def test_a_remainder_within_half_a_percent_is_rounding() -> None:
    check_explained(0.9951, 1.0, "it")
    check_explained(0.0, 0.0, "nothing")
    with pytest.raises(ResultError, match=r"it: cost terms explain 0\.9949 s of 1 s"):
        check_explained(0.9949, 1.0, "it")
    with pytest.raises(ResultError):
        check_explained(1.0051, 1.0, "it")
