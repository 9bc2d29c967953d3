"""Blocks with the features that ArborKV reads, and the fit to what hiding them does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.core.errors import UsageError
from arborsim.core.observations import Signal
from arborsim.play.controller import Controller
from arborsim.policies.base import Policy
from arborsim.policies.tree import TreeRule
from arborsim.products.calibrate.backend import Masking, MaskingRequest, Maskings, ModelChoice
from arborsim.products.calibrate.msve import (
    HiddenBlock,
    blocks_of,
    features_of,
    fit_msve,
    mask_searches,
)
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.scores import Score
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from tests.helpers.plain_executor import PlainExecutor
from tests.helpers.traces import make_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(tmp_path_factory.mktemp("t") / "t.parquet", kind="tree", prompt=20, nodes=14)


def episodes(trace: Path) -> list[Episode]:
    return list(TraceReader(trace).episodes((Signal.ATTENTION,)))


def test_features_are_those_that_the_policy_reads(trace: Path) -> None:
    """Each coefficient alone, through the policy's own sigmoid, at the end of the search."""

    class Probe(Policy):
        def scores(self) -> dict[str, Score]:
            return {"attention": CumulativeAttention(from_later_blocks=True)}

    for episode in episodes(trace):
        geometry = episode.info.geometry
        controller = Controller(
            Probe(), PlainExecutor(), budget_tokens=10**6, layers=geometry.layers,
            vocabulary=geometry.vocab,
        )  # fmt: skip
        controller.run(play(episode))
        _, features = features_of(episode)
        names = ("theta_value", "theta_certainty", "theta_attention")
        for column, name in enumerate(names):
            rule = TreeRule(**(dict.fromkeys(names, 0.0) | {name: 1.0}))
            view = controller.view()
            score = rule.block_scores(view, view.scores["attention"][0])
            assert np.log(score / (1 - score)) == pytest.approx(features[:, column], abs=1e-9)
        assert features[:, 2].sum() == pytest.approx(1)


def test_blocks_lie_on_the_path_to_a_right_answer(trace: Path) -> None:
    """Tokens are collected by walking up from the answer, row by row."""
    seen = 0
    for episode in episodes(trace):
        found = blocks_of(episode, number=5, problem=77)
        row = int(np.flatnonzero(episode.kind == Kind.ANSWER)[0])
        if episode.correct[row] != 1:
            assert found == []
            continue
        parents = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
        chain, node = [], int(episode.node[row])
        while node >= 0:
            chain.insert(0, node)
            node = parents[node]
        owner = episode.node[episode.token_rows]
        for block, node in zip(found, chain[1:-1], strict=True):
            above = chain[1 : chain.index(node) + 1]
            path = [int(t) for n in above for t in episode.token[owner == n]]
            assert block.masking.prompt == tuple(episode.token[owner == 0].tolist())
            assert block.masking.path == tuple(path)
            assert block.masking.block_tokens == int((owner == node).sum())
            assert (block.trace, block.masking.problem) == (5, 77)
            seen += 1
    assert seen > 0


class Scripted:
    """A backend that answers from a list."""

    def __init__(self) -> None:
        self.requests: list[MaskingRequest] = []

    def occlude(self, request: object, on_progress: object) -> None:
        raise AssertionError("not asked for")

    def mask(self, request: MaskingRequest, on_progress: object) -> Maskings:
        self.requests.append(request)
        count = len(request.items)
        return Maskings(np.ones(count, dtype=bool), np.arange(count) % 2 == 0)


def test_several_traces_are_numbered_on(trace: Path, tmp_path: Path) -> None:
    other = make_trace(tmp_path / "o.parquet", kind="tree", prompt=20, nodes=14)
    backend = Scripted()
    one = mask_searches([trace], backend, ModelChoice(), lambda *_: None)  # type: ignore[arg-type]
    both = mask_searches([trace, other], backend, ModelChoice(), lambda *_: None)  # type: ignore[arg-type]
    assert one.right >= 1
    assert both.right == 2 * one.right
    assert sorted({block.trace for block in both.blocks}) == list(range(both.right))
    assert [block.masked for block in one.blocks] == [i % 2 == 0 for i in range(len(one.blocks))]
    assert [reader.path.name for reader in both.readers] == ["t.parquet", "o.parquet"]


def planted(theta: tuple[float, float, float], traces: int, seed: int = 0) -> list[HiddenBlock]:
    """Blocks that are needed with the probability that `theta` gives."""
    rng = np.random.default_rng(seed)
    blocks = []
    for number in range(traces):
        for v, u, a in rng.random((12, 3)) * [1, 1, 0.05]:
            needed = rng.random() < 1 / (1 + np.exp(-np.dot(theta, (v, u, a))))
            masking = Masking(number, (1,), (2,), 1)
            blocks.append(HiddenBlock(number, (v, u, a), masking, whole=True, masked=not needed))
    return blocks


def test_planted_theta_lies_in_its_interval() -> None:
    theta = (2.0, -2.5, 40.0)
    found = fit_msve(planted(theta, traces=80, seed=1), ridge=1e-3, seed=0)
    for low, value, high in zip(found.low, theta, found.high, strict=True):
        assert low < value < high
        assert high - low < 2 * abs(value)
    assert found.auc > 0.6
    assert found.blocks == 960


def test_blocks_that_lead_nowhere_anyway_are_not_judged() -> None:
    blocks = planted((1, 1, 1), traces=8)
    hopeless = [HiddenBlock(99, (9.0, 9.0, 9.0), blocks[0].masking, whole=False, masked=False)] * 50
    found = fit_msve([*blocks, *hopeless], ridge=1.0, seed=0)
    assert found.unjudged == 50
    assert found.theta == fit_msve(blocks, ridge=1.0, seed=0).theta


@pytest.mark.parametrize("masked", [True, False])
def test_targets_that_are_all_alike_are_refused(masked: bool) -> None:
    blocks = [
        HiddenBlock(n, (1.0, 1.0, 0.1), Masking(n, (1,), (2,), 1), True, masked) for n in range(30)
    ]
    with pytest.raises(UsageError, match="theta cannot be fitted"):
        fit_msve(blocks, ridge=1.0, seed=0)
