"""Captured decode steps that stream DDR: the eager step's bits, from where the last one read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from arborsim.core.tiers import Tier
from arborsim_torch.cache import host_pool
from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.mover import GroupTokenPairs, Mover
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.static import StaticStep
from arborsim_torch.tiers.link import HostLink
from tests.live.tiny import LAYERS, VOCAB, tiny_model, torch

from .arming import pretend

PROMPT = 323  # with this many, the rooms of all that is read stay the same for a dozen steps


@dataclass
class Search:
    """A search on a tree whose prompt is mostly in DDR, in two formats."""

    decoder: TreeDecoder
    mover: Mover
    rng: Any = field(default_factory=lambda: np.random.default_rng(3))
    logits: list[Any] = field(default_factory=list)
    replayed: list[bool] = field(default_factory=list)  # of every step

    @property
    def cache(self) -> TieredCache:
        return self.decoder.cache

    @property
    def replays(self) -> int:
        static = self.decoder.static
        return 0 if static is None or static.graphs is None else static.graphs.replays

    def begin(self) -> None:
        self.decoder.prefill(self.rng.integers(0, VOCAB, PROMPT).tolist())
        for node in (1, 2):
            self.decoder.open(node, 0)
        self.decoder.activate([1])
        self.move(Tier.DDR, 0, 120)
        self.move(Tier.DDR_QUANTISED, 120, 170)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            before = self.replays
            tokens = self.rng.integers(0, VOCAB, len(self.cache.leaves)).tolist()
            self.logits.append(self.decoder.step(tokens).clone())
            self.replayed.append(self.replays > before)

    def move(self, tier: Tier, first: int, last: int, wait: bool = True) -> None:
        """Tokens of the prompt, a few of each group left out."""
        chosen = self.rng.random((self.cache.layout.groups, last - first)) < 0.95
        group, token = np.nonzero(chosen)
        held = self.cache.place.values[group, token + first] != Place.LOST
        pairs = GroupTokenPairs(group[held], token[held] + first)
        self.mover.move(pairs, np.full(len(pairs), tier, dtype=np.int8))
        self.mover.settle(wait=wait)


@contextmanager
def search(device: str, grouping: str = "shared", graphs: bool = True) -> Iterator[Search]:
    """Steps are captured; or static, and launched one by one; on the CPU, as they always are."""
    model = tiny_model("qwen2").to(device)
    with HostLink(device) as link:
        cache = TieredCache(Layout.of(model, grouping), recall="stream", link=link)
        cache.pools[Place.HBM].keep(PROMPT + 100)
        decoder = TreeDecoder(model, cache=cache)
        if device == "cuda" and not graphs:
            decoder.static = StaticStep(model, cache, graphs=False)
        yield Search(decoder, Mover(cache, link, recall="stream"))
        cache.close()


def wander(each: Search) -> None:
    """Steps between which tokens go down, come back and are lost, and paths turn."""
    each.begin()
    each.step(8)
    each.move(Tier.HBM, 20, 35)
    each.step(8)
    each.move(Tier.DDR, 160, 200)
    each.step(8)
    each.move(Tier.EVICTED, 90, 110)
    each.step(8)
    each.decoder.activate([1, 2])
    each.step(8)
    each.move(Tier.HBM, 0, 200)
    each.move(Tier.HBM, 0, 200)
    each.move(Tier.HBM, 0, 200)
    each.step(2)
    each.move(Tier.DDR, 0, 100)
    each.step(4)


@pytest.mark.parametrize("failing", [0, 1, LAYERS - 1])
def test_steps_go_on_where_a_capture_fails_between_copies(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the next layer have been ordered, and never set out."""
    wanted, store, failed = results("cpu").logits, StaticStep.store, []

    def refusing(step: StaticStep, layer: int, *given: Any) -> None:
        if layer == failing and torch.cuda.is_current_stream_capturing() and len(failed) < 2:
            failed.append(layer)
            raise NotImplementedError("not in a capture")
        store(step, layer, *given)

    monkeypatch.setattr(StaticStep, "store", refusing)
    with pretend(), pytest.warns(RuntimeWarning, match="not in a capture"):
        found = results("cuda")
    assert len(failed) == 2
    assert any(found.replayed)
    for one, other in zip(found.logits, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-4)


def results(device: str, grouping: str = "shared", graphs: bool = True) -> Search:
    with search(device, grouping, graphs) as found:
        wander(found)
        found.logits = [each.cpu() for each in found.logits]
    return found


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_a_captured_step_gives_the_eager_steps_bits_wherever_tokens_move(grouping: str) -> None:
    with pretend() as gpu:
        found = results("cuda", grouping)
        # What is read changes with every move, and mostly no graph has to be captured anew.
        assert found.replayed.count(True) >= 30, found.replayed
        assert all(any(found.replayed[first : first + 8]) for first in range(0, 40, 8))
        assert gpu.launches["graph replay"] == found.replayed.count(True)
    with pretend():
        eager = results("cuda", grouping, graphs=False)
    always = results("cpu", grouping)
    for one, other, third in zip(found.logits, eager.logits, always.logits, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, third, rtol=1e-4, atol=1e-4)


def addresses(each: Search) -> list[int]:
    stream = each.cache.stream
    assert stream is not None
    places = [x.inner.data_ptr() for layer in stream.places for x in layer]
    blocks = [x.inner.data_ptr() for layer in stream._parts for part in layer for x in part]
    return places + blocks


def test_replayed_steps_read_and_write_the_same_memory_and_wait_for_nothing() -> None:
    with pretend() as gpu, search("cuda") as each:
        each.begin()
        each.step(4)
        where, held, waits = addresses(each), gpu.allocated, gpu.waits.copy()
        assert len(where) == 2 * LAYERS * 3  # data, 8-bit data and their scales
        carried, gpu.peak = each.mover.link.upward, gpu.allocated
        launches = gpu.launches.copy()
        for _ in range(9):
            each.step()
            assert addresses(each) == where
        assert all(each.replayed[4:])
        assert gpu.waits == waits
        assert gpu.peak - held < 4096 + sum(x.nbytes for x in each.logits)
        launched = gpu.launches - launches
        assert launched["graph replay"] == 9
        # Beyond a step that reads the device alone: the first layer's copies.
        assert launched["copy_ to the device"] <= 9 * (2 + 3), launched
        parts = each.cache.stream._parts  # type: ignore[union-attr]
        blocks = [block for layer in parts for part in layer for block in part]
        now = each.mover.link.upward
        assert now.copies - carried.copies == 9 * len(blocks)
        assert now.carried_bytes - carried.carried_bytes == 9 * sum(x.nbytes for x in blocks)
        first = sum(block.nbytes for part in parts[0] for block in part)
        timed = now.carried_bytes - now.untimed_bytes
        assert timed - (carried.carried_bytes - carried.untimed_bytes) == 9 * first


def only_eager(change: Callable[[Search], None], before: int, patience: int = 0) -> None:
    """After a change no step is replayed, `before` it some are; all give the CPU's results.

    The first step of a bucket is not replayed either, so one is no proof.
    """

    def searched(device: str) -> Search:
        with search(device) as each:
            each.begin()
            each.step(6)
            change(each)
            each.step(3)
        each.logits = [x.cpu() for x in each.logits]
        return each

    wanted = searched("cpu")
    with pretend(patience):
        found = searched("cuda")
    assert found.replayed[:6].count(True) >= before
    assert not any(found.replayed[6:])
    for one, other in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_rows_are_not_streamed_whole_while_some_are_being_written() -> None:
    only_eager(lambda each: each.move(Tier.DDR, 170, 200, wait=False), before=3, patience=50)


def test_rows_are_not_streamed_whole_if_few_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "JOIN_BYTES", 0)
    only_eager(lambda each: each.move(Tier.EVICTED, 10, 100), before=3)


def test_memory_that_could_not_be_locked_is_read_by_eager_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        host_pool, "host_empty", lambda shape, dtype, _: torch.empty(shape, dtype=dtype)
    )
    only_eager(lambda _: None, before=0)
