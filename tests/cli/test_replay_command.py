"""`arborsim replay` as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.products.calibrate.documents import read_calibration
from tests.helpers.traces import make_trace

SHARED = ("--set", "h2o.per=shared")  # the form that needs no vectors


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(
        tmp_path_factory.mktemp("t") / "x.parquet", kind="tree", prompt=24, nodes=30, block=(4, 12)
    )


@pytest.mark.parametrize("columns", [80, 160])
def test_tables_fit_the_terminal(
    columns: int, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert (
        main(["replay", str(trace), "--policy", "h2o,epikv,lag-kv", "--budget", "0.8,0.6", *SHARED])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    text = "\n".join(lines)
    for name in ("full", "h2o", "epikv", "lag-kv"):
        assert name in text
    assert "…" not in text, "a cell was cut"


def test_gpu_host_model_and_type_of_cache_lead_the_output(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "r.html"
    command = ["replay", str(trace), "--episodes", "1", "--no-oracle"]
    given = ["--gpu", "h200", "--host", "ddr5-2tb", "--model", "qwen3-8b", "--kv-dtype", "fp8"]
    for options, line in (
        ([], "GPU h100 under vllm, default host; recorded model "),
        (given, "GPU h200 under vllm, ddr5-2tb host; model qwen3-8b, 8-bit KV (73,728 B/token)"),
    ):
        assert main([*command, *options, "--report", str(page)]) == 0
        assert f"Simulated on {line}" in " ".join(capsys.readouterr().out.split())
        assert f"Simulated on {line}" in page.read_text()


def test_the_matrix_on_request_and_what_cannot_be_replayed(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ["replay", str(trace), "--policy", "all", "--budget", "0.3,0.9", "--episodes", "1",
               "--notes"]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "at 0.3 " in shown
    assert "record with --capture qkv --qkv-layers all" in " ".join(shown.split())
    without = (
        "--set per=shared runs h2o, key-norm, keydiff, random-attention, snapkv, tova and vatp"
    )
    form = "one ranking for all heads, not its authors' form."
    assert f"{without}: {form}" in " ".join(shown.split())
    assert re.search(r"^ arborkv +needs\b", shown, re.MULTILINE)
    assert main([*command[:3], "h2o", *command[4:], *SHARED, "--view", "matrix"]) == 0
    assert "at 0.9" in capsys.readouterr().out


def test_the_oracle_can_be_left_out(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "replay",
        str(trace),
        "--policy",
        "h2o",
        "--budget",
        "0.8",
        "--episodes",
        "1",
        *SHARED,
    ]
    for options, there in (([], True), (["--no-oracle"], False), (["--no-quality"], False)):
        assert main([*command, *options, "--view", "table"]) == 0
        assert ("oracle" in capsys.readouterr().out) is there


def test_workers_give_the_same_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for workers in ("1", "2"):
        command = [
            "replay",
            str(trace),
            "--policy",
            "h2o,arbor-epi",
            "--budget",
            "0.9",
            "--json",
            *SHARED,
        ]
        assert main([*command, "--jobs", workers]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_composed_policies_and_their_parameters(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files and classes work where names do; a parameter of a block has a dot of its own."""
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[score]\nuse = "position"\n[protect]\nrecent = 4\n')
    command = ["replay", str(trace), "--policy", f"{file},arborsim.policies.methods.attention:H2O",
               "--budget", "0.9", "--episodes", "1", "--set", "protect.recent=7",
               "--set", "h2o.sinks=2", *SHARED, "--set", "mine.protect.sinks=3",
               "--report", str(tmp_path / "r.html")]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert "h2o" in shown
    page = (tmp_path / "r.html").read_text()
    assert "protect.sinks 3, protect.recent 7" in page
    assert "sinks 2" in page


def test_one_setting_lets_the_prompts_of_all_policies_compete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget below the prompt's share; of compositions the block may be left out."""
    trace = make_trace(tmp_path / "x.parquet", kind="linear", prompt=60, nodes=6, episodes=1)
    chosen = ("epikv", "h2o", "raas", "staircase")
    command = ["replay", str(trace), "--policy", ",".join(chosen), "--budget", "0.25", "--json",
               "--no-oracle", *SHARED]  # fmt: skip
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["policy"] for row in rows if row["left_out"]} >= {"epikv"}
    assert main([*command, "--set", "pin_prompt=false"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in result["rows"]} == {"full", *chosen}


def test_what_cannot_run_is_a_row_with_its_reason_everywhere(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget below the prompt, and a policy whose vectors were not recorded."""
    monkeypatch.setenv("COLUMNS", "80")
    out, page = tmp_path / "r.parquet", tmp_path / "r.html"
    command = ["replay", str(trace), "--policy", "epikv,h2o,arkv", "--budget", "0.02,0.9",
               "--episodes", "1", *SHARED]  # fmt: skip
    assert main([*command, "--notes", "--out", str(out), "--report", str(page)]) == 0
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if re.match(r" epikv +0\.02 ", line))
    assert re.search(r"needs 0\.\d+ or more: prompt 24", line)
    assert "Left out: arkv. x.parquet does not hold what they read; record with" in shown
    assert "--set pin_prompt=false lets the prompt compete" in " ".join(shown.split())

    frame = pd.read_parquet(out)
    missing = frame[frame["left_out"] != ""].set_index("policy")
    assert missing.loc["epikv", "budget"] == "0.02"
    assert missing.loc["epikv", "left_out"].startswith("needs 0.")
    assert missing.loc["arkv", "budget"] == "any"
    assert "--capture qkv" in missing.loc["arkv", "left_out"]
    assert missing["peak_hbm_kv_bytes"].isna().all()
    assert frame["peak_hbm_kv_bytes"].dtype == "Int64", "whole numbers stay whole"
    html = page.read_text()
    assert re.search(r'<td class="text wrap" colspan="\d+"[^>]*>needs 0\.', html)
    assert arborsim.load_results(out).raw.left_out == arborsim.replay(
        trace, policies="epikv,h2o,arkv", budgets=[0.02, 0.9], episodes=1,
        settings=SHARED[1]).raw.left_out  # fmt: skip

    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    (row,) = (row for row in rows if (row["policy"], row["budget"]) == ("epikv", "0.02"))
    assert row["left_out"].startswith("needs 0.")
    assert row["peak_hbm_kv_bytes"] is None
    assert main([*command, "--strict"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "error"),
    [("epikv", "budget infeasible for epikv"), ("arkv", "record it with --capture qkv"),
     ("arkv,epikv", "budget infeasible for epikv")],
)  # fmt: skip
def test_if_nothing_can_run_that_is_an_error(
    trace: Path, capsys: pytest.CaptureFixture[str], asked: str, error: str
) -> None:
    assert main(["replay", str(trace), "--policy", asked, "--budget", "0.02"]) == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


def test_a_class_in_the_working_directory(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "found_here.py").write_text(
        "from arborsim.policies.methods.attention import H2O\n"
        "class Mine(H2O):\n    name = 'of-my-own'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    command = [
        "replay",
        str(trace),
        "--policy",
        "found_here:Mine",
        "--budget",
        "0.9",
        "--set",
        "per=shared",
    ]
    assert main([*command, "--jobs", "2"]) == 0
    assert "of-my-own" in capsys.readouterr().out


def test_options_of_lists_add_up(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(trace), "--policy", "h2o", "--policy", "random,epikv", "--episodes",
               "1", "--budget", "0.8", "--budget", "0.9", "--json", "--no-oracle",
               *SHARED]  # fmt: skip
    assert main(command) == 0
    cells = {(r["policy"], r["budget"]) for r in json.loads(capsys.readouterr().out)["rows"]}
    both = {(name, budget) for name in ("h2o", "random", "epikv") for budget in ("0.8", "0.9")}
    assert cells == {("full", "any"), *both}


def test_json_parquet_and_report(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "r.parquet", tmp_path / "r.html"
    command = [
        "replay",
        str(trace),
        "--policy",
        "h2o",
        *SHARED,
        "--budget",
        "0.8",
        "--json",
        "--out",
        str(out),
        "--report",
        str(page),
    ]
    assert main(command) == 0
    data = json.loads(capsys.readouterr().out)
    frame = pd.read_parquet(out)
    assert set(frame["policy"]) == {"full", "oracle", "h2o"}
    assert len(frame) == 9  # three episodes under three policies
    assert (frame["peak_hbm_kv_bytes"] > 0).all()
    assert data
    html = page.read_text()
    assert "h2o" in html
    assert "<script src" not in html
    assert "<link" not in html


def test_all_policies_and_several_traces(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(trace), "--policy", "all", "--budget", "0.9", "--set", "interval=4",
               "--set", "hierarchy.recent=8", "--episodes", "1"]  # fmt: skip
    assert main(command) == 0
    assert "arborkv" in capsys.readouterr().out


def test_results_do_not_depend_on_the_process(trace: Path, tmp_path: Path) -> None:
    pages = []
    for number in range(2):
        page = tmp_path / f"{number}.html"
        subprocess.run(
            [sys.executable, "-m", "arborsim.cli.app", "replay", str(trace), "--policy", "random",
             "--report", str(page)],
            check=True, capture_output=True, env={"PYTHONHASHSEED": str(number), "PATH": "",
                                                   "PYTHONPATH": ":".join(sys.path)},
        )  # fmt: skip
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "replay" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("arborsim 0.")


def test_the_core_never_imports_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, arborsim\n"
        "for m in pkgutil.walk_packages(arborsim.__path__, 'arborsim.'):\n"
        "    importlib.import_module(m.name)\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reading_and_replaying_a_trace_does_not_load_pandas(trace: Path) -> None:
    """Arrow's `to_numpy` does, at the price of a quarter second."""
    code = (
        "import sys\n"
        "from arborsim.cli.app import main\n"
        f"assert main(['inspect', {str(trace)!r}]) == 0\n"
        f"assert main(['replay', {str(trace)!r}, '--policy', 'raas', '--budget', '0.7']) == 0\n"
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_calibrated_settings_yield_to_set(trace: Path, tmp_path: Path) -> None:
    """The shipped bands are for six layers, as the trace is."""
    page = tmp_path / "r.html"
    command = [
        "replay",
        str(trace),
        "--policy",
        "epikv",
        "--budget",
        "0.9",
        "--episodes",
        "1",
        "--calibration",
        "chain-bands",
        "--set",
        "layer_b=0.25",
        "--report",
        str(page),
    ]
    assert main(command) == 0
    found = read_calibration("chain-bands").policies["epikv"]
    assert found["layer_b"] != 0.25
    shown = page.read_text()
    assert f"layer_a {found['layer_a']}" in shown
    assert "layer_b 0.25" in shown
