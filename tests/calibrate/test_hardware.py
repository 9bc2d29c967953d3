"""The machine's profile: the fit against machines that are known, and the file against a replay."""

from __future__ import annotations

import math
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.core.outputs import write_text
from arborsim.machine.cost import CostModel
from arborsim.machine.integration import PolicySeconds
from arborsim.machine.lookup import load_engine, load_geometry, load_profile, served_live
from arborsim.machine.price import Price
from arborsim.machine.profile import HardwareProfile
from arborsim.products.calibrate import hardware
from arborsim.products.calibrate.backend import (
    HardwareMeasurements,
    Kernels,
    Launches,
    LinkRates,
    Moved,
    Pass,
    PolicyTime,
    Quiet,
    Spread,
)
from arborsim.products.calibrate.hardware import (
    agreement,
    fit_launches,
    fit_moves,
    fit_passes,
    make_profile,
    predicted_s,
    profile_toml,
)
from arborsim.products.calibrate.policy_cost import (
    DecisionCost,
    fit_policies,
    measure_decisions,
    seconds_of,
)
from tests.simulator.bench import PROFILE

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "reports" / "calibration" / "cpu-epyc.toml"
CHAIN = load_geometry("chain")
FLOPS, BYTES, WEIGHTS = 1e11, 1e11, 4e10
#: A machine that is all overhead.
OVERHEAD = {
    "mfu": 0.5, "kv_read_efficiency": 0.2, "overlap": 0.0,
    "per_layer_s": 2e-4, "per_step_s": 4e-4, "per_sequence_s": 1e-5,
    "wide_per_layer_s": 1.5e-4,
}  # fmt: skip


def profile_of(text: str) -> HardwareProfile:
    return HardwareProfile.from_table(tomllib.loads(text), "m.toml")


def passes(profile: HardwareProfile, layers: tuple[int, ...] = (2, 4, 6)) -> list[Pass]:
    """The passes that are timed, taking what the cost model says; every second one held out."""
    found = []
    for depth in layers:
        parameters = 100_000 + 200_000 * depth
        for length in (64, 128, 512, 1024, 2048):
            kinds: list[tuple[Any, int, int]] = [("prefill", 1, length)]
            kinds += [("decode", lanes, 1) for lanes in (1, 2, 4, 8, 16)]
            for kind, lanes, tokens in kinds:
                one = Pass(kind, depth, parameters, lanes, tokens, length, length + 5 * lanes, 1.0)
                if kind == "prefill":
                    one = replace(one, shared=length)
                seconds = predicted_s(profile, CHAIN, one)
                held_out = length in (128, 1024) or lanes in (2, 8) or depth == 4
                found.append(replace(one, seconds=seconds, held_out=held_out))
    return found


def machine(**changes: Any) -> HardwareProfile:
    """Peaks as above; the rest as given."""
    return replace(
        PROFILE, flops_per_s=FLOPS, hbm_bytes_per_s=BYTES, mbu=WEIGHTS / BYTES, **changes
    )


@settings(max_examples=25, deadline=None)
@given(
    mfu=st.floats(0.3, 0.9),
    kv=st.floats(0.05, 0.9),
    overlap=st.sampled_from([0.0, 0.5, 1.0]),
    layer=st.floats(0, 3e-4),
    step=st.floats(1e-5, 1e-3),
    sequence=st.floats(0, 3e-5),
    wide=st.floats(0, 3e-4),
)
def test_the_fit_predicts_what_it_has_not_seen(
    mfu: float, kv: float, overlap: float, layer: float, step: float, sequence: float, wide: float,
) -> None:  # fmt: skip
    truth = dict(zip(OVERHEAD, (mfu, kv, overlap, layer, step, sequence, wide), strict=True))
    timed = passes(machine(**truth))
    found = fit_passes(timed, CHAIN, FLOPS, BYTES, WEIGHTS)
    held_out = [one for one in timed if one.held_out]
    agreed = agreement(machine(**found), CHAIN, held_out)
    assert agreed.median < 0.02
    assert agreed.r2 > 0.99


def test_the_fit_finds_the_numbers_of_a_machine_that_is_all_overhead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = OVERHEAD
    timed = passes(machine(**truth))
    found = fit_passes(timed, CHAIN, FLOPS, BYTES, WEIGHTS)
    assert found == pytest.approx(truth, rel=1e-6)
    monkeypatch.setattr(hardware, "OVERLAPS", (1.0,))
    rough = fit_passes(timed, CHAIN, FLOPS, BYTES, WEIGHTS)
    assert agreement(machine(**rough), CHAIN, timed).median > 1e-3


def test_too_few_passes_are_refused() -> None:
    timed = [one for one in passes(machine()) if one.kind == "decode"]
    with pytest.raises(UsageError, match="too few"):
        fit_passes(timed, CHAIN, FLOPS, BYTES, WEIGHTS)


def test_agreement_by_hand() -> None:
    one = passes(machine())[3]
    seconds = predicted_s(machine(), CHAIN, one)
    timed = [replace(one, seconds=s) for s in (seconds / 1.5, seconds, 2 * seconds)]
    found = agreement(machine(), CHAIN, timed)
    assert (found.passes, found.median, found.largest) == pytest.approx((3, 0.5, 0.5))
    spread = np.var([1 / 1.5, 1, 2]) * 3
    assert found.r2 == pytest.approx(1 - ((1 - 1 / 1.5) ** 2 + 1) / spread)
    assert math.isnan(agreement(machine(), CHAIN, timed[:1]).r2)


def measurements(on_cpu: bool = True) -> HardwareMeasurements:
    """Round numbers, and passes of a machine that is known."""
    truth = OVERHEAD
    sizes = {1 << 20: BYTES, 1 << 26: BYTES / 2}
    slow = () if on_cpu else (0.5e9, 2e9, 5e9)
    return HardwareMeasurements(
        device="a machine",
        on_cpu=on_cpu,
        geometry=CHAIN,
        dtype="float32",
        memory_bytes=10**10,
        host_memory_bytes=2 * 10**10,
        versions={"torch": "2.0"},
        link=LinkRates(
            (4096, 65536, 1048576), (1e9, 4e9, 1e10), (1e9, 5e9, 2e10), slow, slow, 1e-6, 1.5e10
        ),
        kernels=Kernels(
            {128: FLOPS / 2, 256: FLOPS}, sizes, sizes, {1 << 20: 9e10, 1 << 26: 2e10}, WEIGHTS,
            {256: 1e10}, {256: 1e9, 1024: 2e9, 4096: 6e9}, {"fp8": 1e9}, {"fp8": 4e8}, {256: 1e10},
            {1024: 1e-5}, {1024: 1e-5},
        ),
        passes=tuple(passes(machine(**truth))),
        notes=("a note",),
    )  # fmt: skip


DECISIONS = DecisionCost(3e-5, 5e-9, {"h2o": (3e-5, 5e-9)}, (512, 2048), 1e-6)


def test_a_profile_says_where_every_number_is_from_and_reads_back() -> None:
    profile, agreements = make_profile(
        "m", measurements(), DECISIONS, "2026-01-02", "arborsim calibrate hardware"
    )
    assert profile.assumed() == ["reserve_share"]
    source = "measured 2026-01-02 on a machine, torch 2.0: "
    assert all(text.startswith(source) for text in profile.sources.values())
    assert "same memory" in profile.source("h2d_bytes_per_s")
    assert profile_of(profile_toml(profile)) == profile
    assert profile.per_step_s == pytest.approx(4e-4, rel=1e-5)
    assert profile.ddr_bytes_per_s == 2e10
    assert profile.hbm_bytes_per_s == BYTES
    assert profile.eager_bytes_per_s == 2e9
    assert (profile.h2d_bytes_per_s, profile.d2h_bytes_per_s) == (1e10, 2e10)
    assert profile.block_efficiency == pytest.approx((0.075, 0.325, 1.0))
    assert profile.block_bytes == (4096, 65536, 1048576)
    assert profile.pageable_factor == 1
    assert agreements["decode held out"].median < 1e-4
    assert set(agreements) == {
        f"{kind} {part}" for kind in ("decode", "prefill") for part in ("fitted", "held out")
    }


def test_a_gpus_peak_is_that_of_buffers_no_cache_holds() -> None:
    profile, _ = make_profile("m", measurements(on_cpu=False), DECISIONS, "", "")
    assert profile.hbm_bytes_per_s == BYTES / 2
    # Shares 0.5 0.5 0.5 up and 0.5 0.4 0.25 down.
    assert profile.pageable_factor == pytest.approx(0.5)
    assert "same memory" not in profile.source("h2d_bytes_per_s")


def searched(
    name: str, rows: bool, tokens: float, decision_s: float, slower_s: float
) -> PolicyTime:
    """100 iterations of 1 ms and 50 decisions, full retention's events taking 2 ms in all."""
    decode_s = 100 * (1e-3 + 6 * slower_s)
    return PolicyTime(
        name, rows, False, 6, tokens, 100, 50, decode_s, 2e-3 + 50 * decision_s, 0.1, 2e-3
    )


def test_policies_cost_what_their_searches_take_longer() -> None:
    times = [
        searched("blind", False, 100, 5e-4 + 100 * 2e-7, 0.0),
        searched("blind", False, 500, 5e-4 + 500 * 2e-7, 0.0),
        searched("seeing", True, 100, 8e-4 + 100 * 2e-7, 5e-5),
        replace(searched("seldom", True, 100, 9e-3, 5e-5), decisions=2),
        replace(searched("rounding", True, 100, 8e-4 + 100 * 2e-7, 9e-4), quantises=True),
    ]
    found = fit_policies(times)
    assert found == pytest.approx(
        {
            "decision_base_s": 5e-4,
            "decision_per_token_s": 2e-7,
            "decision_rows_s": 3e-4,
            "eager_per_layer_s": 5e-5,
        }
    )
    assert fit_policies(times[:2]) == {}
    timed = replace(measurements(), policies=tuple(times))
    profile, _ = make_profile("m", timed, DECISIONS, "2026-01-02", "")
    cost = CostModel(profile, CHAIN)
    assert profile.policy_seconds("unknown", True, False).decision_s(1000) == pytest.approx(7e-4)
    assert profile.policy_seconds("unknown", False, True).decision_s(1000) == pytest.approx(1e-3)
    reads = (1, 100, 1e5)
    slower = cost.decode_s(*reads, fused=False) - cost.decode_s(*reads)
    assert float(slower) == pytest.approx(CHAIN.layers * 5e-5)
    assert "under 4 policies" in profile.source("decision_rows_s")
    assert profile_of(profile_toml(profile)) == profile
    alone, _ = make_profile("m", measurements(), DECISIONS, "", "")
    assert (alone.decision_base_s, alone.decision_rows_s) == (DECISIONS.base_s, 0)
    assert "decisions alone" in alone.source("decision_base_s")


def test_a_policy_that_was_also_timed_without_decisions_has_its_own_seconds() -> None:
    # 2e-5 an iteration and 1e-5 a sequence; 3e-4 a turn and 2e-4 a sequence.
    quiet = tuple(
        Quiet(lanes, thought, 2e-5 + lanes * 1e-5 + (3e-4 + lanes * 2e-4) / thought, lanes * 1e-6)
        for lanes in (1, 8)
        for thought in (8, 32)
    )
    alone_s = 100 * 3e-5 + 12 * 5e-4
    times = [
        replace(searched("a", False, tokens, 0, 4e-5), quiet=quiet, turns=12, policy_s=policy_s)
        for tokens, policy_s in ((100, alone_s + 50 * 6e-4), (500, alone_s + 50 * 7e-4))
    ]
    same = (Quiet(1, 8, 5e-6), Quiet(8, 8, 5e-6))
    never = replace(searched("never", True, 100, 0, 0.0), quiet=same, decisions=0)
    untimed = searched("untimed", True, 100, 1e-3, 0.0)
    nothing = (Quiet(1, 8, 0), Quiet(8, 8, 0))
    seldom = replace(searched("seldom", True, 100, 9e-3, 0.0), quiet=nothing, decisions=2)
    # On a tree of four branches: what iterations and turns take for as many, and 8e-4 a decision.
    branching = replace(
        times[0], name="tree", lanes=4, decisions=5,
        policy_s=100 * 6e-5 + 12 * 1.1e-3 + 5 * 8e-4,
    )  # fmt: skip
    every = [*times, never, untimed, seldom, branching]
    assert fit_policies(every) == fit_policies(every[:-1])
    found = seconds_of(every, {"a": (1, 1), "seldom": (1e-4, 1e-7)})
    assert list(found) == ["a", "never", "seldom", "tree"]
    assert found["tree"] == replace(
        found["a"], decision_base_s=pytest.approx(8e-4), decision_per_token_s=0, layer_s=0
    )
    only_decides = PolicySeconds(decision_base_s=1e-4, decision_per_token_s=1e-7)
    assert found["seldom"] == only_decides
    assert vars(found["a"]) == pytest.approx(
        {"iteration_s": 2e-5, "lane_s": 1e-5, "turn_s": 3e-4, "turn_lane_s": 2e-4,
         "decision_base_s": 5.75e-4, "decision_per_token_s": 2.5e-7, "layer_s": 4e-5,
         "wide_layer_s": 8e-6, "deciding_layer_s": 0, "decision_per_pair_s": 0, "held_token_s": 0}
    )  # fmt: skip
    assert found["never"] == PolicySeconds(iteration_s=5e-6)
    timed = replace(measurements(), policies=(*times, never, untimed))
    profile, _ = make_profile("m", timed, DECISIONS, "", "")
    assert profile.policy_seconds("a", True, False).decision_s(1000) == pytest.approx(8.25e-4)
    assert profile.policy_seconds("a", True, False).observing_s(4) == pytest.approx(6e-5)
    assert profile.policy_seconds("a", True, False).turning_s(4) == pytest.approx(1.1e-3)
    assert profile.policy_seconds("a", True, False).layer_s == pytest.approx(4e-5)
    assert profile_of(profile_toml(profile)) == profile
    text = profile_toml(profile)
    with pytest.raises(UsageError, match=r"did you mean .*lane_s"):
        profile_of(text.replace("lane_s", "lanes_s", 1))
    with pytest.raises(UsageError, match=r"m.toml: \[policies.a\] iteration_s must be"):
        profile_of(text.replace("iteration_s = 2e-05", "iteration_s = -1"))


def spread(median: float) -> Spread:
    return Spread(median, median * 0.9, median * 1.5, 15)


def test_launches_are_those_of_live_steps() -> None:
    engine = load_engine("live")
    each, launch_s = engine.layer_launches + engine.search_launches, 9e-6
    steps = {
        layers: spread((layers * each + engine.step_launches) * launch_s + 3e-4)
        for layers in (16, 32)
    }
    launches = Launches(spread(4e-6), spread(2e-5), steps)
    found = fit_launches(launches)
    assert found == pytest.approx(
        {"launch_s": launch_s, "graph_launch_s": 2e-5, "host_step_s": 3e-4}, rel=1e-6
    )
    timed = replace(measurements(on_cpu=False), launches=launches)
    profile, _ = make_profile("m", timed, DECISIONS, "2026-01-02", "")
    assert profile.evidence["launches"]["step_of_32_layers"]["n"] == 15
    assert profile_of(profile_toml(profile)) == profile
    for graphs, launched_s in (
        (False, (CHAIN.layers * engine.layer_launches + engine.step_launches) * launch_s),
        (True, (load_engine("live-graphs").step_launches - 1) * launch_s + 2e-5),
    ):
        live = served_live(profile, graphs)
        assert live.engine is not None
        assert not live.engine.is_assumed("launch_s")
        assert live.engine.step_s == profile.host_step_s
        price = Price(CostModel(live, CHAIN))
        assert price.launch_s == pytest.approx(launched_s + profile.per_step_s)
    # Another engine's launches are not this backend's, and a shipped GPU has none of its own.
    other = profile.served_by(load_engine("transformers")).engine
    assert other is not None
    assert other.launch_s == load_engine("transformers").launch_s
    shipped = served_live(load_profile("h200"), graphs=True).engine
    assert shipped is not None
    assert (shipped.launch_s, shipped.is_assumed("launch_s")) == (engine.launch_s, True)


def test_a_launch_takes_no_less_than_a_kernel_alone() -> None:
    flat = {layers: spread(5e-3) for layers in (2, 4)}
    found = fit_launches(Launches(spread(4e-6), None, flat))
    assert found["launch_s"] == 4e-6
    assert found["host_step_s"] > 0
    # On a CPU a call computes before it returns: an operator's dispatch is all there is.
    assert fit_launches(Launches(spread(2e-6))) == {"launch_s": 2e-6}
    assert fit_launches(None) == {}


def test_the_hosts_work_on_moves_is_fitted() -> None:
    truth = {"move_s": 3e-4, "move_group_s": 8e-5, "move_byte_s": 7e-10}
    moves = tuple(
        Moved(groups, size, 2, 2 * 3e-4 + 2 * groups * 8e-5 + size * 7e-10)
        for groups in (1, 6)
        for size in (200_000, 800_000, 3_000_000)
    )
    assert fit_moves(moves) == pytest.approx(truth)
    assert fit_moves(moves[:2]) == {}
    profile, _ = make_profile("m", replace(measurements(), moves=moves), DECISIONS, "", "")
    assert profile.move_group_s == pytest.approx(8e-5)
    assert "staged again" in profile.source("move_byte_s")
    assert profile_of(profile_toml(profile)) == profile


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.toml"
    path.write_text("before")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_text(path, profile_toml(PROFILE))
    assert [each.name for each in tmp_path.iterdir()] == ["m.toml"]
    assert path.read_text() == "before"
    write_text(path, profile_toml(PROFILE))
    assert load_profile(path) == PROFILE
    with pytest.raises(UsageError, match="cannot write"):
        write_text(tmp_path / "no" / "m.toml", profile_toml(PROFILE))


def test_decisions_cost_more_over_more_tokens() -> None:
    told: list[tuple[int, int]] = []
    found = measure_decisions(
        True, lambda _, i, n: told.append((i, n)), ["epikv", "full", "snapkv"]
    )
    assert set(found.policies) == {"epikv", "snapkv"}  # full never decides anything
    assert found.per_token_s > 0
    assert found.base_s >= 0
    assert told[-1] == (3, 3)
    assert found.run_s > 0


def test_the_committed_profile_predicts_as_it_says() -> None:
    profile = load_profile(COMMITTED)
    evidence = profile.evidence
    command = evidence["command"].split()
    assert command[1:4] == ["arborsim", "calibrate", "hardware"]
    assert command[command.index("--out") + 1] == "reports/calibration/cpu-epyc.toml", (
        "relative, as anybody would"
    )
    assert profile.assumed() == ["reserve_share"]
    columns = evidence["passes"]
    timed = [
        Pass(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
    ]
    geometry = replace(CHAIN, layers=max(columns["layers"]))
    for kind in ("decode", "prefill"):
        for held_out, part in ((False, "fitted"), (True, "held out")):
            chosen = [p for p in timed if (p.kind, p.held_out) == (kind, held_out)]
            said = evidence["agreement"][f"{kind} {part}"]
            assert vars(agreement(profile, geometry, chosen)) == pytest.approx(said, rel=1e-2)
            assert said["median"] < 0.1


def test_a_replay_uses_the_committed_profile(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(ROOT / "traces" / "chain-vectors.parquet"), "--gpu", str(COMMITTED)]
    assert main([*command, "--policy", "h2o", "--budget", "0.5", "--episodes", "1"]) == 0
    assert "h2o" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
class TestMeasuring:
    def test_one_thread_is_timed_by_its_own_clock(self) -> None:
        import torch

        from arborsim_torch.hardware.timing import Timer

        def busy() -> None:
            until = time.thread_time() + 2e-3
            while time.thread_time() < until:
                pass

        timer = Timer(torch.device("cpu"), rounds=2, repeats=3)
        assert timer.seconds(lambda: time.sleep(0.02)) < 0.01
        assert 2e-3 <= timer.seconds(busy) < 4e-3

    def test_passes_are_those_of_the_design(self) -> None:
        import torch

        from arborsim_torch.hardware.model import first_layers
        from arborsim_torch.hardware.passes import Design, time_passes
        from arborsim_torch.hardware.timing import Timer
        from tests.live.tiny import LAYERS, tiny_model

        model = tiny_model()
        whole = sum(parameter.numel() for parameter in model.parameters())
        layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
        embedding = model.model.embed_tokens.weight.numel()

        def counts(layers: int, kind: str) -> int:
            """The whole model's number, in the proportion of the weights that are multiplied."""
            head = embedding if kind == "decode" else 0  # as large as the input's
            return round(whole * (layers * layer + head) / (LAYERS * layer + head))

        with first_layers(model, LAYERS) as counted:
            assert (counted.decode, counted.prefill) == (whole, whole)
        design = Design((8, 20), frozenset({20}), (1, 3), frozenset({3}), True, 2, 1, 4, 60.0)
        told: list[tuple[int, int]] = []
        found, notes = time_passes(
            Timer(torch.device("cpu")), model, design, lambda *at: told.append(at)
        )
        assert notes == []
        assert told[5:7] == [(5, 12), (6, 12)]
        assert told[-1] == (1, 1)
        assert len(model.model.layers) == model.config.num_hidden_layers == LAYERS
        assert len(found) == 3 * 2 * 3
        for one in found:
            held_out = one.layers == 2 or one.lanes == 3 or one.shared >= 20
            assert one.held_out == held_out
            assert one.parameters == counts(one.layers, one.kind)
            # The middle of the second to the fourth token of a thought.
            own = 0 if one.kind == "prefill" else 3
            assert one.attended in (8 + own, 20 + own)
            assert one.shared == one.attended + (one.lanes - 1) * own
            assert 0 < one.seconds < 1

    def test_launches_and_moves_of_this_machine(self) -> None:
        import torch

        from arborsim_torch.hardware.launches import measure_launches, measure_moves
        from arborsim_torch.hardware.timing import Timer
        from tests.live.tiny import tiny_model

        model, timer = tiny_model(), Timer(torch.device("cpu"), 2, 3)
        launches = measure_launches(timer, model)
        assert 1e-8 < launches.kernel.low <= launches.kernel.median <= launches.kernel.high < 1e-3
        assert (launches.kernel.n, launches.graph, launches.steps) == (6, None, {})
        moves = measure_moves(timer, model)
        layers = model.config.num_hidden_layers
        assert [one.groups for one in moves] == [1] * 3 + [layers] * 3
        for one, other in zip(moves[:3], moves[3:], strict=True):
            assert one.size_bytes == other.size_bytes  # of all layers, however they are grouped
        assert all(0 < one.seconds < 1 for one in moves)
        assert set(fit_moves(moves)) == {"move_s", "move_group_s", "move_byte_s"}

    def test_policies_are_searched_live(self) -> None:
        import torch

        from arborsim_torch.hardware.searches import time_policies
        from arborsim_torch.hardware.timing import Timer
        from tests.live.tiny import LAYERS, tiny_model

        told: list[tuple[int, int]] = []
        found = time_policies(
            Timer(torch.device("cpu")), tiny_model(), True, 600.0,
            lambda *at: told.append(at), ["h2o", "random", "arborkv"],
        )  # fmt: skip
        assert [(one.name, one.rows) for one in found] == [
            ("full", False), ("full", False), ("h2o", True), ("h2o", True), ("random", False),
            ("arborkv", True), ("arborkv", True),
        ]  # fmt: skip
        assert told == [(0, 4), (1, 4), (2, 4), (3, 4), (1, 1)]
        assert all(one.lanes > 7 and one.decisions > 4 for one in found if one.name == "arborkv")
        for one in found[:5]:
            assert (one.layers, one.lanes, one.iterations) == (LAYERS, 1, 96)
            assert one.decisions == (0 if one.name == "full" else 48)
        for one in found:
            assert 0 < one.policy_s < 1
            assert [(quiet.lanes, quiet.thought) for quiet in one.quiet] == [
                (1, 8), (1, 32), (8, 8), (8, 32),
            ]  # fmt: skip
            assert all(0 < quiet.per_iteration_s < 0.1 for quiet in one.quiet)

    def test_what_does_not_fit_is_cut_to_its_first_layers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from arborsim.products.calibrate.backend import HardwareRequest
        from arborsim_torch.hardware import model as loading

        request = HardwareRequest("config:chain")
        loaded, notes = loading.load_for_timing(request)
        assert (loaded.model.config.num_hidden_layers, notes) == (6, ())
        size = CHAIN.weight_bytes
        monkeypatch.setattr(loading, "usable_bytes", lambda device: int(1.3 * size))
        loaded, notes = loading.load_for_timing(request)
        weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
        assert loaded.model.config.num_hidden_layers == 3  # 0.65 of 6, rounded down
        assert loaded.model.config.vocab_size == CHAIN.vocab // 2
        assert 0.45 * size < weights < 0.55 * size
        assert notes[0].startswith(f"{loaded.model.config.num_hidden_layers} of the model's 6")
        monkeypatch.setattr(loading, "usable_bytes", lambda device: size // 8)
        with pytest.raises(UsageError, match="not even 2 layers"):
            loading.load_for_timing(request)
