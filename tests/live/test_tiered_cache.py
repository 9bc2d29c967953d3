"""The live cache against plain forward passes in which attention is masked instead of evicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.tiers import RECALLS, Tier
from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.pool import Pool, StoredTokens
from arborsim_torch.cache.slots import SlotTable
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.tiers.codec import Plain
from arborsim_torch.tiers.link import HostLink
from tests.live.tiny import KV_HEADS, LAYERS, VOCAB, plain_copy, tiny_model, torch

PER_TOKEN = 2 * LAYERS * KV_HEADS * 16 * 4


class MaskedModel:
    """A plain model whose layers and KV heads stop reading tokens at given queries."""

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        self._dead: dict[tuple[int, int], dict[int, int]] = {}
        self._skipped: dict[tuple[int, int], list[tuple[int, int]]] = {}
        AttentionInterface.register("test_masked", self._attend)
        AttentionMaskInterface.register("test_masked", lambda *a, **k: None)
        self._twin = plain_copy(model)
        self._twin.set_attn_implementation("test_masked")

    def kill(self, layer: int, head: int, token: int, first_query: int) -> None:
        self._dead.setdefault((layer, head), {}).setdefault(token, first_query)

    def skip(self, layer: int, head: int, token: int, query: int) -> None:
        """This query alone does not read the token."""
        self._skipped.setdefault((layer, head), []).append((query, token))

    def logits(self, ids: list[int]) -> Any:
        with torch.no_grad():
            return self._twin(torch.tensor([ids]), use_cache=False).logits[0]

    def _attend(
        self, module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float, **__: Any
    ) -> Any:
        n = query.shape[2]
        heads, shared = query.shape[1], query.shape[1] // key.shape[1]
        readable = torch.ones(n, n, dtype=torch.bool).tril()[None].repeat(heads, 1, 1)
        for head in range(heads):
            group = head // shared
            for token, first in self._dead.get((module.layer_idx, group), {}).items():
                readable[head, first:, token] = False
            for each, token in self._skipped.get((module.layer_idx, group), []):
                readable[head, each, token] = False
        keys, values = (x.repeat_interleave(shared, 1) for x in (key, value))
        scores = (query @ keys.transpose(2, 3) * scaling).masked_fill(~readable, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2), None


def groups_of(grouping: str, group: int) -> list[tuple[int, int]]:
    """Layers and KV heads of a cache group."""
    if grouping == "shared":
        return [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]
    if grouping == "layer":
        return [(group, head) for head in range(KV_HEADS)]
    return [divmod(group, KV_HEADS)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("recall", RECALLS)
def test_evicting_equals_masking(grouping: str, ordered: bool, recall: str) -> None:
    """Invariant 18: random evictions and moves to DDR and back; every logit is compared."""
    rng = np.random.default_rng(3)
    model = tiny_model("qwen2")
    masked = MaskedModel(model)
    with HostLink("cpu") as link:
        layout = Layout.of(model, grouping)
        cache = TieredCache(layout, ordered=ordered, page_tokens=4, recall=recall, link=link)
        groups = cache.layout.groups
        mover = Mover(cache, link, recall=recall)
        decoder = TreeDecoder(model, prefill_block=16, cache=cache)
        ids = rng.integers(0, VOCAB, 40).tolist()
        decoder.prefill(ids)
        decoder.open(1, 0)
        decoder.activate([1])
        for step in range(40):
            ids.append(int(rng.integers(0, VOCAB)))
            logits = decoder.step(ids[-1:])[0]
            torch.testing.assert_close(logits, masked.logits(ids)[-1], rtol=1e-4, atol=1e-4)
            mover.settle(wait=False)
            alive = np.argwhere(cache.place.values[:, :-3] != Place.LOST)
            chosen = alive[rng.choice(len(alive), 4 * groups, replace=False)]
            cells = GroupTokenPairs(chosen[:, 0], chosen[:, 1])
            if step % 5 == 2:
                in_ddr = cache.pools[Place.DDR].slots.of[cells.group, cells.token] >= 0
                mover.move(cells, np.where(in_ddr, Tier.HBM, Tier.DDR).astype(np.int8))
            elif step % 5 == 4:
                for group, token in chosen.tolist():
                    for layer, head in groups_of(grouping, group):
                        masked.kill(layer, head, token, len(ids))
                mover.move(cells, np.full(len(cells), Tier.EVICTED, dtype=np.int8))
        mover.settle(wait=True)  # on their way, tokens have memory at both ends
        cache.close()
    assert (cache.place.values == Place.LOST).sum() == 8 * 4 * groups
    assert cache.used_bytes(Place.HBM, Place.DDR) * groups == (
        PER_TOKEN * (80 * groups - 8 * 4 * groups)
    )


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("recall", RECALLS)
def test_reading_a_selection_equals_masking_the_rest(grouping: str, recall: str) -> None:
    """Selections at random, half of the old tokens in DDR: logits, bytes and what crosses."""
    rng = np.random.default_rng(5)
    model = tiny_model("qwen2")
    masked = MaskedModel(model)
    with HostLink("cpu") as link:
        cache = TieredCache(Layout.of(model, grouping), page_tokens=4, recall=recall, link=link)
        groups = cache.layout.groups
        mover = Mover(cache, link, recall=recall)
        decoder = TreeDecoder(model, prefill_block=16, cache=cache)
        ids = rng.integers(0, VOCAB, 40).tolist()
        decoder.prefill(ids)
        decoder.open(1, 0)
        decoder.activate([1])
        away = GroupTokenPairs(*np.nonzero(rng.random((groups, 30)) < 0.5))
        cache.select(np.zeros((groups, 40), dtype=bool))  # or `stage` would fetch them at once
        mover.move(away, np.full(len(away), Tier.DDR, dtype=np.int8))
        mover.settle(wait=True)
        in_ddr = cache.pools[Place.DDR].slots.of[:, :30] >= 0
        before = np.zeros((groups, 30), dtype=bool)  # selected in DDR by the last step
        crossed = 0
        for step in range(12):
            reads = rng.random((groups, len(ids))) < (1.0 if step == 7 else 0.4)
            cache.select(reads)
            mover.activate()
            newly = reads[:, :30] & in_ddr & ~before
            crossed += int(newly.sum()) * PER_TOKEN // groups
            before = reads[:, :30] & in_ddr
            if recall in ("stage", "stream") and step != 7:
                assert (before == (cache.pools[Place.STAGING].slots.of[:, :30] >= 0)).all()
                assert link.upward.carried_bytes == crossed
            elif step == 7:  # all is read: `stream` has no selection any more
                crossed, before = link.upward.carried_bytes, before & (recall != "stream")
            for group, token in np.argwhere(~reads).tolist():
                for layer, head in groups_of(grouping, group):
                    masked.skip(layer, head, token, len(ids))
            ids.append(int(rng.integers(0, VOCAB)))
            logits = decoder.step(ids[-1:])[0]
            torch.testing.assert_close(logits, masked.logits(ids)[-1], rtol=1e-4, atol=1e-4)
            if step == 7:
                crossed = link.upward.carried_bytes
        cache.close()
    assert not (cache.place.values == Place.LOST).any()
    assert cache.used_bytes(Place.HBM, Place.DDR) == PER_TOKEN * len(ids)


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_after_rehydration_logits_equal_full_retention(grouping: str) -> None:
    """On a tree with two active branches, whatever has been lost on their paths."""
    rng = np.random.default_rng(5)
    model = tiny_model()
    twin = plain_copy(model)
    cache = TieredCache(Layout.of(model, grouping))
    with HostLink("cpu") as link:
        mover = Mover(cache, link)
        decoder = TreeDecoder(model, prefill_block=16, cache=cache)
        paths = {0: rng.integers(0, VOCAB, 30).tolist()}
        decoder.prefill(paths[0])
        for node, parent in ((1, 0), (2, 1), (3, 1)):
            decoder.open(node, parent)
            paths[node] = list(paths[parent])
            decoder.activate([node])
            for _ in range(10):
                paths[node].append(int(rng.integers(0, VOCAB)))
                decoder.step(paths[node][-1:])
        every = np.argwhere(cache.place.values != Place.LOST)
        chosen = every[np.sort(rng.choice(len(every), len(every) // 2, replace=False))]
        cells = GroupTokenPairs(chosen[:, 0], chosen[:, 1])
        mover.move(cells, np.full(len(cells), Tier.EVICTED, dtype=np.int8))
        decoder.activate([2, 3])
        mover.restore(cells)
        for leaf in (2, 3):
            lost = (cache.place.values == Place.LOST).any(axis=0)
            tokens = cache.tree.path(leaf)
            decoder.recompute(leaf, tokens[lost[tokens]])
        assert not (cache.place.values == Place.LOST).any()
        logits = decoder.step([7, 8])
    for row, leaf, token in zip(logits, (2, 3), (7, 8), strict=True):
        with torch.no_grad():
            expected = twin(torch.tensor([[*paths[leaf], token]])).logits[0, -1]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def test_logits_equal_those_of_dynamic_cache() -> None:
    from transformers import DynamicCache

    rng = np.random.default_rng(0)
    model = tiny_model("qwen3")
    twin = plain_copy(model)
    prompt, then = rng.integers(0, VOCAB, 50), rng.integers(0, VOCAB, 30)
    decoder = TreeDecoder(model)
    decoder.prefill(prompt.tolist())
    decoder.open(1, 0)
    decoder.activate([1])
    theirs = DynamicCache(config=twin.config)
    with torch.no_grad():
        twin(torch.tensor([prompt.tolist()]), past_key_values=theirs)
        for token in then.tolist():
            expected = twin(torch.tensor([[token]]), past_key_values=theirs).logits[0, -1]
            logits = decoder.step([token])[0]
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    cache = decoder.cache
    for layer, other in enumerate(theirs.layers):
        (data,) = cache.pools[Place.HBM].slab(layer)
        torch.testing.assert_close(data[0][:, :80], other.keys[0], rtol=1e-5, atol=1e-5)
    assert cache.hf.get_seq_length() == theirs.get_seq_length() == 80


def test_evicting_gives_memory_back() -> None:
    cache = TieredCache(Layout.of(tiny_model()), page_tokens=8)
    with HostLink("cpu") as link:
        mover = Mover(cache, link)
        decoder = TreeDecoder(tiny_model(), cache=cache)
        decoder.prefill(list(range(50)) * 4)
        before = cache.capacity_bytes(Place.HBM)
        assert before >= 200 * PER_TOKEN
        gone = np.setdiff1d(np.arange(200), [0, 5, 17, 150, 199])
        cells = GroupTokenPairs(np.zeros(len(gone), dtype=np.int64), gone)
        mover.move(cells, np.full(len(gone), Tier.EVICTED, dtype=np.int8))
    assert cache.used_bytes(Place.HBM) == 5 * PER_TOKEN
    assert cache.capacity_bytes(Place.HBM) == 8 * PER_TOKEN


def keep(mover: Mover, numbers: list[int]) -> list[tuple[int, int]]:
    """Evict the oldest tokens of each group but so many; which (group, token) went."""
    gone = []
    for group, number in enumerate(numbers):
        held = np.flatnonzero(mover.cache.place.values[group] != Place.LOST)
        gone += [(group, int(token)) for token in held[: max(0, len(held) - number)]]
    cells = GroupTokenPairs(*np.array(gone, dtype=np.int64).reshape(-1, 2).T)
    mover.move(cells, np.full(len(cells), Tier.EVICTED, dtype=np.int8))
    return gone


@pytest.mark.parametrize("page_tokens", [1, 8])
@pytest.mark.parametrize(
    ("grouping", "numbers"),
    [
        ("layer", [70, 20]),
        ("head", [90, 12, 40, 5]),
        ("head", [60, 57, 57, 60]),  # so little difference that heads get the same capacity
        ("head", [90, 0, 3, 40]),
    ],
)
def test_uneven_groups_take_the_memory_that_they_use(
    grouping: str, numbers: list[int], page_tokens: int
) -> None:
    """Every logit is that of a masked model; bytes follow each group's own count."""
    rng = np.random.default_rng(7)
    model = tiny_model("qwen2")
    masked = MaskedModel(model)
    with HostLink("cpu") as link:
        cache = TieredCache(Layout.of(model, grouping), page_tokens=page_tokens)
        mover, groups = Mover(cache, link), cache.layout.groups
        numbers = (numbers * groups)[:groups]
        decoder = TreeDecoder(model, prefill_block=32, cache=cache)
        ids = rng.integers(0, VOCAB, 100).tolist()
        decoder.prefill(ids)
        decoder.open(1, 0)
        decoder.activate([1])
        per_group = PER_TOKEN // groups
        for step in range(24):
            if step == 12:
                numbers = numbers[::-1]  # those that had few grow
            for group, token in keep(mover, numbers):
                for layer, head in groups_of(grouping, group):
                    masked.kill(layer, head, token, len(ids))
            if step == 0:
                used, slots = cache.used_bytes(Place.HBM), cache.capacity_bytes(Place.HBM)
                assert used == per_group * sum(numbers)
                pages = sum(-(-n // page_tokens) for n in numbers) * page_tokens
                assert slots <= 1.12 * pages * per_group
            ids.append(int(rng.integers(0, VOCAB)))
            logits = decoder.step(ids[-1:])[0]
            torch.testing.assert_close(logits, masked.logits(ids)[-1], rtol=1e-4, atol=1e-4)
        used, slots = cache.used_bytes(Place.HBM), cache.capacity_bytes(Place.HBM)
        assert slots <= (used + 2 * groups * page_tokens * per_group) / (0.85 * 0.9)


def test_ragged_heads_on_a_tree_are_read_as_in_the_order_of_tokens() -> None:
    """Two leaves at once: in place against gathered in order."""
    rng = np.random.default_rng(2)
    model = tiny_model()
    ids, steps = rng.integers(0, VOCAB, 60).tolist(), rng.integers(0, VOCAB, (20, 2)).tolist()
    seen = []
    with HostLink("cpu") as link:
        for ordered in (False, True):
            cache = TieredCache(Layout.of(model, "head"), page_tokens=4, ordered=ordered)
            mover = Mover(cache, link)
            decoder = TreeDecoder(model, cache=cache)
            decoder.prefill(ids)
            for node in (1, 2):
                decoder.open(node, 0)
            decoder.activate([1, 2])
            logits = []
            for number, tokens in enumerate(steps):
                if number % 6 == 1:
                    keep(mover, [50, 8, 16, 30, 30, 30, 4, 60])
                logits.append(decoder.step(tokens))
            assert any(cache.pools[Place.HBM].ragged(slab) for slab in range(LAYERS))
            seen.append(torch.stack(logits))
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)


def test_quantised_tokens_take_a_byte_an_element_and_a_scale() -> None:
    model = tiny_model()
    cache = TieredCache(Layout.of(model))
    with HostLink("cpu") as link:
        mover = Mover(cache, link)
        decoder = TreeDecoder(model, cache=cache)
        decoder.prefill(list(range(40)))
        exact = cache.tokens_kv(np.arange(40))
        cells = GroupTokenPairs(np.zeros(10, dtype=np.int64), np.arange(10))
        mover.move(cells, np.full(10, Tier.HBM_QUANTISED, dtype=np.int8))
        pool = cache.pools[Place.HBM_QUANTISED]
        assert pool.used_bytes == 10 * 2 * LAYERS * KV_HEADS * (16 + 4)
        block = pool.read(0, pool.slots.of[0, :10])
        back = pool.codec.decode(block.data, block.scale, torch.float32)
        torch.testing.assert_close(back, exact[:, :, :, :10], rtol=0.07, atol=0.02)
        # Down to the host as they are, and attention reads the same bits from there.
        decoder.open(1, 0)
        decoder.activate([1])
        mover.move(cells, np.full(10, Tier.DDR_QUANTISED, dtype=np.int8))
        mover.settle(wait=True)
        assert cache.used_bytes(Place.HBM_QUANTISED) == 0
        assert cache.used_bytes(Place.DDR_QUANTISED) == pool.bytes_per_slot * 10
        host = cache.pools[Place.DDR_QUANTISED]
        again = host.read(0, host.slots.of[0, :10])
        assert torch.equal(again.data.view(torch.uint8), block.data.view(torch.uint8))
        assert torch.equal(again.scale, block.scale)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_slots_never_overlap(seed: int, groups: int) -> None:
    """Whatever is taken and given back, every token has a slot of its own below the highest."""
    rng = np.random.default_rng(seed)
    slots = SlotTable(groups)
    held: set[tuple[int, int]] = set()
    for round_ in range(20):
        slots.grow(5 * (round_ + 1))
        new = [(g, t) for g in range(groups) for t in range(5 * round_, 5 * round_ + 5)]
        new = [cell for cell in new if rng.random() < 0.8]
        if new:
            group, token = np.array(new).T
            slots.take(group, token)
            held |= set(new)
        gone = [cell for cell in sorted(held) if rng.random() < 0.3]
        if gone:
            group, token = np.array(gone).T
            slots.give_back(group, token)
            held -= set(gone)
        if rng.random() < 0.1:
            slots.compact()
            assert (slots.high == slots.used).all()
        for g in range(groups):
            own = slots.of[g][slots.of[g] >= 0]
            assert len(np.unique(own)) == len(own) == slots.used[g]
            assert {t for h, t in held if h == g} == set(np.flatnonzero(slots.of[g] >= 0).tolist())
            assert (own < slots.high[g]).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    grouping=st.sampled_from(GROUPINGS),
    page_tokens=st.sampled_from([1, 4]),
)
def test_a_pool_holds_what_was_put_in_whatever_its_groups_hold(
    seed: int, grouping: str, page_tokens: int
) -> None:
    """Tokens enter, leave groups unevenly, and pools grow and shrink; every vector is read back."""
    rng = np.random.default_rng(seed)
    layout = Layout(2, 3, 4, torch.float32, torch.device("cpu"), grouping)
    pool = Pool(layout, Plain(torch.float32), layout.device, page_tokens=page_tokens)
    heads = {"shared": 3, "layer": 3, "head": 1}[grouping]
    layers = layout.slab_layers
    kept: dict[tuple[int, int], torch.Tensor] = {}
    favoured = rng.random(layout.groups) ** 2  # some groups lose nearly all, others little
    born = 0
    for _ in range(12):
        token = np.arange(born, born + int(rng.integers(1, 20)))
        born += len(token)
        slots = pool.enter(token)
        for group, row in enumerate(slots):
            new = torch.from_numpy(rng.random((layers, 2, heads, len(token), 4), np.float32))
            pool.write(group, row, StoredTokens(new))
            kept |= {(group, t): new[..., i, :] for i, t in enumerate(token.tolist())}
        gone = [pair for pair in sorted(kept) if rng.random() > favoured[pair[0]]]
        if gone:
            pool.give_back(*np.array(gone, dtype=np.int64).T)
            kept = {pair: x for pair, x in kept.items() if pair not in set(gone)}
        if rng.random() < 0.5:
            pool.shrink()
        assert pool.used_bytes == len(kept) * pool.bytes_per_slot <= pool.capacity_bytes
        for (group, t), expected in kept.items():
            slot = pool.slots.of[group, [t]]
            assert torch.equal(pool.read(group, slot).data[..., 0, :], expected)
            layer = group // (3 if grouping == "head" else 1)
            first = group % 3 if grouping == "head" else 0
            index = torch.from_numpy(slot.astype(np.int64))
            (found,) = pool.gather(layer, slice(first, first + heads), index)
            assert torch.equal(found[:, :, 0], expected[0])
            piece = pool.piece(layer)
            row = int(slot[0])
            if pool.ragged(layout.slab_of_group(group)[0]):
                row += int(pool.first_row[group])
            assert torch.equal(piece.keys[first : first + heads, row], expected[0, 0])
            assert torch.equal(piece.values[first : first + heads, row], expected[0, 1])
    pool.shrink()
    pages = -(-pool.slots.used // page_tokens) * page_tokens
    spare = page_tokens * layout.groups
    least = 0.5 if grouping == "shared" else 0.85 * 0.9  # in use, of capacities within a tenth
    slots = pool.capacity_bytes / pool.bytes_per_slot
    assert slots <= max((pages.sum() + spare) / least, 4 * spare)
