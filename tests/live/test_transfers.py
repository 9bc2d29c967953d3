"""Tokens that cross the link: what arrives, in how many copies, and from which memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.tiers import RECALLS, Tier
from arborsim_torch.cache import host_pool, ondemand
from arborsim_torch.cache.host_pool import PAGE_TOKENS, HostPool
from arborsim_torch.cache.host_rows import RowTable
from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.kernels.ondemand import PageBounds
from arborsim_torch.tiers.codec import Fp8, Plain
from arborsim_torch.tiers.link import HostLink
from tests.live.tiny import KV_HEADS, LAYERS, VOCAB, tiny_model, torch

HEAD_DIM = 4


def filled(link: HostLink, grouping: str, recall: str, tokens: int) -> tuple[TieredCache, Any]:
    """A cache of random vectors of one path, and these, ``[layers, 2, kv_heads, tokens, dim]``."""
    layout = Layout(2, 3, HEAD_DIM, torch.float32, link.device, grouping)
    cache = TieredCache(layout, recall=recall, link=link, page_tokens=4)
    cache.open(0, -1)
    cache.activate([0])
    metadata = cache.begin(np.zeros((1, tokens), dtype=np.int64))
    vectors = torch.randn(2, 2, 3, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    for layer, (keys, values) in enumerate(vectors):
        metadata.store(layer, keys[None], values[None])
    return cache, vectors


def of_group(vectors: Any, grouping: str, group: int) -> Any:
    if grouping == "shared":
        return vectors
    layer, head = (group, slice(None)) if grouping == "layer" else divmod(group, 3)
    head = head if isinstance(head, slice) else slice(head, head + 1)
    return vectors[layer : layer + 1, :, head]


def check(cache: TieredCache, group: int, rung: np.ndarray, expected: Any) -> int:
    """What attention finds of a group's tokens, but for those that are on their way to 8 bits."""
    seen, place = 0, cache.place.values[group]
    for each, pool in cache.pools.items():
        token = np.flatnonzero((place == each) & (rung == each.rung))
        if len(token):
            block = pool.read(group, pool.slots.of[group, token])
            found = pool.codec.decode(block.data, block.scale, torch.float32)
            assert torch.equal(found, expected[..., torch.from_numpy(token), :])
            seen += len(token)
    return seen


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    grouping=st.sampled_from(GROUPINGS),
    recall=st.sampled_from(RECALLS),
)
def test_whatever_the_order_of_moves_contents_arrive(seed: int, grouping: str, recall: str) -> None:
    """Down, up, into 8 bits, away, with copies that end when they like."""
    rng, tokens = np.random.default_rng(seed), 60
    tiers = [Tier.HBM, Tier.DDR, Tier.DDR, Tier.HBM_QUANTISED, Tier.DDR_QUANTISED, Tier.EVICTED]
    with HostLink("cpu") as link:
        cache, vectors = filled(link, grouping, recall, tokens)
        mover, groups = Mover(cache, link, recall=recall), cache.layout.groups
        expected = [of_group(vectors, grouping, group).clone() for group in range(groups)]
        rung = np.zeros((groups, tokens), dtype=np.int64)
        for _ in range(8):
            alive = np.argwhere(cache.place.values != Place.LOST)
            chosen = alive[rng.random(len(alive)) < rng.choice([0.02, 0.3, 0.8])]
            target = rng.choice(tiers, len(chosen), p=[0.2, 0.3, 0.1, 0.1, 0.2, 0.1])
            mover.move(GroupTokenPairs(chosen[:, 0], chosen[:, 1]), target.astype(np.int8))
            to = np.array([Tier(tier).rung for tier in target])
            old = rung[chosen[:, 0], chosen[:, 1]]
            rung[chosen[:, 0], chosen[:, 1]] = to
            for group in range(groups):
                coded = chosen[(chosen[:, 0] == group) & (to > old), 1]
                own = expected[group][..., coded, :]
                expected[group][..., coded, :] = Fp8().decode(*Fp8().encode(own), torch.float32)
            if rng.random() < 0.3:
                mover.activate()
            mover.settle(wait=bool(rng.random() < 0.3))
            for group in range(groups):
                check(cache, group, rung[group], expected[group])
        mover.settle(wait=True)
        assert not mover.leaving_tokens.any()
        for group in range(groups):
            alive = np.count_nonzero(cache.place.values[group] != Place.LOST)
            assert check(cache, group, rung[group], expected[group]) == alive
        cache.close()


@pytest.mark.parametrize(
    ("grouping", "recall", "copies"),
    [
        ("shared", "stage", 1), ("layer", "stage", 1), ("head", "stage", 1),
        ("shared", "stream", 2), ("layer", "near", 2), ("head", "ondemand", 2),
    ],
)  # fmt: skip
def test_a_move_is_a_copy_for_all_that_moves(grouping: str, recall: str, copies: int) -> None:
    """Scattered tokens of all groups go down in one copy, or in one per layer, and come up so."""
    with HostLink("cpu") as link:
        cache, _ = filled(link, grouping, recall, 200)
        mover = Mover(cache, link, recall=recall, overlap=False)
        moving = np.random.default_rng(0).random((cache.layout.groups, 200)) < 0.5
        cells = GroupTokenPairs(*np.nonzero(moving))
        cache.select(np.zeros((cache.layout.groups, 200), dtype=bool))  # stages nothing
        for tier, traffic in ((Tier.DDR, "downward"), (Tier.HBM, "upward")):
            mover.move(cells, np.full(len(cells), tier, dtype=np.int8))
            carried = getattr(link, traffic)
            size = len(cells) * cache.pools[Place.HBM].bytes_per_slot
            assert (carried.copies, carried.carried_bytes) == (copies, size)
        cache.close()


def test_copies_of_fragmented_rows_are_as_many_as_blocks_of_the_least_size() -> None:
    """Gaps that are too small for a block are left, until most rows are free."""
    least, rows = 8, RowTable(np.zeros(1, dtype=np.int64), 8)
    rows.grow(4000)
    token = np.arange(1000)
    rows.take(np.zeros(1000, dtype=np.int64), token)
    gone = token[(token % 50 < 12) | (token % 3 == 0)]
    rows.give_back(np.zeros(len(gone), dtype=np.int64), gone)
    for first, count in ((1000, 100), (1100, 300), (1400, 5)):
        new = np.arange(first, first + count)
        got = rows.take(np.zeros(count, dtype=np.int64), new)
        assert (np.diff(got) > 0).all()
        assert np.count_nonzero(np.diff(got) != 1) <= count // least
    every = rows.of[0][rows.of[0] >= 0]
    assert len(np.unique(every)) == len(every) == rows.total


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans())
def test_rows_are_never_shared_and_gaps_are_used(seed: int, groups: int, apart: bool) -> None:
    rng = np.random.default_rng(seed)
    space = np.arange(groups) if apart else np.zeros(groups, dtype=np.int64)
    rows, held_pairs, born = RowTable(space, int(rng.integers(1, 20))), set(), 0
    for _ in range(25):
        new = [(g, born + t) for g in range(groups) for t in range(8) if rng.random() < 0.7]
        born += 8
        rows.grow(born)
        if new:
            rows.take(*np.array(new).T)
            held_pairs |= set(new)
        gone = [pair for pair in sorted(held_pairs) if rng.random() < 0.4]
        if gone:
            rows.give_back(*np.array(gone).T)
            held_pairs -= set(gone)
        for one in np.unique(space).tolist():
            own = rows.of[space == one]
            own = own[own >= 0]
            assert len(np.unique(own)) == len(own)
        assert (rows.used == [sum(g == h for h, _ in held_pairs) for g in range(groups)]).all()
    most = int(rows.used.sum() if not apart else rows.used.max())
    assert rows.rows <= 8 * (most + 8 * groups) + 100


def test_what_is_there_never_moves_and_memory_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens go down and come back many times: nothing is allocated after the first."""
    made: list[tuple[int, ...]] = []
    real = host_pool.host_empty

    def counted(shape: Any, dtype: Any, pinned: bool) -> Any:
        made.append(tuple(shape))
        return real(shape, dtype, pinned)

    monkeypatch.setattr(host_pool, "host_empty", counted)
    rng = np.random.default_rng(0)
    with HostLink("cpu") as link:
        cache, _ = filled(link, "shared", "near", 400)
        mover = Mover(cache, link, recall="near")
        first: list[int] = []
        for number in range(30):
            token = np.sort(rng.choice(400, 150, replace=False))
            cells = GroupTokenPairs(np.zeros(150, dtype=np.int64), token)
            mover.move(cells, np.full(150, Tier.DDR, dtype=np.int8))
            mover.settle(wait=True)
            pool = cache.pools[Place.DDR]
            assert isinstance(pool, HostPool)
            addresses = [part.data_ptr() for part in pool.layer_rows(0, 0)]
            first = first or addresses
            assert addresses == first
            assert len(made) == 1, number
            mover.move(cells, np.full(150, Tier.HBM, dtype=np.int8))
        cache.close()


def test_what_is_reserved_keeps_to_a_limit_and_to_the_memory_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = Layout(2, 3, HEAD_DIM, torch.float32, torch.device("cpu"))
    pool = HostPool(layout, Plain(torch.float32), by_layer=True)
    assert pool.reserve_up_to(1 << 20, 0) == 0
    added = pool.reserve_up_to(1 << 20, 5 << 20)
    assert (2 << 20) < added == pool.capacity_bytes <= 5 << 20
    pages = pool.pages
    assert pool.pages_taken == 0  # no token has come

    def full(shape: Any, dtype: Any, pinned: bool) -> Any:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(host_pool, "host_empty", full)
    assert pool.reserve_up_to(1 << 20, 64 << 20) == 0
    assert pool.pages == pages


def test_growing_adds_a_chunk_and_reads_find_tokens_in_all() -> None:
    layout = Layout(2, 3, HEAD_DIM, torch.float32, torch.device("cpu"))
    pool = HostPool(layout, Plain(torch.float32), by_layer=True)
    pool.reserve(1)
    capacity, chunks = pool.pages * PAGE_TOKENS, []
    pool.grow(3 * capacity)
    for first in range(0, 3 * capacity, capacity // 2):
        token = np.arange(first, first + capacity // 2)
        pool.take(np.zeros(len(token), dtype=np.int64), token)
        blocks = pool.blocks(np.zeros(len(token), dtype=np.int64), token)
        buffers = pool.buffers(blocks.rows, layout.device)
        for buffer in buffers:
            buffer.copy_(torch.from_numpy(np.tile(token, 2))[:, None, None, None, None])
        for host, new in pool.pairs(blocks, buffers):
            host.copy_(new)
        chunks.append(pool.layer_rows(0, 0)[0].data_ptr())
    assert len(set(chunks)) == 1
    token = np.array([0, capacity + 3, 5, 3 * capacity - 1, capacity - 1])
    slots = pool.slots.of[0, token]
    assert len(np.unique(pool.chunk_of(slots))) > 1
    (found,) = pool.gather(1, slice(None), torch.from_numpy(slots.astype(np.int64)))
    assert (found == torch.from_numpy(token)[None, None, :, None]).all()
    assert (pool.read(0, slots).data[1, 1, 2, :, 0] == torch.from_numpy(token)).all()


@pytest.mark.parametrize("grouping", ["shared", "layer"])
def test_ondemand_carries_the_chosen_pages_and_no_byte_more(
    grouping: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all crosses to find out which; the union of the heads' pages does, whole."""
    chosen: list[Any] = []
    real = PageBounds.select

    def noted(bounds: PageBounds, *args: Any, **kwargs: Any) -> Any:
        chosen.append(real(bounds, *args, **kwargs))
        return chosen[-1]

    monkeypatch.setattr(PageBounds, "select", noted)
    rng, model = np.random.default_rng(0), tiny_model()
    with HostLink("cpu") as link:
        cache = TieredCache(Layout.of(model, grouping), recall="ondemand", link=link)
        mover = Mover(cache, link, recall="ondemand")
        decoder = TreeDecoder(model, cache=cache)
        decoder.prefill(rng.integers(0, VOCAB, 800).tolist())
        decoder.open(1, 0)
        decoder.activate([1])
        cells = GroupTokenPairs(*np.nonzero(rng.random((cache.layout.groups, 790)) < 0.9))
        mover.move(cells, np.full(len(cells), Tier.DDR, dtype=np.int8))
        mover.settle(wait=True)
        assert link.upward.carried_bytes == 0
        pages = PAGE_TOKENS * 2 * KV_HEADS * 16 * 4  # bytes
        for token in (3, 4, 5):
            chosen.clear()
            before = link.upward.carried_bytes
            decoder.step([token])
            unions = [len(np.unique(own[own >= 0])) for own in chosen]
            assert len(unions) == LAYERS
            assert all(ondemand.PAGES_TOP <= n <= KV_HEADS * ondemand.PAGES_TOP for n in unions)
            assert link.upward.carried_bytes - before == sum(unions) * pages
        attention = cache.host_attention
        assert isinstance(attention, ondemand.PageAttention)
        assert attention.fetched_bytes == link.upward.carried_bytes
        cache.close()
