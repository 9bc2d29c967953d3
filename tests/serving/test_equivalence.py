"""Closed form and event by event are the same engine, and both lose nothing."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.machine.clock import Iterate
from arborsim.machine.engine import EngineProfile
from arborsim.machine.integration import PolicySeconds
from arborsim.machine.lookup import load_engine
from arborsim.machine.machine import ServingOptions
from arborsim.machine.profile import Memory
from arborsim.machine.program import SearchDemand
from arborsim.machine.report import ServingReport
from arborsim.machine.scheduler import Arrivals, ClosedLoop, Timed
from arborsim.machine.server import Server
from arborsim.machine.serving import ServingEngine
from arborsim.machine.state import State
from tests.serving.literal import play_event_by_event
from tests.serving.make import random_demand
from tests.simulator.bench import GEOMETRY, KV, profile

#: Irregular speeds, so that few things happen at the same time by chance.
SPEEDS: dict[str, Any] = {
    "h2d_bytes_per_s": 0.717e6, "d2h_bytes_per_s": 0.523e6, "ddr_bytes_per_s": 0.391e6,
    "pcie_latency_s": 13.7e-6, "decision_base_s": 3.1e-6, "decision_per_token_s": 0.17e-6,
    "per_layer_s": 1.3e-6, "per_step_s": 2.3e-6, "per_sequence_s": 0.71e-6, "flops_per_s": 1.37e9,
    "eager_per_layer_s": 0.37e-6, "wide_per_layer_s": 0.23e-6,
    "block_bytes": (64.0, 1024.0), "block_efficiency": (0.3, 1.0),
    "all_reduce_gpus": (2.0, 4.0), "all_reduce_bytes_per_s": (1e8, 0.6e8),
    "all_reduce_latency_s": (1.1e-6, 1.7e-6),
}  # fmt: skip
#: What the policy "p" of the demands takes where somebody has measured it.
POLICY = PolicySeconds(0.53e-6, 0.29e-6, 1.9e-6, 0.83e-6, 3.1e-6, 0.17e-6, 0.31e-6, 0.19e-6)
LARGE = 1 << 40


def random_inference_engine(rng: np.random.Generator) -> EngineProfile:
    """Measured kernels, under an engine of every kind."""
    return replace(
        load_engine(str(rng.choice(["vllm", "sglang", "transformers"]))),
        launch_s=float(rng.choice([0.0, 30e-6])),
        layer_launches=1.0,
        search_launches=0.3,
        rows_launches=0.7,
        mixes_prefill=bool(rng.random() < 0.6),
        chunk_tokens=int(rng.choice([0, 5, 8192])),
        layer_s=float(rng.choice([0.0, 1.3e-6])),
        request_s=float(rng.choice([0.0, 1.7e-3])),
    )


def blockwise(rng: np.random.Generator, source: SearchDemand) -> SearchDemand:
    """Its prefix is made of few kinds of blocks, so that only some of it may be shared."""
    block_tokens = int(rng.choice([1, 2, 5]))
    blocks = rng.integers(0, 2, -(-source.info.prefix_tokens // block_tokens)).tolist()
    info = replace(source.info, prefix_blocks=tuple(blocks), prefix_block_tokens=block_tokens)
    return replace(source, info=info)


def random_engine(rng: np.random.Generator) -> tuple[ServingEngine, Arrivals]:
    """A machine that is too small for some, with every option drawn."""
    demands = [
        random_demand(rng, str(rng.choice(["", "a", "b", "c"]))) for _ in range(rng.integers(1, 6))
    ]
    options = ServingOptions(
        max_searches=int(rng.choice([2, 100])),
        prefill_chunk=int(rng.choice([0, 0, 3, 7])),
        preemption=str(rng.choice(["swap", "recompute"])),
        prefix_sharing=bool(rng.random() < 0.75),
        prefix_block_tokens=int(rng.choice([1, 3, 16])),
        prefix_host_bytes=int(rng.choice([0, 15 * KV, LARGE])),
        prefix_load_tokens=int(rng.choice([1, 3])),
        watermark=float(rng.choice([0, 0.05])),
        tensor_parallel=int(rng.choice([1, 1, 2, 3])),
        nvme_bytes=int(rng.choice([0, 20 * KV, LARGE])),
        nvme_bytes_per_s=0.3e6,
    )
    kernels: dict[str, Any] = {}
    if rng.random() < 0.4:
        kernels = {"kernels": "h100", "engine": random_inference_engine(rng)}
    machine = profile(
        **SPEEDS,
        **kernels,
        overlap=float(rng.choice([1.0, 0.6])),
        ddr_bytes=int(rng.choice([30 * KV, 100 * KV, LARGE])),
        memories=(
            Memory("NVMe", int(rng.choice([40 * KV, LARGE])), 0.217e6, 0.113e6, 71.3e-6),
            Memory("remote", LARGE, 0.091e6, 0.083e6, 31.9e-6, (64.0, 4096.0), (0.2, 1.0)),
        ),
        policies={"p": POLICY} if rng.random() < 0.5 else {},
    )
    count = int(rng.integers(1, 12))
    which = rng.integers(0, len(demands), count).tolist()
    arrivals: Arrivals
    if rng.random() < 0.7:
        times = rng.exponential(0.02, count).cumsum().tolist()
        arrivals = Timed(tuple(zip(times, which, strict=True)))
    else:
        think_s = float(rng.choice([0, 0.0113]))
        arrivals = ClosedLoop(int(rng.integers(1, 5)), tuple(which), think_s)
    kv_bytes = int(rng.integers(20, 300)) * KV
    if rng.random() < 0.5:
        demands = [blockwise(rng, each) for each in demands]
    return ServingEngine(demands, machine, GEOMETRY, options, kv_bytes=kv_bytes), arrivals


def assert_same(
    fast: ServingReport, slow: ServingReport, memories: Collection[str] = ("NVMe", "remote")
) -> None:
    for ours, theirs in zip(fast.searches, slow.searches, strict=True):
        for field in fields(ours):
            expected = getattr(theirs, field.name)
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert getattr(ours, field.name) == expected, field.name
    for name in (
        "tokens", "iterations", "preemptions", "peak_hbm_bytes", "peak_host_bytes",
        "to_host_bytes", "from_host_bytes",
    ):  # fmt: skip
        assert getattr(fast, name) == getattr(slow, name), name
    for part in ("busy", "used"):
        for field in fields(getattr(fast, part)):
            value = getattr(getattr(fast, part), field.name)
            expected = getattr(getattr(slow, part), field.name)
            if isinstance(value, dict):  # by memory
                assert value.keys() == expected.keys() == set(memories)
            assert value == pytest.approx(expected, rel=1e-7, abs=1e-9), field.name
    assert fast.prefixes == slow.prefixes
    assert fast.first_s == pytest.approx(slow.first_s, rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_closed_form_equals_event_by_event(seed: int) -> None:
    """Invariant 12: many searches."""
    engine, arrivals = random_engine(np.random.default_rng(seed))
    assert_same(engine.run(arrivals), engine.run(arrivals, play_event_by_event))


def test_the_random_cases_reach_every_rule() -> None:
    """Else agreement would say nothing."""
    seen: dict[str, int] = dict.fromkeys(
        ("hbm", "host", "below", "searches", "preempted", "refused"), 0
    )
    spent: dict[str, float] = {}
    for seed in range(60):
        engine, arrivals = random_engine(np.random.default_rng(seed))
        report = engine.run(arrivals)
        for name in report.first_s:
            seen[name] += 1
        seen["preempted"] += report.preemptions
        seen["refused"] += sum(bool(search.refused) for search in report.searches)
        for field in fields(report.busy):
            spent[field.name] = spent.get(field.name, 0.0) + getattr(report.busy, field.name)
        for field in fields(report.prefixes):
            spent[field.name] = spent.get(field.name, 0) + getattr(report.prefixes, field.name)
        for name, share in {**report.used.below, **report.used.links}.items():
            spent[name] = spent.get(name, 0.0) + share
    assert all(seen.values()), seen
    assert all(spent.values()), spent


class CheckedServer:
    """Checks a server's books whenever it asks for time to pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checks = 0
        self.latest_s = 0.0
        loop = Server.loop
        checked = self

        def watched(server: Server) -> Any:
            checked.latest_s = 0.0
            for command in loop(server):
                checked.check(server.state)
                if isinstance(command, Iterate) and len(server.state.batch):
                    needed = server.state.hbm.value + server.state.batch.sums.hbm
                    assert needed <= server.state.kv_bytes
                yield command
            checked.check(server.state)

        monkeypatch.setattr(Server, "loop", watched)

    def check(self, server: State) -> None:
        self.checks += 1
        assert server.clock.now >= self.latest_s
        self.latest_s = server.clock.now
        resident = [search for search in server.searches if search.resident]
        held = sum(search.hbm_bytes for search in resident if search.key not in server.batch)
        held += sum(search.extra_bytes for search in resident if search.key in server.batch)
        assert server.hbm.value == held + server.prefixes.bytes
        decoding = [search for search in resident if search.key in server.batch]
        assert len(decoding) == len(server.batch)
        on_host = sum(search.ddr_bytes for search in server.searches if not search.ended)
        on_host += sum(
            search.restore.swapped_bytes
            for search in server.searches
            if search.restore and not search.ended
        )
        copies = server.host.copies
        assert server.host.level.value == on_host + copies.bytes
        assert copies.bytes <= server.options.prefix_host_bytes
        assert not copies.bytes or server.host.level.value <= server.host.ddr_bytes
        for shelf in (server.prefixes, copies):
            assert shelf.bytes == sum(prefix.held_bytes for prefix in shelf.values())
            assert all(0 <= prefix.filled <= prefix.held for prefix in shelf.values())
            assert all(0 < prefix.held <= prefix.tokens for prefix in shelf.values())
            unused = [prefix.held_bytes for prefix in shelf.values() if not prefix.references]
            assert shelf.unused_bytes() == sum(unused)
        assert 0 <= server.host.level.value <= server.host.ddr_bytes + server.host.nvme_bytes
        for memory, level in server.stored.items():
            there = [each for each in server.searches if each.admitted_s >= 0 and not each.ended]
            assert level.value == sum(each.stored_bytes.get(memory, 0) for each in there)
            assert level.value <= server.reserved_bytes[memory] <= server.stored_capacity[memory]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_nothing_is_lost(seed: int) -> None:
    """Invariants 1 and 2: of many searches on one machine."""
    engine, arrivals = random_engine(np.random.default_rng(seed))
    with pytest.MonkeyPatch.context() as monkeypatch:
        checked = CheckedServer(monkeypatch)
        report = engine.run(arrivals)
    assert checked.checks or all(search.refused for search in report.searches)
    served = [search for search in report.searches if not search.refused]
    for search in served:
        source = engine.demands[search.demand].source
        assert search.generated_tokens == source.generated_tokens
        assert search.arrival_s <= search.admitted_s <= search.first_token_s <= search.finish_s
    aborted = any("outgrown" in s.refused or "next to" in s.refused or "part" in s.refused
                  for s in report.searches)  # fmt: skip
    if not aborted:
        assert report.tokens == sum(search.generated_tokens for search in served)
    most = sum(
        (1 + search.preemptions) * engine.demands[search.demand].prefix_tokens
        for search in report.searches
    )
    prefixes = report.prefixes
    assert prefixes.hbm + prefixes.ddr + prefixes.computed <= most, "once for each place"
    assert report.busy.total_s <= report.total_s * (1 + 1e-9)
    assert len(report.series.time_s) <= engine.options.series_points
    assert report.series.time_s == sorted(report.series.time_s)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_same_seed_gives_the_same_bytes(seed: int) -> None:
    runs = []
    for _ in range(2):
        engine, arrivals = random_engine(np.random.default_rng(seed))
        runs.append(pickle.dumps([engine.run(arrivals), engine.run(arrivals)]))
    assert runs[0] == runs[1]
