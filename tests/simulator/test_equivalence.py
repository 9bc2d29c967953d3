"""Closed form and event by event are the same simulation; and both conserve what they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.measurements import Measurements
from arborsim.core.tiers import MOST_TIERS, Tier
from arborsim.machine.profile import HardwareProfile, Memory
from arborsim.machine.transfers import stretches
from arborsim.memory.moves import ALL_GROUPS, Moves
from tests.simulator.bench import GEOMETRY, Bench, moves, profile
from tests.simulator.literal import LiteralExecutor

#: Irregular speeds, so that no transfer ends exactly when an iteration does.
MACHINE = profile(
    h2d_bytes_per_s=0.717e6, d2h_bytes_per_s=0.523e6, ddr_bytes_per_s=0.391e6,
    pcie_latency_s=13.7e-6, decision_base_s=3.1e-6, decision_per_token_s=0.17e-6,
    per_layer_s=1.3e-6, block_bytes=(64.0, 1024.0), block_efficiency=(0.3, 1.0),
    memories=(
        Memory("NVMe", 1 << 40, 0.217e6, 0.113e6, 71.3e-6),
        Memory("remote", 1 << 40, 0.091e6, 0.083e6, 31.9e-6, (64.0, 4096.0), (0.2, 1.0)),
    ),
)  # fmt: skip

OPTIONS = st.fixed_dictionaries(
    {
        "groups": st.sampled_from([1, 2]),
        "page_tokens": st.sampled_from([1, 4, 16]),
        "recall": st.sampled_from(["stage", "stream", "near", "ondemand"]),
        "fused": st.booleans(),
        "tree_attention": st.booleans(),
        "overlap": st.booleans(),
        "compact": st.booleans(),
        "bounds_page": st.sampled_from([0, 4]),
    }
)
#: Tokens go to memories below DDR, too, which only ``stage`` recalls.
BELOW = {"recall": "stage", "tiers": MOST_TIERS}


def options_of(options: dict[str, Any], below: bool) -> dict[str, Any]:
    return {**options, **BELOW} if below else options


def known(bench: Bench) -> list[Tier]:
    """Tiers that its ledger counts."""
    return [tier for tier in Tier if tier < bench.executor.ledger.tiers]


def random_moves(rng: np.random.Generator, bench: Bench, steps: int, tiers: list[Tier]) -> Moves:
    """A few tokens each go somewhere, within a run of `steps` iterations that is about to come."""
    width, held = len(bench.leaves), bench.tree.num_tokens
    token = rng.permutation(held + steps * width)[: rng.integers(0, 12)]
    first = np.maximum(0, (token - held) // width)
    step = np.array([rng.integers(f, steps) for f in first], dtype=np.int64)
    order = np.argsort(step, kind="stable")
    group = rng.integers(ALL_GROUPS, bench.executor.ledger.groups, len(token))
    target = rng.choice(np.array(tiers), len(token)).astype(np.int8)
    return Moves(
        step[order], group[order].astype(np.int32), token[order].astype(np.int64), target[order]
    )


def random_search(
    bench: Bench, seed: int, check: Callable[[Bench], None], selects: bool = False
) -> Measurements:
    """Transitions, runs with moves inside and decisions outside, all drawn from `seed`.

    With `selects`, most decisions say what is read.
    """
    rng = np.random.default_rng(seed)
    bench.prefill(int(rng.integers(1, 30)))
    check(bench)
    for _ in range(8):
        size = len(bench.tree)
        leaves = {size, *rng.integers(1, size + 1, rng.integers(0, 3)).tolist()}
        parents = rng.integers(0, size)
        bench.turn(*sorted(leaves), parent=int(parents))
        check(bench)
        steps = int(rng.integers(1, 25))
        # Moves that start transfers are rarer, or no closed form would ever be taken.
        tiers = known(bench) if rng.random() < 0.5 else [Tier.HBM_QUANTISED, Tier.EVICTED]
        bench.decode(steps, random_moves(rng, bench, steps, tiers))
        check(bench)
        outside = random_moves(rng, bench, 1, known(bench))
        born = outside.token < bench.tree.num_tokens
        made = Moves(*(getattr(outside, n)[born] for n in ("step", "group", "token", "target")))
        reads = None
        if selects and rng.random() < 0.8:
            tier = bench.executor.tier.copy()
            made.carry_out(tier)
            reads = (tier != Tier.EVICTED) & (rng.random(tier.shape) < rng.choice([0.1, 0.5, 1.0]))
        bench.executor.apply(made, examined_tokens=bench.tree.num_tokens, reads=reads)
        check(bench)
    assert bench.executor.clock() == pytest.approx(bench.us("total_s") / 1e6)
    bench.executor.finish()
    check(bench)
    return bench.executor.measurements()


def conserves(bench: Bench) -> None:
    """Bytes are neither lost nor made up, and the books agree with each other."""
    executor = bench.executor
    executor.ledger.check()
    measured = executor.measurements()
    series = measured.series
    held = [
        sum(parts)
        for parts in zip(
            series.hbm_kv_bytes, series.staging_bytes, series.in_flight_bytes, strict=True
        )
    ]
    assert max(held) == measured.peak_hbm_kv_bytes
    assert series.time_s == sorted(series.time_s)
    assert min(series.staging_bytes) >= 0
    assert min(series.in_flight_bytes) >= 0
    assert len(held) <= 512


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), options=OPTIONS, selects=st.booleans(), below=st.booleans())
def test_closed_form_equals_event_by_event(
    seed: int, options: dict[str, Any], selects: bool, below: bool
) -> None:
    """Invariant 12: one search."""
    options = options_of(options, below)
    one, other = Bench(MACHINE, **options), Bench(MACHINE, **options, event_by_event=True)
    fast, slow = (random_search(each, seed, lambda _: None, selects) for each in (one, other))
    for name, value in asdict(fast).items():
        if name == "time":
            for part, seconds in value.items():
                assert seconds == pytest.approx(getattr(slow.time, part), rel=1e-9, abs=1e-12), part
        elif name == "hbm_byte_seconds":
            # What rounds tokens of a run is played after it, when memory has changed already.
            assert value == pytest.approx(slow.hbm_byte_seconds, rel=1e-2)
        elif name == "stored":
            for memory, each in value.items():
                for field, expected in asdict(slow.stored[memory]).items():
                    assert each[field] == pytest.approx(expected, rel=1e-9), (memory, field)
        elif name != "series":
            assert value == pytest.approx(getattr(slow, name), rel=1e-12), name


class LiteralBench(Bench):
    """A bench whose searches are played by the oracle."""

    def __init__(self, machine: HardwareProfile, **options: Any) -> None:
        super().__init__(machine)
        self.executor: Any = LiteralExecutor(GEOMETRY, machine, **options)
        self.executor.bind(self.tree)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), options=OPTIONS, selects=st.booleans(), below=st.booleans())
def test_a_program_played_is_the_literal_replay(
    seed: int, options: dict[str, Any], selects: bool, below: bool
) -> None:
    options = options_of(options, below)
    one, other = Bench(MACHINE, **options), LiteralBench(MACHINE, **options)
    fast, slow = (random_search(each, seed, lambda _: None, selects) for each in (one, other))
    for part in ("prefill_s", "decode_s", "policy_s", "exposed_transfer_s", "rehydration_s"):
        expected = pytest.approx(getattr(slow.time, part), rel=1e-9, abs=1e-12)
        assert getattr(fast.time, part) == expected, part
    for name in (
        "peak_hbm_kv_bytes", "peak_hbm_kv_tokens", "peak_ddr_bytes", "peak_quantised_bytes",
        "peak_staging_bytes", "to_ddr_bytes", "from_ddr_bytes", "rehydrations",
        "kv_read_bytes", "bounds_read_bytes",
    ):  # fmt: skip
        assert getattr(fast, name) == getattr(slow, name), name
    for memory in MACHINE.memories:
        at, found = memory.number, fast.stored[memory.name]
        literal = other.executor
        assert found.peak_bytes == literal.stored_peaks[at]
        assert (found.to_bytes, found.from_bytes) == tuple(
            literal.carried[at, up] for up in (False, True)
        )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), options=OPTIONS, selects=st.booleans())
def test_conservation_at_every_event(seed: int, options: dict[str, Any], selects: bool) -> None:
    """Invariants 1 and 2: bytes and the order of time, after every event."""
    bench = Bench(MACHINE, **options)
    random_search(bench, seed, conserves, selects)
    series = bench.executor.measurements().series
    assert series.in_flight_bytes[-1] == 0  # everything has landed


def test_a_repeat_is_identical() -> None:
    def run() -> str:
        return repr(random_search(Bench(MACHINE, page_tokens=4), 7, lambda bench: None))

    assert run() == run()


def test_staging_is_what_the_active_paths_hold_in_ddr() -> None:
    bench = Bench(MACHINE)
    rng = np.random.default_rng(3)

    def check(bench: Bench) -> None:
        if bench.executor._program.under_way or len(bench.tree) < 2:
            return
        on_path = bench.tree.on_path(bench.leaves)[bench.tree.node_of_token.values]
        tier = bench.executor.tier[0]
        small = bench.executor.ledger.bytes_by_tier
        staged = sum(
            int(small[t]) * int(((tier == t) & on_path).sum()) for t in Tier if t.offloaded
        )
        assert bench.executor.staging_bytes == staged

    for _ in range(10):
        bench = Bench(MACHINE, overlap=False)
        random_search(bench, int(rng.integers(1 << 30)), check)


def test_a_run_that_starts_no_transfer_is_one_closed_form() -> None:
    bench = Bench(MACHINE)
    bench.prefill(8)
    bench.turn(1)
    steps = 32_768
    inside = moves(np.arange(steps), Tier.EVICTED, step=np.arange(steps))
    changes = bench.executor.ledger.resolve(inside, arriving=steps)
    assert list(stretches(steps, changes, 1, lambda: False)) == [(0, steps, True)]
    bench.decode(steps, inside)
    assert bench.executor.ledger.hbm_tokens == 8
    bench.executor.ledger.check()


def test_a_transfer_cuts_the_run_where_it_starts() -> None:
    bench = Bench(MACHINE)
    bench.prefill(8)
    bench.turn(1)
    inside = moves([1, 2, 3], [Tier.EVICTED, Tier.DDR, Tier.EVICTED], step=[2, 5, 9])
    changes = bench.executor.ledger.resolve(inside, arriving=20)
    assert list(stretches(20, changes, 1, lambda: False)) == [
        (0, 5, True),
        (5, 6, False),
        (6, 20, True),
    ]
