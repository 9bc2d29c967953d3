"""Replays on real files: what must hold whatever the trace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.core.errors import ArborsimError, MissingSignal
from arborsim.core.observations import Signal
from arborsim.core.tiers import Budget, Tier
from arborsim.machine.integration import PolicySeconds
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.results import EpisodeResult, ReplayResult, aggregate
from arborsim.play.served import needed
from arborsim.policies.base import Policy
from arborsim.policies.registry import available, build
from arborsim.products.replay.run import Replay
from arborsim.products.replay.tables import to_json
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import decide_all
from tests.helpers.traces import make_trace

TIMED = (
    "Policy time of raas is assumed (50.0 µs a decision), not measured: `arborsim calibrate "
    "hardware` measures it on your machine."
)
SHARED = {"per": "shared"}
SMALL = {"h2o": SHARED, "hierarchy": {"interval": "8", "recent": "16"}, "arborkv": {"margin": "4"}}
#: Every kind of move: none, eviction by run and by decision, to DDR and to 8 bits, rehydration.
MOVERS = ("full", "random", "h2o", "hierarchy", "arborkv", "staircase")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(
        tmp_path_factory.mktemp("t") / "tree.parquet", kind="tree", prompt=24, nodes=40,
        block=(4, 16), episodes=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(
        tmp_path_factory.mktemp("t") / "linear.parquet", kind="linear", prompt=40, nodes=20,
        block=(10, 14), episodes=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with the vectors of all layers."""
    return make_trace(
        tmp_path_factory.mktemp("t") / "vectors.parquet", kind="linear", prompt=24, nodes=10,
        block=(8, 12), episodes=1, capture="qkv", layers=3, qkv_layers=(0, 1, 2),
    )  # fmt: skip


def policies(names: Iterable[str] | None = None) -> list[Policy]:
    return [build(name, SMALL.get(name)) for name in names or available()]


def replay(
    path: Path,
    chosen: list[Policy],
    budget: str = "0.7",
    machine: Machine | None = None,
    **options: Any,
) -> ReplayResult:
    machine = machine or Machine(load_profile("h100"), load_geometry("llama-3.1-8b"))
    budgets = [Budget.parse(text) for text in budget.split(",")]
    return Replay([path], chosen, budgets, machine, **options).run()


def by_policy(result: ReplayResult, episode: int = 0) -> dict[str, EpisodeResult]:
    return {r.policy: r for r in result.episodes if r.episode == episode}


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_full_never_evicts_and_its_peak_is_every_token(kind: str, linear: Path, tree: Path) -> None:
    """Invariant 10: full retention keeps all attention, in the bytes of all tokens."""
    path = linear if kind == "linear" else tree
    geometry = load_geometry("llama-3.1-8b")
    for result in replay(path, [build("full")]).episodes:
        episode = next(iter(TraceReader(path).episodes(start=result.episode)))
        measured = result.measured
        assert measured.peak_hbm_kv_bytes == episode.num_tokens * geometry.kv_bytes_per_token
        assert measured.peak_hbm_kv_tokens == episode.num_tokens
        assert measured.prompt_tokens + measured.generated_tokens == episode.num_tokens
        assert measured.evicted_tokens == measured.offloaded_tokens == 0
        assert measured.peak_ddr_bytes == measured.to_ddr_bytes == measured.from_ddr_bytes == 0
        assert result.attention_kept == 1.0


@pytest.mark.parametrize("recall", ["stage", "stream", "near"])
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_closed_form_and_event_by_event_agree(
    recall: str, page_tokens: int, tree: Path, linear: Path
) -> None:
    machine = Machine(
        load_profile("h100"), load_geometry("llama-3.1-8b"), recall, page_tokens=page_tokens
    )
    for path in (tree, linear):
        closed = replay(path, policies(MOVERS), machine=machine)
        events = replay(path, policies(MOVERS), machine=replace(machine, event_by_event=True))
        for a, b in zip(closed.episodes, events.episodes, strict=True):
            figures, others = asdict(a.measured), asdict(b.measured)
            figures.pop("series"), others.pop("series")
            assert figures.pop("stored") == others.pop("stored") == {}  # no memory below DDR
            assert figures.pop("time") == pytest.approx(others.pop("time"), rel=1e-9), a.policy
            assert figures == pytest.approx(others), a.policy
            assert a.attention_kept == pytest.approx(b.attention_kept)


def test_two_runs_are_byte_identical(tree: Path) -> None:
    """Invariant 6: a replay and its repeat."""
    first, second = (replay(tree, policies(), count=1) for _ in range(2))
    assert to_json(first) == to_json(second)


def test_workers_change_nothing(tree: Path, linear: Path) -> None:
    """Invariant 6: results, pictures, and what is left out under the smaller budget."""
    one, two = (
        Replay(
            [tree, linear], policies(MOVERS), [Budget.parse("0.2"), Budget.parse("0.7")],
            Machine(load_profile("h100")), pictures=True, workers=workers,
        ).run()
        for workers in (1, 2)
    )  # fmt: skip
    assert to_json(one) == to_json(two)
    assert one.left_out
    assert one.left_out == two.left_out
    for a, b in zip(one.token_maps, two.token_maps, strict=True):
        assert (a.policy, a.budget, a.trace) == (b.policy, b.budget, b.trace)
        assert np.array_equal(a.cells, b.cells)


def test_an_error_in_a_worker_is_the_same_error(linear: Path) -> None:
    said = []
    for workers in (1, 2):
        with pytest.raises(ArborsimError) as caught:
            replay(linear, policies(["epikv"]), "0.05", workers=workers)
        said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1]


def test_what_a_trace_cannot_serve_is_left_out(tmp_path: Path) -> None:
    path = make_trace(tmp_path / "plain.parquet", kind="linear", prompt=40)
    result = replay(path, policies(), "0.9")
    by_name = {each.policy: each for each in result.left_out if each.remedy}
    reader = TraceReader(path)
    lacking = {p.name for p in policies() if not all(map(reader.has, needed(p)))}
    assert set(by_name) == lacking
    assert "keydiff" in lacking
    assert by_name["keydiff"].remedy == "--capture qkv --qkv-layers all"
    assert by_name["keydiff"].unrecorded == ""
    assert by_name["keydiff"].instead == "per=shared"
    assert by_name["arkv"].instead == "", "it has no such choice"
    served = [build(name, {"per": "shared"}) for name, each in by_name.items() if each.instead]
    assert {r.policy for r in replay(path, served, "0.9").episodes} == {p.name for p in served}
    assert not lacking & {r.policy for r in result.episodes}


@pytest.mark.parametrize("kind", ["linear", "tree"])
def test_no_policy_that_only_evicts_beats_the_oracle(kind: str, linear: Path, tree: Path) -> None:
    """Invariant 11: policies of every family against the offline bound."""
    chosen = policies(["oracle", "random", "streaming-llm", "h2o", "epikv", "lag-kv"])
    result = replay(linear if kind == "linear" else tree, chosen, "0.6,0.8")
    for row in aggregate(result.episodes):
        assert row.oracle_gap >= -1e-6, row.policy


def test_output_error_is_nothing_for_full_retention_and_more_for_less(vectors: Path) -> None:
    chosen = policies(["full", "random"])
    found = {r.budget: r for r in replay(vectors, chosen, "0.5,0.8").episodes}
    assert found["any"].output_error == 0
    assert 0 < found["0.8"].output_error < found["0.5"].output_error


def test_the_peak_of_quantised_bytes_is_that_of_the_tiers(tree: Path) -> None:
    result = by_policy(replay(tree, policies(["full", "staircase"]), "0.6"))
    assert result["full"].measured.peak_quantised_bytes == 0
    measured = result["staircase"].measured
    assert measured.peak_quantised_bytes > 0
    assert measured.peak_quantised_bytes <= measured.peak_hbm_kv_bytes + measured.peak_ddr_bytes


def test_two_traces_of_one_name_stay_apart(tmp_path: Path) -> None:
    paths = [
        make_trace(tmp_path / folder / "x.parquet", kind="linear", prompt=8, episodes=1)
        for folder in ("a", "b")
        if (tmp_path / folder).mkdir() is None
    ]
    job = Replay(paths, policies(["full"]), [Budget.parse("1")], Machine(load_profile("h100")))
    assert [r.trace for r in job.run().episodes] == [str(path) for path in paths]


def test_attention_kept_equals_a_literal_sum(tree: Path) -> None:
    reader = TraceReader(tree)
    served = [p for p in policies() if all(map(reader.has, p.reads())) and p.grouping == "shared"]
    assert len(served) > 10
    result = by_policy(replay(tree, served, "0.8"))
    needs = frozenset().union(*(p.reads() for p in served))
    episode = next(iter(reader.episodes(sorted(needs))))
    assert episode.attention is not None
    budget = int(0.8 * episode.num_tokens)
    node_of = [int(episode.node[row]) for row in episode.token_rows]
    parent = {int(n): int(p) for n, p in zip(episode.node, episode.parent, strict=True)}
    generated = [t for t, row in enumerate(episode.token_rows) if episode.kind[row] == 1]
    for policy in served:
        tiers, _ = decide_all(policy, episode, budget, max_steps=1)
        # tiers after each event: the row of a token sees the last event before its iteration
        shapes = [len(t) for t in tiers]
        kept = []
        for token in generated:
            first_with = next(i for i, n in enumerate(shapes) if n > token)
            seen = tiers[first_with - 1]
            chain, node = set(), node_of[token]
            while node >= 0:
                chain.add(node)
                node = parent[node]
            path = [t for t in range(token + 1) if node_of[t] in chain]
            row = episode.attention.row(token)
            kept.append(
                1
                - sum(
                    w
                    for w, t in zip(row, path, strict=True)
                    if t < len(seen) and seen[t] == Tier.EVICTED
                )
            )
        assert result[policy.name].attention_kept == pytest.approx(np.mean(kept), abs=1e-5)


def test_smaller_budgets_hold_less(linear: Path) -> None:
    for name in ("random", "streaming-llm", "h2o", "epikv", "lag-kv"):
        peaks, kept = [], []
        for budget in ("0.9", "0.6", "0.4"):
            result = by_policy(replay(linear, policies([name]), budget))[name]
            assert result.measured.peak_hbm_kv_tokens <= result.budget_tokens + 1
            peaks.append(result.measured.peak_hbm_kv_bytes)
            kept.append(result.attention_kept)
        assert peaks == sorted(peaks, reverse=True)
        assert kept == sorted(kept, reverse=True)


def test_recall_modes_differ_in_place_and_time_not_in_quality(linear: Path) -> None:
    chosen = [build("hierarchy", {**SMALL["hierarchy"], "hbm_ratio": "0.3"})]
    results = {}
    for recall in ("stage", "stream", "near"):
        machine = Machine(load_profile("h100"), load_geometry("llama-3.1-8b"), recall)
        results[recall] = by_policy(replay(linear, chosen, "0.9", machine))["hierarchy"]
    kept = {r.attention_kept for r in results.values()}
    assert len(kept) == 1
    peak = {name: r.measured.peak_hbm_kv_bytes for name, r in results.items()}
    assert peak["stage"] > peak["near"], "staging keeps what was recalled in HBM"
    traffic = {name: r.measured.from_ddr_bytes for name, r in results.items()}
    assert traffic["stream"] > traffic["stage"], "streaming fetches at every step"


def test_geometry_transplant_changes_bytes_not_decisions(linear: Path) -> None:
    """Invariant 17: one trace under two geometries."""
    own = Machine(load_profile("h100"))
    theirs = Machine(load_profile("h100"), load_geometry("qwen2.5-7b"))
    a = by_policy(replay(linear, policies(MOVERS), machine=own))
    b = by_policy(replay(linear, policies(MOVERS), machine=theirs))
    for name, result in a.items():
        other = b[name]
        assert result.measured.evicted_tokens == other.measured.evicted_tokens
        assert result.attention_kept == other.attention_kept
        if name != "hierarchy":  # bytes in flight depend on how fast links are
            assert result.measured.peak_hbm_kv_tokens == other.measured.peak_hbm_kv_tokens
        assert result.measured.peak_hbm_kv_bytes != other.measured.peak_hbm_kv_bytes


def test_what_a_trace_lacks_is_said_before_any_work(tmp_path: Path) -> None:
    path = make_trace(tmp_path / "bare.parquet", kind="linear", capture="tree")
    with pytest.raises(MissingSignal, match=r"h2o.*attention.*--capture signals"):
        replay(path, [build("h2o", SHARED)])
    assert math.isnan(replay(path, [build("full")]).episodes[0].attention_kept)


def test_an_infeasible_budget_names_episode_numbers_and_remedy(linear: Path) -> None:
    with pytest.raises(ArborsimError, match=r"linear.parquet, episode 0: .*prompt 40.*--budget 0"):
        replay(linear, [build("epikv")], "0.1")


def test_an_infeasible_cell_is_left_out_with_its_reason(linear: Path) -> None:
    result = replay(linear, policies(["full", "epikv", "h2o"]), "0.1,0.7")
    cells = {(r.policy, r.budget) for r in result.episodes}
    assert cells == {("full", "any"), ("epikv", "0.7"), ("h2o", "0.1"), ("h2o", "0.7")}
    [left_out] = result.left_out
    assert (left_out.policy, left_out.budget, left_out.trace) == ("epikv", "0.1", "linear.parquet")
    assert "prompt 40" in left_out.detail
    assert f"needs at least --budget {left_out.least}, and can need more" in left_out.detail
    assert left_out.reason.startswith(f"needs {left_out.least} or more: prompt 40")
    assert left_out.instead == "pin_prompt=false"


def test_strict_stops_at_the_first_cell_that_cannot_run(linear: Path, tmp_path: Path) -> None:
    three = policies(["full", "epikv", "h2o"])
    with pytest.raises(ArborsimError, match=r"prompt 40.*; without --strict it is left out"):
        replay(linear, three, "0.1,0.7", strict=True)
    bare = make_trace(tmp_path / "bare.parquet", kind="linear", capture="tree")
    with pytest.raises(MissingSignal, match="epikv"):
        replay(bare, three, "0.9", strict=True)
    with pytest.raises(ArborsimError, match="prompt 40"):
        replay(linear, three, "0.1,0.7", strict=True, asked=frozenset({"epikv"}))
    assert replay(linear, three, "0.1,0.7", strict=True, asked=frozenset({"h2o"})).left_out


@pytest.mark.parametrize("workers", [1, 2])
def test_if_nothing_that_was_asked_for_can_run_that_is_an_error(
    linear: Path, tmp_path: Path, workers: int
) -> None:
    """Full retention and the oracle, which nobody asked for, make no comparison."""
    asked = frozenset({"epikv"})
    both = policies(["full", "oracle", "epikv"])
    with pytest.raises(ArborsimError, match=r"epikv: prompt 40.*--budget 0"):
        replay(linear, both, "0.05,0.1", asked=asked, workers=workers)
    assert replay(linear, both, "0.1,0.9", asked=asked, workers=workers).left_out
    assert replay(linear, both, "0.1", asked=asked | {"full"}, workers=workers).left_out
    bare = make_trace(tmp_path / "bare.parquet", kind="linear", capture="tree")
    with pytest.raises(MissingSignal, match="epikv"):
        replay(bare, both, "0.9", asked=asked)


def test_what_one_of_two_traces_serves_runs_there(linear: Path, tmp_path: Path) -> None:
    bare = make_trace(tmp_path / "bare.parquet", kind="linear", capture="tree")
    job = Replay(
        [bare, linear], [build("h2o", SHARED)], [Budget.parse("0.7")], Machine(load_profile("h100"))
    )
    result = job.run()
    assert {r.trace for r in result.episodes} == {"linear.parquet"}
    [left_out] = result.left_out
    assert left_out.trace == "bare.parquet"
    assert "record the trace with --capture signals" in left_out.reason


def test_only_the_columns_needed_are_read(linear: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[Signal]] = []
    original = TraceReader.episodes

    def spy(self, needs=(), **options):  # type: ignore[no-untyped-def]
        asked.append(list(needs))
        return original(self, needs, **options)

    monkeypatch.setattr(TraceReader, "episodes", spy)
    machine = Machine(load_profile("h100"))
    Replay([linear], [build("epikv")], [Budget.parse("0.7")], machine, quality=False).run()
    assert asked == [[Signal.HIDDEN_CHANGE]] * 2, "once per episode"


def test_results_say_who_keeps_to_the_budget(vectors: Path) -> None:
    result = replay(vectors, policies(["full", "h2o", "rkv"]), "0.7")
    assert {r.policy: r.bounded for r in result.episodes} == {
        "full": False, "h2o": True, "rkv": False
    }  # fmt: skip


def test_raas_on_sparse_attention_is_cautioned(linear: Path, tmp_path: Path) -> None:
    sparse = make_trace(tmp_path / "s.parquet", kind="linear", prompt=40, attention="sparse",
                        episodes=1)  # fmt: skip
    medians = build("raas", {"variant": "median"})
    *_, note = replay(sparse, [*policies(["h2o"]), medians], "0.9").notes
    assert note.startswith("raas: ")
    assert replay(sparse, policies(["raas"]), "0.9").notes == (TIMED,)
    assert replay(linear, [medians]).notes == (TIMED,)


def test_policy_time_that_nobody_measured_is_said_to_be_assumed(linear: Path) -> None:
    """Once a machine's profile has the policy's own seconds, or measured ones, nothing is said."""
    both = policies(["full", "oracle", "h2o", "streaming-llm"])
    (note,) = replay(linear, both, "0.7").notes
    assert note == TIMED.replace("raas", "h2o, streaming-llm")
    profile = load_profile("h100")
    own = replace(profile, policies={"h2o": PolicySeconds(decision_base_s=1e-3)})
    (note,) = replay(linear, both, "0.7", Machine(own)).notes
    assert note == TIMED.replace("raas", "streaming-llm")
    sources = {**profile.sources, "decision_base_s": "measured"}
    assert replay(linear, both, "0.7", Machine(replace(profile, sources=sources))).notes == ()
    free = replace(profile, decision_base_s=0.0, decision_per_token_s=0.0)
    assert replay(linear, policies(["streaming-llm"]), "0.7", Machine(free)).notes == ()


def test_what_does_not_fit_says_how_much_is_missing(linear: Path) -> None:
    """HBM that only full retention exceeds, DDR for what offloads, and weights alone."""
    big = load_profile("h100")
    whole = replay(linear, policies(["full", "h2o"]), "0.6", Machine(big))
    assert whole.does_not_fit == ()
    most = max(r.measured.needed_hbm_bytes for r in whole.episodes if r.policy == "full")
    small = replace(big, name="small", hbm_bytes=most - 2000, reserve_share=0.0)
    (line,) = replay(linear, policies(["full", "h2o"]), "0.6", Machine(small)).does_not_fit
    assert line.startswith("Does not fit on linear.parquet: full lacks 2.00 kB of HBM. small has ")
    assert "h2o" not in line
    offloading = policies(["hierarchy"])
    down = replay(linear, offloading, "0.4", Machine(big))
    ddr = max(r.measured.peak_ddr_bytes for r in down.episodes)
    short = Machine(replace(big, ddr_bytes=ddr - 1000))
    (line,) = replay(linear, offloading, "0.4", short).does_not_fit
    assert "hierarchy at budget 0.4 lacks 1.00 kB of DDR" in line
    weights = down.episodes[0].measured.weight_bytes
    tiny = replace(big, name="tiny", hbm_bytes=weights - 1000, reserve_share=0.0)
    (line,) = replay(linear, policies(["full", "h2o"]), "0.6", Machine(tiny)).does_not_fit
    assert line.startswith("Nothing fits on linear.parquet: the weights alone are ")
    assert "which is 1.00 kB too little" in line
