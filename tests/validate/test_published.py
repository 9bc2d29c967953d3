"""Published serving runs: the file, how they are played, what is odd, what is said of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from arborsim.cli.app import main
from arborsim.core.documents import to_toml
from arborsim.core.tiers import Budget
from arborsim.machine.fidelity import FidelityFile, fidelity, fidelity_file
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.machine.program import Op, iterations
from arborsim.policies.registry import build
from arborsim.products.generate.lengths import TreeSpec, fixed, write_generated
from arborsim.products.validate import published, published_errors, published_report
from arborsim.products.validate.aiconfigurator import Prediction, installed
from arborsim.products.validate.comparison_log import ComparisonLog
from arborsim.products.validate.published import KeptRun, PlayedRun, compare
from arborsim.products.validate.published_errors import error_lines
from arborsim.products.validate.published_report import Published, report_of, to_frame
from arborsim.products.validate.serving import ServingRun, read_runs
from arborsim.report.text import print_report
from tests.helpers.demands import record_demands

RUN = ServingRun(
    model="llama-3.1-8b", gpu="h100_sxm", engine="vllm", weights="bfloat16", tensor_parallel=1,
    expert_parallel=1, prompt_tokens=1000, output_tokens=100, concurrency=4, id="00000001aaaa",
    ttft_ms=60.0, tpot_ms=8.0,
)  # fmt: skip
NIGHTLY = replace(RUN, data_parallel=1, measured="2026-01-31")
HEAD = (
    "id,model,gpu,engine,weights,tensor_parallel,prompt_tokens,output_tokens,concurrency,"
    "ttft_ms,tpot_ms"
)
ROW = "00000001,llama-3.1-8b,h100_sxm,vllm,bfloat16,1,1000,100,4,60.0,8.0"


def some_runs(path: Path, step: int) -> Path:
    """Every so many of the shipped runs, as a file."""
    every = pd.DataFrame(read_runs()).iloc[::step]
    every.replace({0: None, "": None}).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return some_runs(tmp_path_factory.mktemp("runs") / "sample.csv", 61)


@pytest.fixture(scope="module")
def played_once() -> Iterator[None]:
    """Each run is played once for all tests that ask for this; it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published, "compare", cache(published.compare))
        yield


# --- the file ---


def test_all_shipped_runs_are_read() -> None:
    runs = read_runs()
    assert len(runs) == 796
    assert len({run.id for run in runs}) == 796
    assert {run.gpu for run in runs} == {"h100_sxm", "h200_sxm", "b200_sxm"}
    assert sum(run.nightly for run in runs) == 404
    assert 0.4 < np.mean([run.fitted for run in runs]) < 0.6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "head: column model is missing"),
        (HEAD, "holds no run"),
        (HEAD.replace("gpu", "gpus"), "unknown column 'gpus': did you mean gpu"),
        (f"{HEAD},gpu\n{ROW},h100_sxm", "column gpu is there twice"),
        (HEAD.replace(",tpot_ms", ""), "column tpot_ms is missing"),
        (f"{HEAD}\n{ROW}\n{ROW},5", "row 2: has 12 columns: expected 11"),
        (f"{HEAD}\n{ROW.replace('8.0', 'fast')}", "row 1, column tpot_ms: expected milliseconds"),
        (f"{HEAD}\n{ROW.replace('8.0', '-8')}", "row 1, column tpot_ms: expected milliseconds"),
        (f"{HEAD}\n{ROW.replace('60.0', 'nan')}", "column ttft_ms: expected milliseconds above 0"),
        (f"{HEAD}\n{ROW.replace(',4,', ',0,')}", "concurrency: expected a whole number of 1"),
        (f"{HEAD}\n{ROW.replace(',100,', ',1,')}", "output_tokens: expected a whole number of 2"),
        (f"{HEAD}\n{ROW.replace(',100,', ',9.5,')}", "not '9.5'"),
        (f"{HEAD}\n{ROW.replace('bfloat16', 'int3')}", "column weights: expected one of bfloat16"),
        (f"{HEAD}\n{ROW.replace('00000001', 'mine')}", "column id: expected 8 or more hexadecimal"),
        (f"{HEAD}\n{ROW.replace('llama-3.1-8b', '')}", "column model: expected a model's name"),
        (f'{HEAD}\n{ROW}\n"{ROW}', "row 2: is not CSV"),
    ],
)
def test_bad_files_are_one_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text)
    assert main(["validate", "published", str(path)]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert str(path) in line
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nowhere.csv", "nowhere.csv: cannot be read"),
        ("--out runs.json", "unknown format of --out '.json'"),
        ("--out nowhere/runs.csv", "there is no directory nowhere"),
        ("--jobs 0", "--jobs"),
    ],
)
def test_bad_options_are_one_line(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "published", *arguments.split()]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert said in line


def test_the_file_that_is_read_is_not_written(
    sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "published", str(sample), "--out", str(sample)]) == 2
    assert "the command reads it" in capsys.readouterr().err


def test_validate_without_a_subcommand_is_what_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--task", "chain"]) == 2
    assert "--gpu" in capsys.readouterr().err
    assert main(["validate", "--help"]) == 0
    assert "  published  Play serving runs" in capsys.readouterr().out


# --- playing ---


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mistral-7b-v0.1", "gemma-3-1b"])
@pytest.mark.parametrize("prompt", [100, 500])
def test_a_request_is_what_a_replay_would_record(model: str, prompt: int, tmp_path: Path) -> None:
    geometry, output = load_geometry(model), 60
    trace = tmp_path / "linear.parquet"
    write_generated(TreeSpec(fixed(prompt), fixed(output)), 1, 0, geometry, trace)
    machine = Machine(load_profile("h100"), geometry)
    (recorded,) = record_demands(trace, build("full"), Budget("-", share=1.0), machine)
    made = published.request(geometry, prompt, output)
    for mine, its in zip(iterations(made.pieces), iterations(recorded.pieces), strict=True):
        assert np.array_equal(mine, its[: output - 1])  # the first token comes with the prompt
    before = [op for op in recorded.ops.tolist() if op[0] in (Op.LEVEL, Op.PREFILL)]
    assert made.ops[:2].tolist() == before
    assert made.info.prefix == ""
    assert not made.info.prefix_tokens


def test_nightly_lengths_are_spread_and_others_are_as_stated() -> None:
    assert published.lengths(RUN) == ([1000], [100])
    prompts, outputs = published.lengths(NIGHTLY)
    assert len(prompts) == len(outputs) == published.LENGTHS
    assert min(prompts) > 800
    assert max(prompts) < 1000
    assert np.mean(prompts) == pytest.approx(900, abs=1)
    assert len(set(np.diff(prompts))) <= 2


def test_the_cache_is_in_fp8_only_where_checkpoints_under_tensorrt_llm_ask_for_it() -> None:
    quantised = replace(NIGHTLY, engine="trtllm", weights="fp8")
    assert published.kv_dtype(quantised) == "fp8"
    for other in (
        replace(quantised, weights="bfloat16"),
        replace(quantised, engine="vllm"),
        replace(quantised, model="gpt-oss-120b"),
    ):
        assert published.kv_dtype(other) == "bf16"
    assert published.machine_of(quantised).geometry.kv_bytes_per_element == 1


def test_one_client_has_the_times_of_single_requests() -> None:
    made = published.play(replace(RUN, concurrency=1))
    profile, geometry, options = published.machine_of(RUN)
    engine = published.ServingEngine(
        [published.request(geometry, 1000, 100)], profile, geometry, options
    )
    assert made.ttft_s + 99 * made.tpot_s == pytest.approx(engine.alone[0].seconds)
    assert made.tokens_per_s == pytest.approx(100 / engine.alone[0].seconds)
    assert made.queueing == pytest.approx(0)


def test_more_clients_queue_and_get_more_out() -> None:
    few, many = (published.play(replace(RUN, concurrency=n)) for n in (2, 64))
    assert many.queueing > few.queueing
    assert many.tokens_per_s > few.tokens_per_s
    assert many.tpot_s > few.tpot_s


def test_runs_of_one_setting_share_its_machine_and_stay_what_they_are_alone() -> None:
    other = replace(RUN, id="00000001", tpot_ms=9.0, output_tokens=40)
    for run in (RUN, replace(RUN, concurrency=32), other, replace(other, concurrency=8), RUN):
        assert published.play(run) == published.play(run, published.machine_of(run))


def test_measured_throughput_is_littles_law() -> None:
    assert published.measured_tokens_per_s(RUN) == pytest.approx(4 * 100 / (0.060 + 99 * 0.008))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "gpt-9"}, "no geometry of model gpt-9"),
        ({"gpu": "tpu"}, "no profile of GPU tpu"),
        ({"engine": "mlc"}, "no tables of engine mlc"),
        ({"data_parallel": 2}, "several copies"),
        ({"model": "llama-3.1-70b"}, "does not fit"),
        ({"prompt_tokens": 1_000_000}, "does not fit"),
    ],
)
def test_what_cannot_be_played_says_why(changed: dict[str, object], said: str) -> None:
    made = compare(replace(RUN, **changed))  # type: ignore[arg-type]
    assert made.simulated is None
    assert said in made.reason
    assert math.isnan(made.tpot_error)


# --- odd runs ---


def test_weights_that_exceed_the_memory_are_odd() -> None:
    large = replace(RUN, model="llama-3.1-70b")
    assert "weights of 141 GB alone exceed the 86 GB" in published.oddness(large)
    assert not published.oddness(replace(large, tensor_parallel=2))


def test_prompts_faster_than_half_of_the_peak_are_odd() -> None:
    profile, geometry, _ = published.machine_of(RUN)
    most = published.MOST_OF_PEAK * profile.flops_per_s
    prompts_per_s = most / (2 * geometry.active_parameters * RUN.prompt_tokens)
    request_ms = 1e3 * RUN.concurrency / prompts_per_s
    for factor, odd in ((0.99, True), (1.01, False)):
        run = replace(RUN, tpot_ms=(factor * request_ms - RUN.ttft_ms) / 99)
        assert bool(published.oddness(run)) is odd
        if odd:
            assert "51% of its GPUs' peak" in published.oddness(run)
            assert not published.oddness(replace(run, tensor_parallel=2))
            assert not published.oddness(replace(run, weights="fp8"))


def test_runs_on_unknown_hardware_are_not_odd() -> None:
    assert published.oddness(replace(RUN, gpu="tpu", tpot_ms=1e-6)) == ""


# --- results ---


def test_results_do_not_depend_on_the_number_of_jobs(tmp_path: Path) -> None:
    """Invariant 6: published runs, played by one process and by two."""
    texts, sample = [], some_runs(tmp_path / "sample.csv", 199)
    for jobs in ("1", "2"):
        out = tmp_path / f"{jobs}.csv"
        arguments = ["published", str(sample), "--jobs", jobs, "--out", str(out)]
        assert main(["validate", *arguments, "--no-aiconfigurator"]) == 0
        texts.append(out.read_text())
    assert texts[0] == texts[1]


def test_an_interruption_loses_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW.replace("1000,100,4", f"1000,100,{n}") for n in (1, 2, 3)]
    rows.append(ROW.replace("llama-3.1-8b", "no-model"))
    file, out = tmp_path / "runs.csv", tmp_path / "errors.csv"
    file.write_text("\n".join([HEAD, *rows]) + "\n")
    log = tmp_path / "errors.csv.partial.jsonl"
    arguments = ["validate", "published", str(file), "--no-aiconfigurator", "--out", str(out)]
    real, played = published.compare, []

    def pressed_at_the_third(run: ServingRun) -> PlayedRun:
        played.append(run.concurrency)
        if len(played) == 3:
            raise KeyboardInterrupt
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(published, "compare", pressed_at_the_third)
        assert main(arguments) == 130
        assert f": {log} holds 2 of 4 runs; --resume goes on" in capsys.readouterr().err
        assert not out.exists()
        assert main(arguments) == 2
        assert "holds an interrupted comparison" in capsys.readouterr().err
        assert main([*arguments, "--resume"]) == 0
    assert played == [1, 2, 3, 3, 4], "what was done is not played again"
    assert not log.exists()
    resumed = out.read_bytes()
    assert main(arguments) == 0
    assert out.read_bytes() == resumed
    assert main([*arguments, "--resume"]) == 0, "with nothing to go on with, it begins"


def test_a_log_of_other_runs_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "runs.csv", tmp_path / "errors.csv"
    file.write_text(f"{HEAD}\n{ROW}\n{ROW}\n")
    other = Prediction(0.1, 0.01, 100.0)
    log = ComparisonLog(out, KeptRun, read_runs(file), "", resume=False)
    log.keep(0, replace(compare(read_runs(file)[0]), other=other))
    log.close()
    again = ComparisonLog(out, KeptRun, read_runs(file), "", resume=True)
    assert [each.other for each in again.played] == [other]
    again.close()
    file.write_text(f"{HEAD}\n{ROW}\n")
    arguments = ["validate", "published", str(file), "--no-aiconfigurator", "--resume"]
    assert main([*arguments, "--out", str(out)]) == 2
    assert "is of other runs, or another arborsim" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "--resume needs --out" in capsys.readouterr().err


@pytest.mark.usefixtures("played_once")
def test_figures_are_those_of_the_rows_that_are_written(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs.parquet"
    arguments = ["published", str(sample), "--out", str(out), "--no-aiconfigurator"]
    assert main(["validate", *arguments]) == 0
    printed = capsys.readouterr().out
    frame = pd.read_parquet(out)
    assert len(frame) == len(read_runs(sample))
    assert {
        "id", "model", "side", "odd", "not_played", "simulated_tpot_ms", "simulated_ttft_ms",
        "simulated_tokens_per_s", "measured_tokens_per_s", "queueing",
    } <= set(frame)  # fmt: skip
    assert (frame.not_played != "").equals(frame.simulated_tpot_ms.isna())
    e2e = frame[frame.not_played == ""].filter(like="simulated_e2e_")
    assert list(e2e) == [f"simulated_e2e_p{each}_ms" for each in (50, 95, 99)]
    assert (e2e.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert (e2e.simulated_e2e_p99_ms > frame.simulated_ttft_ms.loc[e2e.index]).all()
    judged = frame[(frame.side == "judged") & (frame.not_played == "")]
    assert set(judged.id.map(lambda text: int(text[:8], 16) % 2)) == {1}
    lines = error_lines([published.compare(run) for run in read_runs(sample)])
    for line in lines:
        own = {
            "": {"all judged": judged, "without odd runs": judged[judged.odd == ""]},
            "GPUs": {
                "one GPU": judged[judged.tensor_parallel == 1],
                "several GPUs": judged[judged.tensor_parallel > 1],
            },
            "model": dict(list(judged.groupby("model"))),
            "GPU": dict(list(judged.groupby("gpu"))),
            "engine": dict(list(judged.groupby("engine"))),
        }.get(line.group, {}).get(line.name)  # fmt: skip
        if own is None:
            assert line.group == "number of GPUs" or line.name == "fitted, for comparison"
            continue
        error = own.simulated_tpot_ms / own.tpot_ms - 1
        assert line.tpot.n == len(own)
        assert line.tpot.median == pytest.approx(error.abs().median())
        assert line.tpot.high == pytest.approx(error.abs().quantile(0.9))
        assert line.tpot.signed == pytest.approx(error.median())
        rate = own.simulated_tokens_per_s / own.measured_tokens_per_s - 1
        assert line.throughput.median == pytest.approx(rate.abs().median())
        little = own[own.queueing < published.LITTLE_QUEUEING]
        assert line.ttft.n == len(little)
        first = little.simulated_ttft_ms / little.ttft_ms - 1
        assert line.ttft.median == pytest.approx(first.abs().median(), nan_ok=True)
    error = (judged.simulated_tpot_ms / judged.tpot_ms - 1).abs()
    assert f"{error.median():.1%} in the median" in " ".join(printed.split())
    assert f"{error.quantile(0.9):.1%} at the 90th percentile" in " ".join(printed.split())
    skipped = frame[frame.not_played != ""].not_played.value_counts()
    for reason, number in skipped.items():
        assert f"{number} run{'s' * (number > 1)}: {reason}" in printed


def played(tpot_ms: float, **changed: object) -> PlayedRun:
    run = replace(RUN, **changed)  # type: ignore[arg-type]
    return PlayedRun(run, published.Simulated(0.06, tpot_ms / 1e3, 500.0, 0.0))


def test_targets_are_met_or_missed_on_judged_runs() -> None:
    runs = [played(8.4), played(8.8), played(80.0, id="00000002"), played(8.2, tensor_parallel=2)]
    found = {target.name: target for target in published_errors.targets(runs)}
    one = found["time per output token on one GPU, median"]
    assert one.n == 2
    assert one.reached == pytest.approx(0.075)
    assert not one.met
    assert found["time per output token on several GPUs, median"].met
    assert [each.run.tensor_parallel for each in published_errors.worst(runs)] == [1, 1, 2]


def test_versions_that_no_constant_was_fitted_to_are_named_and_judged_apart() -> None:
    near, old = played(8.4), played(80.0, engine="trtllm", engine_version="nim-1.0")
    assert [published.far(each.run) for each in (near, old)] == [False, True]
    lines = {line.name: line for line in published_errors.error_lines([near, old])}
    assert (lines["all judged"].tpot.n, lines[published_errors.NEAR].tpot.n) == (2, 1)
    assert published_errors.near([near, old]) == [near]
    said = published_report.sentences([near, old])
    assert any("No constant was fitted to these versions" in each for each in said)
    assert any("trtllm nim-1.0" in each for each in said)
    assert not any("No constant" in each for each in published_report.sentences([near]))


def test_a_bias_of_throughput_has_a_target_of_its_own() -> None:
    found = {target.name: target for target in published_errors.targets([played(8.4)])}
    bias = found["output tokens per second, bias"]
    assert (bias.limit, bias.n) == (0.02, 1)
    assert bias.reached == found["output tokens per second, median"].reached
    assert not bias.met


def test_without_judged_runs_nothing_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    runs = (played(8.4, id="00000002"), compare(replace(RUN, gpu="tpu")))
    assert published_errors.targets(runs) == []
    print_report(report_of(Published(runs, {"runs": "mine"})))
    said = capsys.readouterr().out
    assert "No judged run could be played." in said
    assert "1 of 2 runs could not be played." in said
    assert "nan" not in said


def test_runs_without_an_identifier_are_judged() -> None:
    assert not replace(RUN, id="").fitted
    assert replace(RUN, id="0000000012").fitted


def test_our_errors_next_to_aiconfigurators_are_on_the_runs_that_it_predicts() -> None:
    near, far = played(8.0), played(16.0)
    predicted = replace(near, other=Prediction(0.06, 8.8e-3, 500.0))
    (line, *_) = error_lines([predicted, far])
    assert line.tpot.n == 2
    assert (line.other.n, line.ours.n) == (1, 1)
    assert line.other.median == pytest.approx(0.1)
    assert line.ours.median == pytest.approx(0)
    assert to_frame(Published((predicted,), {})).aiconfigurator_tpot_ms[0] == pytest.approx(8.8)


@pytest.mark.skipif(not installed(), reason="aiconfigurator-core is not installed")
def test_aiconfigurator_is_asked_where_it_is_installed(tmp_path: Path) -> None:
    path, out = tmp_path / "runs.csv", tmp_path / "out.csv"
    path.write_text(f"{HEAD}\n{ROW}\n")
    assert main(["validate", "published", str(path), "--out", str(out)]) == 0
    frame = pd.read_csv(out)
    assert 2 < frame.aiconfigurator_tpot_ms[0] < 20


# --- the summary that plans quote ---


@pytest.mark.usefixtures("played_once")
def test_the_summary_is_read_as_it_was_written(sample: Path, tmp_path: Path) -> None:
    path = tmp_path / "fidelity.toml"
    arguments = ["published", str(sample), "--no-aiconfigurator", "--fidelity", str(path)]
    assert main(["validate", *arguments]) == 0
    from arborsim.core.records import read_toml

    found = read_toml(FidelityFile, path)
    found_by = [published.compare(run) for run in read_runs(sample)]
    assert found.group == published_errors.by_kind(found_by)
    assert to_toml(found) == path.read_text()


def test_what_was_measured_is_found_by_its_kind() -> None:
    every = fidelity_file()
    assert every.date
    for each in every.group:
        gpus = 4 if each.several_gpus else 1
        assert fidelity(each.gpu, each.engine, each.weights, gpus) == each
        assert fidelity(f"{each.gpu}+ddr5-2tb", each.engine, each.weights, gpus) == each
    assert fidelity("h100", "vllm", "bf16", 8) == fidelity("h100", "vllm", "bfloat16", 2)
    assert fidelity("a6000", "vllm", "bfloat16", 1) is None
