"""Whether the live cache computes what it should: literal forward passes on the same device.

Evicting is compared with a plain model whose layers and KV heads are forbidden to read tokens from
some query on, rehydration with a plain model that has lost nothing.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.tiers import Tier
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.models import load_model
from arborsim_torch.tiers.link import HostLink
from benchmarks.gpu.journal import Facts

TOLERANCE = 1e-4  #: of a logit: absolute, and as a share of the largest logit of its row
_MASKED = "validation_masked"
_NEVER = 1 << 30


class MaskedModel:
    """A plain model whose layers and KV heads stop reading tokens at given queries."""

    def __init__(self, model: Any, tokens: int) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(_MASKED, self._attend)
        AttentionMaskInterface.register(_MASKED, lambda *a, **k: None)
        config = model.config
        self._group = config.num_attention_heads // config.num_key_value_heads
        shape = (config.num_hidden_layers, config.num_key_value_heads, tokens)
        self._unread_from = torch.full(shape, _NEVER, device=model.device)
        self._twin = copy.deepcopy(model)
        self._twin.set_attn_implementation(_MASKED)

    def kill(self, layers: slice, heads: slice, token: int, first_query: int) -> None:
        """From this query on none of these reads the token; called once per token."""
        self._unread_from[layers, heads, token] = first_query

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        device = self._unread_from.device
        found: Tensor = self._twin(torch.tensor([ids], device=device), use_cache=False).logits[0]
        return found

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any,
        scaling: float, **__: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        n = query.shape[2]
        at = torch.arange(n, device=query.device)[:, None]
        alive = at < self._unread_from[module.layer_idx, :, None, :n]  # [kv_heads, queries, n]
        readable = (alive & (at >= at.T)).repeat_interleave(self._group, 0)
        keys, values = (x.repeat_interleave(self._group, 1) for x in (key, value))
        scores = (query @ keys.transpose(2, 3) * scaling).masked_fill(~readable, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2), None


class Worst:
    """The largest difference seen, as a share of what is tolerated."""

    def __init__(self) -> None:
        self.apart = self.largest = self.used = 0.0

    def see(self, found: Tensor, wanted: Tensor) -> None:
        apart = float((found - wanted).abs().max())
        largest = float(wanted.abs().max())
        self.apart, self.largest = max(self.apart, apart), max(self.largest, largest)
        self.used = max(self.used, apart / (TOLERANCE * (1 + largest)))

    def facts(self) -> Facts:
        return {"ok": self.used <= 1.0, "largest_difference": self.apart,
                "largest_logit": self.largest, "share_of_tolerance": self.used}  # fmt: skip


def evicting_is_masking(
    device: str, grouping: str, ordered: bool, recall: str, steps: int, prompt: int = 40
) -> Facts:
    """Random evictions, and moves to DDR and back; every logit of every step is compared."""
    rng = np.random.default_rng(3)
    model = load_model("chain", "", device, "float32").model
    masked = MaskedModel(model, prompt + steps)
    layout, worst = Layout.of(model, grouping), Worst()
    with HostLink(layout.device) as link:
        cache = TieredCache(layout, ordered=ordered, page_tokens=4, recall=recall, link=link)
        groups = layout.groups
        mover = Mover(cache, link, recall=recall)
        decoder = TreeDecoder(model, prefill_block=16, cache=cache)
        ids = rng.integers(0, model.config.vocab_size, prompt).tolist()
        decoder.prefill(ids)
        decoder.open(1, 0)
        decoder.activate([1])
        for step in range(steps):
            ids.append(int(rng.integers(0, model.config.vocab_size)))
            worst.see(decoder.step(ids[-1:])[0], masked.logits(ids)[-1])
            mover.settle(wait=False)
            alive = np.argwhere(cache.place.values[:, :-3] != Place.LOST)
            chosen = alive[rng.choice(len(alive), min(4 * groups, len(alive) // 2), replace=False)]
            cells = GroupTokenPairs(chosen[:, 0], chosen[:, 1])
            if step % 5 == 2:
                in_ddr = cache.pools[Place.DDR].slots.of[cells.group, cells.token] >= 0
                mover.move(cells, np.where(in_ddr, Tier.HBM, Tier.DDR).astype(np.int8))
            elif step % 5 == 4:
                for group, token in chosen.tolist():
                    masked.kill(*_of_group(layout, group), token, len(ids))
                mover.move(cells, np.full(len(cells), Tier.EVICTED, dtype=np.int8))
        cache.close()
        carried = link.downward.carried_bytes
    lost = int((cache.place.values == Place.LOST).sum())
    return {**worst.facts(), "evicted_cells": lost, "to_ddr_bytes": carried, "steps": steps}


def _of_group(layout: Layout, group: int) -> tuple[slice, slice]:
    """Layers and KV heads of a cache group."""
    if layout.grouping == "shared":
        return slice(None), slice(None)
    if layout.grouping == "layer":
        return slice(group, group + 1), slice(None)
    layer, head = divmod(group, layout.kv_heads)
    return slice(layer, layer + 1), slice(head, head + 1)


def rehydrating_is_keeping(device: str, grouping: str) -> Facts:
    """On a tree with two active branches, after half of the cache has been lost."""
    rng = np.random.default_rng(5)
    model = load_model("chain", "", device, "float32").model
    vocabulary = model.config.vocab_size
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    cache = TieredCache(Layout.of(model, grouping))
    with HostLink(cache.layout.device) as link:
        mover = Mover(cache, link)
        decoder = TreeDecoder(model, prefill_block=16, cache=cache)
        paths = {0: rng.integers(0, vocabulary, 30).tolist()}
        decoder.prefill(paths[0])
        for node, parent in ((1, 0), (2, 1), (3, 1)):
            decoder.open(node, parent)
            paths[node] = list(paths[parent])
            decoder.activate([node])
            for _ in range(10):
                paths[node].append(int(rng.integers(0, vocabulary)))
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
        logits = decoder.step([7, 8])
    worst = Worst()
    with torch.inference_mode():
        for row, leaf, token in zip(logits, (2, 3), (7, 8), strict=True):
            ids = torch.tensor([[*paths[leaf], token]], device=model.device)
            worst.see(row, twin(ids, use_cache=False).logits[0, -1])
    return {**worst.facts(), "recomputed_cells": len(cells)}
