"""Decoding a tree equals plain forward passes over its paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from tests.live.tiny import FAMILIES, VOCAB, plain_copy, tiny_model, torch


def plain_logits(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def grow(
    model: Any,
    seed: int = 0,
    prompt_tokens: int = 30,
    block: int = 8,
    cache: TieredCache | None = None,
) -> None:
    """A random tree with pauses, returns and ragged batches; checked at every step."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> int:
        return int(torch.randint(0, n, (1,), generator=generator))

    twin = plain_copy(model)
    decoder = TreeDecoder(model, prefill_block=block, cache=cache)
    prompt = [draw(VOCAB) for _ in range(prompt_tokens)]
    logits = decoder.prefill(prompt)
    torch.testing.assert_close(logits, plain_logits(twin, prompt)[-1], rtol=1e-4, atol=1e-4)
    paths = {0: prompt}
    open_, closed = [], [0]
    for _ in range(12):
        while len(open_) < 4:
            parent = closed[draw(len(closed))]
            node = len(paths)
            decoder.open(node, parent)
            paths[node] = list(paths[parent])
            open_.append(node)
        leaves = open_[: 1 + draw(4)]
        decoder.activate(leaves)
        for _ in range(1 + draw(5)):
            tokens = [draw(VOCAB) for _ in leaves]
            for leaf, token in zip(leaves, tokens, strict=True):
                paths[leaf].append(token)
            logits = decoder.step(tokens)
        for row, leaf in zip(logits, leaves, strict=True):
            expected = plain_logits(twin, paths[leaf])[-1]
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
        done = open_.pop(draw(len(open_)))
        if decoder.cache.tree.num_node_tokens(done):
            closed.append(done)


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_equals_plain_forward(family: str) -> None:
    grow(tiny_model(family))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2-window"])
def test_every_way_to_read_the_cache(family: str, grouping: str, ordered: bool) -> None:
    model = tiny_model(family)
    layout = Layout.of(model, grouping)
    grow(model, seed=2, cache=TieredCache(layout, ordered=ordered, page_tokens=4))


def test_positions_beyond_one_chunk_of_slots() -> None:
    grow(tiny_model(), seed=1, prompt_tokens=300, block=64)


def test_one_batch_equals_one_by_one() -> None:
    model = tiny_model()
    prompt = list(range(20))
    together, alone = TreeDecoder(model), TreeDecoder(model)
    for decoder in (together, alone):
        decoder.prefill(prompt)
        for node in (1, 2, 3):
            decoder.open(node, 0)
    leaves = [1, 2, 3]
    together.activate(leaves)
    tokens = {1: [4, 5, 6], 2: [7, 8, 9], 3: [1, 1, 2]}
    batch = [together.step([tokens[leaf][t] for leaf in leaves]) for t in range(3)]
    for row, leaf in enumerate(leaves):
        alone.activate([leaf])
        for t in range(3):
            one = alone.step([tokens[leaf][t]])[0]
            torch.testing.assert_close(batch[t][row], one, rtol=1e-5, atol=1e-5)


def test_a_shared_ancestor_is_stored_once() -> None:
    model = tiny_model()
    decoder = TreeDecoder(model)
    decoder.prefill(list(range(40)))
    for node in range(1, 6):
        decoder.open(node, 0)
    decoder.activate([1, 2, 3, 4, 5])
    decoder.step([1] * 5)
    per_token = 2 * 4 * 2 * 16 * 4  # keys and values, layers, heads, head_dim, bytes
    # The prompt once, and one token of each of the five leaves.
    assert decoder.cache.used_bytes(Place.HBM) == (40 + 5) * per_token
    decoder.drop(2)
    assert decoder.cache.used_bytes(Place.HBM) == (40 + 4) * per_token


def test_several_tokens_at_once_need_one_seq() -> None:
    decoder = TreeDecoder(tiny_model())
    decoder.prefill([1, 2])
    for node in (1, 2):
        decoder.open(node, 0)
    decoder.activate([1, 2])
    with pytest.raises(ValueError, match="2 leaves"):
        decoder.cache.begin(np.zeros((2, 2), dtype=np.int64))
