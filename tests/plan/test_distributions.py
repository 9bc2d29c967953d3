"""Distributions of whole numbers: what text means, and that draws are distributed so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from arborsim.core.errors import UsageError
from arborsim.products.generate.lengths import (
    Counts,
    Empirical,
    LogNormal,
    Uniform,
    check_range,
    fixed,
    parse_counts,
)
from arborsim.trace.importers.fields import MOST_TOKENS

DRAWS = 20_000
SIGNIFICANCE = 1e-3  # the seeds are fixed: a test that passes once always passes


def drawn(counts: Counts, count: int = DRAWS, seed: int = 0) -> np.ndarray:
    return counts.draw(np.random.default_rng(seed), count)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (7, fixed(7)),
        ("7", fixed(7)),
        ([3, 3, 9], Empirical((3, 3, 9))),
        ("uniform:low=2,high=5", Uniform(2, 5)),
        ("lognormal: sigma=0.5, median=80", LogNormal(80, 0.5)),
        ("lognormal:median=80.5,sigma=0,most=90", LogNormal(80.5, 0.0, 90)),
    ],
)
def test_text_and_values(given_: object, expected: Counts) -> None:
    assert parse_counts(given_, "depth") == expected


def test_numbers_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("# of thoughts\n12\n\n 40 # long\n12\n")
    found = parse_counts("file:lengths.txt", "thought_tokens", tmp_path)
    assert found == Empirical((12, 40, 12), "lengths.txt")
    assert found.text == "file:lengths.txt"


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (1.5, "depth: it must be a whole number, not 1.5"),
        (True, "depth: it must be a whole number, not True"),
        ([1, "2"], "depth: its numbers: item 2 must be a whole number, not '2'"),
        ([], "depth: there is no number to draw from"),
        ("few", "depth: 'few' is no distribution: give a whole number, uniform:"),
        ("lognorm:median=3,sigma=1", "unknown distribution 'lognorm': did you mean lognormal"),
        ("lognormal:median=3", "depth: lognormal sigma is missing"),
        ("lognormal:mean=3,sigma=1", "unknown key of lognormal 'mean': did you mean median"),
        ("lognormal:median=3,sigma=1,sigma=2", "depth: lognormal has sigma twice"),
        ("lognormal:median=x,sigma=1", "depth: lognormal median must be a number, not 'x'"),
        ("lognormal:median=nan,sigma=1", "lognormal median must be a finite number, not nan"),
        ("lognormal:median=300,sigma=1,most=200", "most=200 is below median=300"),
        ("lognormal:median=0.5,sigma=1", "lognormal median must be at least 1, not 0.5"),
        ("uniform:low=1.5,high=2", "depth: uniform low must be a whole number, not 1.5"),
        ("uniform:low=5,high=2", "depth: uniform: low=5 is above high=2"),
        ("uniform:5", "depth: '5' in uniform: expected name=value"),
        ("file:nowhere.txt", "nowhere.txt: cannot be read (No such file"),
        ("file:words.txt", "words.txt, line 2, must be a whole number, not 'ten'"),
        ("file:empty.txt", "empty.txt holds no number"),
    ],
)
def test_what_is_no_distribution(given_: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("1\nten\n")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(UsageError) as caught:
        parse_counts(given_, "depth", tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bounds_are_those_of_the_distribution_not_of_a_draw() -> None:
    check_range(Uniform(1, 8), "depth", 8)
    with pytest.raises(UsageError, match=r"depth must be in \[1, 8\], not 1 to 9$"):
        check_range(Uniform(1, 9), "depth", 8)
    with pytest.raises(UsageError, match=r"depth must be in \[1, 8\], not 0$"):
        check_range(fixed(0), "depth", 8)
    with pytest.raises(UsageError, match=rf"not 1 to {MOST_TOKENS}: set most$"):
        check_range(LogNormal(3, 1), "depth", 8)


def test_lognormal_is_lognormal() -> None:
    # Rounding moves a number by at most a half, which is nothing against a median of 10^6.
    found = drawn(LogNormal(1_000_000, 0.5))
    scipys = stats.lognorm(s=0.5, scale=1_000_000)
    assert stats.kstest(found, scipys.cdf).pvalue > SIGNIFICANCE
    assert stats.kstest(found, stats.lognorm(s=0.55, scale=1_000_000).cdf).pvalue < SIGNIFICANCE


def test_lognormal_is_cut_where_it_says() -> None:
    found = drawn(LogNormal(20, 2.0, 100))
    assert found.min() == 1
    assert found.max() == 100
    above = 1 - stats.lognorm(s=2.0, scale=20).cdf(99.5)
    low, high = stats.binom(DRAWS, above).ppf([0.0005, 0.9995])
    assert low <= (found == 100).sum() <= high


def test_uniform_is_uniform_with_both_ends() -> None:
    values, counts = np.unique(drawn(Uniform(3, 7)), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert stats.chisquare(counts).pvalue > SIGNIFICANCE


def test_empirical_keeps_the_shares_of_its_numbers() -> None:
    values, counts = np.unique(drawn(Empirical((5, 9, 5, 100))), return_counts=True)
    assert values.tolist() == [5, 9, 100]
    assert stats.chisquare(counts, DRAWS * np.array([0.5, 0.25, 0.25])).pvalue > SIGNIFICANCE


whole = st.integers(1, 5000)
any_counts: Callable[..., st.SearchStrategy[Counts]] = lambda: st.one_of(  # noqa: E731
    st.builds(fixed, whole),
    st.builds(lambda a, b: Uniform(min(a, b), max(a, b)), whole, whole),
    st.builds(lambda m, s, more: LogNormal(m, s, m + more), whole, st.floats(0, 10), whole),
    st.builds(lambda v: Empirical(tuple(v)), st.lists(whole, min_size=1, max_size=9)),
)


@given(any_counts(), st.integers(0, 50), st.integers(0, 9))
def test_draws_are_within_range_and_depend_on_the_seed_alone(
    counts: Counts, count: int, seed: int
) -> None:
    found = drawn(counts, count, seed)
    assert found.dtype == np.int64
    assert found.shape == (count,)
    low, high = counts.range
    assert ((found >= low) & (found <= high)).all()
    assert (found == drawn(counts, count, seed)).all()
    if not isinstance(counts, Empirical):
        again = parse_counts(counts.text, "it")
        assert again.range == counts.range
