"""The worked example of CONTRIBUTING.md does what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.tiers import Budget, Tier
from arborsim.machine import terms
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine, num_groups
from arborsim.machine.serving import ServingEngine
from arborsim.policies.base import Policy
from arborsim.policies.methods.attention import H2O
from arborsim.policies.methods.snapkv import HeadsShare
from arborsim.policies.registry import build
from arborsim.products.plan.evaluate import cost_terms
from arborsim.searches import make_search
from arborsim.searches.bank import open_bank, read_bank
from arborsim.searches.walk import walk
from arborsim.signals.scores import Score
from arborsim.trace.reader import TraceReader
from tests.helpers.demands import record_demands
from tests.helpers.plain_executor import decide_all
from tests.helpers.traces import make_trace, trace_for

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def test_a_policy_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.search(r"<!-- example: policy -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert code
    (tmp_path / "my_policies.py").write_text(code.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    trace = make_trace(tmp_path / "x.parquet", kind="linear", prompt=20, nodes=8)
    command = f"replay {trace} --policy my_policies:LateMover --budget 0.7 --set recent=8"
    assert main(command.split()) == 0
    assert "late-mover" in capsys.readouterr().out


def test_a_score_is_one_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the text replays, with its settings, in workers, too, and the first runs live."""
    for name in ("score", "scores"):
        code = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
        assert code
        (tmp_path / f"my_{name}.py").write_text(code.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    named = [f"my_scores:{n}" for n in ("fading", "short_keys", "long_values", "restless")]
    policies = ",".join(["my_score:highest", *named])
    policy = build("snapkv")
    trace = trace_for(policy, tmp_path / "x.parquet", kind="tree", prompt=20, nodes=8, episodes=2)
    settings = "--set recent=4 --set fading.decay=0.5 --set restless.first=0.25 --jobs 2"
    assert main(f"replay {trace} --policy {policies} --budget 0.7 {settings}".split()) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("highest", "fading", "short-keys", "long-values"))
    assert main(["policies", "my_score:highest"]) == 0
    assert "Keep what some query has attended to most" in capsys.readouterr().out
    pytest.importorskip("torch")
    live = "live --lines 6 --episodes 1 --max-tokens 32 --policy my_score:highest --budget 0.7"
    assert main([*live.split(), "--out", str(tmp_path / "live.parquet")]) == 0
    assert "highest" in capsys.readouterr().out


@arborsim.score(reads="attention", per="head")
def received(now: np.ndarray, row: np.ndarray) -> np.ndarray:
    return now + row


@arborsim.score(reads="attention", per="layer", recent=0)
def newest(now: np.ndarray, row: np.ndarray) -> np.ndarray:
    return row


@dataclass(frozen=True)
class FunctionH2O(H2O):
    """H2O with its score written as a function."""

    @cached_property
    def score(self) -> Score:
        return received().score


@pytest.mark.parametrize(
    ("own", "shipped", "kind"),
    [
        (FunctionH2O(), "h2o", "linear"),
        (FunctionH2O(), "h2o", "tree"),
        (newest(), "tova", "linear"),
    ],
)
def test_functions_decide_as_the_shipped_policies(
    own: Policy, shipped: str, kind: str, tmp_path: Path
) -> None:
    policy = build(shipped)
    trace = trace_for(policy, tmp_path / "x.parquet", kind=kind, prompt=12, nodes=14, episodes=1)
    episode = next(iter(TraceReader(trace).episodes(sorted(policy.reads()))))
    _, expected = decide_all(policy, episode, int(0.6 * episode.num_tokens))
    _, moves = decide_all(own, episode, int(0.6 * episode.num_tokens))
    assert len(moves)
    assert np.array_equal(moves, expected)


def test_functions_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown signal 'atention'"):
        arborsim.score(reads="atention")
    with pytest.raises(UsageError, match="leave out per"):
        arborsim.score(reads="key_norm", per="head")
    with pytest.raises(UsageError, match="score one: expected 2 arguments"):

        @arborsim.score(reads="attention")
        def one(row: np.ndarray) -> np.ndarray:
            return row


def test_values_that_cannot_rank_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("import arborsim", '@arborsim.score(reads="hidden_change")', "def short(change):")
    (tmp_path / "bad_scores.py").write_text("\n".join([*lines, "    return change[0]"]))
    monkeypatch.syspath_prepend(tmp_path)
    trace = make_trace(tmp_path / "x.parquet", kind="linear", prompt=20, nodes=8)
    assert main(f"replay {trace} --policy bad_scores:short --budget 0.7".split()) == 2
    assert "score short returned (6,) values for 20 tokens" in capsys.readouterr().err


def test_an_allocation_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is short, keeps heads unevenly, and decides as the shipped allocation with its score."""
    code = re.search(r"<!-- example: allocation -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert code
    assert sum(bool(line.strip()) for line in code.group(1).splitlines()) < 45
    (tmp_path / "my_allocations.py").write_text(code.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    policy = build("my_allocations:MyAdaKV", {"alpha": "0.3"})
    trace = trace_for(
        policy, tmp_path / "x.parquet", kind="linear", prompt=12, nodes=14, episodes=1
    )
    episode = next(iter(TraceReader(trace).episodes(sorted(policy.reads()))))
    groups, budget = num_groups(policy, episode.info), int(0.6 * episode.num_tokens)
    tiers, moves = decide_all(policy, episode, budget)
    held = np.count_nonzero(np.array(tiers[-1]).reshape(groups, -1) == Tier.HBM, axis=1)
    assert held.max() > budget > held.min()
    assert held.sum() <= budget * groups

    @dataclass(frozen=True)
    class Shipped(type(policy)):  # type: ignore[misc]
        @cached_property
        def allocate(self) -> HeadsShare:
            return HeadsShare(self.adaptation, self.alpha)

    _, expected = decide_all(Shipped(alpha=0.3), episode, budget)
    assert np.array_equal(moves, expected)


def test_a_policy_from_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.search(r"<!-- example: composition -->\n```toml\n(.*?)```", TEXT, re.DOTALL)
    assert text
    file = tmp_path / "my-mix.toml"
    file.write_text(text.group(1))
    trace = make_trace(tmp_path / "x.parquet", kind="tree", prompt=20, nodes=12)
    command = (
        f"replay {trace} --policy {file},arborkv --budget 0.8 --set my-mix.allocate.alpha=1.5 "
        "--set margin=4 --set my-mix.schedule.slack=4 --set protect.recent=8"
    )
    assert main(command.split()) == 0
    assert "my-mix" in capsys.readouterr().out
    assert main(["policies", str(file)]) == 0
    assert "allocate.alpha" in capsys.readouterr().out


def test_a_search_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It walks a bank, and its live recording as it ran live."""
    code = re.search(r"<!-- example: search -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert code
    (tmp_path / "my_searches.py").write_text(code.group(1))
    monkeypatch.syspath_prepend(tmp_path)
    bank = Path(__file__).parent / "golden" / "bank.parquet"
    search = "my_searches:LeastEntropy"
    command = f"search {bank} --algorithm rebase,{search} --width 4 --set least-entropy.keep=3"
    assert main(command.split()) == 0
    assert "least-entropy" in capsys.readouterr().out
    pytest.importorskip("torch")
    out = tmp_path / "live.parquet"
    given = "--set least-entropy.keep=3 --episodes 2"
    live = f"record --model game24 --search {search} {given} --out {out}"
    assert main(live.split()) == 0
    reader = open_bank(out)
    assert reader.info.search == "least-entropy"
    for problem in range(2):
        recorded = read_bank(reader, problem)
        walked = walk(make_search(search, keep=3), recorded)
        assert walked.bank_misses == 0
        assert walked.bank_node == tuple(range(len(recorded.parent)))
        assert walked.depth == tuple(recorded.depth)


def test_a_cost_term_is_one_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It shows in what a search takes by itself, in a plan's terms, and in --explain."""
    code = re.search(r"<!-- example: cost term -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    assert code
    trace = make_trace(tmp_path / "x.parquet", kind="tree", prompt=20, nodes=8, episodes=1)
    profile, geometry = load_profile("h100"), load_geometry("llama-3.1-8b")
    machine, whole = Machine(profile, geometry), Budget.parse("1")
    (demand,) = record_demands(trace, build("full"), whole, machine)
    plain = ServingEngine([demand], profile, geometry)
    exec(code.group(1), {})
    try:
        engine = ServingEngine([demand], profile, geometry)
        found = cost_terms(engine, 0)
        assert main(f"replay {trace} --policy full --no-quality --explain".split()) == 0
    finally:
        terms.ITERATION_TERMS.pop()
    sampling_s = 20e-6 * demand.generated_tokens
    served_s = plain.alone[0].seconds + sampling_s
    assert engine.alone[0].seconds == pytest.approx(served_s, rel=1e-9)
    assert found["decode: sampling"] == pytest.approx(sampling_s, rel=1e-9)
    assert "decode: sampling" in capsys.readouterr().out
