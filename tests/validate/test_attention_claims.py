"""How concentrated attention is: shares of the most and the least attended tokens."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.claims.attention import concentration, received


def test_shares_of_the_top_fifth_and_the_bottom_half() -> None:
    top, bottom = concentration(np.array([np.arange(1.0, 11.0), np.ones(10)]))
    np.testing.assert_allclose(top, [(9 + 10) / 55, 0.2])
    np.testing.assert_allclose(bottom, [(1 + 2 + 3 + 4 + 5) / 55, 0.5])


def test_each_generated_token_gives_one_per_layer_and_head() -> None:
    from arborsim_torch import reference

    model, task = reference.load("chain", attn_implementation="eager", lines=4)
    problem = task.problem("test", 0)
    generated = tuple(task.solution(problem))
    found = received(model, problem.prompt, generated)
    assert found.shape == (6, 4, len(problem.prompt) + len(generated))
    np.testing.assert_allclose(found.sum(axis=2), len(generated), rtol=1e-5)
    assert found[:, :, -1] == pytest.approx(found[:, :, -1].clip(0, 1))  # one query reads it
