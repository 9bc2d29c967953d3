"""`arborsim plan --report`: a workload in, one page out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.products.plan import sensitivity
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.sensitivity import compared, detailed, work
from tests.plan.make import SMALL, small_workload

ONE_POLICY = ('policies = ["full", "streaming-llm"]', 'policies = ["full"]')
FEW = ("max_searches = 24", "max_searches = 3")  # short runs see this limit, so costs are known
TEXT = SMALL.replace(*ONE_POLICY).replace(*FEW)
LENGTHS = ["--searches", "24", "--warm-up", "4", "--runs", "1"]


@pytest.fixture(autouse=True)
def only_one_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are served in the same way, and take their time."""
    monkeypatch.setattr(sensitivity, "ASSUMPTIONS", sensitivity.ASSUMPTIONS[:1])


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(TEXT)
    return path


def data_of(path: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.S
    )
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_has_everything(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = workload.with_name("plan.html")
    assert main(["plan", str(workload), "--report", str(page), *LENGTHS]) == 0
    assert f"wrote {page}" in capsys.readouterr().out.replace("\n", "")
    data = data_of(page)
    lines = [
        each for each in data["figures"]["load"][0]["figure"]["data"] if "lines" in each["mode"]
    ]
    assert len(lines) == 2
    titles = list(dict.fromkeys(each["labels"][0] for each in data["figures"]["moved"]))
    assert titles == ["HBM size", "Price of RTX 4090"]
    assert {"timeline", "memory"} < set(data["figures"])
    names = ("candidates", "curves", "sensitivity")
    assert list(data["csv"]) == [f"arborsim-plan-{name}.csv" for name in names]
    assert "one run of 24 searches with the seed 0" in page.read_text()


def test_without_assumptions_the_page_has_loads_but_no_changed_numbers(workload: Path) -> None:
    page = workload.with_name("plan.html")
    assert main(["plan", str(workload), "--report", str(page), "--no-assumptions", *LENGTHS]) == 0
    data = data_of(page)
    assert "moved" not in data["figures"]
    assert "arborsim-plan-sensitivity.csv" not in data["csv"]
    assert "timeline" in data["figures"]
    assert data["csv"]["arborsim-plan-curves.csv"]
    assert "one run of 24 searches" not in page.read_text()


def test_help_says_that_the_page_takes_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "can take several times as long as the plan itself" in told


def test_an_interruption_leaves_the_plan(
    workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(sensitivity, "timeline", interrupted)
    page = workload.with_name("plan.html")
    assert main(["plan", str(workload), "--report", str(page), *LENGTHS]) == 130
    assert "has the plan, but no loads" in capsys.readouterr().err
    data = data_of(page)
    assert len(data["csv"]["arborsim-plan-candidates.csv"].splitlines()) == 3
    assert "moved" not in data["figures"]


def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.toml", "missing/plan.html"):
        assert main(["plan", str(workload), "--report", str(workload.parent / name)]) == 2
        assert "--report" in capsys.readouterr().err
    assert workload.read_text() == TEXT


def test_processes_change_nothing_and_work_is_counted() -> None:
    units: list[int] = []
    planner = Planner(small_workload(ONE_POLICY).with_run_length(24, 4, 1))
    plan = planner.run()
    one, found = detailed(planner, plan, 1, lambda what, done: units.append(done))
    assert sum(units) == work(plan)
    assert [row.number for row in one.candidates if row.curve] == sorted(compared(plan))
    assert one.timeline is not None
    assert one.timeline.candidate == plan.recommendation.candidate
    two, same = detailed(planner, plan, 2)
    assert (two, same) == (one, found)
