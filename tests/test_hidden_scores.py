"""Scores of bands of layers and of vectors, where observations are odd."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.core.events import TokenRun
from arborsim.core.observations import HiddenRows, Observations, Signal
from arborsim.core.tree import ThoughtTree
from arborsim.policies.methods.epikv import BandAdaptive
from arborsim.policies.methods.keys import lag_score
from arborsim.signals.rolling import Band, HiddenCosine, rolling_mean, rolling_mean_std
from arborsim.signals.vectors import layer_mean, vectors_per_group

NAN, INF = float("nan"), float("inf")


def test_layers_that_are_no_numbers_are_left_out_of_the_mean() -> None:
    values = np.array([[1, 2, 6], [NAN, 2, 6], [INF, NAN, NAN]], dtype=np.float16)
    assert layer_mean(values, 0, 2).tolist() == [3.0, 4.0, 0.0]
    assert layer_mean(values, 1, 2).tolist() == [4.0, 4.0, 0.0]


@pytest.mark.parametrize(
    ("depth", "band_a", "band_b", "whole"),
    [(32, (7, 13), (18, 25), (0, 31)), (1, (0, 0), (0, 0), (0, 0)), (8, (2, 3), (4, 6), (0, 7))],
)
def test_bands_scale_with_depth(
    depth: int, band_a: tuple[int, int], band_b: tuple[int, int], whole: tuple[int, int]
) -> None:
    assert Band(7 / 32, 13 / 32).layers(depth) == band_a
    assert Band(18 / 32, 25 / 32).layers(depth) == band_b
    assert Band(0.0, 1.0).layers(depth) == whole


def test_a_band_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(UsageError, match=r"band-adaptive: b_first \(0.8\) lies behind b_last"):
        BandAdaptive(b_first=0.8, b_last=0.5)


@given(
    values=st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=60),
    window=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_the_mean_alone_has_the_bits_of_mean_and_deviation(
    values: list[float], window: int, cuts: list[int]
) -> None:
    sequence = np.array(values)
    expected = rolling_mean_std(sequence[:0], sequence, window)[0]
    bounds = sorted({0, len(values), *(min(c, len(values)) for c in cuts)})
    parts = [rolling_mean(sequence[:a], sequence[a:b], window) for a, b in pairwise(bounds)]
    assert np.array_equal(np.concatenate(parts), expected)


def test_a_channel_that_is_constant_in_the_reference_is_only_shifted() -> None:
    vectors = np.array([[5, 1], [5, 3]], dtype=np.float16)
    reference = np.array([[5, 1], [5, 5]], dtype=np.float16)
    # normalised (0, 0) and (0, 0.5): deviations 0 and sqrt(0.125)
    odds = np.exp(np.sqrt(0.125))
    assert lag_score(vectors, reference) == pytest.approx([1 / (1 + odds), odds / (1 + odds)])


def test_groups_are_ordered_layer_by_layer() -> None:
    keys = np.arange(2 * 3 * 2 * 4, dtype=np.float16).reshape(2, 3, 2, 4)
    observed = Observations(2, keys=keys)
    by_head = vectors_per_group(observed, Signal.KEYS, "head")
    by_layer = vectors_per_group(observed, Signal.KEYS, "layer")
    assert by_head.shape == (6, 2, 4)
    assert by_layer.shape == (3, 2, 8)
    assert np.array_equal(by_head[2 * 2 + 1, 1], keys[1, 2, 1])
    assert np.array_equal(by_layer[2, 1], np.concatenate([keys[1, 2, 0], keys[1, 2, 1]]))


@pytest.mark.parametrize("turn", ["state", "change"])
def test_turns_do_not_depend_on_how_runs_are_cut(
    turn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, in one run, and a few vectors at a time: the same bits."""
    vectors = np.random.default_rng(0).normal(size=(40, 1, 7)).astype(np.float16)
    vectors[11] = 0
    vectors[21] = vectors[20]

    def scores(cuts: list[int]) -> np.ndarray:
        state, tree = HiddenCosine(turn, window=9).start(6), ThoughtTree()
        tree.open(0, -1)
        for first, last in pairwise([0, 5, *cuts, 40]):
            tree.append((0,), last - first)
            seen = Observations(last - first, hidden=HiddenRows((3,), vectors[first:last]))
            run = TokenRun((0,), last - first, np.zeros(last - first, np.int32), seen)
            state.begin(run, tree, first > 0)
        return state.values.copy()

    whole = scores([])
    assert len(np.unique(whole[0, 5:])) > 25
    np.testing.assert_array_equal(scores(list(range(6, 40))), whole)
    monkeypatch.setattr("arborsim.signals.rolling._AT_ONCE", 4)
    np.testing.assert_array_equal(scores([17]), whole)
