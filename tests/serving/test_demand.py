"""A demand, played alone on an idle machine, is the search that it was recorded from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.core.tiers import Budget
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.integration import Longer
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine, ServingOptions
from arborsim.machine.program import (
    FIXED,
    LINEAR,
    Op,
    Piece,
    SearchDemand,
    cut,
    iterations,
    joined,
)
from arborsim.machine.serving import ServingEngine
from arborsim.machine.writing import OpenProgram
from arborsim.play.episode import record_demand
from arborsim.policies.registry import build
from arborsim.trace.reader import TraceReader
from tests.helpers.demands import record_demands
from tests.serving.make import chain, random_demand
from tests.simulator.bench import GEOMETRY, Bench, executor
from tests.simulator.test_equivalence import MACHINE, random_search

TRACES = Path(__file__).parents[2] / "traces"
H100 = load_profile("h100")
LLAMA = load_geometry("llama-3.1-8b")

CASES = [
    (trace, policy, budget, recall)
    for trace in ("chain-linear", "chain-tree", "game24-tot")
    for policy, budget, recall in (
        ("full", "1", "stage"),
        ("streaming-llm", "0.5", "stage"),
        ("thinkv", "0.5", "stage"),
        ("hierarchy", "0.5", "stage"),
        ("hierarchy", "0.5", "stream"),
        ("hierarchy", "0.5", "near"),
        ("hierarchy", "0.5", "ondemand"),
    )
] + [
    ("chain-tree", "arborkv", "0.5", "stage"),
    ("game24-tot", "arborkv", "0.5", "stage"),
    ("chain-vectors", "arkv", "0.8", "stage"),
    ("chain-tree", "staircase", "0.5", "stage"),
]


@pytest.mark.parametrize(("trace", "policy", "budget", "recall"), CASES)
def test_demand_alone_is_the_replay(trace: str, policy: str, budget: str, recall: str) -> None:
    """Invariant 13: bytes to the byte, seconds to rounding."""
    built = build(policy)
    reader = TraceReader(TRACES / f"{trace}.parquet")
    (episode,) = reader.episodes(tuple(sorted(built.reads())), start=0, stop=1)
    # ARKV ranks per head of the recorded model, which a larger one's token need not divide by.
    geometry = episode.info.geometry if policy == "arkv" else LLAMA
    machine = Machine(H100, geometry, recall=recall)
    demand, measured = record_demand(episode, built, Budget.parse(budget), machine)
    alone = ServingEngine([demand], H100, geometry).alone[0]
    assert alone.seconds == pytest.approx(measured.time.total_s, rel=1e-12)
    assert alone.peak_hbm_bytes == measured.peak_hbm_kv_bytes
    assert demand.peak_ddr_bytes == measured.peak_ddr_bytes
    assert demand.generated_tokens == measured.generated_tokens
    assert demand.iterations == measured.iterations
    assert demand.prompt_tokens == measured.prompt_tokens
    if policy == "arborkv":
        assert (demand.ops[:, 0] == Op.RECOMPUTE).sum() == measured.rehydrations
    down, up = (demand.legs[demand.legs[:, 1] == way, 2].sum() for way in (0, 1))
    streamed = int(demand.column("iterations") @ demand.column("streamed_bytes"))
    if recall in ("stage", "stream"):  # the messages of the others belong to iterations
        assert (down, up + streamed) == (measured.to_ddr_bytes, measured.from_ddr_bytes)


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "gemma-3-1b"])
@pytest.mark.parametrize(
    ("policy", "recall"), [("full", "stage"), ("thinkv", "stage"), ("hierarchy", "stream")]
)
def test_other_caches_alone_are_their_replay(model: str, policy: str, recall: str) -> None:
    """A mixture of experts with latent attention, and windows short enough to matter."""
    geometry, built = load_geometry(model), build(policy)
    geometry = replace(geometry, window=100) if geometry.window else geometry
    reader = TraceReader(TRACES / "chain-tree.parquet")
    (episode,) = reader.episodes(tuple(sorted(built.reads())), start=0, stop=1)
    machine = Machine(H100, geometry, recall=recall)
    demand, measured = record_demand(episode, built, Budget.parse("0.5"), machine)
    alone = ServingEngine([demand], H100, geometry).alone[0]
    assert alone.seconds == pytest.approx(measured.time.total_s, rel=1e-12)
    assert alone.peak_hbm_bytes == measured.peak_hbm_kv_bytes
    if model == "gemma-3-1b":
        windowed = Machine(H100, geometry, recall="near")
        with pytest.raises(UsageError, match="'near' cannot be recorded for serving gemma-3-1b"):
            record_demand(episode, built, Budget.parse("0.5"), windowed)


def test_demands_with_rehydration_are_among_the_cases() -> None:
    (demand,) = record_demands(
        TRACES / "chain-tree.parquet", build("arborkv"), Budget.parse("0.5"),
        Machine(H100, LLAMA), first=0, count=1,
    )  # fmt: skip
    assert (demand.ops[:, 0] == Op.RECOMPUTE).any()
    assert demand.info.trace == "chain-tree.parquet"
    assert demand.info.solved in (0, 1)
    assert demand.nbytes < 1 << 20


class PeakAtTheEnd(SimulatedExecutor):
    """Knows the peak of the search itself, without transfers that outlive it."""

    peak_bytes = 0

    def finish(self) -> None:
        self.peak_bytes = self.measurements().peak_hbm_kv_bytes
        super().finish()


class RecordingBench(Bench):
    """A bench whose searches are recorded."""

    def __init__(self, machine: Any, **options: Any) -> None:
        super().__init__(machine)
        self.executor = executor(machine, GEOMETRY, PeakAtTheEnd, record=True, **options)
        self.executor.bind(self.tree)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    options=st.fixed_dictionaries({
        "groups": st.sampled_from([1, 2]),
        "page_tokens": st.sampled_from([1, 4, 16]),
        "recall": st.sampled_from(["stage", "stream", "near", "ondemand"]),
        "fused": st.booleans(),
        "tree_attention": st.booleans(),
        "overlap": st.booleans(),
        "bounds_page": st.sampled_from([0, 4]),
    }),
    selects=st.booleans(),
)  # fmt: skip
def test_random_searches_alone_are_their_replay(
    seed: int, options: dict[str, Any], selects: bool
) -> None:
    bench = RecordingBench(MACHINE, **options)
    measured = random_search(bench, seed, lambda bench: None, selects)
    assert isinstance(bench.executor, PeakAtTheEnd)
    demand = bench.executor.demand()
    alone = ServingEngine([demand], MACHINE, GEOMETRY).alone[0]
    assert alone.seconds == pytest.approx(measured.time.total_s, rel=1e-9)
    assert alone.peak_hbm_bytes == bench.executor.peak_bytes
    assert demand.peak_ddr_bytes == measured.peak_ddr_bytes


def test_the_shared_prefix_is_what_the_ledger_still_holds_of_it() -> None:
    """StreamingLLM keeps four sinks and gives the rest of the prompt up."""
    policy = build("streaming-llm", {"sinks": "4"})
    (demand,) = record_demands(
        TRACES / "chain-linear.parquet", policy, Budget.parse("0.3"), Machine(H100, LLAMA),
        count=1, prefix="system", prefix_tokens=32,
    )  # fmt: skip
    token = LLAMA.kv_bytes_per_token
    levels = demand.ops[demand.ops[:, 0] == Op.LEVEL]
    assert levels[0, 2] == 32 * token
    assert levels[-1, 2] == 4 * token
    (plain,) = record_demands(
        TRACES / "chain-linear.parquet", policy, Budget.parse("0.3"), Machine(H100, LLAMA), count=1
    )
    assert np.array_equal(plain.column("read_bytes").sum(), demand.column("read_bytes").sum())
    assert not plain.column("prefix_bytes").any()


def random_iterations(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantities that stay or grow by the same for some iterations, then change."""
    rng = np.random.default_rng(seed)
    fixed = np.repeat(rng.integers(0, 2, (count, len(FIXED))), rng.integers(1, 9, count), axis=0)
    linear = np.cumsum(
        np.repeat(rng.integers(-1, 2, (count, len(LINEAR))), rng.integers(1, 9, count), axis=0),
        axis=0,
    )
    steps = min(len(fixed), len(linear))
    return fixed[:steps], linear[:steps]


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 60))
def test_pieces_are_exact_and_as_few_as_can_be(seed: int, count: int) -> None:
    fixed, linear = random_iterations(seed, count)
    rows = cut(fixed, linear)
    back = []
    for row in rows:
        split = 1 + len(FIXED) + len(LINEAR)
        i = np.arange(row[0])[:, None]
        grown = row[1 + len(FIXED) : split] + i * row[split:]
        back.append(np.hstack([np.repeat(row[None, 1 : 1 + len(FIXED)], row[0], axis=0), grown]))
    assert np.array_equal(np.concatenate(back), np.hstack([fixed, linear]))
    assert all(map(np.array_equal, iterations(rows), (fixed, linear)))
    # The first iteration of a piece would not have continued the one before it.
    starts = np.cumsum(rows[:, 0])[:-1]
    for start, before in zip(starts, rows, strict=False):
        same = np.array_equal(fixed[start], fixed[start - 1])
        steady = before[0] == 1 or np.array_equal(
            linear[start] - linear[start - 1], linear[start - 1] - linear[start - 2]
        )
        assert not (same and steady)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 30), part=st.floats(0, 1))
def test_pieces_of_two_halves_join_to_those_of_the_whole(
    seed: int, count: int, part: float
) -> None:
    fixed, linear = random_iterations(seed, count)
    half = round(part * len(fixed))
    halves = [
        cut(fixed[own], linear[own]) for own in (slice(half), slice(half, None)) if len(fixed[own])
    ]
    assert np.array_equal(joined(np.concatenate(halves)), cut(fixed, linear))


@pytest.mark.parametrize("policy", ["full", "thinkv", "arborkv", "hierarchy", "epikv"])
@pytest.mark.parametrize("trace", ["chain-tree", "chain-linear"])
def test_turns_that_cost_nothing_leave_no_mark(
    trace: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record() -> SearchDemand:
        machine = Machine(H100, LLAMA)
        (found,) = record_demands(
            TRACES / f"{trace}.parquet", build(policy), Budget.parse("0.6"), machine, count=1
        )
        return found

    with_turns = record()
    assert (with_turns.ops[:, 0] == Op.TURN).any()
    monkeypatch.setattr(OpenProgram, "activate", lambda *_: None)
    never_noted = record()
    assert np.array_equal(with_turns.without_turns.ops, never_noted.ops)
    assert np.array_equal(with_turns.without_turns.pieces, never_noted.pieces)
    assert len(never_noted.ops) < len(with_turns.ops)
    assert never_noted.without_turns is never_noted


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_saved_and_loaded(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    demand = random_demand(np.random.default_rng(seed), "key")
    path = tmp_path_factory.mktemp("d") / "demand.npz"
    demand.save(path)
    loaded = SearchDemand.load(path)
    assert loaded.info == demand.info
    for name in ("ops", "pieces", "legs"):
        assert np.array_equal(getattr(loaded, name), getattr(demand, name))


def test_files_that_are_no_demands_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    for content in (b"", b"PK\x03\x04 nonsense", b"hello"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"x\.npz is not a recorded demand"):
            SearchDemand.load(path)
    np.savez(path, header=np.array('{"format": 99}'))
    with pytest.raises(UsageError, match="another format"):
        SearchDemand.load(path)
    with pytest.raises(UsageError, match="not a recorded demand"):
        SearchDemand.load(tmp_path / "missing.npz")
    chain(3, 5).save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at])
        with pytest.raises(UsageError, match="not a recorded demand"):
            SearchDemand.load(path)
    np.savez(path, header=np.array('{"format": 1}'), ops=np.zeros((2, 3), dtype=np.int64))
    with pytest.raises(UsageError, match="a table of shape"):
        SearchDemand.load(path)


def test_a_demand_belongs_to_a_model() -> None:
    with pytest.raises(UsageError, match=r"recorded for toy, not llama-3\.1-8b: record it again"):
        ServingEngine([chain(4, 4)], H100, LLAMA)


def test_prices_follow_a_demand_onto_other_machines() -> None:
    """What a demand asks for is the same elsewhere: full retention waits for nothing."""
    built = build("full")
    reader = TraceReader(TRACES / "chain-tree.parquet")
    (episode,) = reader.episodes((), start=0, stop=1)
    demand, _ = record_demand(episode, built, Budget.parse("1"), Machine(H100, LLAMA))
    other = load_profile("a100-80")
    _, measured = record_demand(episode, built, Budget.parse("1"), Machine(other, LLAMA))
    alone = ServingEngine([demand], other, LLAMA, ServingOptions()).alone[0]
    assert alone.seconds == pytest.approx(measured.time.total_s, rel=1e-12)


def test_a_piece_that_is_split_keeps_what_its_layers_take_longer() -> None:
    """Growing quantities begin where they have grown to. What a policy adds to a layer stays."""
    pair, whole = (1.0, 0.5), (8, 2)
    piece = Piece(4, 1, *[pair] * 6, whole, whole, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, Longer(3.0, 2.0))
    one, rest = piece.split(1)
    assert one.longer == rest.longer == Longer(3.0, 2.0)
    assert isinstance(rest.longer, Longer)
    assert (rest.compute_s, rest.hbm_bytes) == ((1.5, 0.5), (10, 2))
