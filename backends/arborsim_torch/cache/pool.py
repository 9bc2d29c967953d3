"""A pool: the keys and values of the tokens of one tier, in slots that can be freed one by one.

Tensors grow by whole pages and shrink once half of their slots are free, which moves the tokens
that remain together: evicting gives memory back to the allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.slots import SlotTable
from arborsim_torch.tiers.codec import Codec, Plain
from arborsim_torch.tiers.copies import to_device

_GROWTH = 1.25
_SHRINK_BELOW = 0.5  # share of slots in use


@dataclass(frozen=True)
class StoredTokens:
    """Tokens as a pool stores them.

    Attributes
    ----------
    data : Tensor ``[layers, 2, kv_heads, tokens, head_dim]``
    scale : float32 Tensor ``[layers, 2, kv_heads, tokens, 1]`` or None
    """

    data: Tensor
    scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def parts(self) -> list[Tensor]:
        return [self.data] if self.scale is None else [self.data, self.scale]


def _addressable(dtype: torch.dtype) -> torch.dtype:
    """A type of the same size whose tensors PyTorch can index on every device."""
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype


class Pool:
    """Slots for tokens on one device in one format.

    Parameters
    ----------
    layout : Layout
    codec : Codec
        How tokens are stored.
    device : torch.device
    page_tokens : int
        The number of slots of a slab is a multiple of this.
    pinned : bool
        Page-locked host memory.

    Attributes
    ----------
    slots : SlotTable
    """

    def __init__(
        self,
        layout: Layout,
        codec: Codec,
        device: torch.device,
        *,
        page_tokens: int = 16,
        pinned: bool = False,
    ) -> None:
        self.layout, self.codec, self.device = layout, codec, device
        self.slots = SlotTable(layout.groups)
        self.page_tokens = page_tokens
        self._pinned = pinned
        self._slabs: list[list[Tensor]] = [[] for _ in range(layout.slabs)]
        self._capacity = [0] * layout.slabs
        self._views: dict[int, list[Tensor]] = {}  # by layer

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in one group."""
        vectors = self.layout.elements_per_group // self.layout.head_dim
        return vectors * self.codec.bytes_per_token(self.layout.head_dim)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens held."""
        return int(self.slots.used.sum()) * self.bytes_per_slot

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(part.nbytes for slab in self._slabs for part in slab)

    def capacity(self, slab: int = 0) -> int:
        """Slots of a slab."""
        return self._capacity[slab]

    def reserve(self, tokens: int) -> None:
        """Allocate slots for `tokens` tokens in every group at once."""
        for slab in range(self.layout.slabs):
            self._grow(slab, tokens)

    def enter(self, token: np.ndarray) -> np.ndarray:
        """Give new tokens slots in every group; returns them, int64 ``[groups, tokens]``."""
        groups = self.layout.groups
        self.slots.grow(int(token[-1]) + 1)
        if groups == 1:  # every decoding step comes here
            slot = self.slots.take_shared(token)
            self._make_room()
            return slot[None]
        group = np.repeat(np.arange(groups), len(token))
        return self.take(group, np.tile(token, groups)).reshape(groups, -1)

    def take(self, group: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Give slots to pairs (group, token) and make room for them."""
        slot = self.slots.take(group, token)
        self._make_room()
        return slot

    def _make_room(self) -> None:
        per_bank = self.slots.high.reshape(self.layout.slabs, -1).max(axis=1)
        for slab, needed in enumerate(per_bank.tolist()):
            if needed > self._capacity[slab]:
                self._grow(slab, max(needed, int(_GROWTH * self._capacity[slab])))

    def give_back(self, group: np.ndarray, token: np.ndarray) -> None:
        """Free the slots of pairs."""
        self.slots.give_back(group, token)

    def slab(self, layer: int) -> list[Tensor]:
        """Data ``[2, kv_heads, capacity, head_dim]`` (and scales) of a layer: views."""
        known = self._views.get(layer)
        if known is None:
            slab, index = self.layout.slab_of_layer(layer)
            known = self._views[layer] = [part[index] for part in self._slabs[slab]]
        return known

    def gather(self, layer: int, heads: slice, slots: Tensor) -> list[Tensor]:
        """Copy tokens of some heads of a layer as they are stored, ``[2, heads, m, ...]``."""
        return [part[:, heads].index_select(2, slots) for part in self.slab(layer)]

    def span(self, slab: int, first: int, count: int) -> Tensor:
        """Slots that follow one another, of every layer of a slab: a view of the data.

        Returns
        -------
        Tensor ``[2 layers, kv_heads, count, head_dim]``
            Keys, then values of each layer.
        """
        return self._slabs[slab][0].narrow(3, first, count).flatten(0, 1)

    def read(self, group: int, slot: np.ndarray) -> StoredTokens:
        """Copy the tokens in `slot` of one group, as they are stored."""
        slab, heads = self.layout.slab_of_group(group)
        index = to_device(slot.astype(np.int64), self.device)
        parts = [part[:, :, heads].index_select(3, index) for part in self._slabs[slab]]
        return StoredTokens(parts[0].view(self.codec.storage), *parts[1:])

    def read_tokens(self, token: np.ndarray) -> Tensor:
        """Copy tokens that every group holds, ``[layers, 2, kv_heads, tokens, head_dim]``."""
        slots = self.slots.of[:, token]
        assert (slots >= 0).all(), "a token was asked for after it had moved"
        parts = [self.read(group, slot).data for group, slot in enumerate(slots)]
        if self.layout.grouping == "head":
            heads = self.layout.kv_heads
            firsts = range(0, self.layout.groups, heads)
            parts = [torch.cat(parts[first : first + heads], dim=2) for first in firsts]
        return torch.cat(parts)

    def write(self, group: int, slot: np.ndarray, block: StoredTokens) -> None:
        """Put tokens, as they are stored, into slots of one group."""
        slab, heads = self.layout.slab_of_group(group)
        index = to_device(slot.astype(np.int64), self.device)
        for part, new in zip(self._slabs[slab], block.parts(), strict=True):
            part[:, :, heads].index_copy_(3, index, new.view(part.dtype))

    def shrink(self) -> bool:
        """Give memory back if half of it is unused; True if tokens have new slots."""
        roomy = [
            self._capacity[b] > 4 * self.page_tokens and needed < _SHRINK_BELOW * self._capacity[b]
            for b, needed in enumerate(self.slots.used.reshape(self.layout.slabs, -1).max(axis=1))
        ]
        if not all(roomy):
            return False
        old = self.slots.compact()
        for slab in range(self.layout.slabs):
            kept = self._slabs[slab]
            needed = int(self.slots.used.reshape(self.layout.slabs, -1)[slab].max())
            self._capacity[slab] = self._pages(needed)
            self._slabs[slab] = self._empty(slab)
            for group in range(self.layout.groups):
                where, heads = self.layout.slab_of_group(group)
                if where != slab:
                    continue
                index = to_device(old[group], self.device)
                for part, source in zip(self._slabs[slab], kept, strict=True):
                    part[:, :, heads, : len(index)] = source[:, :, heads].index_select(3, index)
        return True

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens

    def _empty(self, slab: int) -> list[Tensor]:
        g = self.layout
        shape = (g.slab_layers, 2, g.kv_heads, self._capacity[slab], g.head_dim)
        self._views.clear()
        # Zeros: a slot that is masked still meets the values' product, as 0 x slot.
        options: dict[str, Any] = {"device": self.device, "pin_memory": self._pinned}
        parts = [torch.zeros(shape, dtype=_addressable(self.codec.storage), **options)]
        if self.codec.scaled:
            parts.append(torch.zeros((*shape[:-1], 1), dtype=torch.float32, **options))
        return parts

    def _grow(self, slab: int, tokens: int) -> None:
        wanted = self._pages(tokens)
        if wanted <= self._capacity[slab]:
            return
        before, self._capacity[slab] = self._slabs[slab], wanted
        self._slabs[slab] = self._empty(slab)
        for new, old in zip(self._slabs[slab], before, strict=False):
            new[:, :, :, : old.shape[3]] = old


def make_pools(layout: Layout, quantised: Sequence[Codec], page_tokens: int) -> dict[Place, Pool]:
    """An empty pool for every place that a token can be held in.

    Parameters
    ----------
    layout : Layout
    quantised : sequence of Codec
        Formats of the places that hold quantised tokens, by rung; without a second there are no
        places for coarse ones.
    page_tokens : int
    """
    host, on_gpu = torch.device("cpu"), layout.device.type == "cuda"
    codecs = (Plain(layout.dtype), *quantised)
    return {
        place: Pool(
            layout,
            codecs[place.rung],
            host if place.on_host else layout.device,
            page_tokens=page_tokens,
            pinned=place.on_host and on_gpu,
        )
        for place in Place
        if place is not Place.LOST and place.rung < len(codecs)
    }
