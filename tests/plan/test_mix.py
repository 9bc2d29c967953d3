"""Draws of a mix: by weight, and the same for whoever asks with the same seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from arborsim.plan.arrivals import draw_mix

SIGNIFICANCE = 1e-3
weights_and_sizes = st.lists(
    st.tuples(st.floats(1e-3, 1e3), st.integers(1, 50)), min_size=1, max_size=6
)


def test_traces_come_by_weight_and_their_episodes_evenly() -> None:
    draws = draw_mix([3, 1, 6], [4, 1, 10], 20_000, seed=0)
    counts = np.bincount(draws.entry, minlength=3)
    assert stats.chisquare(counts, 20_000 * np.array([0.3, 0.1, 0.6])).pvalue > SIGNIFICANCE
    for entry, size in ((0, 4), (2, 10)):
        episodes = np.bincount(draws.episode[draws.entry == entry], minlength=size)
        assert len(episodes) == size
        assert stats.chisquare(episodes).pvalue > SIGNIFICANCE
    table = stats.contingency.crosstab(draws.entry[:-1], draws.entry[1:]).count
    assert stats.chi2_contingency(table).pvalue > SIGNIFICANCE  # no memory


@given(weights_and_sizes, st.integers(0, 60), st.integers(0, 60), st.integers(0, 9))
def test_draws_depend_on_mix_and_seed_alone(
    mix: list[tuple[float, int]], count: int, more: int, seed: int
) -> None:
    weights, sizes = zip(*mix, strict=True)
    draws = draw_mix(weights, sizes, count, seed)
    assert len(draws) == count
    assert ((draws.episode >= 0) & (draws.episode < np.array(sizes)[draws.entry])).all()
    longer = draw_mix([8 * weight for weight in weights], sizes, count + more, seed)
    assert (longer.entry[:count] == draws.entry).all()
    assert (longer.episode[:count] == draws.episode).all()
    pairs = [(int(e), int(i)) for e, i in zip(draws.entry, draws.episode, strict=True)]
    assert draws.distinct() == sorted(set(pairs))


def test_other_seeds_draw_others() -> None:
    first, second = (draw_mix([1, 1], [1000, 1000], 100, seed) for seed in (0, 1))
    assert (first.episode != second.episode).mean() > 0.9
