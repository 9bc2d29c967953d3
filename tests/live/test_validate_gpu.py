"""The GPU validation at toy size on the CPU, and its parts that no toy run reaches."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from arborsim.core.errors import UsageError  # noqa: E402
from arborsim.core.tiers import RECALLS  # noqa: E402
from arborsim_torch.hardware.kernels import buffers  # noqa: E402
from arborsim_torch.models import load_model  # noqa: E402
from benchmarks.gpu.context import longest_context  # noqa: E402
from benchmarks.gpu.decisions import TASKS, compare_decisions  # noqa: E402
from benchmarks.gpu.journal import DeviceLost, Journal, OutOfTime, time_limit  # noqa: E402
from benchmarks.gpu.kernels import compare_pieces  # noqa: E402
from benchmarks.gpu.masking import MaskedModel, evicting_is_masking  # noqa: E402
from benchmarks.gpu.plan import YARDSTICKS, Load, arms  # noqa: E402
from benchmarks.gpu.worker import in_json  # noqa: E402
from benchmarks.gpu.yardsticks import (  # noqa: E402
    KINDS,
    memory_rate,
    run_yardstick,
)
from benchmarks.validate_gpu import main  # noqa: E402

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# Calibration has tests of its own.
OPTIONS = ("--tiny", "--sizes", "64", "--repeats", "2",
           "--parts", "yardsticks", "smoke", "correctness", "search", "trace",
           "context")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of one tiny run from a plain checkout."""
    out = tmp_path_factory.mktemp("out")
    subprocess.run(
        [sys.executable, "benchmarks/validate_gpu.py", *OPTIONS, "--out", out],
        check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    return out / "cpu"


@pytest.fixture(scope="module")
def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def of(records: list[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [record for record in records if record["part"] == part]


def test_the_run_says_what_made_it(records: list[dict[str, Any]]) -> None:
    first = records[0]
    assert first["part"] == "start"
    assert first["identity"]["device"] == "cpu"
    assert first["identity"]["torch"] == torch.__version__
    assert first["date"][:2] == "20"
    assert {record["outcome"] for record in records} == {"done"}


def test_every_check_holds(records: list[dict[str, Any]]) -> None:
    checks = of(records, "correctness")
    assert all(check["ok"] for check in checks)
    assert {check["of"]["check"] for check in checks} == {
        "copies are right", "tokens come back", "rehydrating is keeping",
        "evicting is masking", "decisions are the CPU's", "a block of a prompt",
        "attention over pieces", "attention over a shared prefix",
    }  # fmt: skip
    (decided,) = (check for check in checks if "equal_share" in check)
    assert decided["moves"] > decided["policies"] == decided["equal_policies"] == 7
    assert not decided["different"]
    assert all(signal["largest"] == 0 for signal in decided["signals"].values())
    for check in checks:
        if check["of"]["check"] == "evicting is masking":
            assert check["evicted_cells"] > 0
            assert check["to_ddr_bytes"] > 0


def test_every_policy_is_measured_next_to_its_simulation(records: list[dict[str, Any]]) -> None:
    searches = of(records, "search")
    every = [*YARDSTICKS, *(arm.label for arm in arms(16))]
    captured = [arm.label for arm in arms(16) if arm.graphs]
    assert [search["of"]["arm"] for search in searches] == [*every, *every, *captured]
    kinds = [(search["of"]["graphs"], search["of"]["repeat"]) for search in searches]
    assert list(dict.fromkeys(kinds)) == [("auto", 1), ("auto", 2), ("off", 1)]
    for search in searches:
        label = search["of"]["arm"]
        assert search["tokens_per_s"] == search["steady_tokens"] / search["steady_s"] > 0
        assert search["steady_tokens"] == (48 if "(tree)" in label else 12)
        if label in YARDSTICKS:
            continue
        assert search["generated_tokens"] == (56 if "(tree)" in label else 16)
        assert search["tiers_differ"] == 0
        if label.startswith("half"):  # copies land when they land
            down = search["counters"]["to_ddr_bytes"]
            assert down[0] == down[1] > 0 or "near" in label
            assert search["counters"]["offloaded_tokens"][0] >= 64 // 2 - 8
            assert search["kv_bytes_at_end"]["ddr"] > 0
        else:
            assert search["calls_with_equal_bytes"] == search["calls"] > 4
        assert search["predicted_s"]["total_s"] > 0
        parts = [s for name, s in search["live_s"].items() if name not in HIDDEN]
        assert sum(parts) == pytest.approx(search["live_s"]["total_s"])
        assert 0 <= search["policy_share"] < 1


HIDDEN = ("total_s", "hidden_transfer_s")


def test_kv_bytes_are_those_of_the_tokens(records: list[dict[str, Any]]) -> None:
    """Keys and values, 4 layers, 2 KV heads of 16 numbers, 4 bytes each; full retention of both."""
    size = 2 * 4 * 2 * 16 * 4
    (known,) = of(records, "yardsticks")
    assert known["kv_bytes_per_token"] == size
    embeddings = 211 * 64 * 4  # one of the two; the other gives the logits
    per_layer = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3 + 2 * 64
    assert known["step_weight_bytes"] == embeddings + 4 * (4 * per_layer + 64)
    for search in of(records, "search"):
        if search["of"]["arm"] in YARDSTICKS:
            assert search["kv_bytes"] == 80 * size
        if search["of"]["arm"] == "full":
            assert search["live_peaks"]["peak_hbm_kv_bytes"] == 80 * size
            assert search["predicted_peaks"]["peak_hbm_kv_bytes"] == 80 * size


def test_a_step_of_each_policy_is_traced(records: list[dict[str, Any]], folder: Path) -> None:
    traces = of(records, "trace")
    assert [trace["of"]["arm"] for trace in traces] == [arm.label for arm in arms(16)]
    for trace in traces:
        with zipfile.ZipFile(folder / "traces.zip") as packed:
            content = packed.read(trace["file"])
        names = [e.get("name", "") for e in json.loads(gzip.decompress(content))["traceEvents"]]
        assert names.count("aten::embedding") == 1, "one forward pass"
        assert len(content) < 1 << 19


def test_every_arm_had_a_short_search_first(records: list[dict[str, Any]]) -> None:
    found = of(records, "smoke")
    every = [*YARDSTICKS, *(arm.label for arm in arms(8)), "full"]
    assert [record["of"]["arm"] for record in found] == every
    assert all(record["tokens_per_s"] > 0 for record in found)
    parts = list(dict.fromkeys(record["part"] for record in records))
    assert parts[:4] == ["start", "yardsticks", "smoke", "correctness"]


def test_few_small_files_come_home(folder: Path) -> None:
    """As the machine with the GPU hands them back: at most two folders down, and eight files."""
    files = [path for path in folder.parent.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"results.jsonl", "README.md", "traces.zip"}
    for path in files:
        below = path.relative_to(folder.parent)
        assert len(below.parts) <= 3
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+", part) for part in below.parts)
        assert path.stat().st_size < 16 << 20


def test_contexts_are_probed(records: list[dict[str, Any]]) -> None:
    assert [found["fits_tokens"] for found in of(records, "context")] == [256, 256, 256]
    assert all(probe["fits"] for probe in of(records, "probe"))


def test_the_page_has_the_verdicts_and_every_arm(
    records: list[dict[str, Any]], folder: Path
) -> None:
    text, checks = (folder / "README.md").read_text(), len(of(records, "correctness"))
    assert f"- met: every check of correctness holds: {checks} of {checks}" in text
    assert "- not measured: CUDA's peak" in text
    assert all(f"| {arm.label} |" in text for arm in arms(16))
    assert "What did not come to its end" not in text


def test_a_second_call_does_what_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines()
    lost = [line for line in lines if json.loads(line).get("of", {}).get("arm") == "h2o per=shared"]
    kept = [line for line in lines if line not in lost]
    path.write_text("\n".join(kept) + '\n{"part": "search", "outc')  # interrupted while writing
    command = ["validate_gpu.py", *OPTIONS, "--out", str(folder.parent)]
    monkeypatch.setattr(sys, "argv", [*command, "--resume"])
    assert main() == 0
    added = [json.loads(line) for line in path.read_text().splitlines()[len(kept) + 1 :]]
    again = [(record["part"], record["of"]["arm"]) for record in added if "of" in record]
    assert again == [
        *((part, "h2o per=shared") for part in ("smoke", "search", "search", "trace", "search"))
    ]  # fmt: skip
    assert "h2o per=shared, 64, auto, 2: done" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", command)
    assert main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--resume goes on" in said


def test_another_folder_goes_on_from_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What the file holds is not done again, and the page shows all of it."""
    path = tmp_path / "carried.jsonl"
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()
             if line.endswith("}")]  # fmt: skip
    lines = [line for line in lines if line["part"] != "trace"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["validate_gpu.py", *OPTIONS[:-6], "trace", "--out", str(tmp_path / "new")]
    monkeypatch.setattr(sys, "argv", [*command, "--resume", str(path)])
    assert main() == 0
    text = (tmp_path / "new" / "cpu" / "results.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert records[: len(lines)] == lines
    assert {r["part"] for r in records[len(lines) :]} == {"start", "trace"}
    page = (tmp_path / "new" / "cpu" / "README.md").read_text()
    assert "every check of correctness holds: 2" in page
    assert capsys.readouterr().out.count(": done") == 1 + len(arms(16))
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "NVIDIA H200"'))
    monkeypatch.setattr(sys, "argv", [*command[:-1], str(tmp_path / "2"), "--resume", str(path)])
    assert main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "device NVIDIA H200 there, cpu here" in said


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


def journal(send: Any = None, budget_s: float = 600.0, earlier: Any = ()) -> Journal:
    return Journal(time.monotonic() + budget_s, CPU, send or (lambda record: None), earlier)


def raising(error: BaseException) -> Any:
    def work() -> dict[str, Any]:
        raise error

    return work


def test_every_end_of_a_part_is_a_record_and_the_next_one_runs() -> None:
    said = "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of"
    sent: list[dict[str, Any]] = []
    kept = journal(sent.append)
    kept.attempt("a", {"n": 1}, 5.0, lambda: {"x": 2})
    kept.attempt("b", {}, 5.0, raising(torch.OutOfMemoryError(said)))
    kept.attempt("c", {}, 5.0, raising(RuntimeError("DefaultCPUAllocator: can't allocate memory")))
    kept.attempt("d", {}, 5.0, raising(UsageError("no")))
    kept.attempt("e", {}, 5.0, raising(ValueError("oh")))
    kept.attempt("f", {}, 2.1, lambda: time.sleep(600) or {})
    kept.attempt("g", {}, 1.0, dict)
    kept.attempt("h", {}, 5000.0, dict, expected_s=4000.0)
    began = [line for line in sent if "began" in line]
    assert [line["began"]["part"] for line in began] == list("abcdef")
    assert began[0] == {"began": {"part": "a", "of": {"n": 1}}, "limit_s": 5.0}
    written = [line for line in sent if "began" not in line]
    assert written == kept.records
    assert [record["outcome"] for record in written] == [
        "done", "does not fit", "does not fit", "refused", "failed", "out of time", "left out",
        "left out",
    ]  # fmt: skip
    assert {"of": {"n": 1}, "x": 2}.items() <= written[0].items()
    assert written[1]["asked"] == "20.50 GiB"
    assert written[3]["error"] == "no"
    assert written[4]["error"] == "ValueError: oh"
    assert "raise error" in "".join(written[4]["where"])
    assert 2 < written[5]["seconds"] < 600
    assert "4000 s needed" in written[7]["why"]


def test_what_is_done_is_not_done_again() -> None:
    """Not after an interruption, and not by the process that comes after a lost one."""
    known = {"part": "a", "of": {"n": 1}, "outcome": "hung"}
    kept = journal(earlier=[known])
    assert kept.attempt("a", {"n": 1}, 5.0, raising(AssertionError())) == known
    assert kept.attempt("a", {"n": 2}, 5.0, dict)["outcome"] == "done"
    assert kept.attempt("a", {"n": 2}, 5.0, raising(AssertionError()))["outcome"] == "done"


def test_what_json_cannot_hold_is_a_failure_and_no_end() -> None:
    assert json.loads(in_json({"part": "a", "of": {"n": 1}, "x": torch.ones(2)}))["x"] == [1, 1]
    found = json.loads(in_json({"part": "a", "of": {"n": 1}, "x": {(1, 2): 3}}))
    assert (found["part"], found["of"], found["outcome"]) == ("a", {"n": 1}, "failed")
    assert "keys must be" in found["error"]


def test_a_traceback_is_kept_and_a_compilers_words_are_cut() -> None:
    def deep(levels: int) -> dict[str, Any]:
        if levels:
            return deep(levels - 1) or deep(levels + 1)
        raise RuntimeError("word " * 10_000)

    record = journal().attempt("a", {}, 5.0, lambda: deep(8))
    assert len(record["where"]) >= 12
    assert len(json.dumps(record)) < 20_000


def test_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import journal as module

    def lost(device: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    kept = journal()
    monkeypatch.setattr(module, "release", lost)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        kept.attempt("a", {}, 5.0, raising(RuntimeError("CUDA error: an illegal memory access")))
    assert kept.records[-1]["outcome"] == "failed"


def test_parts_share_what_their_stage_may_take() -> None:
    kept = journal()
    with kept.within(0.5):
        assert kept.left_s <= 0.5
        assert kept.attempt("a", {}, 5.0, dict)["outcome"] == "left out"
    with kept.within(1e9):
        assert 20 < kept.left_s <= 600
    assert kept.attempt("b", {}, 5.0, dict)["outcome"] == "done"


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


def test_the_floor_is_of_memory_that_no_cache_holds() -> None:
    rates = {4 << 20: 9e12, 256 << 20: 3.0e12, 1 << 30: 2.9e12}
    assert memory_rate(rates, torch.device("cuda")) == 3.0e12
    assert memory_rate(dict([*rates.items()][:1]), torch.device("cuda")) == 9e12
    assert memory_rate(rates, CPU) == 9e12
    assert buffers(torch.device("cuda"), 67 << 20) == 4
    assert buffers(torch.device("cuda"), 1 << 30) == buffers(CPU, 1) == 1


def test_both_caches_of_transformers_take_the_same_tokens() -> None:
    loaded, load = load_model("chain"), Load(40, 16, 16)
    dynamic, static = (run_yardstick(loaded, load, kind) for kind in KINDS)
    assert dynamic["tokens"] == static["tokens"]
    assert len(set(static["tokens"])) > 4
    assert dynamic["kv_bytes"] == static["kv_bytes"]
    assert dynamic["step"] == static["step"] == "eager"
    with pytest.raises(ValueError, match="no yardstick: use DynamicCache or StaticCache"):
        run_yardstick(loaded, load, "QuantizedCache")


def test_wrong_pieces_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import kernels

    right = kernels.attend_pieces
    for case in kernels.SMALL_PIECES:
        assert compare_pieces(case, "cpu")["ok"]

    def off(q: Any, pieces: Any, scale: float, **named: Any) -> Any:
        return right(q, pieces, scale * (1 if q.dtype == torch.float64 else 1.05), **named)

    monkeypatch.setattr(kernels, "attend_pieces", off)
    assert not any(compare_pieces(case, "cpu")["ok"] for case in kernels.SMALL_PIECES)


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
    found = compare_decisions(TASKS["game24, tight"], "cpu", ["arborkv", "streaming-llm"], 0)
    assert found["ok"]
    assert found["equal_policies"] == 1
    assert found["equal_share"] == 0.5
    assert set(found["different"]) == {"arborkv"}
    assert found["signals"]["attention"]["differ"] > 0
    assert found["signals"]["key_norm"]["differ"] == 0
