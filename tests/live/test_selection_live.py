"""Policies that choose what is read, in live searches, against attention with a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arborsim.core.tiers import Tier
from arborsim.memory.moves import Moves
from arborsim.policies.registry import build
from arborsim.searches import make_search
from arborsim_torch.batches import run_batched
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import LiveOutcome, PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.models import load_model
from arborsim_torch.sources import TaskSource
from tests.live.test_tiered_cache import MaskedModel
from tests.live.tiny import torch

MOST = 60  # generated tokens


class Noting:
    """A live executor; notes what is read, and what crosses the link."""

    def __init__(self, live: LiveExecutor, mover: Mover) -> None:
        self._live, self._mover = live, mover
        self.reads: list[np.ndarray | None] = []
        self.newly: list[int] = []  # tokens in DDR that are selected and were not before
        self._before = np.zeros((mover.cache.layout.groups, 1 << 12), dtype=bool)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._live, name)

    def apply(self, moves: Moves, examined_tokens: int, reads: np.ndarray | None = None) -> None:
        tier = self._live.tier.copy()
        self._live.apply(moves, examined_tokens, reads)
        self.reads.append(None if reads is None else reads.copy())
        if reads is not None:
            now = np.zeros_like(self._before)
            now[:, : tier.shape[1]] = reads & (tier == Tier.DDR) & (self._live.tier == Tier.DDR)
            self.newly.append(int((now & ~self._before).sum()))
            self._before = now
        held = self._mover.cache.place.values
        assert not (held == Place.LOST).any(), "choosing what is read frees nothing"


@pytest.mark.parametrize(
    ("name", "recall"),
    [("quest", "stage"), ("freekv", "stage"), ("freekv", "stream"), ("freekv", "near")],
)
def test_outputs_are_those_of_a_mask(name: str, recall: str) -> None:
    loaded = load_model("chain", task_options={"lines": 12})
    setup = SearchSetup(
        loaded.model, TaskSource(loaded.task), lambda: make_search("linear"), 0.0, 0, MOST
    )
    problem, noting, found = setup.source.problem(3), [], []

    def wrap(live: LiveExecutor, mover: Mover) -> Any:
        noting.append(Noting(live, mover))
        return noting[0]

    settings = {"page": "4"} | (
        {"sinks": "4", "recent": "8"} if name == "freekv" else {"dense": "1"}
    )
    search = PolicySearch(
        setup, problem, build(name, settings), 48, CacheOptions(recall), wrap=wrap
    )
    run_batched([search], 1, lambda one, ended: found.append(one.outcome(ended)))  # type: ignore[arg-type]
    (outcome,) = found
    assert isinstance(outcome, LiveOutcome)
    layout = search.cache.layout
    masked = MaskedModel(loaded.model)
    kind, token = (outcome.episode.columns[n] for n in ("kind", "token"))
    rows = np.isin(kind, [0, 1])
    ids, logprob = token[rows].tolist(), outcome.episode.columns["logprob"][rows]
    last = 0
    for reads in noting[0].reads:
        if reads is None or reads.shape[1] >= len(ids):  # no step follows the last plan
            continue
        query = reads.shape[1]
        for group, unread in np.argwhere(~reads).tolist():
            masked.skip(*divmod(group, layout.kv_heads), unread, query)
        last = query
    assert last > len(problem.prompt) + 20, "hardly anything was chosen"
    exact = torch.log_softmax(masked.logits(ids).float(), -1)
    plain = torch.log_softmax(MaskedModel(loaded.model).logits(ids).float(), -1)
    at = np.arange(len(problem.prompt) + 1, len(ids))
    wanted, unmasked = (x[at - 1, np.asarray(ids)[at]].numpy() for x in (exact, plain))
    np.testing.assert_allclose(logprob[at], wanted, atol=2e-3)
    assert np.abs(unmasked - wanted).max() > 0.1, "the choice makes no difference"
    if name == "freekv" and recall == "stage":
        token_bytes = 2 * layout.head_dim * layout.dtype.itemsize
        fetched = outcome.measured.from_ddr_bytes / token_bytes
        assert sum(noting[0].newly) <= fetched <= 1.2 * sum(noting[0].newly)
