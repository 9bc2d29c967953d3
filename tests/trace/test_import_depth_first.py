"""Depth-first and sampling logs of the tree-of-thoughts program, against a second reading."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core import events
from arborsim.core.errors import UsageError
from arborsim.products.traces.describe import episode_facts
from arborsim.trace.episode import Episode, play
from arborsim.trace.importers.fields import Damage
from arborsim.trace.importers.sources import read_list
from arborsim.trace.importers.tot import TotLog
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import KINDS, End, Kind
from tests.trace.import_helpers import (
    imported,
    parents,
    recording,
    rows,
    tokens_of,
    tot_samples,
    tot_visits,
)

SMALL = [
    {"total_step": 0, "actions": ["ab"], "info": {"r_word": 0.5},
     "count": {"sure": 1, "maybe": 1, "impossible": 0}},
    {"total_step": 1, "actions": ["ab", "c"], "info": {"r_word": 0.5},
     "count": {"sure": 0, "maybe": 0, "impossible": 0}},
    {"total_step": 2, "actions": ["ab", "c", "d"], "info": {"r_word": 1.0},
     "count": {"sure": 0, "maybe": 0, "impossible": 2}},
    {"total_step": 3, "actions": ["ab", "e"], "info": {"r_word": 0},
     "count": {"sure": 2, "maybe": 0, "impossible": 0}},
    {"total_step": 4, "actions": ["f"], "info": {"r_word": 0},
     "count": {"sure": 1, "maybe": 0, "impossible": 1}},
]  # fmt: skip
LOG = TotLog(tokens_per_character=1, prompt_tokens=2)


def read_one(path: Path, item: Any, log: TotLog = LOG) -> Episode:
    path.mkdir(exist_ok=True)
    source = path / "log.json"
    source.write_text(json.dumps([item]))
    reader = imported(source, read_list(source, log.search_of), path / "out.parquet")
    return next(reader.episodes(text=True))


def test_a_small_search_row_by_row(tmp_path: Path) -> None:
    episode = read_one(tmp_path, SMALL)
    found = [
        (KINDS[kind], int(node), int(up), int(position))
        for kind, node, up, position in zip(
            episode.kind, episode.node, episode.parent, positions(episode), strict=True
        )
    ]
    assert found == [
        ("prefill", 0, -1, 0), ("prefill", 0, -1, 1),
        ("transition", 1, 0, -1), ("token", 1, 0, 2), ("token", 1, 0, 3), ("boundary", 1, 0, -1),
        ("transition", 2, 1, -1), ("token", 2, 1, 4), ("boundary", 2, 1, -1),
        ("transition", 3, 2, -1), ("token", 3, 2, 5), ("boundary", 3, 2, -1),
        # Back to node 1: what lies below it is given up, the deepest first.
        ("prune", 3, 2, -1), ("prune", 2, 1, -1),
        ("transition", 4, 1, -1), ("token", 4, 1, 4), ("boundary", 4, 1, -1),
        ("prune", 4, 1, -1), ("prune", 1, 0, -1),
        ("transition", 5, 0, -1), ("token", 5, 0, 2), ("boundary", 5, 0, -1),
        ("prune", 5, 0, -1),  # the log ends here, at a state with an impossible word
        ("answer", 3, 2, -1),  # the deepest
    ]  # fmt: skip
    closed = rows(episode, Kind.BOUNDARY)
    np.testing.assert_allclose(episode.reward[closed], [0.75, np.nan, 0, 1, 0.5])
    assert episode.correct[closed].tolist() == [0, 0, 1, 0, 0]
    assert episode.correct[-1] == 1
    assert episode.text is not None
    assert episode.text[-1] == "ab\nc\nd"
    assert [episode.text[row] for row in closed] == ["ab", "c", "d", "e", "f"]


def positions(episode: Episode) -> np.ndarray:
    found = np.full(episode.num_rows, -1)
    found[episode.token_rows] = episode.position
    return found


def check_against_a_second_reading(
    episode: Episode, visits: list[dict[str, Any]], length: Callable[[str], int]
) -> None:
    """Nodes, edges, order, switches, values, verdicts, answer: from the log anew."""
    names = [tuple(visit["actions"]) for visit in visits]
    # The state above is the last one visited by that name.
    above = [
        1 + max(i for i in range(n) if names[i] == name[:-1]) if len(name) > 1 else 0
        for n, name in enumerate(names)
    ]
    nodes = range(1, len(visits) + 1)
    assert parents(episode) == {0: -1, **dict(zip(nodes, above, strict=True))}
    opened = [int(episode.node[row]) for row in rows(episode, Kind.TRANSITION)]
    assert opened == list(nodes)
    own = [length(name[-1]) for name in names]
    assert [tokens_of(episode)[n] for n in nodes] == own
    assert episode.iteration[-1] == sum(own)  # one after the other
    depth = dict(zip(episode.node.tolist(), episode.depth.tolist(), strict=True))
    assert [depth[n] for n in nodes] == [len(name) for name in names]
    # Each event's leaf; a return is a visit whose state above is not the one just visited.
    turned = [event for event in play(episode) if isinstance(event, events.Transition)]
    assert [event.leaves for event in turned] == [(n,) for n in nodes]
    facts = episode_facts(episode)
    assert facts.transitions == len(visits)
    returns = sum(len(name) <= len(before) for before, name in pairwise(names))
    assert facts.revisits == returns
    # Given up, when the search is past them: states that no later visit lies under.
    row_of = dict(zip(episode.node[rows(episode, Kind.TRANSITION)].tolist(),
                      rows(episode, Kind.TRANSITION), strict=True))  # fmt: skip
    under = {n: [m for m in nodes if n in line(m, above)] for n in nodes}
    given_up = {int(episode.node[row]): row for row in rows(episode, Kind.PRUNE)}
    for n in nodes:
        last = max(under[n])
        if last < len(visits):
            assert row_of[last] < given_up[n] < row_of[last + 1]
        else:
            assert (n in given_up) == (n == last and visits[-1]["count"]["impossible"] > 0)
    closed = rows(episode, Kind.BOUNDARY)
    for visit, row in zip(visits, closed, strict=True):
        sure, maybe, impossible = (visit["count"][k] for k in ("sure", "maybe", "impossible"))
        judged = sure + maybe + impossible
        value = (sure + 0.5 * maybe) / judged if judged else math.nan
        np.testing.assert_allclose(episode.reward[row], value, rtol=1e-6)
        assert bool(episode.correct[row]) == (visit["info"]["r_word"] == 1)
    deepest = max(len(name) for name in names)
    answer = next(n for n in nodes if len(names[n - 1]) == deepest)
    assert int(episode.node[-1]) == answer
    assert bool(episode.correct[-1]) == (visits[answer - 1]["info"]["r_word"] == 1)


def line(node: int, above: list[int]) -> list[int]:
    """A node and those above it but for the prompt."""
    found = []
    while node:
        found.append(node)
        node = above[node - 1]
    return found


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), per_character=st.floats(0.01, 2))
def test_the_trace_is_the_log(
    tmp_path_factory: pytest.TempPathFactory, seed: int, per_character: float
) -> None:
    visits = tot_visits(seed)
    log = TotLog(per_character, prompt_tokens=3)
    episode = read_one(tmp_path_factory.mktemp("log"), visits, log)
    check_against_a_second_reading(
        episode, visits, lambda text: max(1, round(len(text) * per_character))
    )


def test_thoughts_take_the_length_that_is_asked_for(tmp_path: Path) -> None:
    episode = read_one(tmp_path, SMALL, TotLog(prompt_tokens=7, thought_tokens=5))
    assert tokens_of(episode) == {0: 7, **dict.fromkeys(range(1, 6), 5)}


DAMAGE: dict[str, tuple[Any, str]] = {
    "nothing": ([], "there are no visits"),
    "a visit left out": (SMALL[1:], "total_step is 1"),
    "a state without its parent": (
        [{**SMALL[0], "actions": ["ab", "c"]}], "visit 0: actions continue no state",
    ),
    "another path": (
        [*SMALL[:2], {**SMALL[2], "actions": ["x", "c", "d"]}], "visit 2: actions continue no",
    ),
    "no actions": ([{**SMALL[0], "actions": []}], "visit 0: actions continue no state"),
    "actions are text": ([{**SMALL[0], "actions": "ab"}], "visit 0: actions is 'ab' instead"),
    "an action is a number": ([{**SMALL[0], "actions": [1]}], "visit 0: actions is 1 instead"),
    "no counts": ([{**SMALL[0], "count": {}}], "sure is missing"),
    "half a count": (
        [{**SMALL[0], "count": {"sure": 0.5, "maybe": 0, "impossible": 0}}],
        "visit 0: sure is 0.5 instead of a whole number",
    ),
    "a visit as text": (["ab"], "expected an object with total_step, found text"),
    "more than all words": ([{**SMALL[0], "info": {"r_word": 1.5}}], "r_word is 1.5, more than 1"),
    "no verdict": ([{**SMALL[0], "info": {}}], "r_word is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str) -> None:
    item, named = DAMAGE[case]
    with pytest.raises(Damage, match=re.escape(named)):
        LOG.search_of(item)


@pytest.mark.parametrize("item", [SMALL, tot_samples(0)])
def test_a_log_without_problems_asks_for_the_prompts_length(item: Any) -> None:
    with pytest.raises(UsageError, match="--prompt-tokens"):
        TotLog().search_of(item)


def test_samples_stand_side_by_side(tmp_path: Path) -> None:
    item = {"idx": 3, "ys": ["a\nAnswer: 7", "bcd", "ef"],
            "infos": [{"r": 0}, {"r": 1}, {"r": 1}]}  # fmt: skip
    episode = read_one(tmp_path, item)
    assert parents(episode) == {0: -1, 1: 0, 2: 0, 3: 0}
    assert tokens_of(episode) == {0: 2, 1: 11, 2: 3, 3: 2}
    assert episode.iteration[-1] == 11
    closed = rows(episode, Kind.BOUNDARY)
    assert episode.correct[closed].tolist() == [0, 1, 1]
    assert episode.answer is not None
    assert [episode.answer[row] for row in closed] == ["7", None, None]
    assert episode.end is not None
    assert set(episode.end[closed]) == {End.FINISHED}
    assert np.isnan(episode.reward[closed]).all()
    assert not rows(episode, Kind.PRUNE)
    assert (episode.node[-1], episode.correct[-1]) == (2, 1)  # the first right one


@pytest.mark.parametrize(
    ("judged", "verdicts", "rewards", "best"),
    [
        ({"infos": [{"r": 6.0}, {"r": 8.0}]}, [-1, -1], [0.6, 0.8], (2, -1)),
        ({"infos": [{"r": 0.3, "r_game": False}, {"r": 1.0, "r_game": True}]}, [0, 1],
         [0.03, 0.1], (2, 1)),
        ({"accs": [False, True]}, [0, 1], [math.nan, math.nan], (2, 1)),
        ({"accs": [0, 0]}, [-1, -1], [math.nan, math.nan], (1, -1)),
    ],
)  # fmt: skip
def test_scores_are_rewards_and_verdicts_are_verdicts(
    tmp_path: Path, judged: dict[str, Any], verdicts: list[int], rewards: list[float],
    best: tuple[int, int],
) -> None:  # fmt: skip
    log = TotLog(prompt_tokens=1, value_scale=10)
    episode = read_one(tmp_path, {"ys": ["a", "b"], **judged}, log)
    closed = rows(episode, Kind.BOUNDARY)
    assert episode.correct[closed].tolist() == verdicts
    np.testing.assert_allclose(episode.reward[closed], rewards, rtol=1e-6)
    assert (episode.node[-1], episode.correct[-1]) == best


SAMPLE_DAMAGE = {
    "none": ({"ys": [], "infos": []}, "there are no samples"),
    "one verdict too few": ({"ys": ["a", "b"], "infos": [{"r": 1}]}, "1 verdicts for 2"),
    "a score beyond the scale": ({"ys": ["a"], "infos": [{"r": 99.5}]}, "score 0 is 99.5, more"),
    "no verdicts": ({"ys": ["a"]}, "infos is missing"),
    "a verdict of text": ({"ys": ["a"], "infos": [{"r": "1"}]}, "verdict 0 is '1'"),
    "accs as a number": ({"ys": ["a"], "accs": 1}, "accs is 1 instead of a list"),
}


@pytest.mark.parametrize("case", SAMPLE_DAMAGE)
def test_damage_of_samples_is_named(case: str) -> None:
    item, named = SAMPLE_DAMAGE[case]
    with pytest.raises(Damage, match=re.escape(named)):
        LOG.search_of(item)


@pytest.fixture(scope="module")
def crosswords(tmp_path_factory: pytest.TempPathFactory) -> TraceReader:
    log = recording("tot-gpt4-crosswords-dfs.json")
    out = tmp_path_factory.mktemp("gpt4") / "crosswords.parquet"
    reading = TotLog(prompt_tokens=300)
    return imported(log, read_list(log, reading.search_of), out, ends="unknown")


def test_gpt4s_crosswords_are_what_the_log_says(crosswords: TraceReader) -> None:
    log = json.loads(recording("tot-gpt4-crosswords-dfs.json").read_text())
    for episode, visits in zip(crosswords.episodes(text=True), log, strict=True):
        check_against_a_second_reading(episode, visits, lambda text: round(0.62 * len(text)))


def test_gpt4s_crosswords_have_the_papers_results(crosswords: TraceReader) -> None:
    """Yao et al. (2023), table 3: 20 % of the games; the best state of each search has 35 %."""
    facts = [episode_facts(episode) for episode in crosswords.episodes()]
    assert sum(fact.correct is True for fact in facts) == 4
    best = [bool((episode.correct == 1).any()) for episode in crosswords.episodes()]
    assert sum(best) == 7
    assert sum(fact.nodes - 1 for fact in facts) == 1856
    assert (min(fact.depth for fact in facts), max(fact.depth for fact in facts)) == (4, 9)
    assert sorted(fact.revisits for fact in facts)[3] > 50  # 17 of 20 have that many returns
