"""A pool: the keys and values of the tokens of one tier, in slots that can be freed one by one.

Tensors grow by whole pages and shrink once much of them is free, which moves the tokens that remain
together: evicting gives memory back to the allocator.

With plans per KV head, the heads of a layer lie one after the other in its slab, each with slots of
its own number.  As long as these are about equal, heads get the same.  Else the slab is *ragged*:
it takes what its heads hold, and each head is read by an index of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.slots import SlotTable
from arborsim_torch.kernels.piece import Piece
from arborsim_torch.tiers.codec import Codec, Packed
from arborsim_torch.tiers.copies import to_device

#: By how much a full tensor grows, and the share of slots in use below which tensors shrink: of one
#: group, and of several, whose numbers differ
_GROWTH, _SHRINK_BELOW = 1.25, 0.5
_GROWTH_OF_GROUPS, _SHRINK_GROUPS_BELOW = 1.125, 0.85
#: The same if it is known what is needed soon: it will not grow again.
_SHRINK_KEPT_BELOW = 0.95
#: Heads with slots of their own must save this much: reading a ragged slab takes an index.
_RAGGED_SAVES = 0.1


@dataclass(frozen=True)
class StoredTokens:
    """Tokens as a pool stores them."""

    data: Tensor  #: ``[layers, 2, kv_heads, tokens, head_dim]``
    scale: Tensor | None = None  #: float32 ``[layers, 2, kv_heads, tokens, 1]``

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def parts(self) -> list[Tensor]:
        return [self.data] if self.scale is None else [self.data, self.scale]


def addressable(dtype: torch.dtype) -> torch.dtype:
    """A type of the same size whose tensors PyTorch can index on every device."""
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype


class Pool:
    """Slots for tokens on one device in one format; the host's are in a `HostPool`.

    The number of slots of a group is a multiple of `page_tokens`.  `allocations` says how often
    tensors have been allocated: views of them are valid until the next time.
    """

    def __init__(
        self, layout: Layout, codec: Codec, device: torch.device, *, page_tokens: int = 16
    ) -> None:
        self.layout, self.codec, self.device = layout, codec, device
        self._scales = codec.scaled  # lie next to the data
        self.slots = SlotTable(layout.groups)
        self.page_tokens = page_tokens
        self.allocations = 0
        self._kept = np.zeros(layout.groups, dtype=np.int64)  # slots that tensors have at least
        self._capacity = np.zeros(layout.groups, dtype=np.int64)
        #: Where each group begins in the `rows` of its layers; int64 ``[groups]``
        self.first_row = np.zeros(layout.groups, dtype=np.int64)
        # Data (and scales) of each slab, [layers, 2, slots of all heads, ...], and, if it is not
        # ragged, the same as [layers, 2, kv_heads, capacity, ...]
        self._slabs: list[list[Tensor]] = [[] for _ in range(layout.slabs)]
        self._tables: list[list[Tensor] | None] = [[] for _ in range(layout.slabs)]
        self._slab_bytes = [0] * layout.slabs
        self._bytes = self._room = self._kept_room = 0  # of all: bytes, slots, and slots kept
        self._views: dict[int, list[Tensor]] = {}  # by layer
        self._pieces: dict[int, Piece] = {}  # by layer

    @property
    def addresses(self) -> tuple[int, ...]:
        """Something else whenever its tensors have other addresses."""
        return (self.allocations,)

    @cached_property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in one group."""
        head_dim = self.layout.head_dim
        pairs = self.layout.elements_per_group // (2 * head_dim)
        return pairs * self.codec.bytes_per_token(head_dim)

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens held."""
        return self.slots.total * self.bytes_per_slot

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the tensors."""
        return self._bytes

    def capacity(self, slab: int = 0) -> int:
        """Slots of a slab's group, or of its longest head."""
        return int(self._capacity[self._groups_of(slab)].max())

    def ragged(self, slab: int) -> bool:
        """Whether the heads of a slab have different numbers of slots."""
        return self._tables[slab] is None

    def keep(self, tokens: int) -> None:
        """Tensors that are made have `tokens` slots of every group, or more, and keep them.

        They are known to be needed soon.  Nothing is allocated before the first token comes.
        """
        self._kept[:] = self._pages(np.array(tokens))
        self._kept_room = int(self._kept.sum())

    @property
    def kept_bytes(self) -> int:
        """Bytes of tensors with the slots of `keep`."""
        return self._kept_room * self.bytes_per_slot

    def reserve(self, tokens: int) -> None:
        """Allocate slots for `tokens` tokens in every group at once."""
        for slab in range(self.layout.slabs):
            own = self._groups_of(slab)
            self._grow(slab, np.maximum(self._capacity[own], self._pages(np.array(tokens))))

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

    def grow(self, tokens: int) -> None:
        """Know of tokens up to, not including, number `tokens`."""
        self.slots.grow(tokens)

    def unused_slots(self) -> np.ndarray:
        """A slot of every group that no token has, int64 ``[groups]``: the next one gets it."""
        slot = self.slots.next
        self._fit(np.maximum(self.slots.high, slot + 1))
        return slot

    def _make_room(self) -> None:
        self._fit(self.slots.high)

    def _fit(self, high: np.ndarray) -> None:
        """Have memory for the slots below `high`, int64 ``[groups]``."""
        over = high > self._capacity
        if not over.any():
            return
        growth = _GROWTH if self.layout.groups == 1 else _GROWTH_OF_GROUPS
        # The tensor is made anew: heads that are not full get as much room as those that are.
        room = np.where(over, self._capacity, high)
        wanted = np.maximum(high, (growth * room).astype(np.int64))
        if self._kept.any():
            wanted = np.maximum(wanted, self._kept)
            # More is needed than was known: what it takes once, it will again.
            self._kept = np.where(over, np.maximum(self._kept, self._pages(wanted)), self._kept)
            self._kept_room = int(self._kept.sum())
        for slab in range(self.layout.slabs):
            own = self._groups_of(slab)
            if over[own].any():
                self._grow(slab, self._pages(wanted[own]))

    def give_back(self, group: np.ndarray, token: np.ndarray) -> None:
        """Free the slots of pairs."""
        self.slots.give_back(group, token)

    def give_back_shared(self, token: np.ndarray) -> None:
        """The same where there is one group."""
        self.slots.give_back_shared(token)

    def has_slab(self, layer: int) -> bool:
        """Whether a layer has tensors; its first slots make them."""
        return len(self._slabs[self.layout.slab_of_layer(layer)[0]]) > 0

    def slab(self, layer: int) -> list[Tensor]:
        """Views ``[2, kv_heads, capacity, head_dim]`` (and scales) of a layer not ragged."""
        known = self._views.get(layer)
        if known is None:
            slab, index = self.layout.slab_of_layer(layer)
            table = self._tables[slab]
            assert table is not None, "a ragged slab has no common capacity"
            known = self._views[layer] = [part[index] for part in table]
        return known

    def rows(self, layer: int) -> Tensor:
        """A layer's slots, head after head, ``[2, slots of all heads, head_dim]``: a view."""
        slab, index = self.layout.slab_of_layer(layer)
        return self._slabs[slab][0][index]

    def piece(self, layer: int) -> Piece:
        """A layer's slots, to be read in place; of no room yet.

        Of a ragged slab each head has the rows of all: an index begins at the head's `first_row`.
        """
        known = self._pieces.get(layer)
        if known is None:
            slab, index = self.layout.slab_of_layer(layer)
            if self.ragged(slab):
                heads = (-1, self.layout.kv_heads, -1, -1)
                parts = [part[index][:, None].expand(heads) for part in self._slabs[slab]]
            else:
                parts = self.slab(layer)
            known = self._pieces[layer] = self.as_piece(parts)
        return known

    def bring_up_to_date(self) -> None:
        """Let `piece` make nothing anew until tokens come or go."""

    def as_piece(self, parts: list[Tensor]) -> Piece:
        """Data ``[records, kv_heads, n, width]``, and scales, as a piece without a room."""
        codec, (data, *scales) = self.codec, parts
        data = data.view(codec.storage)
        if isinstance(codec, Packed) and codec.scaled:
            codes, values = data[0].tensor_split([codec.key_bytes], dim=-1)
            if not scales:  # they lie apart (`arborsim_torch.cache.spans`)
                return Piece(codes, values, codec, None, None, None, 0)
            spans = scales[0][0]  # of each token, and its number in its group
            number = spans[..., -2:].contiguous().view(torch.int16)[..., 0]
            each = torch.arange(number.shape[-1], dtype=torch.int32, device=number.device)
            member = each * codec.scale_tokens + number
            return Piece(codes, values, codec, spans[..., :-2], None, None, 0, member=member)
        if len(data) == 1:  # scales alone
            return Piece(data[0], data[0], codec, None, None, None, 0)
        scale = [None, None] if not scales else [scales[0][0, ..., 0], scales[0][1, ..., 0]]
        return Piece(data[0], data[1], codec, scale[0], scale[1], None, 0)

    def gather(self, layer: int, heads: slice, slots: Tensor) -> list[Tensor]:
        """Copy tokens of some heads of a layer as they are stored, ``[2, heads, m, ...]``.

        The heads are one group, or all of them.
        """
        slab, index = self.layout.slab_of_layer(layer)
        if self.ragged(slab):
            group = self.layout.groups_of_layer(layer).start + heads.start
            return [part[index].index_select(2, slots) for part in self._strip(group)]
        return [part[:, heads].index_select(2, slots) for part in self.slab(layer)]

    def span(self, slab: int, first: int, count: int) -> Tensor:
        """Slots that follow one another, of every layer of a slab that is not ragged: a view.

        Returns ``[2 layers, kv_heads, count, head_dim]``: keys, then values of each layer.
        """
        table = self._tables[slab]
        assert table is not None, "a ragged slab has no common capacity"
        return table[0].narrow(3, first, count).flatten(0, 1)

    def _groups_of(self, slab: int) -> slice:
        """The groups that lie in a slab."""
        size = self.layout.groups // self.layout.slabs
        return slice(slab * size, (slab + 1) * size)

    def _strip(self, group: int) -> list[Tensor]:
        """Data (and scales) of one group, ``[layers, 2, heads, capacity, ...]``: views."""
        slab, heads = self.layout.slab_of_group(group)
        table = self._tables[slab]
        if table is not None:
            return [part[:, :, heads] for part in table]
        first, count = int(self.first_row[group]), int(self._capacity[group])
        return [part.narrow(2, first, count).unsqueeze(2) for part in self._slabs[slab]]

    def read(self, group: int, slot: np.ndarray) -> StoredTokens:
        """Copy the tokens in `slot` of one group, as they are stored."""
        index = to_device(slot.astype(np.int64), self.device)
        parts = [part.index_select(3, index) for part in self._strip(group)]
        return StoredTokens(parts[0].view(self.codec.storage), *parts[1:])

    def read_rows(self, group: int, slot: np.ndarray, rows: list[Tensor]) -> None:
        """Copy the tokens in `slot` of one group to `rows`; no scales that tokens share.

        `rows` are the parts, ``[tokens, layers, records, heads, ...]``.
        """
        index = to_device(slot.astype(np.int64), self.device)
        for part, row in zip(self._strip(group), rows, strict=True):
            torch.index_select(part.movedim(3, 0), 0, index, out=row)

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

    def read_keys(self, layer: int, head: int, token: np.ndarray) -> Tensor:
        """Copy unquantized keys of tokens that a layer's KV head holds, ``[tokens, head_dim]``."""
        group = self.layout.groups_of_layer(layer).start
        group += head if self.layout.grouping == "head" else 0
        slots = self.slots.of[group, token].astype(np.int64)
        assert (slots >= 0).all(), "a token was asked for after it had moved"
        slab, index = self.layout.slab_of_layer(layer)
        ragged = self.ragged(slab)
        keys = self._strip(group)[0][index, 0, 0] if ragged else self.slab(layer)[0][0, head]
        return keys.index_select(0, to_device(slots, self.device))

    def write(self, group: int, slot: np.ndarray, block: StoredTokens) -> None:
        """Put tokens, as they are stored, into slots of one group."""
        index = to_device(slot.astype(np.int64), self.device)
        for part, new in zip(self._strip(group), block.parts(), strict=True):
            part.index_copy_(3, index, new.view(part.dtype))

    def shrink(self) -> bool:
        """Give memory back if much of it is unused; True if tokens have new slots."""
        capacity, kept = self._room, self._kept_room
        enough = _SHRINK_BELOW if self.layout.groups == 1 else _SHRINK_GROUPS_BELOW
        enough = max(enough, _SHRINK_KEPT_BELOW * bool(kept))
        spare = self.page_tokens * self.layout.groups  # or a growth by pages would be undone
        if max(self.slots.total, kept) + spare >= enough * capacity:
            return False  # what is asked after every eviction: rounding only makes it more
        if kept and (self.slots.used > self._kept).any():
            return False  # tokens are on their way to DDR: once they have left, it is worth it
        slabs = range(self.layout.slabs)
        needed = self._pages(np.maximum(self.slots.used, self._kept))
        wanted = [self._shared_out(needed[self._groups_of(slab)]) for slab in slabs]
        roomy = np.concatenate(wanted).sum() + spare < enough * capacity
        if not roomy or self._capacity.max() <= 4 * self.page_tokens:
            return False
        old = self._renumber()
        for slab in slabs:
            self._resize(slab, wanted[slab], old)
        return True

    def _renumber(self) -> list[np.ndarray]:
        return self.slots.compact()

    def _pages(self, tokens: np.ndarray) -> np.ndarray:
        return -(-tokens // self.page_tokens) * self.page_tokens

    def _shared_out(self, wanted: np.ndarray) -> np.ndarray:
        """The capacities that the groups of a slab get who want these, int64 ``[groups]``."""
        most = int(wanted.max())
        if wanted.sum() > (1 - _RAGGED_SAVES) * most * len(wanted):
            return np.full(len(wanted), most)
        return wanted

    def _grow(self, slab: int, wanted: np.ndarray) -> None:
        wanted = self._shared_out(wanted)
        if (wanted > self._capacity[self._groups_of(slab)]).any():
            self._resize(slab, wanted, None)

    def _resize(self, slab: int, capacity: np.ndarray, order: list[np.ndarray] | None) -> None:
        """Give the groups of a slab new capacities.

        Tokens keep their slots, or get new ones: `order` has, of every group, the old slot of each.
        """
        g, own = self.layout, self._groups_of(slab)
        groups = range(g.groups)[own]
        before = [self._strip(group) for group in groups]
        self._capacity[own], self.first_row[own] = capacity, np.cumsum(capacity) - capacity
        rows = int(np.broadcast_to(capacity, g.kv_heads).sum())
        records, width = self.codec.record(g.head_dim)
        shape = (g.slab_layers, records, rows, width)
        # Zeros: a slot that is masked still meets the values' product, as 0 x slot.
        parts = [torch.zeros(shape, dtype=addressable(self.codec.storage), device=self.device)]
        if self._scales:
            parts.append(torch.zeros((*shape[:-1], 1), dtype=torch.float32, device=self.device))
        self._slabs[slab], self._slab_bytes[slab] = parts, sum(part.nbytes for part in parts)
        self._bytes, self._room = sum(self._slab_bytes), int(self._capacity.sum())
        even = (capacity == capacity[0]).all()
        heads = (g.kv_heads, int(capacity[0]))
        self._tables[slab] = [part.unflatten(2, heads) for part in parts] if even else None
        self._views.clear()
        self._pieces.clear()
        self.allocations += 1
        for group, old in zip(groups, before, strict=True):
            for new, source in zip(self._strip(group), old, strict=False):
                if order is None:
                    count = min(new.shape[3], source.shape[3])  # beyond `high` there is nothing
                    new[:, :, :, :count] = source[:, :, :, :count]
                else:
                    index = to_device(order[group], self.device)
                    # Straight to where they stay: the device holds nothing a third time.
                    torch.index_select(source, 3, index, out=new[:, :, :, : len(index)])
