"""`arborsim compare`: searches are matched one by one, and every difference is shown."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.core.tables import read_table
from tests.cli.test_search_command import write_bank
from tests.helpers.traces import make_trace

#: Columns of a replay's table that figures are of, and how they are put together.
FIGURES = {"peak_hbm": ("peak_hbm_kv_bytes", "max"), "peak_ddr": ("peak_ddr_bytes", "max"),
           "total": ("total_s", "sum"), "evicted": ("evicted_tokens", "sum"),
           "offloaded": ("offloaded_tokens", "sum")}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replays of the same searches on other GPUs, and of a trace that was renamed."""
    folder = tmp_path_factory.mktemp("runs")
    trace = make_trace(folder / "trace.parquet", kind="tot", prompt=40, nodes=8, episodes=3)
    shutil.copy(trace, folder / "renamed.parquet")

    def run(name: str, *more: str, trace: str = "trace.parquet") -> None:
        asked = [
            "replay",
            str(folder / trace),
            "--set",
            "pin_prompt=false",
            "--set",
            "h2o.per=shared",
            *more,
        ]
        assert main([*asked, "--out", str(folder / f"{name}.parquet")]) == 0

    run("a", "--policy", "h2o,streaming-llm", "--budget", "0.6,0.8")
    run("b", "--policy", "h2o,streaming-llm", "--budget", "0.60,0.7", "--gpu", "l40s",
        "--episodes", "2", "--set", "streaming-llm.sinks=8")  # fmt: skip
    run("c", "--policy", "h2o,streaming-llm", "--budget", "0.6,0.8", trace="renamed.parquet")
    return folder


def compared(capsys, *arguments: object) -> dict:
    capsys.readouterr()
    assert main(["compare", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_figures_are_those_of_the_searches_that_both_hold(folder, capsys) -> None:
    """A literal re-implementation, on the tables in the files."""
    frames = []
    for name in "ab":
        frame, _ = read_table(folder / f"{name}.parquet")
        frame["budget"] = frame["budget"].replace({"0.60": "0.6", "any": "all"})
        frames.append(frame.set_index(["policy", "budget", "episode"]).sort_index())
    common = frames[0].index.intersection(frames[1].index)
    found = compared(capsys, folder / "a.parquet", folder / "b.parquet")
    assert {(row["policy"], row["budget"]) for row in found["rows"]} == {
        (policy, budget) for policy, budget, _ in common
    }
    for row in found["rows"]:
        assert row["searches"] == 2
        for key, (column, how) in FIGURES.items():
            a, b = (
                frame.loc[common].loc[(row["policy"], row["budget"])][column].agg(how)
                for frame in frames
            )
            said = row["figures"][key]
            assert said["a"] == pytest.approx(a)
            assert said["b"] == pytest.approx(b)
            expected = 0.0 if a == b else b / a - 1 if a else None
            assert said["difference"] == (None if expected is None else pytest.approx(expected))
    assert found["only_in_a"] == [f"{policy} 0.8" for policy in ("oracle", "h2o", "streaming-llm")]
    assert found["only_in_b"] == [f"{policy} 0.7" for policy in ("oracle", "h2o", "streaming-llm")]
    assert found["settings"]["GPU"] == {"a": "h100", "b": "l40s"}
    assert found["settings"]["policy streaming-llm"] == {"a": "sinks 4", "b": "sinks 8"}


@pytest.mark.parametrize("columns", [80, 160])
def test_it_fits_the_terminal(folder, columns, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["compare", str(folder / "a.parquet"), str(folder / "b.parquet")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    text = " ".join(" ".join(lines).split())
    assert text.startswith("B differs from A in "), "the largest differences lead"
    for said in ("GPU: h100 -> l40s", "2 searches in both", "vs A", "Only in A: oracle 0.8, h2o",
                 "The same in both: HBM peak"):  # fmt: skip
        assert said in text


def test_a_run_equals_itself_and_that_of_a_renamed_trace(folder, capsys) -> None:
    for other in ("a", "c"):
        paths = [str(folder / f"{name}.parquet") for name in ("a", other)]
        assert main(["compare", *paths, "--fail-over", "0%"]) == 0
        assert "No figure differs: 7 settings compared" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("limit", "code"), [("1%", 1), ("100000%", 1), ("", 0)])
def test_a_limit_makes_differences_exit_code_1(folder, limit, code, capsys) -> None:
    """What only one run holds differs by more than any limit."""
    more = ["--fail-over", limit] if limit else []
    paths = [str(folder / f"{name}.parquet") for name in "ab"]
    assert main(["compare", *paths, *more]) == code


def test_answers_gained_and_lost_are_counted(tmp_path, capsys) -> None:
    bank = write_bank(tmp_path / "bank.parquet", problems=6, width=5, depth=3)
    for name, keep in (("a", "4"), ("b", "1")):
        asked = ["--algorithm", "rebase,tot-bfs", "--width", "4", "--set", f"tot-bfs.keep={keep}"]
        assert main(["search", str(bank), *asked, "--out", str(tmp_path / f"{name}.parquet")]) == 0
    found = compared(capsys, tmp_path / "a.parquet", tmp_path / "b.parquet")
    a, b = (
        arborsim.load_results(tmp_path / f"{name}.parquet").to_pandas().set_index(
            ["algorithm", "swept", "episode"]
        )["correct"]
        for name in "ab"
    )  # fmt: skip
    both = pd.concat([a, b], axis=1, join="inner", keys=["a", "b"]).dropna().astype(bool)
    assert any(row["gained"] or row["lost"] for row in found["rows"])
    for row in found["rows"]:
        algorithm, _, swept = row["search"].partition(" ")
        own = both.loc[(algorithm, swept)]
        assert row["gained"] == int((own["b"] & ~own["a"]).sum())
        assert row["lost"] == int((own["a"] & ~own["b"]).sum())
        assert row["figures"]["accuracy"]["a"] == pytest.approx(own["a"].mean())


@pytest.mark.parametrize("text", ["much", "-1%", "nan", "inf"])
def test_a_limit_must_be_a_percentage(folder, text, capsys) -> None:
    path = str(folder / "a.parquet")
    assert main(["compare", path, path, f"--fail-over={text}"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"arborsim: --fail-over {text}: expected a percentage such as 5%\n"


def test_runs_that_cannot_be_compared_are_one_line(folder, tmp_path, capsys) -> None:
    bank = write_bank(tmp_path / "bank.parquet", problems=1, width=4, depth=2)
    search, lone = tmp_path / "search.parquet", tmp_path / "lone.parquet"
    assert main(["search", str(bank), "--algorithm", "rebase", "--out", str(search)]) == 0
    trace = make_trace(tmp_path / "other.parquet", kind="linear", prompt=40, nodes=8, seed=5)
    assert main(["replay", str(trace), "--out", str(lone)]) == 0
    capsys.readouterr()
    a = folder / "a.parquet"
    for other, said in (
        (search, "holds replay results"), (trace, "a trace, not results"),
        (lone, "have nothing in common"), (tmp_path / "none.parquet", "cannot be read"),
    ):  # fmt: skip
        assert main(["compare", str(a), str(other)]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert len(shown.err.splitlines()) == 1
