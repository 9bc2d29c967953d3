"""Scales that tokens share: one slot for each group of tokens.

Keys in groups along tokens have one scale per channel and group (`arborsim.core.formats`).  It is
kept once, in a pool of its own, for as long as a token of the group is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from arborsim.core.tree import GrowingTable
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.pool import Pool, StoredTokens
from arborsim_torch.kernels.piece import Piece
from arborsim_torch.tiers.codec import Codec, Packed, Plain
from arborsim_torch.tiers.copies import to_device


@dataclass(frozen=True)
class _Bytes:
    """A codec of nothing but bytes: the format of a pool of spans."""

    width: int
    name: ClassVar[str] = "bytes"
    storage: ClassVar[torch.dtype] = torch.uint8
    scaled: ClassVar[bool] = False

    def encode(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return data

    def bytes_per_token(self, head_dim: int) -> int:
        return self.width

    def record(self, head_dim: int) -> tuple[int, int]:
        return 1, self.width


class GroupedPool(Pool):
    """A pool whose keys share scales, a *span* for each group of tokens, in a pool of their own.

    A span is held for the first token of its group, until the last of them has left.
    """

    def __init__(
        self, layout: Layout, codec: Packed, device: torch.device, *, page_tokens: int = 16
    ) -> None:
        super().__init__(layout, codec, device, page_tokens=page_tokens)
        self._scales = False
        self._together = codec.scale_tokens
        self.spans = Pool(layout, _Bytes(codec.span_bytes), device, page_tokens=1)
        # By cache group, until tokens move: see `_by_slot`, and the same on the device.
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._on_device: dict[int, tuple[Tensor, Tensor]] = {}
        self._members: dict[int, Tensor] = {}  # by slab
        self._current: set[int] = set()  # slabs whose members are up to date
        self._first = GrowingTable(layout.groups, np.int32)  # of each token's group; -1: none
        self._number = GrowingTable(layout.groups, np.int16)  # of each token in its group

    @property
    def addresses(self) -> tuple[int, ...]:
        return (*super().addresses, self.spans.allocations)

    @property
    def capacity_bytes(self) -> int:
        return super().capacity_bytes + self.spans.capacity_bytes

    def keep(self, tokens: int) -> None:
        super().keep(tokens)
        self.spans.keep(-(-tokens // self._together))

    @property
    def kept_bytes(self) -> int:
        records, width = self.codec.record(self.layout.head_dim)
        pairs = self.layout.elements_per_group // (2 * self.layout.head_dim)
        size = pairs * records * width * self.codec.storage.itemsize
        return self._kept_room * size + self.spans.kept_bytes

    def grow(self, tokens: int) -> None:
        super().grow(tokens)
        self.spans.grow(tokens)
        more = tokens - len(self._first)
        if more > 0:
            self._first.extend(more, -1)
            self._number.extend(more, 0)

    def take(self, group: np.ndarray, token: np.ndarray) -> np.ndarray:
        """See `Pool.take`; tokens come group of tokens by group of tokens."""
        assert not len(token) % self._together, "part of a group of tokens cannot be quantised"
        slot, first = super().take(group, token), token[:: self._together]
        self._first.values[group, token] = np.repeat(first, self._together)
        self._number.values[group, token] = np.arange(len(token)) % self._together
        self.spans.take(group[:: self._together], first)
        self._moved()
        return slot

    def give_back(self, group: np.ndarray, token: np.ndarray) -> None:
        super().give_back(group, token)
        for one in np.unique(group).tolist():
            row, gone = self._first.values[one], token[group == one]
            firsts = np.unique(row[gone])
            row[gone] = -1
            empty = firsts[~np.isin(firsts, row)].astype(np.int64)
            self.spans.give_back(np.full(len(empty), one), empty)
        self._moved()

    def _renumber(self) -> list[np.ndarray]:
        self.spans.shrink()
        self._moved()
        return super()._renumber()

    def _moved(self) -> None:
        self._known.clear()
        self._on_device.clear()
        self._current.clear()

    def bring_up_to_date(self) -> None:
        for slab in range(self.layout.slabs):
            self.piece(slab * self.layout.slab_layers)

    def piece(self, layer: int) -> Piece:
        known, slab = super().piece(layer), self.layout.slab_of_layer(layer)[0]
        if slab not in self._current:
            self._list_members(slab, self.layout.groups_of_layer(layer), known.keys.shape[1])
        member = self._members[slab]
        member = member[0] if len(member) == 1 else member
        return replace(known, key_scale=self.spans.piece(layer).keys, member=member)

    def _list_members(self, slab: int, groups: slice, rows: int) -> None:
        """Write `Piece.member` of the layers of a slab, whose tokens stand in `rows` rows."""
        ragged, apart = self.ragged(slab), self.spans.ragged(slab)
        members = np.zeros((1 if ragged else groups.stop - groups.start, rows), dtype=np.int32)
        for i, group in enumerate(range(groups.start, groups.stop)):
            slot_of = self.slots.of[group]
            held = np.flatnonzero(slot_of >= 0)
            at = self.spans.slots.of[group, self._first.values[group, held]].astype(np.int64)
            at += self.spans.first_row[group] if apart else 0
            number = at * self._together + self._number.values[group, held]
            if ragged:  # heads share the rows
                members[0, slot_of[held] + self.first_row[group]] = number
            else:
                members[i, slot_of[held]] = number
        known = self._members.get(slab)
        if known is None or known.shape != members.shape:
            known = torch.empty(members.shape, dtype=torch.int32, device=self.device)
            self._members[slab] = known
        known.copy_(to_device(members, self.device))
        self._current.add(slab)

    def gather(self, layer: int, heads: slice, slots: Tensor) -> list[Tensor]:
        """See `Pool.gather`; then the span of each token (`Packed.decode`)."""
        group = self.layout.groups_of_layer(layer).start + (heads.start or 0)
        known = self._on_device.get(group)
        if known is None:
            at, number = (to_device(each, self.device) for each in self._by_slot(group))
            known = self._on_device[group] = at, number
        at, number = (each.index_select(0, slots) for each in known)
        (found,) = self.spans.gather(layer, heads, at)
        return [*super().gather(layer, heads, slots), self._numbered(found, number)]

    def read(self, group: int, slot: np.ndarray) -> StoredTokens:
        at, number = (each[slot] for each in self._by_slot(group))
        spans = self.spans.read(group, at).data
        spans = self._numbered(spans, to_device(number, self.device))
        return StoredTokens(super().read(group, slot).data, spans)

    def write(self, group: int, slot: np.ndarray, block: StoredTokens) -> None:
        """See `Pool.write`; the tokens of a group follow one another."""
        assert block.scale is not None
        at = self._by_slot(group)[0][slot[:: self._together]]
        self.spans.write(group, at, StoredTokens(block.scale))
        super().write(group, slot, StoredTokens(block.data))

    def _by_slot(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """By slot of a token: that of its span, int64, and its number in its group, int16."""
        known = self._known.get(group)
        if known is None:
            slot_of = self.slots.of[group]
            held = np.flatnonzero(slot_of >= 0)
            token = np.zeros(int(self.slots.high[group]), dtype=np.int64)
            token[slot_of[held]] = held
            at = self.spans.slots.of[group, self._first.values[group, token]]
            known = self._known[group] = at.astype(np.int64), self._number.values[group, token]
        return known

    @staticmethod
    def _numbered(spans: Tensor, number: Tensor) -> Tensor:
        last = number[:, None].contiguous().view(torch.uint8)
        return torch.cat([spans, last.expand(*spans.shape[:-1], 2)], dim=-1)


def make_pool(layout: Layout, codec: Codec, device: torch.device, **options: Any) -> Pool:
    """A `Pool`, or a `GroupedPool` if the codec shares scales among tokens."""
    if isinstance(codec, Packed) and codec.scaled:
        return GroupedPool(layout, codec, device, **options)
    return Pool(layout, codec, device, **options)


def make_pools(
    layout: Layout, quantised: Sequence[Codec], page_tokens: int, by_layer: bool = False
) -> dict[Place, Pool]:
    """An empty pool for every place that a token can be held in; a `HostPool` on the host.

    `quantised` are the formats of the places that hold quantised tokens, by rung: without a second
    there are no places for coarse ones.  `page_tokens` is of pools on the device.  With `by_layer`,
    every layer of tokens on the host is read by itself.
    """
    on_gpu = layout.device.type == "cuda"
    codecs = (Plain(layout.dtype), *quantised)
    return {
        place: HostPool(layout, codecs[place.rung], pinned=on_gpu, by_layer=by_layer)
        if place.on_host
        else make_pool(layout, codecs[place.rung], layout.device, page_tokens=page_tokens)
        for place in Place
        if place is not Place.LOST and place.rung < len(codecs)
    }
