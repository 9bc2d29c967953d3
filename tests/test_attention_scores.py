"""Scores from attention rows: rows that are no numbers, cut runs, and shared prefixes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.events import TokenRun
from arborsim.core.observations import DenseRows, Observations, Signal, SparseRows
from arborsim.core.tree import ThoughtTree
from arborsim.signals.attention import (
    CumulativeAttention,
    NewestAttention,
    PromptAttention,
    ValueWeightedAttention,
)
from arborsim.signals.last_attended import LastAttended, fresh_pages, median
from arborsim.signals.scores import Score, ScoreBook

PROMPT, TOKENS, LAYERS = 3, 9, 2


class Layers:
    """Rows of two layers, made from one list of dense rows."""

    layers = (0, 1)

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = rows

    def of(self, token: int) -> np.ndarray:
        mean = np.stack([self.rows[token], self.rows[token] / 2])
        return np.stack([mean, mean], axis=1).astype(np.float16)

    def __getitem__(self, tokens: slice) -> Layers:
        return Layers(self.rows[tokens])


def dense(rows: list[np.ndarray]) -> DenseRows:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return DenseRows(np.concatenate(rows), offsets)


def sparse(rows: list[np.ndarray]) -> SparseRows:
    """The first position of each row is listed, the rest is spread."""
    return SparseRows(
        np.zeros(len(rows), dtype=np.int32),
        np.array([row[0] for row in rows], dtype=np.float16),
        np.arange(len(rows) + 1),
        np.array([row[1:].sum() for row in rows], dtype=np.float32),
        np.array([len(row) for row in rows]),
    )


def chain(rows: list[np.ndarray], form: Callable[[list[np.ndarray]], object]) -> Observations:
    """One prompt and one run of generated tokens."""
    count = len(rows)
    norms = np.arange(1, count * LAYERS + 1, dtype=np.float16).reshape(count, LAYERS)
    return Observations(
        count,
        form(rows),  # type: ignore[arg-type]
        {Signal.VALUE_NORM: norms},
        layer_attention=Layers(rows),
    )


def final(score: Score, observed: Observations, cuts: tuple[int, ...] = ()) -> np.ndarray:
    """Values after a prompt and runs that end at `cuts`."""
    tree, book = ThoughtTree(), ScoreBook({"it": score}, LAYERS)
    tree.open(0, -1)
    bounds = [0, PROMPT, *cuts, observed.num_tokens]
    for start, stop in pairwise(bounds):
        if start == PROMPT:
            tree.open(1, 0)
        leaf = int(start >= PROMPT)
        token = np.zeros(stop - start, dtype=np.int32)
        run = TokenRun((leaf,), stop - start, token, observed.slice(start, stop))
        tree.append(run.leaves, run.steps)
        book.begin(run, tree, generated=bool(leaf))
        book.skip(run.steps)
    return book.values()["it"].copy()


def random_rows(broken: tuple[int, ...] = ()) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    rows = [rng.dirichlet(np.ones(n + 1)).astype(np.float16) for n in range(TOKENS)]
    for i in broken:
        rows[i] = np.full(i + 1, np.nan, dtype=np.float16)
    return rows


SCORES: dict[str, Score] = {
    "cumulative": CumulativeAttention(),
    "cumulative of later blocks": CumulativeAttention(from_later_blocks=True),
    "cumulative, generated": CumulativeAttention(count_prompt=False),
    "cumulative, any constant": CumulativeAttention(up_to_constant=True),
    "newest": NewestAttention(),
    "newest of layers": NewestAttention(layers=2),
    "prompt": PromptAttention(window=2),
    "value-weighted": ValueWeightedAttention(),
    "used": LastAttended(),
    "pages used": LastAttended(page=2),
}


@pytest.mark.parametrize("form", [dense, sparse])
@pytest.mark.parametrize("name", SCORES)
def test_cut_runs_and_broken_rows_leave_numbers(name: str, form: Callable[..., object]) -> None:
    for broken in ((), (2, 5), (8,), (7, 8)):
        observed = chain(random_rows(broken), form)
        whole = final(SCORES[name], observed)
        assert np.isfinite(whole).all()
        for cuts in ((4,), (4, 5, 6, 7, 8)):
            assert np.array_equal(final(SCORES[name], observed, cuts), whole)


@pytest.mark.parametrize("form", [dense, sparse])
def test_a_broken_row_adds_nothing_to_sums(form: Callable[..., object]) -> None:
    without = [np.zeros_like(row) if i == 5 else row for i, row in enumerate(random_rows())]
    for score in (CumulativeAttention(), CumulativeAttention(up_to_constant=True)):
        expected = final(score, chain(without, form))
        assert np.array_equal(final(score, chain(random_rows((5,)), form)), expected)


@pytest.mark.parametrize("form", [dense, sparse])
def test_queries_of_the_prompt_need_not_count(form: Callable[..., object]) -> None:
    observed = chain(random_rows(), form)
    assert observed.attention is not None
    expected = np.zeros(TOKENS)
    for token in range(PROMPT, TOKENS):
        expected[: token + 1] += observed.attention.row(token)
    found = final(CumulativeAttention(count_prompt=False), observed)[0]
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, final(CumulativeAttention(), observed)[0])


def test_the_last_good_row_is_the_newest() -> None:
    rows = random_rows(broken=(7, 8))
    newest = final(NewestAttention(), chain(rows, dense))[0]
    assert newest.tolist() == [*rows[6].astype(float).tolist(), 0.0, 0.0]


def test_a_token_that_two_leaves_see_gets_the_mean() -> None:
    tree, state = ThoughtTree(), NewestAttention().start(LAYERS)
    tree.open(0, -1)
    prompt = chain([np.ones(1), np.array([0.5, 0.5])], dense)
    tree.append((0,), 2)
    state.begin(TokenRun((0,), 2, np.zeros(2, np.int32), prompt), tree, generated=False)
    state.observe(0)
    state.observe(1)
    tree.open(1, 0)
    tree.open(2, 0)
    tree.append((1, 2), 1)
    pair = chain([np.array([0.5, 0.25, 0.25]), np.array([0.0, 0.75, 0.25])], dense)
    state.begin(TokenRun((1, 2), 1, np.zeros(2, np.int32), pair), tree, generated=True)
    state.observe(0)
    assert state.values.tolist() == [[0.25, 0.5, 0.25, 0.25]]


@given(values=st.lists(st.floats(0, 1, width=16), min_size=1, max_size=40))
def test_the_median_is_the_lower_of_two_in_the_middle(values: list[float]) -> None:
    assert median(np.array(values)) == statistics.median_low(values)


def test_pages_are_fresh_together() -> None:
    paid = np.array([0.0, 0.2, 0.0, 0.0, 0.1, 0.0, 0.0])
    assert fresh_pages(paid, 2, 0.1).tolist() == [True, True, False, False, False, False, True]
