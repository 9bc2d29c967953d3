"""Scores that take sparse rows in the time of what they list, against the same rows written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.events import TokenRun
from arborsim.core.observations import DenseRows, Observations, SparseRows
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.signals import sparse_rows as attention_rows
from arborsim.signals.attention import CumulativeAttention, NewestAttention
from arborsim.signals.last_attended import LastAttended
from arborsim.signals.scores import Score, ScoreBook, Steps
from arborsim.signals.sparse_rows import SparseSums

PROMPT = 3
SCORES: dict[str, tuple[Score, Score]] = {
    "cumulative": (CumulativeAttention(), CumulativeAttention()),
    "cumulative, generated": (
        CumulativeAttention(count_prompt=False),
        CumulativeAttention(count_prompt=False),
    ),
    "newest": (NewestAttention(up_to_constant=True), NewestAttention()),
    "used": (LastAttended(up_to_constant=True), LastAttended()),
}


def sparse_rows(rng: np.random.Generator, lengths: np.ndarray) -> SparseRows:
    """Few or many positions listed, with more or less than the others get; some not numbers."""
    index, value, rest = [], [], []
    for length in lengths:
        chosen = np.flatnonzero(rng.random(length) < rng.choice([0.0, 0.2, 0.9, 1.0]))
        weight = rng.choice([0.01, 0.05, 0.1, 0.3], len(chosen))
        left = rng.choice([0.0, 0.1, 0.5])
        if rng.random() < 0.25:
            weight[:], left = np.nan, np.nan
            chosen, weight = chosen[: length - 1], weight[: length - 1]
        index.append(chosen)
        value.append(weight)
        rest.append(left)
    return SparseRows(
        np.concatenate(index).astype(np.int32),
        np.concatenate(value).astype(np.float16),
        np.concatenate([[0], np.cumsum([len(part) for part in index])]),
        np.array(rest, dtype=np.float32),
        lengths,
    )


def written_out(rows: SparseRows) -> DenseRows:
    dense = [rows.row(i) for i in range(len(rows))]
    return DenseRows(np.concatenate(dense), np.concatenate([[0], np.cumsum(rows.lengths)]))


class Pair:
    """One search, seen by a score that takes sparse rows and by one that takes them written out."""

    def __init__(self, scores: tuple[Score, Score]) -> None:
        self.tree = ThoughtTree()
        self.tree.open(0, -1)
        self.tier = np.zeros((1, 0), dtype=np.int8)
        self.books = [ScoreBook({"it": score}, 1) for score in scores]

    def begin(self, rng: np.random.Generator, leaf: int, steps: int) -> list[Observations]:
        """Enter a run; leaf 0 is the prompt.  Some generated tokens were evicted before it."""
        old = np.arange(self.tier.shape[1])
        self.tier[:, old[(old >= PROMPT) & (rng.random(len(old)) < 0.2)]] = Tier.EVICTED
        self.tree.append((leaf,), steps)
        path = len(self.tree.path(leaf))
        rows = sparse_rows(rng, np.arange(path - steps + 1, path + 1))
        seen = [Observations(steps, rows), Observations(steps, written_out(rows))]
        for book, observed in zip(self.books, seen, strict=True):
            run = TokenRun((leaf,), steps, np.zeros(steps, dtype=np.int32), observed)
            book.begin(run, self.tree, leaf > 0, self.tier)
        self.tier = np.pad(self.tier, ((0, 0), (0, steps)))
        return seen

    def evict(self, rng: np.random.Generator, known: int, *steps: Steps) -> None:
        """Perhaps one of the first `known` generated tokens, but the newest, within a run."""
        (held,) = np.nonzero(self.tier[0, PROMPT : known - 1] == Tier.HBM)
        if len(held) and rng.random() < 0.5:
            gone = PROMPT + int(rng.choice(held))
            self.tier[0, gone] = Tier.EVICTED
            for each in steps:
                each.lose(np.arange(known), [gone])

    def values(self, known: int) -> tuple[np.ndarray, np.ndarray]:
        """Both scores of the generated tokens that are held among the first `known`."""
        held = PROMPT + np.flatnonzero(self.tier[0, PROMPT:known] == Tier.HBM)
        one, other = (book.values()["it"][..., held] for book in self.books)
        return one, other


def order(values: np.ndarray) -> list[int]:
    """Rank of every value; equal values have equal ranks."""
    return np.unique(values, return_inverse=True)[1].ravel().tolist()


@pytest.mark.parametrize("name", SCORES)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), stepwise=st.booleans())
def test_order_and_ties_are_those_of_rows_written_out(name: str, seed: int, stepwise: bool) -> None:
    rng, pair = np.random.default_rng(seed), Pair(SCORES[name])
    pair.begin(rng, 0, PROMPT)
    for book in pair.books:
        book.skip(PROMPT)
    for leaf in (1, 2):  # the second leaf's path is not all there is: true values are asked for
        pair.tree.open(leaf, 0)
        for _ in range(3):
            steps = int(rng.integers(1, 9))
            pair.begin(rng, leaf, steps)
            born = pair.tree.num_tokens - steps
            if stepwise:
                both = [book.steps(steps) for book in pair.books]
                for t, _ in enumerate(zip(*both, strict=True)):
                    one, other = pair.values(born + t + 1)
                    assert order(one) == order(other)
                    pair.evict(rng, born + t + 1, *both)
            else:
                for book in pair.books:
                    book.skip(steps)
            one, other = pair.values(pair.tree.num_tokens)
            assert order(one) == order(other)
            if leaf == 2:
                assert np.array_equal(one, other)


def test_sums_do_not_depend_on_how_many_rows_are_widened_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(2)
    rows = sparse_rows(rng, np.arange(1, 41))
    found = []
    for at_once in (1, 7, 100, 1 << 16):
        monkeypatch.setattr(attention_rows, "_AT_ONCE", at_once)
        for cut in (0, 13, 40):  # rows added one by one, then all others together
            sums, adder = np.zeros(40), SparseSums()
            adder.begin(rows, sums)
            for step in range(cut):
                adder.take(step)
            adder.take_many(cut, 40)
            adder.settle(sums)
            found.append(sums)
    assert all(np.array_equal(sums, found[0]) for sums in found)
    literal = np.zeros(40)
    for i in range(40):
        row, others = rows.row(i), i + 1 - int(rows.offsets[i + 1] - rows.offsets[i])
        if not np.isnan(row).any():  # what is listed never counts for less than what is not
            literal[: i + 1] += np.maximum(row, rows.rest[i] / others if others else 0.0)
    assert found[0] == pytest.approx(literal)
