"""Whole runs on the pretended device: kernels, copies, searches and measurements, at toy size."""

from __future__ import annotations

import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.profiler import ProfilerActivity

from arborsim.cli.app import main
from arborsim.machine.live_memory import CUBLAS_BYTES
from arborsim.machine.lookup import load_profile
from arborsim_torch.hardware import kernels, measure, searches, transfers
from arborsim_torch.hardware.launches import measure_launches, measure_moves
from arborsim_torch.hardware.passes import Design, time_passes
from arborsim_torch.hardware.timing import Timer, aside, capture
from arborsim_torch.models import geometry, load_model
from benchmarks import gpu
from benchmarks.gpu import live, yardsticks
from benchmarks.gpu.context import KINDS, Prober, longest_context
from benchmarks.gpu.kernels import (
    SMALL_PIECES,
    compare_copies,
    compare_moved_tokens,
    compare_pieces,
    compare_prefill,
)
from benchmarks.gpu.live import run_arm, trace_step
from benchmarks.gpu.masking import evicting_is_masking, rehydrating_is_keeping
from benchmarks.gpu.plan import Arm, Load, Plan, arms
from benchmarks.gpu.targets import as_simulated
from benchmarks.gpu.worker import Worker
from benchmarks.gpu.yardsticks import measure_yardsticks, run_yardstick
from tests.live.pieces_cases import CASES, Case, Part

from .arming import pretend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("history", [0, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_a_prompt(dtype: torch.dtype, history: int) -> None:
    with pretend():
        found = compare_prefill(dtype, history, "cuda")
    assert found["ok"], found
    assert found["form"] == ("torch-efficient" if dtype == torch.float32 else "torch-flash")


@pytest.mark.parametrize("patience", [0, 3])
def test_copies_and_moves(patience: int) -> None:
    with pretend(patience):
        copied = compare_copies("cuda", (1 << 10, 3 << 12))
        assert copied["ok"]
        assert copied["pinned"]
        for grouping in ("shared", "head"):
            assert compare_moved_tokens("cuda", grouping, 24)["ok"]


def test_the_cache_against_plain_passes() -> None:
    with pretend():
        assert rehydrating_is_keeping("cuda", "layer")["ok"]
        assert evicting_is_masking("cuda", "layer", False, "stream", 8)["ok"]


@pytest.mark.parametrize(
    ("arm", "graphs"),
    [*((arm, "auto") for arm in arms(8)), *((a, "off") for a in arms(8) if a.policy == "h2o")],
    ids=lambda value: getattr(value, "label", value),
)
def test_a_search_next_to_its_simulation(arm: Arm, graphs: str) -> None:
    with pretend(patience=2):
        loaded = load_model("chain", device="cuda")
        found = run_arm(loaded, Load(24, 8, 16), arm, load_profile("h200"), graphs)
        assert found["tiers_differ"] == 0
        assert found["allocator_peak_bytes"] >= found["pool_bytes"] > 0
        assert found["tokens_per_s"] > 0
        captured = graphs == "auto" and arm.graphs
        assert found["step"] == ("graph" if captured else "eager")
        del loaded


@pytest.mark.parametrize("arm", arms(16), ids=lambda arm: arm.label)
def test_the_predicted_peak_is_that_of_the_search(arm: Arm) -> None:
    """Long enough a prompt for pools and moves to be most of it; weights left out.

    Rows and tables of a step of a tree, which are not predicted, take up to 128 KiB.
    """
    with pretend(patience=2) as gpu:
        loaded = load_model("chain", device="cuda")
        weights = gpu.allocated
        found = run_arm(loaded, Load(512, 16, 16), arm, load_profile("h200"), "auto")
        del loaded
    predicted = found["predicted_hbm_bytes"] - CUBLAS_BYTES - weights
    assert predicted == pytest.approx(found["allocator_peak_bytes"] - weights, 0.03, 1 << 17)


@pytest.mark.parametrize("case", [*SMALL_PIECES, *CASES[-4:]], ids=lambda case: case.name)
def test_pieces_are_launched_as_the_kernels_want_them(case: Case) -> None:
    pytest.importorskip("triton")
    with pretend() as gpu:
        found = compare_pieces(case, "cuda")
        assert found["form"] == "triton"
        calls, rest = divmod(gpu.launches["attend_split"], len(case.parts))
        assert rest == 0
        assert gpu.launches["merge_splits"] == calls > 0
        assert gpu.launches["mean_mass"] == gpu.launches["add_mean_mass"] == 1
        assert gpu.launches["graph replay"] > 1, "the device alone is timed"
    assert found["ok"], found
    assert "sdpa_s" not in found, "no plain attention in 16 bits"


def test_plain_attention_is_timed_beside_that_of_pieces() -> None:
    case = Case((Part(room=96, capacity=128),), torch.bfloat16, seqs=1)
    with pretend():
        found = compare_pieces(case, "cuda")
    assert found["ok"]
    assert found["sdpa_form"] == "torch-flash"
    assert found["timed_over_bytes"] == 16 * 2 * 2 * 96 * 64 * 2, "16 pools are the most"
    assert min(found["sdpa_s"], found["median_s"]) > 0


def test_works_are_timed_in_turn_in_one_graph() -> None:
    with pretend() as gpu:
        totals = [torch.zeros(8, device="cuda") for _ in range(3)]
        timer = Timer(torch.device("cuda"), 2, 3)
        assert timer.seconds(*(partial(total.add_, 1.0) for total in totals)) > 0
        assert gpu.launches["graph replay"] == 1 + 2 * 3
        found = [int(total[0].cpu()) for total in totals]
    assert found[0] == found[1] == found[2] > 7


def test_what_waits_for_the_device_is_timed_in_a_loop() -> None:
    with pretend() as gpu:
        total = torch.zeros(8, device="cuda")
        assert Timer(torch.device("cuda"), 1, 2).seconds(lambda: float(total.add_(1.0)[0])) > 0
        assert gpu.launches["graph replay"] == 0
        assert torch.cuda.get_sync_debug_mode() == 0


def test_a_capture_that_fails_leaves_the_process_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released: list[Any] = []
    with pretend() as gpu:
        # The pretended allocator knows by itself whether it was told that recording is over.
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *of: released.append(of),
                            raising=False)  # fmt: skip
        device, total = torch.device("cuda", 0), torch.zeros(8, device="cuda")
        here = torch.cuda.current_stream()

        def waits() -> None:
            total.add_(1.0)
            torch.cuda.synchronize()

        with aside(device):
            waits()
        graph, why = capture(waits, device)
        assert graph is None
        assert "waits inside of a capture" in why
        assert len(released) == 1
        assert torch.cuda.current_stream() is here
        gpu.faults.clear()
        graph, why = capture(lambda: total.add_(1.0), device)
        assert why == ""
        graph.replay()
        assert total.cpu().tolist() == [2.0] * 8
        del graph


@pytest.mark.parametrize("broken", [False, True])
def test_a_static_cache_takes_graphs_and_the_same_tokens(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(24, 8, 16)
    wanted = run_yardstick(load_model("chain"), load)["tokens"]
    if broken:
        monkeypatch.setattr(yardsticks, "capture", lambda *_: (None, "why not"))
    with pretend() as gpu:
        loaded = load_model("chain", device="cuda")
        found = run_yardstick(loaded, load, "StaticCache")
        assert gpu.launches["graph replay"] == (0 if broken else 7)
        del loaded
    assert found["step"] == ("eager: why not" if broken else "graph")
    assert found["tokens"] == wanted


def test_searches_are_timed_after_their_kernels_were_compiled() -> None:
    pytest.importorskip("triton")
    with pretend() as gpu:
        model = load_model("chain", device="cuda").model
        assert searches._compile(Timer(model.device), model, "h2o") > 0
        assert gpu.launches["mean_mass"] > 0
        del model


def test_a_run_begins_with_a_short_search_of_every_arm(tmp_path: Path) -> None:
    """As the process does that works on a GPU, from the model's random weights on."""
    tiny = Path(gpu.__file__).with_name("tiny.json")
    plan = Plan(f"config:{tiny}", "cuda", True, (64,), 8, 32, 1, 64, 128, ("start", "smoke"),
                tmp_path, "")  # fmt: skip
    sent: list[dict[str, Any]] = []
    with pretend():
        worker = Worker(plan, [], time.monotonic() + 600, sent.append)
        worker.run()
        del worker
    found = [record for record in sent if record.get("part") == "smoke"]
    assert [(r["of"]["arm"], r["of"]["graphs"]) for r in found] == [
        (label, graphs) for label, _, graphs in plan.smoke
    ]
    assert all(as_simulated(record) for record in found), found
    assert {r["of"]["arm"] for r in found if r["step"] == "graph"} >= {
        "full", "h2o per=shared", "StaticCache"
    }  # fmt: skip
    assert found[-1]["step"] == "eager"


def test_a_step_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where PyTorch has no CUDA, profiling it raises an error, with all frames, at every event.
    of_the_host = partial(live.profile, activities=[ProfilerActivity.CPU])
    monkeypatch.setattr(live, "profile", lambda activities, **rest: of_the_host(**rest))
    (arm,) = (each for each in arms(8) if each.label == "streaming-llm")
    with pretend():
        loaded = load_model("chain", device="cuda")
        found = trace_step(loaded, Load(24, 8, 16), arm, tmp_path / "traces.zip")
        assert found["file"] in zipfile.ZipFile(tmp_path / "traces.zip").namelist()
        del loaded


def test_the_yardsticks_and_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "LARGE_READS", (1 << 16, 1 << 18))
    monkeypatch.setattr(kernels, "BEYOND_CACHE", 1 << 18)
    with pretend():
        loaded = load_model("chain", device="cuda")
        assert run_yardstick(loaded, Load(24, 4, 16))["step_s"] > 0
        known = measure_yardsticks(loaded, True)
        assert min(known["read_bytes_per_s"], known["pinned_up_bytes_per_s"]) > 0
        for kind in KINDS:
            prober = Prober(loaded, kind, 16)
            found = longest_context(prober, 16, 32, lambda: 60.0, lambda facts: None)
            assert found["fits_tokens"] == 32
        del loaded, prober


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel and copy of ``arborsim calibrate hardware``, small, once."""
    for module, name, value in (
        (transfers, "QUICK_BLOCKS", (4 << 10, 64 << 10)), (transfers, "_POOL", 1 << 20),
        (transfers, "_MOVED", 1 << 18), (kernels, "LARGE_READS", (1 << 16, 1 << 18)),
        (kernels, "SIZES", {"cpu": (64, 128), "cuda": (64, 128)}),
        (kernels, "READS", (1 << 16, 1 << 18)),
        (kernels, "BEYOND_CACHE", 1 << 18), (kernels, "TOKENS", (64, 128, 256)),
        (kernels, "LENGTHS", {"cuda": (64, 128, 256)}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    with pretend(patience=1) as gpu:
        loaded = load_model("chain", device="cuda")
        timer = Timer(loaded.model.device, 1, 1, 0.01)
        link = transfers.measure_link(timer, True, lambda what: None)
        found = measure._kernels(timer, loaded, geometry(loaded), True, lambda what: None)
        launched = gpu.launches.copy()
        launches = measure_launches(timer, loaded.model)
        moves = measure_moves(timer, loaded.model)
        small = Design((16, 32), frozenset({32}), (1, 2), frozenset({2}), False, 1, 1, 4, 60.0)
        passes, notes = time_passes(timer, loaded.model, small, lambda done, total: None)
        del loaded
    assert min(*link.h2d, *link.d2h, *link.pageable_h2d, link.latency_s) > 0
    assert found.weights_bytes > 0
    assert set(found.kv_bytes) == {64, 128}
    assert launched["attend_split"] > 0, "keys and values are read by what graph steps run"
    assert launches.graph is not None
    assert set(launches.steps) == {3, 6}
    for one in (launches.kernel, launches.graph, *launches.steps.values()):
        assert 0 < one.low <= one.median <= one.high
    assert all(one.seconds > 0 and one.size_bytes > 0 for one in moves)
    assert {each.kind for each in passes} == {"decode", "prefill"}
    assert not notes


def _numbers(column: pa.ChunkedArray) -> Any:
    """What a column holds, lists one after the other; None if that is no numbers."""
    flat = column.combine_chunks()
    while pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type):
        flat = flat.flatten()
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        return None
    return flat.drop_null().to_numpy(zero_copy_only=False)


def test_recording_and_looking_on(tmp_path: Path) -> None:
    """Traces with every signal, and policies that only decide, from the command line."""
    common = ["--model", "chain", "--lines", "2", "--episodes", "1"]
    traces = []
    for device in ("cpu", "cuda"):
        with pretend():
            trace = tmp_path / f"{device}.parquet"
            capture = ["--capture", "qkv", "--qkv-layers", "2,3", "--attention-layers", "2,3"]
            wanted = [*common, *capture, "--device", device, "--out", str(trace)]
            assert main(["record", *wanted]) == 0
            traces.append(pq.read_table(trace))
    compared = 0
    for name in traces[0].column_names:
        one, other = (_numbers(trace[name]) for trace in traces)
        if one is None or name == "time_s":
            continue
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3, err_msg=name)
        compared += len(one) > 0
    assert compared > 16
    with pretend():
        out = ["--out", str(tmp_path / "shadow"), "--device", "cuda"]
        policies = ["--policy", "h2o,arkv", "--budget", "0.6", "--shadow"]
        assert main(["live", *common, *policies, *out]) == 0
