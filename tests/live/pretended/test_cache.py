"""The tiered cache on the pretended device: the CPU's numbers, and every copy in order."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from arborsim.core.tiers import RECALLS, Tier
from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.tiers.codec import Fp8
from arborsim_torch.tiers.link import HostLink
from tests.live.tiny import VOCAB, tiny_model, torch

from . import device as own
from .arming import pretend
from .clocks import Stream

TIERS = (Tier.HBM, Tier.DDR, Tier.DDR_QUANTISED, Tier.HBM_QUANTISED)


def wander(
    model: Any, device: str, grouping: str, recall: str, codec: Any, ordered: bool = False,
    tiers: tuple[Tier, ...] = TIERS, steps: int = 7,
) -> list[Any]:  # fmt: skip
    """Logits of a search on a tree whose tokens are moved to and fro, lost and computed again."""
    rng = np.random.default_rng(3)
    with HostLink(device) as link:
        cache = TieredCache(
            Layout.of(model, grouping), quantised=(codec,), ordered=ordered, page_tokens=4,
            recall=recall, link=link,
        )  # fmt: skip
        mover = Mover(cache, link, recall=recall)
        decoder = TreeDecoder(model, prefill_block=16, cache=cache)
        found = [decoder.prefill(rng.integers(0, VOCAB, 40).tolist())]
        for node in (1, 2):
            decoder.open(node, 0)
        decoder.activate([1])
        for step in range(steps):
            if step == steps - 3:
                decoder.activate([1, 2])
                mover.activate()
            found.append(decoder.step(rng.integers(0, VOCAB, len(cache.leaves)).tolist()))
            alive = np.argwhere(cache.place.values[:, :-3] != Place.LOST)
            chosen = alive[rng.choice(len(alive), 6 * cache.layout.groups, replace=False)]
            cells = GroupTokenPairs(chosen[:, 0], chosen[:, 1])
            if step == 4:
                mover.move(cells, np.full(len(cells), Tier.EVICTED, dtype=np.int8))
                mover.restore(cells)
                decoder.recompute(1, np.unique(cells.token))
            elif step != 1:
                mover.move(cells, rng.choice(tiers, len(cells)).astype(np.int8))
            mover.settle(wait=True)
        cache.close()
    return [each.cpu() for each in found]


#: Heads that keep tokens of their own take longest: two ways to read them are enough.
WAYS = [
    (grouping, recall)
    for grouping in GROUPINGS
    for recall in RECALLS
    if grouping != "head" or recall in ("stage", "near")
]


@pytest.mark.parametrize(("grouping", "recall"), WAYS)
def test_moves_and_passes_are_those_of_the_cpu(grouping: str, recall: str) -> None:
    """Bit by bit if in order, since the same kernels of the CPU compute both."""
    number = GROUPINGS.index(grouping) + RECALLS.index(recall)
    codec, ordered = Fp8(), recall == "stage"
    model = tiny_model("qwen2")
    wanted = wander(model, "cpu", grouping, recall, codec, ordered)
    with pretend(patience=2 * (number % 2)):
        there = copy.deepcopy(model).to("cuda")
        found = wander(there, "cuda", grouping, recall, codec, ordered)
    for one, other in zip(found, wanted, strict=True):
        if ordered:
            np.testing.assert_array_equal(one.numpy(), other.numpy())
        else:
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_cpus_to_rounding(dtype: Any) -> None:
    """Products that keep float32 sums exist on CUDA alone; prefill takes FlashAttention there."""
    model = tiny_model("llama").to(dtype)
    # One bit more or less before 8-bit numbers are made of it would be another 8-bit number.
    way: Any = ("layer", "near", Fp8(), False, TIERS[:2])
    wanted = wander(model, "cpu", *way)
    with pretend() as gpu:
        found = wander(copy.deepcopy(model).to("cuda"), "cuda", *way)
        assert gpu.launches["flash attention"] > 0
    # Weights are rounded before they meet the values there, not after.
    off = 6e-2 if dtype == torch.bfloat16 else 8e-3
    for one, other in zip(found, wanted, strict=True):
        one, other = one.float().numpy(), other.float().numpy()
        np.testing.assert_allclose(one, other, atol=off * np.abs(other).max())


@pytest.mark.parametrize("recall", ["stage", "stream"])
def test_tokens_change_their_format_in_ddr(recall: str) -> None:
    """On a GPU this took a tensor of the device for one of the host."""
    model = tiny_model()
    tokens, bits = np.arange(12), []
    for device in ("cpu", "cuda"):
        with pretend():
            there = copy.deepcopy(model).to(device)
            cache = TieredCache(Layout.of(there))
            cells = GroupTokenPairs(np.zeros(len(tokens), dtype=np.int64), tokens)
            with HostLink(device) as link:
                mover = Mover(cache, link, recall=recall)
                TreeDecoder(there, cache=cache).prefill(list(range(40)))
                for tier in (Tier.DDR, Tier.DDR_QUANTISED, Tier.DDR):
                    mover.move(cells, np.full(len(cells), tier, dtype=np.int8))
                    mover.settle(wait=True)
            pool = cache.pools[Place.DDR]
            bits.append(pool.read(0, pool.slots.of[0, tokens]).data.cpu().numpy())
            del there, cache, mover, pool
    assert np.abs(bits[0]).max() > 0
    np.testing.assert_array_equal(*bits)


def _nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    ("where", "name", "recall"),
    [
        (Stream, "wait_stream", "stage"),
        (Stream, "wait_stream", "near"),
        (Stream, "wait_event", "near"),
        (own.PretendedTensor, "record_stream", "near"),
    ],
)
def test_what_keeps_the_order_is_needed(
    where: Any, name: str, recall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any of them the detector speaks up, so in the tests above it was awake."""
    model = tiny_model()
    monkeypatch.setattr(where, name, _nothing)
    with pytest.raises(AssertionError, match=r"in order|no record_stream"), pretend():
        wander(model.to("cuda"), "cuda", "shared", recall, Fp8())


@pytest.mark.parametrize("recall", ["stage", "stream"])
def test_the_device_waits_for_what_comes_up_and_the_host_goes_on(recall: str) -> None:
    """Copies that have not ended when they are needed: their readers come after them in a queue."""
    model = tiny_model()
    with pretend(patience=1 << 30) as gpu:
        gpu.where = own.caller
        there = copy.deepcopy(model).to("cuda")
        with HostLink("cuda") as link:
            cache = TieredCache(Layout.of(there), recall=recall, link=link, page_tokens=4)
            mover = Mover(cache, link, recall=recall)
            decoder = TreeDecoder(there, cache=cache)
            decoder.prefill(list(range(40)))
            decoder.open(1, 0)
            decoder.activate([1])
            for token in (6, 7, 8):  # a capture, which waits for all copies, comes before them
                decoder.step([token])
            gpu.waits.clear()
            cells = GroupTokenPairs(np.zeros(20, dtype=np.int64), np.arange(20))
            mover.move(cells, np.full(20, Tier.DDR, dtype=np.int8))
            for token in (1, 2, 3):  # the copy down takes as long as it likes
                decoder.step([token])
                mover.settle(wait=False)
            assert mover.leaving_tokens.sum() == 20
            assert not any("tiers/" in why for why in gpu.waits), gpu.waits
            mover.settle(wait=True)
            gpu.waits.clear()
            decoder.step([4])
            mover.activate()
            mover.move(cells.where(cells.token < 5), np.full(5, Tier.HBM, dtype=np.int8))
            mover.activate()
            decoder.step([5])
            waited = {why for why in gpu.waits if "torch.cuda.graph" not in why}  # a capture, once
            assert not waited, gpu.waits
        del there, cache, mover, decoder
