"""Settings tuned for memory, time and quality: the front, the study that keeps it, its files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

import arborsim
from arborsim.core.errors import ArborsimError, UsageError
from arborsim.core.statistics import efficient
from arborsim.policies.registry import build, values_of
from arborsim.products.calibrate.documents import read_calibration
from arborsim.products.tune.space import Choice, Range, budget_range, space_of
from arborsim.products.tune.study import Study
from tests.helpers.traces import make_trace

pytest.importorskip("optuna")

VARY = ["place.hbm_quantised", "protect.recent=4:32", "place.ddr=0.5,2"]
FIXED = {"protect.sinks": 2}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "t.parquet"
    return make_trace(path, episodes=5, layers=4, prompt=30, nodes=5, block=(20, 40))


def tuned(trace: Path, **others: object) -> arborsim.TuneResults:
    asked = {"policy": "staircase", "vary": VARY, "settings": FIXED, "budget": "0.3:0.9"}
    return arborsim.tune(trace, **{**asked, "trials": 6, **others})


# --- the front ---


@given(some.lists(some.tuples(*[some.integers(0, 4)] * 3), max_size=12))
def test_no_point_of_the_front_is_beaten_and_every_other_one_is(
    points: list[tuple[int, int, int]],
) -> None:
    front = efficient(points)

    def beats(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    for at, point in enumerate(points):
        beaten = any(beats(other, point) for other in points)
        repeated = point in points[:at]
        assert (at in front) == (not beaten and not repeated)


def test_the_front_and_its_figures_are_those_of_replays(trace: Path) -> None:
    found = tuned(trace)
    frame = found.to_pandas()
    assert len(frame) == 6
    front = frame[frame["front"]]
    assert len(front) >= 1
    points = list(
        zip(frame["tuned_memory"], frame["tuned_time"], -frame["tuned_quality"], strict=True)
    )
    assert sorted(front["trial"]) == sorted(efficient(points))
    assert frame.loc[~frame["front"], "held_out_memory"].isna().all()
    for where, first in (("tuned", 0), ("held_out", 1)):
        row = front.iloc[0]
        settings = {**FIXED, **{name: row[name] for name in frame.columns if "." in name}}
        replays = [
            arborsim.replay(trace, policies="staircase", settings=settings, oracle=False,
                            budgets=float(row["budget"]), first=number, episodes=1).to_pandas()
            for number in range(first, 5, 2)
        ]  # fmt: skip
        peak = [each.set_index("policy")["peak_hbm_kv_bytes"] for each in replays]
        full = sum(each["full"] for each in peak)
        assert row[f"{where}_memory"] == pytest.approx(sum(e["staircase"] for e in peak) / full)
        seconds = [each.set_index("policy")["total_s"] for each in replays]
        full = sum(each["full"] for each in seconds)
        assert row[f"{where}_time"] == pytest.approx(sum(e["staircase"] for e in seconds) / full)
        kept = [each.set_index("policy").loc["staircase"] for each in replays]
        mean = sum(e["attention_kept"] * e["generated_tokens"] for e in kept)
        mean /= sum(e["generated_tokens"] for e in kept)
        assert row[f"{where}_quality"] == pytest.approx(mean)


def test_the_first_trial_is_the_policy_as_it_is(trace: Path) -> None:
    row = tuned(trace, trials=1).to_pandas().iloc[0]
    default = values_of(build("staircase"))
    assert row["place.hbm_quantised"] == default["place.hbm_quantised"]
    assert row["protect.recent"] == 32  # 128, moved to the end of the range
    assert row["budget"] == pytest.approx(0.6)


def test_results_are_read_again_from_their_file(trace: Path, tmp_path: Path) -> None:
    found = tuned(trace)
    read = arborsim.load_results(found.save(tmp_path / "t.parquet"))
    assert read.to_pandas().equals(found.to_pandas())
    assert str(read) == str(found)
    with pytest.raises(UsageError, match="goes on from its study"):
        read.report(tmp_path / "page.html")
    page = found.report(tmp_path / "page.html").read_text()
    first = found.to_pandas().query("front").iloc[0]
    settings = (f"{name}={first[f'{part}.{name}']}" for part, name in
                (("place", "hbm_quantised"), ("protect", "recent"), ("place", "ddr")))  # fmt: skip
    assert f"(trial {first['trial']}: {', '.join(settings)})" in page


# --- the study ---


def test_the_same_seed_gives_the_same_bytes_wherever_it_was_interrupted(
    trace: Path, tmp_path: Path
) -> None:
    whole = tuned(trace, trials=13).save(tmp_path / "whole.parquet").read_bytes()
    storage = f"sqlite:///{tmp_path}/study.sqlite"
    for trials in (1, 5, 11, 13, 13):
        parts = tuned(trace, storage=storage, trials=trials)
        if trials == 5:
            leave_a_trial(trace, storage)
    path = tmp_path / "parts.parquet"
    assert parts.save(path).read_bytes() == whole
    other = tuned(trace, trials=13, seed=1).save(tmp_path / "other.parquet").read_bytes()
    assert other != whole


def leave_a_trial(trace: Path, storage: str) -> None:
    """As a process does that is killed in a trial."""
    import optuna

    (name,) = optuna.get_all_study_names(storage)
    optuna.load_study(study_name=name, storage=storage).ask()


def test_workers_share_a_study(trace: Path, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.sqlite"
    tuned(trace, storage=storage, trials=3, worker=0)
    both = tuned(trace, storage=storage, trials=6, worker=1).to_pandas()
    alone = tuned(trace, trials=6).to_pandas()
    assert both.iloc[:3]["budget"].equals(alone.iloc[:3]["budget"])
    assert not both.iloc[3:]["budget"].equals(alone.iloc[3:]["budget"])


def test_a_killed_run_goes_on(trace: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "arborsim", "tune", str(trace), "--policy", "h2o", "--trials", "400",
        "--set", "per=shared",
    ]  # fmt: skip
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    study = tmp_path / "tune.sqlite"
    try:
        until = time.monotonic() + 120
        while count(study) < 2 and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    had = count(study)
    assert 2 <= had < 400
    found = arborsim.tune(
        trace, policy="h2o", settings="per=shared", trials=had + 1, storage=f"sqlite:///{study}"
    )
    again = arborsim.tune(trace, policy="h2o", settings="per=shared", trials=had + 1)
    assert found.to_pandas().equals(again.to_pandas())


def count(study: Path) -> int:
    """Trials that have ended, as the database says."""
    import sqlite3

    try:
        with sqlite3.connect(f"file:{study}?mode=ro", uri=True) as database:
            query = "select count(*) from trials where state in ('COMPLETE', 'FAIL')"
            return int(database.execute(query).fetchone()[0])
    except sqlite3.OperationalError:  # not there yet
        return 0


def test_settings_that_cannot_run_are_trials_with_a_reason(trace: Path) -> None:
    frame = tuned(trace, budget="0.02,0.9", vary="protect.recent=4:16", trials=8).to_pandas()
    failed = frame[frame["reason"] != ""]
    assert 0 < len(failed) < 8
    assert failed["tuned_memory"].isna().all()
    assert (failed["budget"] == 0.02).all()
    assert not failed["front"].any()
    with pytest.raises(ArborsimError, match="none of 2 settings can run"):
        tuned(trace, budget="0.01,0.02", trials=2)


def test_a_study_of_something_else_is_refused(trace: Path, tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path}/study.sqlite"
    tuned(trace, storage=storage, study="mine", trials=1)
    with pytest.raises(UsageError, match="asked for another memory"):
        tuned(trace, storage=storage, study="mine", trials=1, memory="byte-seconds")


def test_passwords_are_not_shown(trace: Path) -> None:
    with pytest.raises(UsageError) as caught:
        tuned(trace, storage="nosuch://me:secret@host/studies")
    assert "secret" not in str(caught.value)


def test_a_full_disk_is_one_line_that_names_the_study(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(values: object) -> list[float]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        return [0.0]

    study = Study("s", f"sqlite:///{tmp_path}/full.sqlite", {"a": Range(0.0, 1.0)}, 1, {})
    try:
        with pytest.raises(UsageError, match=r"full\.sqlite: the study cannot be kept") as caught:
            study.run(fill, 2, first={"a": 0.5}, seed=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "SQL:" not in str(caught.value)


def test_trials_of_a_study_are_in_their_ranges() -> None:
    space = {
        "a": Range(0.001, 1.0),
        "b": Range(1, 64, integer=True),
        "c": Choice((True, None, "x")),
    }
    study = Study("s", "", space, 1, {})
    first = {"a": 5.0, "b": 0, "c": None}
    found = study.run(lambda values: [values["a"]], 25, first=first, seed=3)
    assert found[0].values == {"a": 1.0, "b": 1, "c": None}
    for each in found:
        assert 0.001 <= each.values["a"] <= 1.0
        assert each.values["a"] == float(f"{each.values['a']:.4g}")
        assert isinstance(each.values["b"], int)
        assert each.values["c"] in (True, None, "x")
    assert len({each.values["a"] for each in found}) > 20


# --- files of the front ---


def test_a_composition_of_the_front_replays_as_its_trial(trace: Path, tmp_path: Path) -> None:
    found = tuned(trace)
    files = found.front(tmp_path / "front")
    frame = found.summary()
    assert [path.stem for path in files] == [f"staircase-{n}" for n in frame["trial"]]
    row = frame.to_dict("records")[0]
    with_it = arborsim.replay(
        trace, policies=str(files[0]), budgets=float(row["budget"]), oracle=False
    )
    texts = {name: row[name] for name in frame.columns if "." in name}
    without = arborsim.replay(
        trace, policies="staircase", settings={**FIXED, **texts}, budgets=float(row["budget"]),
        oracle=False,
    )  # fmt: skip
    a, b = (each.to_pandas().drop(columns="policy") for each in (with_it, without))
    assert a.equals(b)
    assert "--vary place.hbm_quantised --vary protect.recent=4:32" in found.metadata["command"]
    head = files[0].read_text().splitlines()[2]
    assert (
        head == f"# Use: arborsim replay TRACE --policy {files[0].name} --budget {row['budget']:g}"
    )


def test_settings_of_a_method_become_a_calibration(trace: Path, tmp_path: Path) -> None:
    found = arborsim.tune(trace, policy="h2o", settings={"sinks": 2, "per": "shared"}, trials=3)
    files = found.front(tmp_path)
    read = read_calibration(files[0])
    row = found.summary().iloc[0]
    assert read.policies["h2o"] == {
        "sinks": 2, "per": "shared", "recent_share": row["recent_share"]
    }  # fmt: skip
    arborsim.replay(trace, policies="h2o", calibration=str(files[0]), budgets=0.5)


# --- what is asked ---


def test_without_vary_all_shares_are_varied() -> None:
    assert space_of("h2o", [], {}) == {"recent_share": Range(0.0, 1.0)}
    assert space_of("h2o", [], {"recent_share": "0.5"}) == {}
    assert set(space_of("staircase", [], {})) == {
        "score.layer_a", "score.layer_b", "place.hbm_quantised", "place.ddr_quantised",
        "protect.recent_share",
    }  # fmt: skip


def test_what_is_varied() -> None:
    varied = ["ddr=0:4", "sinks=0,4,16", "pin_prompt", "score.statistic", "window"]
    assert space_of("staircase", varied, {}) == {
        "place.ddr": Range(0, 4), "protect.sinks": Choice((0, 4, 16)),
        "protect.pin_prompt": Choice((False, True)), "score.statistic": Choice(("z", "mean")),
        "score.window": Range(2, 65536, integer=True),
    }  # fmt: skip
    assert budget_range("0.5") == Choice((0.5,))
    assert budget_range("0.2:0.4") == Range(0.2, 0.4)


REFUSED = {
    "sinks": "it has no largest value",
    "sinks=4:2": "its ends must rise",
    "sinks=a:b": "a range LOW:HIGH",
    "sinks=0.5:2": "whole numbers",
    "recent_share=0:2": r"in \[0, 1\]",
    "recent_share=0:nan": "must rise and be finite",
    "recent_share=none": "must be a number",
    "snks=1:2": "did you mean",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_varied(text: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[text]):
        space_of("h2o", [text], {})


@pytest.mark.parametrize("text", ["2048", "0:0.5", "0.5:0.5", "0.5:2", "", "x"])
def test_budgets_are_shares(text: str) -> None:
    with pytest.raises(UsageError, match="budget"):
        budget_range(text)


def test_bad_input_is_one_line(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database" * 100)
    bare = make_trace(tmp_path / "bare.parquet", episodes=2, layers=2, nodes=2, capture="tree")
    cases: list[tuple[Path, dict[str, object], str]] = [
        (trace, {"policy": "staircse"}, "staircase"),
        (trace, {"policy": "h2o,tova"}, "one policy"),
        (trace, {"policy": "raas", "memory": "peek"}, "peak"),
        (trace, {"policy": "raas", "quality": "right"}, "measure of quality"),
        (trace, {"policy": "raas", "quality": "error"}, "vectors"),
        (trace, {"policy": "raas", "trials": 0}, "trials must be"),
        (trace, {"policy": "raas", "storage": "what"}, "--storage what"),
        (trace, {"policy": "raas", "storage": f"sqlite:///{tmp_path}/no/s.db"}, "--storage"),
        (trace, {"policy": "raas", "storage": f"sqlite:///{tmp_path}/text.sqlite"}, "--storage"),
        (trace, {"policy": "h2o", "settings": ["sinks=2"], "vary": "sinks=0:4"}, "set and varied"),
        (bare, {"policy": "streaming-llm"}, "--quality kept"),
        (
            trace,
            {"policy": "h2o"},
            "--set h2o.per=shared: one ranking for all heads",
        ),
        (bare, {"policy": "raas"}, "--capture signals"),
    ]
    for path, asked, said in cases:
        with pytest.raises(ArborsimError, match=said) as caught:
            arborsim.tune(path, **asked)
        assert "\n" not in str(caught.value)


def test_without_a_second_episode_nothing_is_held_out(trace: Path, tmp_path: Path) -> None:
    one = make_trace(tmp_path / "one.parquet", episodes=1, layers=2, nodes=3)
    found = arborsim.tune(one, policy="h2o", settings="per=shared", trials=2)
    assert found.to_pandas()["held_out_memory"].isna().all()
    assert "nothing was held out" in str(found)
    with pytest.raises(UsageError, match="no trace has a second episode"):
        found.report(tmp_path / "p.html")
    both = arborsim.tune([trace, one], policy="h2o", settings="per=shared", trials=2)
    assert both.summary()["held_out_memory"].notna().all()


def test_without_optuna_the_extra_is_named(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"tune needs optuna.*arborsim\[tune\]"):
        tuned(trace)
