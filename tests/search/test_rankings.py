"""Scores of paths, elections and refilled beams, against literal re-implementations."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.searches import ROOT, Leaf, make_search, search_names, search_options
from arborsim.searches.ranking import AGGREGATES, elected
from tests.search import literal
from tests.search.bank import Bank, Run, drive
from tests.search.literal import Scored

SCORES = tuple(AGGREGATES)
RANKED = [name for name in search_names() if "score" in search_options(name)]
seeds, depths, digits = st.integers(0, 10_000), st.integers(1, 5), st.sampled_from([1, 2])
scores = st.sampled_from(SCORES)
answers = st.sampled_from(["best", "vote", "weighted"])
some = settings(max_examples=40, deadline=None)


def both(seed: int, depth: int, digits: int, score: str) -> tuple[Bank, Scored]:
    """A bank, and the one that already scores paths."""
    shape: dict[str, Any] = {"depth": depth, "digits": digits}
    return Bank(seed, **shape), Scored(seed, **shape, score=score)


def everything(run: Run) -> tuple[Any, ...]:
    """What a search did, but for the scores that it was shown."""
    dropped = [run.path[n] for n in run.dropped]
    return [run.path[n] for n in run.order], dropped, [run.path[n] for n in run.answer]


@pytest.mark.parametrize("name", RANKED)
@some
@given(seed=seeds, depth=depths, digits=digits, score=scores, answer=answers)
def test_a_score_is_that_of_the_path(
    name: str, seed: int, depth: int, digits: int, score: str, answer: str
) -> None:
    """A search that scores paths does what it does where thoughts are rewarded so."""
    plain, scored = both(seed, depth, digits, score)
    mine = drive(make_search(name, score=score, answer=answer), plain)
    assert everything(mine) == everything(drive(make_search(name, answer=answer), scored))


@some
@given(seeds, depths, digits, scores, st.integers(1, 12), st.integers(1, 4))
def test_a_beam_of_scored_paths(
    seed: int, depth: int, digits: int, score: str, width: int, keep: int
) -> None:
    plain, scored = both(seed, depth, digits, score)

    def share(ranked: list, left: int) -> list:
        kept = ranked[:keep]
        return [(s, left // len(kept) + (i < left % len(kept))) for i, s in enumerate(kept)]

    run = drive(make_search("beam-4", width=width, keep=keep, score=score), plain)
    assert everything(run)[0] == literal.literal_levels(scored, width, 25, share)[0]


@some
@given(seeds, depths, digits, scores, answers, st.integers(1, 8))
def test_chains_elect(seed: int, depth: int, digits: int, score: str, answer: str, n: int) -> None:
    plain, scored = both(seed, depth, digits, score)
    made, finished = literal.literal_samples(scored, n)
    votes = {"best": None, "vote": lambda s: 1, "weighted": lambda s: scored.child(s)[0]}
    for name in ("best-of-n", "self-consistency", "weighted-vote"):
        run = drive(make_search(name, n=n, score=score, answer=answer), plain)
        assert everything(run)[2] == [literal.elected(scored, made, finished, votes[answer])]


@some
@given(
    seeds, depths, digits, scores, answers, st.integers(1, 12), st.integers(1, 4), st.integers(1, 6)
)
def test_refilled_beams(
    seed: int, depth: int, digits: int, score: str, answer: str, width: int, keep: int, most: int
) -> None:
    plain, scored = both(seed, depth, digits, score)
    options = {"width": width, "keep": keep, "depth": most, "score": score, "answer": answer}
    run = drive(make_search("beam-4", **options, refill=True), plain)
    made, pool = literal.literal_refill(scored, width, keep, most)
    assert everything(run)[0] == made
    assert {run.path[n] for n in run.seen if run.leaves[n].finished} == set(pool)
    if pool:
        in_order = [s for s in made if s in pool]
        votes = {"best": None, "vote": lambda s: 1, "weighted": lambda s: scored.child(s)[0]}
        assert everything(run)[2] == [literal.elected(scored, made, in_order, votes[answer])]


def test_a_finished_beam_leaves_its_place() -> None:
    """By hand: of three thoughts one is finished; the width that is left is 3, not 2."""
    root = Leaf(ROOT, -1, 0, math.nan)
    level = [Leaf(1, 0, 1, 0.9, finished=True), Leaf(2, 0, 1, 0.8), Leaf(3, 0, 1, 0.7)]
    frontier = [Leaf(ROOT, -1, 0, math.nan, visits=3), *level]
    for refill, opened in ((False, 2), (True, 3)):
        search = make_search("beam-4", width=3, keep=2, refill=refill)
        assert search.expand([root], 3).children == {0: 3}
        assert sum(search.expand(frontier, 3).children.values()) == opened
    # it competes: a finished one that is not among the best two is no answer
    behind = [Leaf(1, 0, 1, 0.1, finished=True), *level[1:]]
    wish = make_search("beam-4", width=3, keep=2, refill=True).expand([frontier[0], *behind], 3)
    assert (wish.children, wish.dropped) == ({2: 2, 3: 1}, (1,))


@pytest.mark.parametrize("name", RANKED)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=seeds, missing=st.sampled_from([0.0, 0.4]))
def test_no_more_than_the_width_and_the_dropped_stay_away(
    name: str, data: st.DataObject, seed: int, missing: float
) -> None:
    """`drive` asserts that nothing is too wide, given up twice, or expanded afterwards."""
    options: dict[str, Any] = {"score": data.draw(scores), "answer": data.draw(answers)}
    known = search_options(name)
    for option in {"width", "n", "keep", "children"} & set(known):
        options[option] = data.draw(st.integers(4, 9))
    if "refill" in known:
        options["refill"] = data.draw(st.booleans())
    search = make_search(name, **options)
    run = drive(search, Bank(seed, depth=4, missing=missing))
    assert run.most_running <= search.slots
    assert not set(run.dropped) & {*run.seen, *run.answer}
    for node in run.answer:
        assert run.leaves[node].finished or not any(run.leaves[n].finished for n in run.seen)


def test_unknown_rewards() -> None:
    """They make the score of a path unknown, not its children's own rewards."""
    root = Leaf(ROOT, -1, 0, math.nan)
    frontier = [root, Leaf(1, 0, 1, math.nan), Leaf(2, 1, 2, 0.5), Leaf(3, 0, 1, 0.25)]
    for score, expected in (("last", 0.5), ("min", math.nan), ("prod", math.nan)):
        search: Any = make_search("rebase", score=score)
        found = {leaf.node: leaf.score for leaf in search.scored(frontier)}
        assert math.isnan(found[0])
        assert math.isnan(found[1])
        assert found[2] == expected or (math.isnan(found[2]) and math.isnan(expected))
        assert found[3] == 0.25


def test_scores_outlive_what_was_given_up() -> None:
    search: Any = make_search("mcts", score="mean")
    root, first, second = Leaf(ROOT, -1, 0, math.nan), Leaf(1, 0, 1, 0.5), Leaf(2, 1, 2, 1.0)
    assert search.scored([root, first])[1].score == 0.5
    assert search.scored([root, second])[1].score == 0.75
    assert search.scored([root, Leaf(3, 2, 3, 0.0)])[1].score == 0.5


def test_the_other_classes_follow_the_winner() -> None:
    def leaf(node: int, score: float, answer: str) -> Leaf:
        return Leaf(node, 0, 1, score, finished=True, answer=answer)

    given_ = [leaf(1, 0.9, "x"), leaf(2, 0.3, "y"), leaf(3, 0.4, "y"), leaf(4, 0.6, "z")]
    assert elected(given_, "best") == (1, 4, 3, 2)
    assert elected(given_, "vote") == (3, 1, 4)
    assert elected(given_, "weighted") == (1, 3, 4)
