"""What `import arborsim` gives: light, lazy, and callable however its packages are imported."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import arborsim

HEAVY = ("numpy", "pandas", "pyarrow", "plotly", "rich", "scipy", "simpy", "torch", "transformers")


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_imports_nothing_heavy() -> None:
    loaded = "import sys, arborsim; dir(arborsim); print([n for n in sys.modules if n in %r])"
    assert _run(loaded % (HEAVY,)) == "[]"


def test_opening_a_trace_or_replaying_needs_no_torch() -> None:
    code = (
        "import sys, arborsim\n"
        "trace = arborsim.open_trace('traces/game24-tot.parquet')\n"
        "arborsim.replay(trace, policies='raas', episodes=1)\n"
        "print('torch' in sys.modules)"
    )
    assert _run(code) == "False"


@pytest.mark.parametrize("name", arborsim.__all__)
def test_every_name_is_there_documented_and_listed(name: str) -> None:
    assert name in dir(arborsim)
    found = getattr(arborsim, name)
    assert callable(found)
    assert inspect.getdoc(found)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'arborsim' has no attribute 'replai'"):
        _ = arborsim.replai  # type: ignore[attr-defined]


def test_a_trace_shows_what_the_command_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from arborsim.cli.app import main

    monkeypatch.setenv("COLUMNS", "80")
    for options, keywords in (([], {}), (["--all", "--episodes", "1"], {"episodes": 1})):
        assert main(["inspect", "traces/game24-tot.parquet", *options]) == 0
        shown = capsys.readouterr().out
        trace = arborsim.open_trace("traces/game24-tot.parquet")
        trace.inspect(everything=bool(options), **keywords)
        assert capsys.readouterr().out == shown


def test_a_trace_reads_episodes_with_the_signals_that_are_asked_for() -> None:
    trace = arborsim.open_trace("traces/game24-tot.parquet")
    (episode,) = trace.episodes(["attention"], start=3, stop=4)
    assert episode.index == 3
    assert (
        episode.num_tokens
        == trace.to_pandas()["generated_tokens"][3] + (trace.to_pandas()["prompt_tokens"][3])
    )
    assert sum(1 for _ in trace) == len(trace) == len(trace.to_pandas())
    assert "attention" in trace.signals
    for text in (str(trace), trace._repr_html_(), repr(trace)):
        assert "tot-bfs" in text
    with pytest.raises(arborsim.ArborsimError, match="unknown signal 'attentin': did you mean"):
        trace.episodes(["attentin"])
    with pytest.raises(arborsim.ArborsimError, match="record it with --capture qkv"):
        trace.episodes(["queries"])
