"""The GPU validation at toy size on the CPU, and its parts that no toy run reaches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from arborsim.core.errors import UsageError  # noqa: E402
from arborsim.core.tiers import RECALLS  # noqa: E402
from benchmarks.gpu.context import longest_context  # noqa: E402
from benchmarks.gpu.decisions import TASKS, compare_decisions  # noqa: E402
from benchmarks.gpu.journal import Journal, OutOfTime, time_limit  # noqa: E402
from benchmarks.gpu.kernels import compare_kernel  # noqa: E402
from benchmarks.gpu.live import YARDSTICK, arms  # noqa: E402
from benchmarks.gpu.masking import MaskedModel, evicting_is_masking  # noqa: E402
from tests.live.scattered_cases import Case  # noqa: E402

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one toy run from a plain checkout, without the calibration, which has tests of its own."""
    out = tmp_path_factory.mktemp("out")
    parts = ("correctness", "live", "context")
    subprocess.run(
        [sys.executable, "benchmarks/validate_gpu.py", "--toy", "--out", out, "--parts", *parts],
        check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": ".:backends", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    path = out / "validation" / "cpu" / "gpu.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def of(records: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [record for record in records if record["part"] == part]


def test_the_run_says_what_made_it(records: list[dict[str, Any]]) -> None:
    first = records[0]
    assert (first["part"], first["device"]) == ("run", "cpu")
    assert first["versions"]["torch"] == torch.__version__
    assert first["date"][:2] == "20"
    assert records[-1]["part"] == "end"
    assert {record["outcome"] for record in records} == {"done"}


def test_every_check_holds(records: list[dict[str, Any]]) -> None:
    checks = of(records, "correctness")
    assert all(check["ok"] for check in checks)
    assert {check["check"] for check in checks} == {
        "copies are right", "scattered attention", "tokens come back", "rehydrating is keeping",
        "evicting is masking", "decisions are the CPU's", "a block of a prompt",
    }  # fmt: skip
    (decided,) = (check for check in checks if "equal_share" in check)
    assert decided["moves"] > decided["policies"] == decided["equal_policies"] == 7
    assert not decided["different"]
    assert all(signal["largest"] == 0 for signal in decided["signals"].values())
    for check in checks:
        if check["check"] == "evicting is masking":
            assert check["evicted_cells"] > 0
            assert check["to_ddr_bytes"] > 0


def test_every_policy_is_measured_beside_its_simulation(records: list[dict[str, Any]]) -> None:
    searches = of(records, "live")
    first = [arm.label for arm in arms(16) if not arm.later]
    later = [arm.label for arm in arms(16) if arm.later]
    labels = 2 * [YARDSTICK, *first] + 2 * later
    assert [search["policy"] for search in searches] == labels
    for search in searches:
        assert search["iteration_s"] > 0
        assert search["pool_bytes"] > 0
        assert search["generated_tokens"] == (56 if "(tree)" in search["policy"] else 16)
        if search["policy"] == YARDSTICK:
            continue
        assert search["tiers_differ"] == 0
        if search["policy"].startswith(("offload", "hierarchy")):  # copies land when they land
            down = search["counters"]["to_ddr_bytes"]
            assert down[0] == down[1] > 0 or search["recall"] == "near"
        else:
            assert search["calls_with_equal_bytes"] == search["calls"] > 4
        assert search["predicted_s"]["total_s"] > 0
        parts = [s for name, s in search["live_s"].items() if name not in HIDDEN]
        assert sum(parts) == pytest.approx(search["live_s"]["total_s"])
        assert 0 <= search["policy_share"] < 1
        if search["policy"].startswith("offload"):
            assert search["counters"]["offloaded_tokens"][0] >= search["prompt_tokens"] // 2 - 8
            assert search["kv_bytes_at_end"]["ddr"] > 0


HIDDEN = ("total_s", "hidden_transfer_s")


def test_kv_bytes_are_those_of_the_tokens(records: list[dict[str, Any]]) -> None:
    """Keys and values, 4 layers, 2 KV heads of 16 numbers, 4 bytes each; full retention of both."""
    size = 2 * 4 * 2 * 16 * 4
    for search in of(records, "live"):
        tokens = search["prompt_tokens"] + 16
        if search["policy"] == YARDSTICK:
            assert search["pool_bytes"] == tokens * size
        if search["policy"] == "full":
            assert search["live_peaks"]["peak_hbm_kv_bytes"] == tokens * size
            assert search["predicted_peaks"]["peak_hbm_kv_bytes"] == tokens * size


def test_contexts_are_probed(records: list[dict[str, Any]]) -> None:
    assert [found["fits_tokens"] for found in of(records, "context")] == [256, 256, 256]
    assert all(probe["fits"] for probe in of(records, "probe"))


class Fits:
    """A prober of a machine on which `most` tokens fit."""

    loaded = type("Loaded", (), {"model": type("Model", (), {"device": CPU})})

    def __init__(self, most: int, seconds: float = 0.0) -> None:
        self.most, self.seconds, self.spent_s, self.tried = most, seconds, 0.0, []

    def ceiling(self) -> int:
        return 100_000

    def fits(self, tokens: int) -> bool:
        self.tried.append(tokens)
        self.spent_s += self.seconds
        return tokens <= self.most


@pytest.mark.parametrize("most", [0, 99, 100, 7_000, 54_321, 99_999])
def test_bisection_closes_in(most: int) -> None:
    prober: Any = Fits(most)
    seen: list[dict[str, Any]] = []
    found = longest_context(prober, 100, 1 << 30, lambda: 60.0, seen.append)
    assert found["fits_tokens"] <= most < found["fails_tokens"]
    assert found["fails_tokens"] - found["fits_tokens"] <= max(100, 0.02 * most + 100)
    assert [probe["tokens"] for probe in seen] == prober.tried
    assert len(seen) < 12


def test_bisection_ends_with_the_time() -> None:
    prober: Any = Fits(54_321, seconds=10.0)
    found = longest_context(prober, 100, 1 << 30, lambda: 45.0 - prober.spent_s, lambda facts: None)
    assert found["ended"] == "time"
    assert len(prober.tried) == 3
    assert found["fits_tokens"] <= 54_321 < found["fails_tokens"]


def journal(path: Path, budget_s: float = 600.0) -> Journal:
    return Journal(path / "sub" / "found.jsonl", budget_s, CPU, lambda record: None)


def raising(error: BaseException) -> Any:
    def work() -> dict[str, Any]:
        raise error

    return work


def test_every_end_of_a_part_is_a_record_and_the_next_one_runs(tmp_path: Path) -> None:
    said = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of"
    kept = journal(tmp_path)
    kept.attempt("a", {"n": 1}, 5.0, lambda: {"x": 2})
    kept.attempt("b", {}, 5.0, raising(torch.OutOfMemoryError(said)))
    kept.attempt("c", {}, 5.0, raising(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    kept.attempt("d", {}, 5.0, raising(UsageError("no")))
    kept.attempt("e", {}, 5.0, raising(ValueError("oh")))
    kept.attempt("f", {}, 2.1, lambda: time.sleep(600) or {})
    kept.attempt("g", {}, 1.0, dict)
    kept.attempt("h", {}, 5000.0, dict, expected_s=4000.0)
    lines = (tmp_path / "sub" / "found.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert [record["outcome"] for record in written] == [
        "done", "does not fit", "does not fit", "refused", "failed", "out of time", "left out",
        "left out",
    ]  # fmt: skip
    assert {"n": 1, "x": 2}.items() <= written[0].items()
    assert written[1]["asked"] == "20.50 GiB"
    assert written[3]["error"] == "no"
    assert written[4]["error"] == "ValueError: oh"
    assert 2 < written[5]["seconds"] < 600
    assert "4000 s needed" in written[7]["why"]


def test_parts_share_what_their_stage_may_take(tmp_path: Path) -> None:
    kept = journal(tmp_path)
    with kept.within(0.5):
        assert kept.left_s <= 0.5
        assert kept.attempt("a", {}, 5.0, dict)["outcome"] == "left out"
    with kept.within(1e9):
        assert 20 < kept.left_s <= 600
    assert kept.attempt("a", {}, 5.0, dict)["outcome"] == "done"


def test_no_handler_of_errors_stops_the_alarm() -> None:
    def stubborn() -> None:
        with time_limit(0.05):
            try:
                time.sleep(600)
            except Exception:  # an alarm that were one would be lost here
                time.sleep(600)

    began = time.monotonic()
    with pytest.raises(OutOfTime):
        stubborn()
    assert time.monotonic() - began < 600


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import kernels

    right = kernels.attend_scattered
    case = Case(n=77)
    assert compare_kernel(case, "cpu")["ok"]

    def wrong(q: Any, k: Any, v: Any, index: Any, *others: Any, **named: Any) -> Any:
        return right(q, k, v, index.flip(-1).clamp(min=1), *others, **named)

    monkeypatch.setattr(kernels, "attend_scattered", wrong)
    assert not compare_kernel(case, "cpu")["ok"]


def test_a_token_that_is_read_after_its_eviction_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MaskedModel, "kill", lambda *arguments: None)
    assert not evicting_is_masking("cpu", "shared", True, "stage", 7)["ok"]


@pytest.mark.parametrize("recall", RECALLS)
def test_masking_holds_for_every_recall(recall: str) -> None:
    found = evicting_is_masking("cpu", "layer", False, recall, 11)
    assert found["ok"]
    assert found["evicted_cells"] > 0


def test_decisions_over_other_signals_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second search sees attention that is a little off, over the same tokens."""
    from arborsim_torch.context import PassContext

    searches = 0
    plain = PassContext.attention

    def disturbed(self: Any) -> Any:
        rows = plain(self)
        return rows if searches < 2 else rows.flip(-1)

    import benchmarks.gpu.decisions as decisions

    search = decisions._search

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal searches
        searches += 1
        return search(*arguments, **named)

    monkeypatch.setattr(decisions, "_search", counted)
    monkeypatch.setattr(PassContext, "attention", disturbed)
    found = compare_decisions(TASKS["game24, tight"], "cpu", ["h2o", "streaming-llm"], 0)
    assert found["ok"]
    assert found["equal_policies"] == 1
    assert found["equal_share"] == 0.5
    assert set(found["different"]) == {"h2o"}
    assert found["signals"]["attention"]["differ"] > 0
    assert found["signals"]["key_norm"]["differ"] == 0
