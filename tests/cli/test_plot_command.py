"""`arborsim plot`: what a results file holds, drawn here or written."""

from __future__ import annotations

from pathlib import Path

import pytest

import arborsim
from arborsim.cli.app import main
from tests.helpers.traces import make_trace


def asked(trace: Path) -> list[str]:
    policies = ["--policy", "h2o,streaming-llm"]
    forms = ["--set", "pin_prompt=false", "--set", "per=shared"]
    return ["replay", str(trace), *policies, "--budget", "0.6,0.8", *forms]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots")
    trace = make_trace(folder / "trace.parquet", kind="linear", prompt=40, nodes=8)
    assert main([*asked(trace), "--out", str(folder / "r.parquet")]) == 0
    return folder / "r.parquet"


@pytest.mark.parametrize("columns", [80, 160])
def test_a_plot_fits_the_terminal(stored, columns, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for kind in ("pareto", "heat"):
        assert main(["plot", str(stored), "--kind", kind]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert ": trace.parquet" in lines[0]
        assert max(map(len, lines)) <= columns
        text = "\n".join(lines)
        assert "h2o" in text
        assert "streaming-llm" in text


def test_replay_draws_the_same(stored, capsys) -> None:
    assert main(["plot", str(stored)]) == 0
    drawn = capsys.readouterr().out
    trace = stored.parent / "trace.parquet"
    assert main([*asked(trace), "--view", "pareto"]) == 0
    assert capsys.readouterr().out == drawn


def test_the_metric_can_be_chosen(stored, capsys) -> None:
    assert main(["plot", str(stored), "--metric", "time"]) == 0
    assert "time relative to full retention" in capsys.readouterr().out


def test_a_page_says_what_made_the_results(stored, tmp_path: Path) -> None:
    out = tmp_path / "plot.html"
    assert main(["plot", str(stored), "--out", str(out)]) == 0
    text = out.read_text()
    assert "--policy h2o,streaming-llm" in text
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


def test_python_draws_what_a_file_holds(stored) -> None:
    results = arborsim.load_results(stored)
    figure = results.plot(metric="time")
    names = {trace.name for trace in figure.data}
    assert any(name.startswith("efficient") for name in names)
    assert results.plot("heat", dark=True).layout.paper_bgcolor == "#1b2128"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--kind", "haet"], "did you mean heat or pareto?"),
        (["--kind", "width"], "unknown plot of replay results 'width'"),
        (["--metric", "cost"], "unknown metric 'cost'"),
        (["--metric", "error"], "output error is not known of trace.parquet; known: kept"),
        (["--out", "plot.pdf"], "format of --out"),
        (["--out", "no/such/plot.svg"], "there is no directory no/such"),
        (["--dark"], "only for --out FILE.svg or .png"),
        (["--dark", "--out", "plot.html"], "a page follows its reader"),
    ],
)
def test_bad_input_is_one_line(stored, tmp_path, monkeypatch, capsys, more, said) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(stored), *more]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_results_is_one_line(stored, tmp_path, capsys) -> None:
    text = tmp_path / "notes.parquet"
    text.write_text("not a table\n" * 9)
    for path in (stored.parent / "trace.parquet", text, tmp_path / "none.parquet", tmp_path):
        assert main(["plot", str(path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
