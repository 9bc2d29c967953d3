"""The verifier and the model's own value as rewards."""

from __future__ import annotations

import operator
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.trace.reader import Episode, TraceReader
from arborsim.trace.schema import Kind
from arborsim_torch.reference import Problem, get_task
from arborsim_torch.reference.game24 import LINE_ENDS, solvable
from arborsim_torch.rewards.base import Thought
from arborsim_torch.rewards.exact import OwnValue, Verifier

GAME = get_task("game24")


def episodes(out: Path, *arguments: str) -> list[Episode]:
    shared = ("--model", "game24", "--search", "rebase", "--episodes", "3", "--capture", "tree")
    assert main(["record", "--out", str(out), *shared, *arguments]) == 0
    return list(TraceReader(out).episodes(text=True))


def can_win(numbers: tuple[int, ...], text: str) -> bool:
    """Whether a line ``x op y = z ( rest ) Y`` is right and leaves what makes 24."""
    x, sign, y, equals, z, opened, *rest, closed, _ = text.split()
    results = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
    left = Counter(numbers)
    left.subtract([int(x), int(y)])
    left[int(z)] += 1
    right = equals == "=" and opened == "(" and closed == ")" and min(left.values()) >= 0
    right &= int(z) == results[sign](int(x), int(y)) and Counter(map(int, rest)) == +left
    return right and solvable([int(number) for number in rest])


def test_the_verifier_says_whether_24_can_still_be_reached(tmp_path: Path) -> None:
    seen = set()
    for episode in episodes(tmp_path / "t.parquet", "--reward", "verifier", "--noise", "0"):
        closed = episode.kind == Kind.BOUNDARY
        reward_of = dict(zip(episode.node[closed], episode.reward[closed], strict=True))
        numbers = GAME.problem("test", episode.index).data.numbers
        for row in np.flatnonzero(closed & (episode.depth == 1)):
            expected = float(can_win(numbers, episode.text[row]))
            assert reward_of[episode.node[row]] == expected
            seen.add(expected)
        # Nothing comes back to life.
        for node, parent in zip(episode.node[closed], episode.parent[closed], strict=True):
            assert reward_of[node] <= reward_of.get(parent, 1.0)
    assert seen == {0.0, 1.0}


def test_noise_has_the_stated_strength() -> None:
    problem = GAME.problem("test", 0)
    good = GAME.solution(problem)[: LINE_ENDS[0]]
    thoughts = [Thought(problem, good, (len(good),))] * 4000
    half = Verifier(GAME, noise=0.1).score(thoughts, np.random.default_rng(1))
    assert max(half) == 1.0  # clipped
    below = np.array([1.0 - x for x in half if x < 1.0])
    assert len(below) == pytest.approx(2000, abs=150)
    assert np.sqrt((below**2).mean()) == pytest.approx(0.1, rel=0.06)
    again = Verifier(GAME, noise=0.1).score(thoughts, np.random.default_rng(1))
    assert again == half


def test_a_blind_verifier_sees_no_death() -> None:
    problem = GAME.problem("test", 0)
    dead = GAME.vocab.encode(["<eos>"])
    thought = Thought(problem, dead, (1,))
    rng = np.random.default_rng(0)
    assert Verifier(GAME, dead_penalty=1.0).score([thought], rng) == [0.0]
    assert Verifier(GAME, dead_penalty=0.25).score([thought], rng) == [0.75]


def test_progress_of_a_chain_is_lifted_to_the_floor() -> None:
    chain = get_task("chain", lines=12)
    problem = chain.problem("test", 0)
    whole = chain.solution(problem)
    ends = [i for i in range(1, len(whole) + 1) if chain.is_thought_end(problem, whole[:i])]
    thoughts = [Thought(problem, whole[:end], (end,)) for end in ends]
    plain = Verifier(chain).score(thoughts, np.random.default_rng(0))
    assert plain == [chain.judge(problem, t.generated).progress for t in thoughts]
    assert plain[-1] == 1.0
    lifted = Verifier(chain, floor=0.3).score(thoughts, np.random.default_rng(0))
    assert lifted == pytest.approx([0.3 + 0.7 * x for x in plain])


def test_the_default_of_game24_is_the_models_own_value(tmp_path: Path) -> None:
    default = episodes(tmp_path / "a.parquet")
    named = episodes(tmp_path / "b.parquet", "--reward", "value")
    for one, other in zip(default, named, strict=True):
        assert np.array_equal(one.reward, other.reward, equal_nan=True)
        assert np.array_equal(one.token, other.token)


def test_the_default_of_chain_is_the_verifier(tmp_path: Path) -> None:
    found = []
    for name, options in (("a", ()), ("b", ("--reward", "verifier"))):
        out = tmp_path / f"{name}.parquet"
        shared = ["--model", "chain", "--lines", "8", "--episodes", "2", "--capture", "tree"]
        assert main(["record", "--out", str(out), *shared, *options]) == 0
        found.append(list(TraceReader(out).episodes()))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one.reward, other.reward, equal_nan=True)


def test_a_line_without_a_value_is_worth_nothing() -> None:
    problem = Problem("game24", "test", 0, (), None)
    thoughts = [Thought(problem, [1], (1,), None), Thought(problem, [1], (1,), 0.25)]
    assert OwnValue().score(thoughts, np.random.default_rng(0)) == [0.0, 0.25]


def test_what_has_no_verifier_or_value_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["record", "--out", str(tmp_path / "t.parquet"), "--episodes", "1"]
    assert main([*out, "--model", "chain", "--reward", "value"]) == 2
    assert "states no value of its own" in capsys.readouterr().err
