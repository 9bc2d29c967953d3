"""What README and documentation show is what their commands print and their results say."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from arborsim.cli.app import main
from arborsim.policies.registry import available
from arborsim.products.catalog.policies import facts_of
from docs.tools import answers as rkv
from docs.tools import figures, fill

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"


def test_the_table_is_what_the_command_above_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = (README, (DOCS / "start.md").read_text())
    demo = r"<!-- demo -->\n```\n\$ arborsim (.*?)\n(.*?)\n```"
    shown, same = (re.search(demo, page, re.DOTALL) for page in pages)
    assert shown
    assert same
    assert shown.groups() == same.groups()
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shown.group(1).split()) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.strip().splitlines())
    assert printed == shown.group(2)


def recorded_for(facts: dict[str, Any]) -> str:
    """The column of the policy table: what must have been recorded."""
    if {"queries", "keys", "values", "hidden"} & set(facts["reads"]):
        return "queries, keys, values, hidden vectors"
    if {"attention", "attention_layers"} & set(facts["reads"]):
        return "attention rows"
    return "structure and cheap signals"


def test_the_policy_table_names_every_policy_where_it_belongs() -> None:
    table = re.search(r"^\| family .*?(?=\n\n)", (DOCS / "policies.md").read_text(), re.M | re.S)
    assert table
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.group().split("\n")
    ]
    shown = sorted(
        (name, row[0], column)
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
        for name in re.findall("`(.*?)`", cell)
    )
    every = [facts_of(name) for name in available()]
    assert shown == sorted((facts["name"], facts["family"], recorded_for(facts)) for facts in every)


def test_accuracy_figures_are_those_of_the_weights() -> None:
    weights = ROOT / "backends" / "arborsim_torch" / "reference" / "weights"
    rows = {
        (name, row["method"], row["setting"]): row
        for name in ("chain", "game24")
        for row in json.loads((weights / name / "accuracy.json").read_text())["rows"]
    }
    quoted = {
        "`chain`, 64 lines": ("chain", "greedy", "64 lines"),
        "`chain`, 96 lines": ("chain", "greedy", "96 lines"),
        "`chain`, 112 lines": ("chain", "greedy", "112 lines"),
        "`game24`, greedy": ("game24", "greedy", "held-out puzzles"),
        "`game24`, tree of thoughts, b=5, k=8, own value": (
            "game24", "ToT b=5 k=8 by own Y/N value, best leaf", "held-out puzzles"),
    }  # fmt: skip
    page = (DOCS / "live.md").read_text().splitlines()
    for label, key in quoted.items():
        line = next(line for line in page if line.startswith(f"| {label} |"))
        row = rows[key]
        low, high = row["low"], row["high"]
        assert (
            f"| {row['n']} | {100 * row['accuracy']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
            in line
        )


def test_speed_figures_are_those_of_the_benchmark() -> None:
    figures = json.loads((ROOT / "reports" / "benchmarks" / "replay.json").read_text())
    plan = json.loads((ROOT / "reports" / "benchmarks" / "plan.json").read_text())
    last = max(figures["peak_mib"], key=int)
    for quoted in (
        f"{figures['attention_free']['epikv']['tokens_per_s']:,} tokens/s",
        f"{figures['dense']['policies']['h2o per=shared']['ratio']} times",
        f"{figures['sparse']['policies']['h2o per=shared']['ratio']} times",
        f"{figures['peak_mib'][last]} MiB with {last}",
        f"{plan['candidates']} candidates, {plan['searches']:,} searches a run: "
        f"{plan['wall_s']:.0f} s on two cores",
    ):
        assert quoted in (DOCS / "performance.md").read_text()


def test_the_readme_fits_three_screens() -> None:
    assert len(README.splitlines()) <= 150


def test_no_verdicts_stand_before_the_first_command() -> None:
    assert "<!-- claims -->" not in README.partition("## Install")[0]


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_what_others_counted_is_what_their_file_says(name: str) -> None:
    said = " ".join((ROOT / name).read_text().split())
    right = {budget: f"{float(row['right_percent']):.1f}%" for budget, row in rkv.counted().items()}
    assert f"R-KV's authors count {right['']} right with the whole cache" in said
    assert f"{right['2048']}, {right['1024']} and {right['512']} with 2,048, 1,024 and 512" in said
    assert {row["n"] for row in rkv.counted().values()} == {"30"}
    lengths = [float(rkv.counted()[budget]["mean_output_tokens"]) for budget in ("", "512")]
    if name == "README.md":
        grown = f"from {lengths[0]:,.0f} tokens on average to as many as {lengths[1]:,.0f}"
        assert grown in said


def test_the_pictures_are_those_of_the_stored_counts() -> None:
    assert rkv.FIGURE.read_text() == rkv.figure(), "run `python -m docs.tools.answers`"


def test_the_number_of_policies_is_that_of_the_registry() -> None:
    assert f"under {len(available())} policies" in README


def test_the_first_numbers_are_those_of_the_stored_results() -> None:
    said = " ".join((DOCS / "index.md").read_text().split())
    cells = figures.points(pd.read_parquet(figures.RESULTS)).set_index(["policy", "budget"])
    tova, streaming = cells.loc["tova", "0.85"], cells.loc["streaming-llm", "0.7"]
    assert f"keeps **{tova.kept:.1f}%** of the attention" in said
    assert f"answers **{tova.right:.0f} of {tova.n:.0f}** problems" in said
    assert f"keeps {streaming.kept:.1f}% and answers {streaming.right:.0f}." in said
    live = pd.read_parquet(ROOT / "reports" / "quality" / "results.parquet")
    published = live.query("experiment == 'published' and not infeasible")
    right = published.groupby(["label", "budget"])["correct"].agg(
        lambda each: f"{100 * each.astype(bool).mean():.0f}%"
    )
    searched = live.query("experiment == 'published' and label == 'h2o' and budget == '0.95'")
    assert f"is right in {right['h2o', '0.95']} of {len(searched)} problems with 95% of" in said
    assert f"in {right['h2o', '0.69']} with 69%; full retention in {right['full', '1']}." in said
    kept = "h2o, prompt kept"
    assert f"With the prompt kept H2O is right in {right[kept, '0.87']} with 87%" in said
    assert "69% cannot hold prompt and window" in said
    assert (kept, "0.69") not in right
    others = live.query("budget == '0.69'").groupby(["experiment", "label"])["correct"].mean()
    inverted = 100 * others["epikv-rivals", "epikv, inverted"]
    assert f"EpiKV *inverted* (both layers swapped) is right in {inverted:.0f}%" in said
    assert f"later tokens read, in {100 * others['cliff', 'needed']:.0f}%" in said


def test_the_figure_is_that_of_the_stored_results() -> None:
    drawn = figures.figure(figures.points(pd.read_parquet(figures.RESULTS)))
    assert figures.FIGURE.read_text() == drawn, "run `python docs/tools/figures.py`"


def test_the_errors_of_seconds_are_those_of_the_published_runs() -> None:
    section = (DOCS / "trust.md").read_text().split("<!-- fidelity -->\n")[1].split("\n\n")[0]
    shown = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.split("\n")]
    runs = pd.read_parquet(ROOT / "reports/validation/published/runs.parquet")
    runs = runs[(runs["side"] == "judged") & runs["simulated_tpot_ms"].notna()]
    alone = runs["tensor_parallel"] * runs["data_parallel"].fillna(1) == 1
    groups = {"all": runs, "one GPU": runs[alone], "several GPUs": runs[~alone]}
    engines = {"vLLM": "vllm", "TensorRT-LLM": "trtllm", "SGLang": "sglang"}
    groups |= {name: runs[runs["engine"] == engine] for name, engine in engines.items()}
    groups |= {gpu: runs[runs["gpu"] == f"{gpu}_sxm"] for gpu in ("h100", "h200", "b200")}
    assert [row[0] for row in shown[2:]] == list(groups)
    for name, *cells in shown[2:]:
        of = groups[name]
        asked = of[of["aiconfigurator_tpot_ms"].notna()]
        ours, there, theirs = _errors(of), _errors(asked), _errors(asked, "aiconfigurator")
        found = [
            len(of),
            ours.median(),
            ours.quantile(0.9),
            len(asked),
            there.median(),
            theirs.median(),
        ]
        assert cells == [f"{x:.1f}" if isinstance(x, float) else str(x) for x in found], name


def _errors(runs: pd.DataFrame, of: str = "simulated") -> pd.Series:
    """Sizes of the errors of the seconds per output token, in per cent."""
    return 100 * (runs[f"{of}_tpot_ms"] / runs["tpot_ms"] - 1).abs()


def test_the_performance_page_is_made_of_the_figures() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        page = importlib.import_module("page")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    folder = ROOT / "reports" / "benchmarks"
    figures = {name: json.loads((folder / f"{name}.json").read_text()) for name in page.NAMES}
    assert (ROOT / "docs" / "performance.md").read_text() == page.page(figures)


def test_every_local_link_leads_somewhere() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    for page in (*pages, *sorted((ROOT / "docs").glob("*.md"))):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize("name", sorted(fill.PAGES))
def test_what_is_made_from_the_code_stands_in_the_page(name: str) -> None:
    if name == "api.md":
        pytest.importorskip("torch")
    assert (DOCS / name).read_text() == fill.filled(name), "run `python -m docs.tools.fill`"
