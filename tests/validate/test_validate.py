"""`arborsim validate` as a user runs it, on the smallest searches there are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.products.validate.files import read_results
from arborsim.products.validate.results import COUNTERS, TERMS, CellCheck
from tests.live.tiny import torch
from tests.show.test_html import Page

CHAIN = ["validate", "--gpu", "h100", "--task", "chain", "--lines", "10", "--budget", "0.7"]
POLICIES = "full,h2o,arkv,keydiff,arborkv,staircase"


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _exact(check: CellCheck, counters: int = len(COUNTERS)) -> None:
    """All is equal, of the counters the first ones."""
    assert check.parity, check
    assert check.equal_moves == check.shadow_moves
    assert check.calls > 0
    assert check.equal_calls == check.calls, check.off_bytes
    assert check.tiers_differ == 0
    assert check.live_peaks == check.simulated_peaks
    assert check.live_counters[:counters] == check.simulated_counters[:counters]
    assert check.allocated_bytes >= check.live_peaks[0] > 0


def test_a_search_on_both_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "here"
    command = [*CHAIN, "--policy", POLICIES, "--out", str(out)]
    assert main([*command, "--episodes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Plans: 6 of 6 shadow runs" in shown
    found, _ = read_results(out / "results.parquet")
    ran = [check for check in found.checks if not check.infeasible]
    assert {check.policy for check in ran} >= {"full", "h2o", "arkv", "keydiff"}
    for check in ran:
        _exact(check)
        assert all(math.isfinite(s) and s >= 0 for s in (*check.live_s, *check.simulated_s))
        assert check.simulated_s[-1] == pytest.approx(sum(check.simulated_s[:-1]))
        assert check.live_s[TERMS.index("prefill_s")] > 0
        assert all(0 <= value <= 1 for value in check.jaccard)
        assert check.jaccard[0] > 0.9  # the prompt has not been touched, or by both
        assert 0 <= check.attention_kept <= 1
        assert check.output_error >= 0
    moved = [check for check in ran if check.shadow_moves]
    assert len(moved) >= 3
    assert found.about["device"] == "cpu"
    assert {"versions", "date", "command", "GPU profile"} <= set(found.about)
    page = Page((out / "index.html").read_text(encoding="utf-8"))
    assert "h2o" in page.text
    drawn = json.loads(page.data)["figures"]
    assert len([name for name, choices in drawn.items() if choices[0]["figure"]["data"]]) >= 3


def test_more_problems_are_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an option nothing is replaced; --resume searches nothing twice."""
    command = [*CHAIN, "--policy", "streaming-llm", "--out", str(tmp_path)]
    assert main([*command, "--episodes", "1"]) == 0
    found, _ = read_results(tmp_path / "results.parquet")
    assert main([*command, "--episodes", "1"]) == 2
    assert "--resume goes on" in capsys.readouterr().err
    assert main([*command, "--episodes", "2", "--resume"]) == 0
    more, _ = read_results(tmp_path / "results.parquet")
    assert [check.live_s for check in more.checks[:2]] == [check.live_s for check in found.checks]
    assert [check.episode for check in more.checks] == [0, 0, 1, 1]
    assert main([*command, "--episodes", "2", "--resume", "--seed", "3"]) == 2
    assert "another request" in capsys.readouterr().err


def test_branches_whose_tokens_lie_in_ddr(tmp_path: Path) -> None:
    """Staged copies, tokens that come back, branches that end: to the byte, peaks included."""
    command = ["validate", "--gpu", "h100", "--task", "game24", "--budget", "0.6,0.8", "--episodes",
               "1", "--policy", "hierarchy,arbor-epi,staircase", "--set", "search.children=4",
               "--set", "search.keep=3", "--out", str(tmp_path)]  # fmt: skip
    assert main(command) == 0
    found, _ = read_results(tmp_path / "results.parquet")
    ran = [check for check in found.checks if not check.infeasible]
    for check in ran:
        _exact(check)
    assert sum(check.live_peaks[3] > 0 for check in ran) >= 2  # staging buffers were used


def test_tokens_that_stay_in_ddr(tmp_path: Path) -> None:
    """Attention on the CPU: nothing is staged, bytes and peaks are those of the simulator.

    Queries and partial results that cross over are traffic to the simulator only.
    """
    command = ["validate", "--gpu", "h100", "--task", "game24", "--budget", "0.8", "--episodes",
               "1", "--policy", "hierarchy,staircase", "--recall", "near", "--set",
               "search.children=4", "--set", "search.keep=3", "--out", str(tmp_path)]  # fmt: skip
    assert main(command) == 0
    found, _ = read_results(tmp_path / "results.parquet")
    ran = [check for check in found.checks if not check.infeasible]
    for check in ran:
        _exact(check, COUNTERS.index("to_ddr_bytes"))
    assert any(check.live_peaks[1] > 0 for check in ran)
    assert all(check.live_peaks[3] == 0 for check in ran)


def test_an_interruption_keeps_whole_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from arborsim.products.validate import command as validate

    kept = validate.Keeper.checked

    def stop(self: Any, checks: Any) -> None:
        if self.problems:
            raise KeyboardInterrupt
        kept(self, checks)

    monkeypatch.setattr(validate.Keeper, "checked", stop)
    command = [*CHAIN, "--policy", "streaming-llm", "--episodes", "3", "--out", str(tmp_path)]
    assert main(command) == 130
    assert "holds 1 problems; --resume goes on" in capsys.readouterr().err
    found, _ = read_results(tmp_path / "results.parquet")
    assert {check.episode for check in found.checks} == {0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "h10"], "did you mean h100"),
        (["--gpu", "no.toml"], "no.toml: cannot be read"),
        (["--policy", "h3o"], "did you mean h2o"),
        (["--policy", "oracle"], "replay a trace instead"),
        (["--budget", "-1"], "must be above 0"),
        (["--recall", "ondemand"], "unknown recall mode"),
        (["--task", "chess"], "chess"),
        (["--resume", "--overwrite"], "give one"),
        (["--out", __file__], "expected a folder"),
        (["--episodes", "0"], "--episodes"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHAIN, "--policy", "h2o", "--out", str(tmp_path / "new"), *options]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
