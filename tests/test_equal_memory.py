"""Comparisons at equal memory: the budgets found are the nearest, as a scan of all says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import ArborsimError, UnknownName, UsageError
from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell
from arborsim.play.results import ReplayResult
from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from arborsim.products.replay.equal import MEASURES, TOLERANCE, at_equal_memory, bracket, memory
from arborsim.products.replay.run import Replay
from arborsim.trace.reader import TraceReader
from tests.helpers.traces import make_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t") / "x.parquet"
    return make_trace(path, kind="tree", prompt=8, nodes=8, block=(4, 8), episodes=2)


OWN = {"hierarchy": {"recent": "4"}, "h2o": {"per": "shared"}}


def job(trace: Path, names: str, budgets: str, **more: object) -> Replay:
    policies = [build(name, OWN.get(name)) for name in ("full", *names.split(","))]
    asked = frozenset(names.split(","))
    return Replay([trace], policies, [Budget.parse(text) for text in budgets.split(",")],
                  Machine(load_profile("h100")), asked=asked, **more)  # type: ignore[arg-type]  # fmt: skip


def replayed(
    trace: Path, names: str, budgets: str, measure: str, reference: Policy | None = None
) -> ReplayResult:
    return at_equal_memory(job(trace, names, budgets), measure, reference).run()


@given(
    small=st.integers(0, 5),
    steps=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    wanted=st.integers(0, 100),
)
def test_the_bracket_is_that_of_a_scan(small: int, steps: list[int], wanted: int) -> None:
    """The last budget that holds at most what is wanted, and the first that holds more."""
    amounts: list[float | None] = [None] * small
    for step in steps:
        amounts.append((amounts[-1] or 0) + step if amounts else float(step))

    below, above = bracket(lambda at: amounts[at - 1], len(amounts), wanted)
    known = [(at, held) for at, held in enumerate(amounts, 1) if held is not None]
    assert below == max((each for each in known if each[1] <= wanted), default=None)
    assert above == min((each for each in known if each[1] > wanted), default=None)


@pytest.mark.parametrize("measure", list(MEASURES))
def test_budgets_are_the_nearest_of_all(trace: Path, measure: str) -> None:
    """Every number of tokens is tried, for policies whose memory grows with it."""
    reference, names = build("h2o", OWN["h2o"]), "streaming-llm,h2o"
    result = replayed(trace, names, "40", measure, reference)
    reader, asked = TraceReader(trace), job(trace, names, "40")
    wanted = memory(asked, reader, measure, Cell(reference, Budget.parse("40")))
    assert wanted is not None
    longest = max(episode.num_tokens for episode in reader.episodes(()))
    for one in result.equal:
        policy = build(one.policy, OWN.get(one.policy))
        scanned = [
            held
            for tokens in range(1, longest + 1)
            if (held := memory(asked, reader, measure, Cell(policy, Budget("", tokens=tokens))))
            is not None
        ]
        # Near full retention decisions stop, and what they take with them: seconds, not bytes.
        assert scanned == sorted(scanned) or measure == "byte-seconds"
        assert one.wanted == wanted
        assert abs(one.held - wanted) == min(abs(held - wanted) for held in scanned)
    assert {one.policy for one in result.equal} == set(names.split(","))


@pytest.mark.parametrize("measure", list(MEASURES))
def test_rows_take_the_memory_that_was_asked_for(trace: Path, measure: str) -> None:
    """As a share of full retention's; rows keep the label of the budget."""
    result = replayed(trace, "streaming-llm,h2o", "0.6,0.8", measure)
    rows = {row.cell: row for row in result.rows()}
    name = MEASURES[measure]
    full = getattr(rows[trace.name, "full", "any"], name)
    assert len(result.equal) == 4
    for one in result.equal:
        row = rows[one.trace, one.policy, one.budget]
        assert row.equal == one
        assert getattr(row, name) == pytest.approx(one.held, rel=1e-12)
        assert one.wanted == pytest.approx(float(one.budget) * full, rel=1e-12)
        assert abs(one.off) <= TOLERANCE
        assert one.found != one.budget or measure == "peak"


def test_the_reference_has_the_budget_that_was_asked_for(trace: Path) -> None:
    result = replayed(trace, "h2o", "0.7", "peak", build("h2o", OWN["h2o"]))
    (one,) = result.equal
    assert one.off == 0


def test_what_cannot_take_so_little_is_a_row_with_its_reason(trace: Path) -> None:
    """The prompt stays; alone, such a policy is an error."""
    result = replayed(trace, "streaming-llm,hierarchy", "0.3", "peak")
    missing = {each.policy: each.reason for each in result.left_out}
    assert {one.policy for one in result.equal} == {"streaming-llm"}
    assert missing["hierarchy"].startswith("takes at least ")
    assert [row.left_out for row in result.rows(result.left_out) if row.left_out]
    with pytest.raises(ArborsimError, match=r"x.parquet: hierarchy takes at least .*, not "):
        replayed(trace, "hierarchy", "0.3", "peak")
    strict = job(trace, "streaming-llm,hierarchy", "0.3", strict=True)
    with pytest.raises(ArborsimError, match="hierarchy takes"):
        at_equal_memory(strict, "peak")


def test_what_cannot_be_meant_is_refused(trace: Path) -> None:
    with pytest.raises(UsageError, match=r"budget 40 is a number of tokens; .* name a reference"):
        replayed(trace, "h2o", "40", "peak")
    with pytest.raises(UnknownName, match="unknown measure of equal memory 'peek'"):
        replayed(trace, "h2o", "0.5", "peek")


def test_the_command_the_api_and_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "r.parquet", tmp_path / "r.html"
    command = ["replay", str(trace), "--policy", "h2o,streaming-llm", "--budget", "0.7",
               "--equal", "byte-seconds", "--reference", "h2o", "--no-oracle", "--set",
               "h2o.per=shared"]  # fmt: skip
    assert main([*command, "--out", str(out), "--report", str(page), "--jobs", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Equal HBM byte-seconds: under each budget every policy takes what h2o takes" in shown
    assert "found" in shown
    assert "Budget found" in page.read_text()
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {row["policy"]: row["equal"]["found"] for row in rows if row["equal"]}
    assert set(found) == {"h2o", "streaming-llm"}
    results = arborsim.replay(
        trace, policies="h2o,streaming-llm", budgets=0.7, settings={"h2o.per": "shared"},
        oracle=False, equal="byte-seconds", reference="h2o",
    )  # fmt: skip
    read = arborsim.load_results(out)
    assert read.raw.equal == results.raw.equal
    for frame in (results.to_pandas(), read.to_pandas()):
        own = frame[frame["budget_found"] != ""].groupby("policy")
        assert {name: each["budget_found"].unique().tolist() for name, each in own} == {
            name: [text] for name, text in found.items()
        }
        assert not own["memory_wanted"].first().map(math.isnan).any()
    for options, error in (
        (["--equal", "peek"], "unknown measure of equal memory 'peek'"),
        (["--equal", ""], "also give equal"),
        (["--reference", "full"], "reference full knows no budget"),
    ):
        assert main([*command, *options]) == 2
        said = capsys.readouterr().err
        assert error in said
        assert said.count("\n") == 1
