"""Scales that tokens share: one slot for each group of tokens.

Keys in groups along tokens have one scale per channel and group (`arborsim.core.formats`).  It is
kept once, in a pool of its own, for as long as a token of the group is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from arborsim.core.tree import GrowingTable
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.pool import Pool, StoredTokens
from arborsim_torch.cache.slots import SlotTable
from arborsim_torch.tiers.codec import Codec, Packed, Plain
from arborsim_torch.tiers.copies import to_device


@dataclass(frozen=True)
class _Bytes:
    """A codec of nothing but bytes: what a `Spans` pool holds."""

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


class Spans:
    """Scales of keys in groups of tokens, one slot per group of tokens, held for its first token.

    A group's slot is free when the last of its tokens has left.
    """

    def __init__(
        self, layout: Layout, codec: Codec, device: torch.device, slots: SlotTable
    ) -> None:
        assert isinstance(codec, Packed)
        self._together = codec.together
        self._slots = slots  # of the tokens
        # By cache group, until tokens move: see `_by_slot`, and the same on the device.
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._on_device: dict[int, tuple[Tensor, Tensor]] = {}
        self._members: dict[int, Tensor] = {}  # by slab
        self._current: set[int] = set()  # slabs whose members are up to date
        self._pool = Pool(layout, _Bytes(codec.span_bytes), device, page_tokens=1)
        self._first = GrowingTable(layout.groups, np.int32)  # of each token's group; -1: none
        self._number = GrowingTable(layout.groups, np.int16)  # of each token in its group

    @property
    def capacity_bytes(self) -> int:
        return self._pool.capacity_bytes

    @property
    def allocations(self) -> int:
        return self._pool.allocations

    @property
    def kept_bytes(self) -> int:
        return self._pool.kept_bytes

    def keep(self, tokens: int) -> None:
        """See `Pool.keep`, for the spans of `tokens` tokens."""
        self._pool.keep(-(-tokens // self._together))

    def grow(self, tokens: int) -> None:
        self._pool.slots.grow(tokens)
        more = tokens - len(self._first)
        if more > 0:
            self._first.extend(more, -1)
            self._number.extend(more, 0)

    def enter(self, group: np.ndarray, token: np.ndarray) -> None:
        """Tokens of one cache group come in, group of tokens by group of tokens."""
        assert not len(token) % self._together, "part of a group of tokens cannot be quantised"
        first = token[:: self._together]
        self._first.values[group, token] = np.repeat(first, self._together)
        self._number.values[group, token] = np.arange(len(token)) % self._together
        self._pool.take(group[:: self._together], first)
        self._moved()

    def leave(self, group: np.ndarray, token: np.ndarray) -> None:
        for one in np.unique(group).tolist():
            row, gone = self._first.values[one], token[group == one]
            firsts = np.unique(row[gone])
            row[gone] = -1
            empty = firsts[~np.isin(firsts, row)].astype(np.int64)
            self._pool.give_back(np.full(len(empty), one), empty)
        self._moved()

    def shrink(self) -> None:
        """Tokens are about to get new slots."""
        self._pool.shrink()
        self._moved()

    def _moved(self) -> None:
        self._known.clear()
        self._on_device.clear()
        self._current.clear()

    def piece(self, layer: int, rows: int, first_row: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """`Piece.key_scale` and `Piece.member` of a layer whose tokens stand in `rows` rows.

        If heads share these, `first_row` says where those of each begin, int64 ``[kv_heads]``.
        """
        layout = self._pool.layout
        slab, groups = layout.slab_of_layer(layer)[0], layout.groups_of_layer(layer)
        if slab not in self._current:
            count = groups.stop - groups.start
            members = np.zeros((count if first_row is None else 1, rows), dtype=np.int32)
            apart = self._pool.ragged(slab)
            for i, group in enumerate(range(groups.start, groups.stop)):
                slot_of = self._slots.of[group]
                held = np.flatnonzero(slot_of >= 0)
                at = self._pool.slots.of[group, self._first.values[group, held]].astype(np.int64)
                at += self._pool.first_row[group] if apart else 0
                number = at * self._together + self._number.values[group, held]
                if first_row is None:
                    members[i, slot_of[held]] = number
                else:
                    members[0, slot_of[held] + first_row[i]] = number
            known = self._members.get(slab)
            if known is None or known.shape != members.shape:
                known = self._members[slab] = torch.empty(
                    members.shape, dtype=torch.int32, device=self._pool.device
                )
            known.copy_(to_device(members, self._pool.device))
            self._current.add(slab)
        member = self._members[slab]
        return self._pool.piece(layer).keys, member[0] if len(member) == 1 else member

    def gather(self, layer: int, heads: slice, group: int, slots: Tensor) -> Tensor:
        """The span of the token in each slot of a layer's group: see `Packed.decode`."""
        known = self._on_device.get(group)
        if known is None:
            at, number = (to_device(each, self._pool.device) for each in self._by_slot(group))
            known = self._on_device[group] = at, number
        at, number = (each.index_select(0, slots) for each in known)
        (found,) = self._pool.gather(layer, heads, at)
        return self._numbered(found, number)

    def read(self, group: int, slot: np.ndarray) -> Tensor:
        """The same, of all layers of a group."""
        at, number = (each[slot] for each in self._by_slot(group))
        spans = self._pool.read(group, at).data
        return self._numbered(spans, to_device(number, self._pool.device))

    def write(self, group: int, slot: np.ndarray, spans: Tensor) -> None:
        """The spans of groups whose tokens, one group after the other, are in these slots."""
        at = self._by_slot(group)[0][slot[:: self._together]]
        self._pool.write(group, at, StoredTokens(spans))

    def _by_slot(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """By slot of a token: that of its span, int64, and its number in its group, int16."""
        known = self._known.get(group)
        if known is None:
            slot_of = self._slots.of[group]
            held = np.flatnonzero(slot_of >= 0)
            token = np.zeros(int(self._slots.high[group]), dtype=np.int64)
            token[slot_of[held]] = held
            at = self._pool.slots.of[group, self._first.values[group, token]]
            known = self._known[group] = at.astype(np.int64), self._number.values[group, token]
        return known

    @staticmethod
    def _numbered(spans: Tensor, number: Tensor) -> Tensor:
        last = number[:, None].contiguous().view(torch.uint8)
        return torch.cat([spans, last.expand(*spans.shape[:-1], 2)], dim=-1)


def make_pool(layout: Layout, codec: Codec, device: torch.device, **options: Any) -> Pool:
    """A `Pool` of these options, with `Spans` if the codec shares scales among tokens."""
    pool = Pool(layout, codec, device, **options)
    if isinstance(codec, Packed) and codec.scaled:
        return pool.with_spans(Spans(layout, codec, device, pool.slots))
    return pool


def make_pools(
    layout: Layout, quantised: Sequence[Codec], page_tokens: int, by_layer: bool = False
) -> dict[Place, Pool]:
    """An empty pool for every place that a token can be held in; a `HostPool` on the host.

    Parameters
    ----------
    layout : Layout
    quantised : sequence of Codec
        Formats of the places that hold quantised tokens, by rung; without a second there are no
        places for coarse ones.
    page_tokens : int
        Of pools on the device.
    by_layer : bool
        Of tokens on the host, every layer is read by itself.
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
