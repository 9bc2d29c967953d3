"""`arborsim.live` and `arborsim.record` on the shipped models, and the files of live runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import ArborsimError
from arborsim.core.tables import KEY
from arborsim.products.live.results import LiveResults
from arborsim.products.validate.ask import ValidationResults
from tests.cli.test_live_command import without_clock

pytest.importorskip("torch")

LOG, VALIDATION = Path("tests/golden/live.jsonl"), Path("tests/golden/validation.parquet")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> LiveResults:
    out = tmp_path_factory.mktemp("l") / "run.jsonl"
    return arborsim.live(
        task="chain", lines=10, episodes=2, policies=["h2o"], budgets=[0.6, 0.02],
        settings={"h2o.sinks": 2}, out=out,
    )  # fmt: skip


def test_the_call_and_the_command_find_the_same(
    results: LiveResults, capsys: pytest.CaptureFixture[str]
) -> None:
    said = results.metadata["command"]
    assert said == (
        "arborsim live --policy h2o --budget 0.6,0.02 --set h2o.sinks=2 --task chain --episodes 2 "
        "--lines 10"
    )
    assert main([*said.split()[1:], "--json"]) == 0
    theirs, mine = json.loads(capsys.readouterr().out), json.loads(results.to_json())
    assert theirs["request"] == mine["request"]
    assert without_clock(theirs["results"]) == without_clock(mine["results"])
    assert theirs["command"] == mine["command"]


def test_the_log_of_a_run_and_its_table_read_as_the_run(
    results: LiveResults, tmp_path: Path
) -> None:
    log = next(iter(tmp_path.parent.glob("l*/run.jsonl")))
    table = results.save(tmp_path / "r.parquet")
    for path in (log, table):
        again = arborsim.load_results(path)
        assert isinstance(again, LiveResults)
        assert (again.metadata, str(again)) == (results.metadata, str(results))
        pd.testing.assert_frame_equal(again.summary(), results.summary())
        pd.testing.assert_frame_equal(again.to_pandas(), results.to_pandas())
        assert again._repr_html_() == results._repr_html_()
        assert "<html" in again.report(tmp_path / "page.html").read_text()
    assert results.metadata["left_out"][0]["policy"] == "h2o"
    assert results.metadata["facts"]["software"]["torch"]


def test_a_log_of_an_earlier_version_is_read() -> None:
    found = arborsim.load_results(LOG)
    assert isinstance(found, LiveResults)
    assert set(found.summary()["policy"]) == {"full", "h2o", "hierarchy"}
    assert found.to_pandas()["correct"].notna().all()


def test_a_validation_is_read_and_written(tmp_path: Path) -> None:
    found = arborsim.load_results(VALIDATION)
    assert isinstance(found, ValidationResults)
    again = arborsim.load_results(found.save(tmp_path / "v.parquet"))
    assert (str(again), again.to_json()) == (str(found), found.to_json())
    assert again.metadata == found.metadata
    assert len(found.to_pandas()) == found.summary()["searches"].sum()
    assert "<html" in again.report(tmp_path / "v.html").read_text()
    import pyarrow.parquet as pq

    stored = json.loads(pq.read_schema(tmp_path / "v.parquet").metadata[KEY])
    assert stored["kind"] == "validate"
    assert "full" in found._repr_html_()


def test_recording_gives_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "mine.parquet"
    trace = arborsim.record(out, task="game24", search="tot-bfs", settings={"keep": 2}, episodes=1)
    assert (trace.info.task, trace.info.search, len(trace)) == ("game24", "tot-bfs", 1)
    said = trace.info.command
    assert said.startswith(f"arborsim record --out {out} --set keep=2 --task game24 --episodes 1")
    other = str(tmp_path / "again.parquet")
    assert main([*said.replace(str(out), other).split()[1:]]) == 0
    again = arborsim.open_trace(other)
    tokens = [[episode.token.tolist() for episode in each] for each in (trace, again)]
    assert tokens[0] == tokens[1]
    assert len(arborsim.replay(trace, policies="raas", budgets=0.7).to_pandas()) == 3


@pytest.mark.parametrize(
    ("call", "keywords", "said"),
    [
        ("live", {"policies": "epikw"}, "did you mean epikv"),
        ("live", {"task": "chian"}, "did you mean chain"),
        ("live", {"episode": 3}, "unknown keyword 'episode': did you mean episodes"),
        ("live", {"temperature": -1.0}, "temperature must be 0 or more"),
        ("live", {"resume": True}, "--resume needs --out"),
        ("live", {"batch": 0}, "batch must be a whole number of 1 or more"),
        ("live", {"policies": "oracle"}, "replay a trace instead"),
        ("record", {"capture": "everything"}, "unknown capture level"),
        ("record", {"attention": "full"}, "unknown form of attention"),
        ("record", {"children": 8}, "--children is about banks"),
        ("record", {"bank": True, "search": "ets"}, "--bank serves searches later"),
        ("record", {"teacher_forced": "t.jsonl", "prompts": "p"}, "leave out --prompts"),
        ("record", {"qkv_layers": "two"}, "--qkv-layers two: expected numbers"),
    ],
)
def test_what_cannot_work_is_one_line(
    call: str, keywords: dict[str, Any], said: str, tmp_path: Path
) -> None:
    inputs = (tmp_path / "t.parquet",) if call == "record" else ()
    with pytest.raises(ArborsimError) as caught:
        getattr(arborsim, call)(*inputs, **keywords)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_files_that_hold_no_results(tmp_path: Path, results: LiveResults) -> None:
    for ending in ("csv", "json"):
        path = results.save(tmp_path / f"r.{ending}")
        with pytest.raises(ArborsimError, match=r"save them as \.parquet"):
            arborsim.load_results(path)
    head, *rest = LOG.read_text().splitlines()
    (tmp_path / "torn.jsonl").write_text("\n".join([head, "{}", *rest]) + "\n")
    with pytest.raises(ArborsimError, match="line 2"):
        arborsim.load_results(tmp_path / "torn.jsonl")
    (tmp_path / "other.jsonl").write_text('{"format":"mine"}\n')
    with pytest.raises(ArborsimError, match="not a log of format arborsim-live"):
        arborsim.load_results(tmp_path / "other.jsonl")
