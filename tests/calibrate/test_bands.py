"""Labels from windows, and layers from labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.products.calibrate.backend import OccludedTrace
from arborsim.products.calibrate.bands import (
    find_bands,
    run_around,
    sliding_windows,
    token_labels,
)

LAYERS = 8


@given(st.integers(1, 400), st.integers(1, 64), st.integers(1, 64))
def test_windows_cover_every_token(tokens: int, window: int, stride: int) -> None:
    stride = min(stride, window)
    windows = sliding_windows(tokens, window, stride)
    covered = np.zeros(tokens, dtype=int)
    for first, stop in windows:
        assert 0 < stop - first <= window
        covered[first:stop] += 1
    assert (covered > 0).all()
    assert (np.diff(windows[:, 0]) == stride).all()


def test_a_token_is_important_if_any_window_is() -> None:
    windows = sliding_windows(80, 32, 16)
    trace = OccludedTrace(0, np.zeros((80, 1)), windows, windows[:, 0] == 16)
    assert np.flatnonzero(token_labels(trace)).tolist() == list(range(16, 48))


def planted(seed: int, up: int, down: int) -> OccludedTrace:
    """Important windows move layer `up` more and layer `down` less; the others are noise."""
    rng = np.random.default_rng(seed)
    windows = sliding_windows(800, 32, 16)
    flipped = np.repeat(rng.random(len(windows) // 7 + 1) < 0.4, 7)[: len(windows)]
    trace = OccludedTrace(seed, np.zeros((800, LAYERS)), windows, flipped)
    change = rng.random((800, LAYERS))
    important = token_labels(trace)
    change[important, up] += 1
    change[important, down] -= 1
    return OccludedTrace(seed, change.astype(np.float16), windows, flipped)


def test_planted_layers_are_found() -> None:
    found = find_bands([planted(seed, up=3, down=6) for seed in range(8)], seed=0)
    assert (found.a, found.b) == (3, 6)
    assert found.band_a[0] <= 3 <= found.band_a[1] < found.band_b[0] <= 6 <= found.band_b[1]
    assert found.opposed
    assert found.contrast[1] > 0
    assert ((found.low <= found.mean) & (found.mean <= found.high)).all()
    assert found.mean == pytest.approx(found.per_trace.mean(axis=0))


def test_layer_0_is_never_chosen() -> None:
    found = find_bands([planted(seed, up=0, down=6) for seed in range(8)], seed=0)
    assert found.mean[0] == found.mean.max()
    assert found.a > 0
    assert found.band_b[0] > 0


def test_noise_is_not_called_two_bands() -> None:
    rng = np.random.default_rng(0)
    noise = []
    for seed in range(6):
        trace = planted(seed, up=3, down=6)
        change = rng.random(trace.hidden_change.shape)
        noise.append(OccludedTrace(seed, change, trace.windows, trace.flipped))
    found = find_bands(noise, seed=0)
    assert not found.opposed


@pytest.mark.parametrize("flips", [0, 1, 49])
def test_labels_that_are_nearly_all_alike_are_refused(flips: int) -> None:
    windows = sliding_windows(800, 32, 16)
    flipped = np.arange(len(windows)) < flips
    traces = [OccludedTrace(i, np.zeros((800, 3)), windows, flipped) for i in range(3)]
    with pytest.raises(UsageError, match="bands cannot be chosen"):
        find_bands(traces, seed=0)


def test_runs_stop_at_the_sign_the_first_layer_and_the_other_band() -> None:
    mean = np.array([0.9, 0.1, 0.3, 0.2, -0.1, 0.4])
    assert run_around(mean, 2, other=4) == (1, 3)
    assert run_around(mean, 5, other=2) == (5, 5)
    assert run_around(-mean, 2, other=5) == (2, 2)  # not positive: the layer alone
    assert run_around(np.full(6, 0.5), 4, other=2) == (3, 5)
