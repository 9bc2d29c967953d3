"""Steps that are pending for a while leave the cache as steps that are entered at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.tiers import Tier
from arborsim_torch.cache import state
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.state import CacheState
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.tiers.link import HostLink
from tests.live.tiny import VOCAB, tiny_model, torch

OPERATIONS = ("steps", "steps", "steps", "look", "turn", "return", "evict", "recall", "both")


def no_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheState, "_step", lambda *_: None)


class Scenario:
    """One search, chosen by a seed; what it leaves behind can be compared."""

    def __init__(self, model: Any, seed: int, operations: list[str]) -> None:
        self._rng = np.random.default_rng(seed)
        self._cache = TieredCache(Layout.of(model), page_tokens=4)
        self._decoder = TreeDecoder(model, prefill_block=8, cache=self._cache)
        self.logits: list[Any] = []
        with HostLink("cpu") as link:
            self._mover = Mover(self._cache, link)
            self._decoder.prefill(self._draw(9))
            self._nodes = 1
            self._turn(0)
            for name in operations:
                getattr(self, f"_{name}")()
            self._mover.settle(wait=True)

    def _draw(self, count: int) -> list[int]:
        return [int(token) for token in self._rng.integers(0, VOCAB, count)]

    def _turn(self, parent: int | None = None) -> None:
        node, self._nodes = self._nodes, self._nodes + 1
        under = int(self._rng.integers(node)) if parent is None else parent
        self._decoder.open(node, under)
        self._decoder.activate([node])
        self._steps()

    def _steps(self) -> None:
        for token in self._draw(int(self._rng.integers(1, 8))):
            self.logits.append(self._decoder.step([token] * len(self._cache.leaves)))

    def _leaves(self) -> list[int]:
        """Nodes that may go on: a node with children is complete."""
        inner = {self._cache.parent(node) for node in range(1, self._nodes)}
        return [node for node in range(1, self._nodes) if node not in inner]

    def _look(self) -> None:
        assert self._cache.num_tokens == self._cache.pools[Place.HBM].slots.of.shape[1]

    def _return(self) -> None:
        self._decoder.activate([int(self._rng.choice(self._leaves()))])
        self._steps()

    def _both(self) -> None:
        self._turn()
        first = self._nodes - 1
        others = [leaf for leaf in self._leaves() if leaf != first]
        self._decoder.activate([first, int(self._rng.choice(others))] if others else [first])
        self._steps()
        self._decoder.activate([self._nodes - 1])

    def _evict(self) -> None:
        self._move(Place.HBM, Tier.EVICTED)
        self._steps()

    def _recall(self) -> None:
        self._move(Place.HBM, Tier.DDR)
        self._steps()
        self._mover.settle(wait=True)
        self._move(Place.DDR, Tier.HBM)
        self._steps()

    def _move(self, source: Place, target: Tier) -> None:
        held = np.flatnonzero(self._cache.pools[source].slots.of[0] >= 0)
        token = np.sort(self._rng.choice(held, len(held) // 4, replace=False))
        cells = GroupTokenPairs(np.zeros(len(token), dtype=np.int64), token)
        self._mover.move(cells, np.full(len(token), target, dtype=np.int8))

    def contents(self) -> list[list[int]]:
        """All that the cache knows of every token."""
        cache = self._cache
        tables = [cache.tree.node_of_token, cache.vocabulary_id, cache.position]
        slots = [pool.slots.of[0].tolist() for pool in cache.pools.values() if pool.slots.total]
        counts = [[pool.slots.total, pool.slots.high[0]] for pool in cache.pools.values()]
        paths = [cache.tree.path(node).tolist() for node in range(self._nodes)]
        return [
            *(table.values.tolist() for table in tables),
            cache.place.values[0].tolist(), *slots, *counts, *paths,
        ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from(OPERATIONS), max_size=12),
    st.sampled_from([1, 3, 256]),
)
def test_it_does_not_matter_when_steps_are_entered(
    seed: int, operations: list[str], most: int
) -> None:
    model = tiny_model("qwen2-window" if seed % 2 else "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "_MOST_STEPS", most)
        late = Scenario(model, seed, operations)
        no_fast_path(patch)
        at_once = Scenario(model, seed, operations)
    assert late.contents() == at_once.contents()
    assert len(late.logits) == len(at_once.logits) > 0
    for ours, theirs in zip(late.logits, at_once.logits, strict=True):
        assert torch.equal(ours, theirs)


def test_steps_of_a_path_that_is_not_read_stay_pending() -> None:
    decoder = TreeDecoder(tiny_model())
    decoder.prefill(list(range(20)))
    decoder.cache.pools[Place.HBM].reserve(64)
    decoder.open(1, 0)
    decoder.activate([1])
    for _ in range(10):
        decoder.step([5])
    table = decoder.cache._table  # without entering what is pending
    assert len(table) == 21
    assert decoder.cache.length(0) == decoder.cache.seen_tokens == 30
    assert decoder.cache.num_tokens == len(table) == 30
