"""Reads of each pool in a decode step: tables on the device, changed where tokens move.

A `PieceTable` says which slots of one pool are read.  Its *entries* are the slots themselves where
most of them are read, with a mask; otherwise they are listed by an index.  Tokens that come or go
are written into the tensors one by one, so that these keep their memory as long as the pool keeps
its own.  `arborsim_torch.cache.reader` keeps the tables of all pools up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.forward import PlacedPiece
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.pool import Pool
from arborsim_torch.cache.prefix import SharedPrefix
from arborsim_torch.cache.slots import SlotTable
from arborsim_torch.cache.state import CacheState
from arborsim_torch.kernels.fused import choose_decode
from arborsim_torch.kernels.packages import DECODERS
from arborsim_torch.kernels.piece import Piece
from arborsim_torch.tiers.copies import to_device

_LIST_BELOW = 0.7  # of a pool's slots: if fewer are read, they are listed
_ANEW_BELOW = 0.5  # of a table's entries: if fewer are read, it is made anew
_SMALLEST_ROOM = 64
NOT_READ = -1


def padded(seqs: int) -> int:
    """The bucket of a number of sequences: the next power of two."""
    return 1 << (seqs - 1).bit_length()


def rounded(entries: int) -> int:
    """The bucket of a number of entries: eight to a doubling, so at most an eighth is padding."""
    if entries <= _SMALLEST_ROOM:
        return _SMALLEST_ROOM
    step = 1 << max(3, (entries - 1).bit_length() - 4)
    return -(-entries // step) * step


#: Types of a table's tensors, and what stands where nothing is read.
_KINDS = {"index": (torch.int32, NOT_READ), "mask": (torch.bool, 0), "position": (torch.int64, 0)}


@dataclass(frozen=True)
class Pairs:
    """(group, token) pairs and what a table has to know of them; arrays ``[m]``."""

    group: np.ndarray
    token: np.ndarray
    on_path: np.ndarray  #: bool ``[seqs, m]``

    def where(self, mask: np.ndarray) -> Pairs:
        return Pairs(self.group[mask], self.token[mask], self.on_path[:, mask])


class PieceTable:
    """The slots of one pool that are read.

    `held` gives the pairs that are read of this pool, and their entries, int64 ``[m]``.  `count`
    are the entries that are read, int64 ``[groups]``; `version` changes whenever any entry does.
    """

    def __init__(
        self, cache: CacheState, place: Place, held: Callable[[], tuple[Pairs, np.ndarray]]
    ) -> None:
        self._cache, self.place, self._held = cache, place, held
        self._layout: Layout = cache.layout
        self.pool: Pool = cache.pools[place]
        self.count = np.zeros(self._layout.groups, dtype=np.int64)
        self.version = 0
        self._seqs = 1
        self._listed: SlotTable | None = None  # entries of tokens, if they are not the slots
        # By name and, of masks, bucket of sequences; and which allocation each was.
        self._tensors: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._current: set[str] = set()  # those of the tensors that are kept up to date
        self._allocations = -1
        self._allocated = 0  # tensors
        layout = self._layout
        kernel = choose_decode(layout.device, layout.dtype, layout.head_dim).name
        alike = kernel in DECODERS and place is Place.HBM and layout.groups == 1
        self._prefix = SharedPrefix(layout.device, kernel) if alike else None
        self._roomy = -1, 0  # allocations, and slots of the longest group then

    @property
    def high(self) -> np.ndarray:
        """Int64 ``[groups]``: entries below this are looked at."""
        return self.pool.slots.high if self._listed is None else self._listed.high

    @property
    def sparse(self) -> bool:
        """Whether so little of what is looked at is read that the table should be made anew."""
        return bool(self.count.sum() < _ANEW_BELOW * self.high.sum())

    @property
    def moved(self) -> bool:
        """Whether the pool has other tensors than when the table was made, and it must be too."""
        same = self._allocations == self.pool.allocations
        return not same and (self._listed is not None or self._ragged)

    @property
    def _ragged(self) -> bool:
        return any(self.pool.ragged(slab) for slab in range(self._layout.slabs))

    def reset(self, pairs: Pairs) -> np.ndarray:
        """Read these and nothing else; their entries, int64 ``[m]``."""
        self._allocations = self.pool.allocations
        self._seqs = len(pairs.on_path)
        self.count = np.bincount(pairs.group, minlength=self._layout.groups)
        few = len(pairs.group) < _LIST_BELOW * self.pool.slots.high.sum()
        few |= self.place.on_host or self._ragged
        self._listed = SlotTable(self._layout.groups) if few else None
        self._current.clear()
        self.version += 1
        entry = self._enter(pairs)
        if self._prefix is not None and self._listed is None:
            self._prefix.reset(entry, pairs.on_path, len(self._cache.leaves))
        return entry

    def _enter(self, pairs: Pairs) -> np.ndarray:
        if self._listed is None:
            return np.asarray(self.pool.slots.of[pairs.group, pairs.token], dtype=np.int64)
        self._listed.grow(self._cache.num_tokens)
        return self._listed.take(pairs.group, pairs.token)

    def change(self, gone: Pairs, left: np.ndarray, come: Pairs) -> np.ndarray:
        """Stop to read `gone`, whose entries are `left`; then read `come`, whose entries return."""
        if self._listed is not None:
            self._listed.give_back(gone.group, gone.token)
        entry = self._enter(come)
        groups = self._layout.groups
        self.count += np.bincount(come.group, minlength=groups)
        self.count -= np.bincount(gone.group, minlength=groups)
        self.version += 1
        if self._prefix is not None and self._listed is None:
            self._prefix.change(left, entry, come.on_path)
        if self._current and self._needed() > self._room():
            self._current.clear()
        if not self._current:
            return entry
        if self._listed is None and "mask" not in self._current:
            gone, left = gone.where(np.zeros(0, np.int64)), left[:0]  # nothing tells them anyway
        # What is left and taken again is written once.
        width = self._room()
        again = np.isin(gone.group * width + left, come.group * width + entry)
        group = np.concatenate([gone.group[~again], come.group])
        written = np.concatenate([left[~again], entry])
        self._write(group, written, len(group) - len(entry), come)
        return entry

    def _write(self, group: np.ndarray, entry: np.ndarray, emptied: int, come: Pairs) -> None:
        """Write entries, the first `emptied` of which are not read any more."""
        rows = [group[None], entry[None]]
        for name, (_, empty) in _KINDS.items():
            if name in self._current:
                own = np.atleast_2d(self._column(name, come))
                unread = np.full((len(own), emptied), empty)
                rows.append(np.concatenate([unread, own], axis=1))
        table = np.concatenate(rows).astype(np.int64)
        there = to_device(table, self._layout.device)
        row = 2
        for name in _KINDS:
            if name not in self._current:
                continue
            tensor = self._tensors[self._bucket(name)][0]
            if name == "mask":
                tensor[: self._seqs, there[0], there[1]] = there[row : row + self._seqs] != 0
                row += self._seqs
            else:
                tensor[there[0], there[1]] = there[row].to(tensor.dtype)
                row += 1

    def _column(self, name: str, pairs: Pairs) -> np.ndarray:
        """A tensor's entries of pairs."""
        if name == "mask":
            return pairs.on_path
        return self._slots(pairs) if name == "index" else self._cache.position.values[pairs.token]

    def _slots(self, pairs: Pairs) -> np.ndarray:
        """The index's entries of pairs, int64 ``[m]``."""
        slot = np.asarray(self.pool.slots.of[pairs.group, pairs.token], dtype=np.int64)
        if self._ragged:
            per_slab = self._layout.groups // self._layout.slabs
            ragged = np.repeat([self.pool.ragged(s) for s in range(self._layout.slabs)], per_slab)
            slot += np.where(ragged, self.pool.first_row, 0)[pairs.group]
        return slot

    def _room(self) -> int:
        """Entries that every current tensor has room for."""
        found = (self._tensors[self._bucket(name)][0] for name in self._current)
        return min((tensor.shape[-1] for tensor in found), default=0)

    def _bucket(self, name: str) -> tuple[str, int]:
        return name, padded(self._seqs) if name == "mask" else 0

    def _needed(self) -> int:
        """Entries that tensors should have room for: as many as the pool has slots.

        The host's memory grows by large chunks: of its slots, those that are read, rounded up.
        """
        if self.place.on_host:
            return rounded(int(self.high.max()))
        if self._roomy[0] != self.pool.allocations:
            slabs = range(self._layout.slabs)
            most = max(self.pool.capacity(slab) for slab in slabs)
            self._roomy = self.pool.allocations, most
        return max(int(self.high.max()), self._roomy[1])

    def tensor(self, name: str) -> Tensor:
        """``index`` or ``position``, ``[groups, room]``, or ``mask``, ``[seqs, groups, room]``.

        Its memory is the same as at the last call, unless the pool has grown since, or a mask is
        for another bucket of sequences.
        """
        if name not in self._current:
            self._make(name)
        made = self._tensors[self._bucket(name)][0]
        return made[: self._seqs] if name == "mask" else made

    def _make(self, name: str) -> None:
        dtype, empty = _KINDS[name]
        device = self._layout.device
        room = self._needed()
        bucket = self._bucket(name)
        known, _ = self._tensors.get(bucket, (None, 0))
        if known is None or known.shape[-1] < room:
            lead = (bucket[1],) if name == "mask" else ()
            known = torch.empty((*lead, self._layout.groups, room), dtype=dtype, device=device)
            self._allocated += 1
            self._tensors[bucket] = known, self._allocated
        pairs, entry = self._held()
        lead = (self._seqs,) if name == "mask" else ()
        table = np.full((*lead, *known.shape[-2:]), empty, dtype=np.int64)
        table[..., pairs.group, entry] = self._column(name, pairs)
        if name == "mask":
            known[: self._seqs] = to_device(table.astype(np.bool_), device)
        else:
            known.copy_(to_device(table, device))
        self._current.add(name)

    def reads(self, layer: int) -> bool:
        """Whether anything of a layer is read."""
        return bool(self.count[self._layout.groups_of_layer(layer)].any())

    def full(self, groups: slice) -> bool:
        """Whether all of a layer's entries, as many in every group, are read by one sequence."""
        high = self.high[groups]
        return self._seqs == 1 and bool(((self.count[groups] == high) & (high == high[0])).all())

    @property
    def in_order(self) -> bool:
        """Whether entries are slots."""
        return self._listed is None

    def piece(
        self, layer: int, room: int | None = None, rows: list[Tensor] | None = None
    ) -> PlacedPiece:
        """One layer's reads, of `room` entries or of as many as there are.

        With a room the piece always has a mask or an index, so that no shape tells how many entries
        are read.  `rows` are parts ``[rows, 1, records, heads, ...]`` of the layer's first rows on
        the device, if the pool is the host's.
        """
        groups = self._layout.groups_of_layer(layer)
        if rows is None:
            piece = self.pool.piece(layer)
        else:
            heads = self._layout.kv_heads  # rows of single heads lie among each other
            parts = [part[:, 0].permute(1, 2, 0, 3).expand(-1, heads, -1, -1) for part in rows]
            piece = self.pool.as_piece(parts)
        fixed = room is not None
        room = int(self.high[groups].max()) if room is None else room
        index = mask = None
        if self._listed is not None:
            index = self.tensor("index")[groups, :room]
            index = index[0] if groups.stop - groups.start == 1 else index
        else:
            room = min(room, piece.keys.shape[1])
        if self._seqs > 1 or (self._listed is None and (fixed or not self.full(groups))):
            mask = self.tensor("mask")[:, groups, :room]
        piece = replace(piece, index=index, room=room, mask=mask)
        if fixed and self._has_prefix:
            assert self._prefix is not None
            piece = self._prefix.of(piece)
        return self._placed(piece, groups)

    @property
    def _has_prefix(self) -> bool:
        """Whether slots at the start of the pool are to be read as a contiguous cache."""
        return self._prefix is not None and self._listed is None and self._prefix.useful

    def room(self, rounded: Callable[[int], int]) -> int:
        """Entries that pieces of all layers look at, if their number is rounded up."""
        return min(rounded(int(self.high.max())), self._needed())

    def key(self, room: int) -> Hashable:
        """Changes if `piece` gives other shapes or memory; has all tensors made that it needs."""
        in_order = self._listed is None
        if in_order or self._seqs > 1:
            self.tensor("mask")
        if not in_order:
            self.tensor("index")
        made = [self._tensors.get(self._bucket(name), (None, 0))[1] for name in _KINDS]
        prefix = None
        if self._has_prefix and self._prefix is not None:
            prefix = self._prefix.key()
        return self.place, in_order, self._seqs, room, self.pool.addresses, *made, prefix

    def _placed(self, piece: Piece, groups: slice) -> PlacedPiece:
        return PlacedPiece(
            piece,
            lambda: self.tensor("position")[groups, : piece.room],
            (self.place, groups.start, piece.room),
        )

    def brought(self, layer: int, parts: list[Tensor]) -> PlacedPiece:
        """A layer's piece whose tokens, in the order of entries, have been copied to the device.

        `parts` are data ``[records, kv_heads, room, width]``, and scales.
        """
        groups, room = self._layout.groups_of_layer(layer), parts[0].shape[2]
        piece = self.pool.as_piece(parts)
        even = bool((self.count[groups] == room).all())
        mask = None if self._seqs == 1 and even else self.tensor("mask")[:, groups, :room]
        return self._placed(replace(piece, room=room, mask=mask), groups)

    def rows_read(self) -> np.ndarray:
        """Int64 ``[groups]``: slots below which all lie that are read."""
        pairs, _ = self._held()
        end = np.zeros(self._layout.groups, dtype=np.int64)
        np.maximum.at(end, pairs.group, self.pool.slots.of[pairs.group, pairs.token] + 1)
        return end

    def listed(self) -> list[Tensor]:
        """Slots by entry, int64 ``[n]``, of each group of a table that was just reset."""
        pairs, _ = self._held()
        slots = self.pool.slots.of[pairs.group, pairs.token].astype(np.int64)
        return list(to_device(slots, self.pool.device).split(self.count.tolist()))
