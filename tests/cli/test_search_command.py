"""`arborsim search` as a user runs it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

import arborsim
import arborsim.products.search.run as job_module
from arborsim.cli.app import main
from arborsim.trace.writer import TraceWriter
from tests.bank.banks import bank_columns, bank_info
from tests.helpers.traces import make_info, make_trace


def write_bank(path: Path, problems: int = 4, embeddings: bool = True, **shape: int) -> Path:
    with TraceWriter(path, bank_info(embeddings)) as writer:
        for seed in range(problems):
            writer.write_episode(bank_columns(seed, embeddings=embeddings, **shape))
    return path


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bank(tmp_path_factory.mktemp("b") / "bank.parquet", width=5, depth=3)


def fail(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(["search", *map(str, arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert shown.err.startswith("arborsim: ")
    return shown.err


@pytest.mark.parametrize("columns", [80, 160])
def test_tables_fit_the_terminal(
    columns: int, bank: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    command = ["search", str(bank), "--algorithm", "all", "--width", "8,16", "--gpu", "h200"]
    assert main([*command, "--model", "llama-3.1-8b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    text = "\n".join(lines)
    assert lines[0].startswith("At width 16, no search reaches REBASE's accuracy; ")
    assert (
        "bank.parquet: 4 problems of random, simulated on GPU h200 under vllm, default host; "
        in " ".join(text.split())
    )
    assert "model llama-3.1-8b, 16-bit KV (131,072 B/token)" in " ".join(text.split())
    for name in ("rebase", "ets-kv", "self-consistency", "dpts", "mcts", "linear"):
        assert f" {name} " in text
    assert "…" not in text, "a cell was cut"
    assert len([line for line in lines if line.startswith(" search ")]) == 1, "one table"
    below = text.rpartition("\n\n")[2]
    assert below.endswith(": --notes")


def test_results_are_the_same_to_the_byte_for_any_number_of_jobs(
    bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for jobs, form in ((1, "parquet"), (1, "csv"), (1, "json"), (2, "csv")):
        out = tmp_path / f"{jobs}.{form}"
        command = ["search", str(bank), "--algorithm", "ets-kv,rebase,dpts", "--width", "8,4"]
        assert main([*command, "--jobs", str(jobs), "--out", str(out)]) == 0
        assert f"wrote {out}" in capsys.readouterr().out
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    frame = pd.read_parquet(tmp_path / "1.parquet")
    keys = frame[["algorithm", "width", "policy", "budget", "episode"]]
    assert len(frame) == (2 * 2 + 1) * 4  # dpts runs once, with its own 4 slots
    assert not keys.duplicated().any()
    assert frame["width"].tolist() == [4] * 12 + [8] * 8
    assert (frame["kv_tokens_with_prompt"] == frame["kv_tokens"] + 8 * frame["selections"]).all()
    assert (frame["peak_held_kv_bytes"] <= frame["peak_hbm_kv_bytes"]).all()
    rows = json.loads((tmp_path / "1.json").read_text())["searches"]
    assert [row["kv_tokens"] for row in rows] == frame["kv_tokens"].tolist()
    assert rows[0]["attention_kept"] is None
    # pandas before 3 reads some numbers a last place off unless told not to.
    csv = pd.read_csv(tmp_path / "1.csv", float_precision="round_trip")
    assert csv["total_s"].tolist() == frame["total_s"].tolist()


def test_a_host_and_another_type_of_cache(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a replay: both are charged, named in the heading, and listed in the page."""
    monkeypatch.setenv("COLUMNS", "80")
    page, sizes = tmp_path / "r.html", []
    command = ["search", str(bank), "--algorithm", "rebase", "--width", "8", "--episodes", "1"]
    command += ["--model", "llama-3.1-8b", "--policy", "streaming-llm", "--budget", "0.5"]
    command += ["--notes"]
    for options in ([], ["--kv-dtype", "fp8", "--host", "ddr4-256gb", "--report", str(page)]):
        out = tmp_path / "r.csv"
        assert main([*command, *options, "--out", str(out)]) == 0
        sizes.append(pd.read_csv(out)["kv_bytes_per_token"].tolist())
    assert sizes == [[131_072], [65_536]]
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "GPU h100 under vllm, ddr4-256gb host; model llama-3.1-8b, 8-bit KV (65,536 B/token)"
        in shown
    )
    said = " ".join(shown.split())
    assert "Policy time of streaming-llm in vllm is worked out from the operations" in said
    text = page.read_text()
    for fact in ("h100+ddr4-256gb", "llama-3.1-8b, fp8 KV", "8-bit", "65,536", "Policy time of"):
        assert fact in text
    assert "unknown type of a KV cache 'fp3'" in fail(capsys, bank, "--kv-dtype", "fp3")
    assert "unknown host 'ddr9'" in fail(capsys, bank, "--host", "ddr9")


def test_what_does_not_fit_is_said(
    bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "small.toml"
    profile.write_text('base = "h100"\nname = "small"\nhbm_bytes = 17_850_000_000\n')
    command = ["search", str(bank), "--algorithm", "rebase", "--width", "8", "--gpu", str(profile)]
    assert main([*command, "--model", "llama-3.1-8b"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Does not fit on bank.parquet: rebase at width 8 lacks " in shown
    assert " of HBM. small has 16.1 GB of HBM" in shown


def test_policies_and_budgets(
    bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.parquet"
    command = ["search", str(bank), "--algorithm", "rebase", "--width", "8", "--out", str(out)]
    command += ["--policy", "full,streaming-llm", "--budget", "0.5,0.8"]
    assert main([*command, "--set", "sinks=2", "--set", "temperature=0.4"]) == 0
    shown = capsys.readouterr().out
    assert "\n streaming-llm at budget 0.8\n" in shown
    frame = pd.read_parquet(out)
    assert frame.groupby(["policy", "budget"], sort=False).size().to_dict() == {
        ("full", "any"): 4, ("streaming-llm", "0.5"): 4, ("streaming-llm", "0.8"): 4,
    }  # fmt: skip
    by = frame.groupby(["policy", "budget"])
    assert by["kv_tokens"].sum().nunique() == 1  # the search does not change, the cache does
    evicted = by["evicted_tokens"].sum()
    assert evicted["full", "any"] == 0 < evicted["streaming-llm", "0.8"]
    assert evicted["streaming-llm", "0.8"] < evicted["streaming-llm", "0.5"]


def test_a_sweep_names_a_value(
    bank: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ["search", str(bank), "--algorithm", "ets,ets-kv", "--width", "8"]
    assert main([*command, "--sweep", "lambda_b=1,2", "--notes"]) == 0
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    shown = " ".join(printed.split())
    assert "vs REBASE: a multiple of REBASE's figure" in shown
    assert "ets lambda_b=1 8 " in shown
    assert " rebase 8 " in shown  # what it is compared with
    for name in ("ets", "ets-kv"):
        assert f"{name} at width 8: " in shown


def test_bad_input(bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown search 'rebas': did you mean rebase" in fail(
        capsys, bank, "--algorithm", "rebas"
    )
    assert "expected whole numbers" in fail(capsys, bank, "--width", "0")
    assert "expected whole numbers" in fail(capsys, bank, "--width", "a")
    error = fail(capsys, bank, "--algorithm", "dvts-4", "--width", "2")
    assert "subtrees must be 1 to width (2)" in error
    error = fail(capsys, bank, "--algorithm", "tot-bfs", "--width", "2")
    assert "--set tot-bfs.keep=2" in error
    assert "lambda_b" in fail(capsys, bank, "--set", "lambda_c=1")
    assert "unknown policy 'h3o'" in fail(capsys, bank, "--policy", "h3o")
    assert "--capture signals" in fail(capsys, bank, "--policy", "raas")
    assert "--capture qkv --qkv-layers all" in fail(capsys, bank, "--policy", "h2o")
    assert "unknown format of --out '.txt'" in fail(capsys, bank, "--out", "x.txt")
    assert "the command reads it; choose another name" in fail(capsys, bank, "--out", bank)
    assert "no episode 9" in fail(capsys, bank, "--first", "9")
    assert "no such file" in fail(capsys, tmp_path / "none.parquet")
    assert "'h201'" in fail(capsys, bank, "--gpu", "h201")
    assert "expected name=value,value" in fail(capsys, bank, "--sweep", "lambda_b")
    error = fail(capsys, bank, "--policy", "streaming-llm", "--budget", "2")
    assert "rebase at width 16" in error
    assert "--strict" not in error
    command = ["search", str(bank), "--policy", "full,streaming-llm", "--budget", "2"]
    assert "without --strict it is left out" in fail(capsys, *command[1:], "--strict")
    assert main([*command, "--algorithm", "rebase"]) == 0


def test_what_a_budget_is_too_small_for_is_a_row(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out, page = tmp_path / "r.parquet", tmp_path / "r.html"
    command = ["search", str(bank), "--algorithm", "rebase,ets", "--width", "4", "--policy",
               "full,streaming-llm", "--budget", "2,0.9", "--out", str(out)]  # fmt: skip
    assert main([*command, "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    _, _, block = shown.partition(" streaming-llm at budget 2\n")
    assert re.search(r"^ rebase +4 +needs \d+ tokens or more: ", block, re.MULTILINE)
    assert "left out:" not in shown, "said once"
    tables, _, _ = shown.partition("wrote ")  # paths are as long as they are
    assert max(len(line.rstrip()) for line in tables.splitlines()) <= 80
    frame = pd.read_parquet(out)
    missing = frame[frame["left_out"] != ""]
    assert len(missing) == 8, "two searches on four problems"
    assert set(missing["budget"]) == {"2"}
    assert missing["kv_tokens"].isna().all()
    assert frame["kv_tokens"].dtype == "Int64"
    assert 'colspan="' in page.read_text()
    again = arborsim.load_results(out)
    assert len(again.raw) == len(frame) - 8
    assert len(again.to_pandas()) == len(frame)
    assert [row["left_out"] != "" for row in again.summary().to_dict("records")].count(True) == 2


def test_a_trace_that_is_no_bank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = make_trace(tmp_path / "t.parquet", info=make_info(extra={"ends": "unknown"}))
    assert "arborsim record --bank" in fail(capsys, trace)


def test_a_bank_without_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = write_bank(tmp_path / "b.parquet", problems=1, embeddings=False, width=3, depth=2)
    error = fail(capsys, bare, "--algorithm", "ets")
    assert "or search with ets-kv" in error
    assert main(["search", str(bare), "--algorithm", "ets", "--set", "lambda_d=0"]) == 0
    assert main(["search", str(bare), "--algorithm", "all", "--width", "2", "--notes"]) == 0
    shown = capsys.readouterr().out
    assert "\nets clusters thoughts by embeddings" in shown
    assert "\ndvts-4: subtrees must be 1 to width (2)" in shown


def test_a_broken_off_run_keeps_what_is_done(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = job_module.run_problem
    calls = []

    def stop_at_the_third(*arguments: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(job_module, "run_problem", stop_at_the_third)
    out = tmp_path / "r.csv"
    assert main(["search", str(bank), "--algorithm", "rebase", "--out", str(out)]) == 130
    shown = capsys.readouterr()
    assert "interrupted: 2 of 4 problems are in the results" in shown.err
    assert "2 problems of random" in shown.out
    assert sorted(set(pd.read_csv(out)["episode"])) == [0, 1]
