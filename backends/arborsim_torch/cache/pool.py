"""A pool: the keys and values of the tokens of one tier, in slots that can be freed one by one.

Tensors grow by whole pages and shrink once half of their slots are free, which moves the tokens
that remain together: evicting gives memory back to the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.places import Place
from arborsim_torch.cache.slots import Slots
from arborsim_torch.tiers.codec import Codec, Plain
from arborsim_torch.upload import uploaded

_GROWTH = 1.25
_SHRINK_BELOW = 0.5  # share of slots in use


@dataclass(frozen=True)
class Block:
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
        The number of slots of a bank is a multiple of this.
    pinned : bool
        Page-locked host memory.

    Attributes
    ----------
    slots : Slots
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
        self.slots = Slots(layout.groups)
        self.page_tokens = page_tokens
        self._pinned = pinned
        self._banks: list[list[Tensor]] = [[] for _ in range(layout.banks)]
        self._capacity = [0] * layout.banks
        self._views: dict[int, list[Tensor]] = {}  # by layer

    @property
    def bytes_per_cell(self) -> int:
        """Bytes of one token in one group."""
        vectors = self.layout.elements_per_group // self.layout.head_dim
        return vectors * self.codec.bytes_per_token(self.layout.head_dim)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens held."""
        return int(self.slots.used.sum()) * self.bytes_per_cell

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(part.nbytes for bank in self._banks for part in bank)

    def capacity(self, bank: int = 0) -> int:
        """Slots of a bank."""
        return self._capacity[bank]

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens in every group at once."""
        for bank in range(self.layout.banks):
            self._grow(bank, tokens)

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
        """Give slots to cells (group, token) and make room for them."""
        slot = self.slots.take(group, token)
        self._make_room()
        return slot

    def _make_room(self) -> None:
        per_bank = self.slots.high.reshape(self.layout.banks, -1).max(axis=1)
        for bank, needed in enumerate(per_bank.tolist()):
            if needed > self._capacity[bank]:
                self._grow(bank, max(needed, int(_GROWTH * self._capacity[bank])))

    def give_back(self, group: np.ndarray, token: np.ndarray) -> None:
        """Free the slots of cells."""
        self.slots.give_back(group, token)

    def bank(self, layer: int) -> list[Tensor]:
        """Data ``[2, kv_heads, capacity, head_dim]`` (and scales) of a layer: views."""
        known = self._views.get(layer)
        if known is None:
            bank, index = self.layout.bank_of_layer(layer)
            known = self._views[layer] = [part[index] for part in self._banks[bank]]
        return known

    def span(self, bank: int, first: int, count: int) -> Tensor:
        """Slots that follow one another, of every layer of a bank: a view of the data.

        Returns
        -------
        Tensor ``[2 layers, kv_heads, count, head_dim]``
            Keys, then values of each layer.
        """
        return self._banks[bank][0].narrow(3, first, count).flatten(0, 1)

    def read(self, group: int, slot: np.ndarray) -> Block:
        """Copy the tokens in `slot` of one group, as they are stored."""
        bank, heads = self.layout.bank_of_group(group)
        index = uploaded(slot.astype(np.int64), self.device)
        parts = [part[:, :, heads].index_select(3, index) for part in self._banks[bank]]
        return Block(parts[0].view(self.codec.storage), *parts[1:])

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

    def write(self, group: int, slot: np.ndarray, block: Block) -> None:
        """Put tokens, as they are stored, into slots of one group."""
        bank, heads = self.layout.bank_of_group(group)
        index = uploaded(slot.astype(np.int64), self.device)
        for part, new in zip(self._banks[bank], block.parts(), strict=True):
            part[:, :, heads].index_copy_(3, index, new.view(part.dtype))

    def shrink(self) -> bool:
        """Give memory back if half of it is unused; True if tokens have new slots."""
        roomy = [
            self._capacity[b] > 4 * self.page_tokens and needed < _SHRINK_BELOW * self._capacity[b]
            for b, needed in enumerate(self.slots.used.reshape(self.layout.banks, -1).max(axis=1))
        ]
        if not all(roomy):
            return False
        old = self.slots.compact()
        for bank in range(self.layout.banks):
            kept = self._banks[bank]
            needed = int(self.slots.used.reshape(self.layout.banks, -1)[bank].max())
            self._capacity[bank] = self._pages(needed)
            self._banks[bank] = self._empty(bank)
            for group in range(self.layout.groups):
                where, heads = self.layout.bank_of_group(group)
                if where != bank:
                    continue
                index = uploaded(old[group], self.device)
                for part, source in zip(self._banks[bank], kept, strict=True):
                    part[:, :, heads, : len(index)] = source[:, :, heads].index_select(3, index)
        return True

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens

    def _empty(self, bank: int) -> list[Tensor]:
        g = self.layout
        shape = (g.bank_layers, 2, g.kv_heads, self._capacity[bank], g.head_dim)
        self._views.clear()
        # Zeros: a slot that nobody reads still meets the values' product, as 0 x slot.
        options: dict[str, Any] = {"device": self.device, "pin_memory": self._pinned}
        parts = [torch.zeros(shape, dtype=_addressable(self.codec.storage), **options)]
        if self.codec.scaled:
            parts.append(torch.zeros((*shape[:-1], 1), dtype=torch.float32, **options))
        return parts

    def _grow(self, bank: int, tokens: int) -> None:
        wanted = self._pages(tokens)
        if wanted <= self._capacity[bank]:
            return
        before, self._capacity[bank] = self._banks[bank], wanted
        self._banks[bank] = self._empty(bank)
        for new, old in zip(self._banks[bank], before, strict=False):
            new[:, :, :, : old.shape[3]] = old


def make_pools(layout: Layout, quantised: Codec, page_tokens: int) -> dict[Place, Pool]:
    """An empty pool for every place that a token can be held in.

    Parameters
    ----------
    layout : Layout
    quantised : Codec
        Format of the places that hold quantised tokens.
    page_tokens : int
    """
    host, on_gpu = torch.device("cpu"), layout.device.type == "cuda"
    full = Plain(layout.dtype)
    return {
        place: Pool(
            layout,
            quantised if place.quantised else full,
            host if place.on_host else layout.device,
            page_tokens=page_tokens,
            pinned=place.on_host and on_gpu,
        )
        for place in Place
        if place is not Place.LOST
    }
