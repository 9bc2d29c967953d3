"""Keeps what every layer reads of every pool: which tokens, from where, by which sequence.

Every pool says which of its tokens have come or gone since the last pass; only these are entered
into the tables (`arborsim_torch.cache.pieces`).  All is looked up anew where paths turn, where
slots are numbered anew, and where little of what is looked at is still read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborsim.core.tree import GrowingTable
from arborsim_torch.cache.forward import Entries, PlacedPiece
from arborsim_torch.cache.host import HostTokens
from arborsim_torch.cache.host_pieces import HostPieces
from arborsim_torch.cache.host_stream import HostStream
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pieces import NOT_READ, Pairs, PieceTable
from arborsim_torch.cache.state import CacheState


class PieceReader:
    """Knows what every layer reads of every pool; `stale` where paths have turned.

    With `split_host`, tokens on the host are not read as pieces, but listed as `HostTokens`.  A
    stream brings them to the device layer by layer.
    """

    def __init__(
        self, cache: CacheState, split_host: bool = False, stream: HostStream | None = None
    ) -> None:
        self._cache, self._layout = cache, cache.layout
        self.stale = True
        self._tables: dict[Place, PieceTable] = {}
        groups = cache.layout.groups
        self._place = GrowingTable(groups, np.int8)  # that a token is read of; LOST: it is not
        self._entry = GrowingTable(groups, np.int32)
        self._on_path = np.zeros((0, 0), dtype=np.bool_)  # [seqs, nodes]
        self._rows = 0
        self._more: list[tuple[np.ndarray, np.ndarray]] = []  # pairs to look at again
        self._contiguous = False
        self._host = HostPieces(cache, split_host, stream)

    def look_again(self, group: np.ndarray, token: np.ndarray) -> None:
        """Whether these pairs are to be read has changed."""
        self._more.append((group, token))

    @torch.inference_mode()
    def plan(self, rounded: Callable[[int], int] | None = None, rows: int = 0) -> PiecePlan:
        """The reads of the next pass.

        `rounded` rounds up how many entries pieces look at.  Of the `rows` of the pass, those
        beyond the leaves' read nothing.
        """
        rows = max(rows, len(self._cache.leaves))
        self.stale |= rows != self._rows
        self._rows = rows
        self._bring_up_to_date()
        if any(table.moved or (table.count.any() and table.sparse) for table in self._on_device()):
            self._look_up()
        on_device = [table for table in self._on_device() if table.count.any()]
        fresh = self._host.begin(self._tables_on_host(), fixed=rounded is not None)
        rooms = [None if rounded is None else table.room(rounded) for table in on_device]
        return PiecePlan(on_device, self._host, self._contiguous, fresh, rooms)

    def _bring_up_to_date(self) -> None:
        changed = self._changes()
        if self.stale or changed is None:
            self._look_up()
        elif len(changed[0]):
            self._update(*changed)

    @property
    def reads_host(self) -> bool:
        """Whether anything that is read now lies on the host; new tokens never do."""
        if self.stale:
            self._rows = len(self._cache.leaves)
        self._bring_up_to_date()
        return any(table.count.any() for table in self._tables_on_host())

    @property
    def streams_whole_rows(self) -> bool:
        """Whether all of that may reach the device as whole rows; asked after `reads_host`."""
        return self._host.whole(self._tables_on_host())

    def _tables_on_host(self) -> list[PieceTable]:
        return [table for table in self._tables.values() if table.place.on_host]

    def _on_device(self) -> list[PieceTable]:
        return [table for table in self._tables.values() if not table.place.on_host]

    def _changes(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Pairs that may be read otherwise than before; None if too many to tell."""
        found, self._more = self._more, []
        known = True
        for pool in self._cache.pools.values():
            own = pool.slots.changes()
            if own is None:
                known = False
            elif len(own[0]):
                found.append(own)
        if not known:
            return None
        if len(found) == 1 and len(found[0][0]) == 1:
            return found[0]
        if not found:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        tokens = self._cache.num_tokens
        key = np.unique(np.concatenate([group * tokens + token for group, token in found]))
        return np.divmod(key, tokens)

    def _grow(self) -> None:
        more = self._cache.num_tokens - len(self._place)
        if more > 0:
            self._place.extend(more, Place.LOST)
            self._entry.extend(more, NOT_READ)

    def _pairs(self, group: np.ndarray, token: np.ndarray) -> Pairs:
        node = self._cache.tree.node_of_token.values[token]
        return Pairs(group, token, self._on_path[:, node])

    def _table(self, place: Place) -> PieceTable:
        if place not in self._tables:

            def held() -> tuple[Pairs, np.ndarray]:
                pairs = self._pairs(*np.nonzero(self._place.values == place))
                return pairs, self._entry.values[pairs.group, pairs.token].astype(np.int64)

            none = np.empty(0, dtype=np.int64)
            self._tables[place] = PieceTable(self._cache, place, held)
            self._tables[place].reset(self._pairs(none, none))
        return self._tables[place]

    def _look_up(self) -> None:
        cache, tree = self._cache, self._cache.tree
        for pool in cache.pools.values():
            pool.slots.changes()
        self.stale = False
        self._more.clear()
        self._grow()
        of_leaves = np.stack([tree.on_path([leaf]) for leaf in cache.leaves])
        self._on_path = np.pad(of_leaves, ((0, self._rows - len(of_leaves)), (0, 0)))
        token = np.flatnonzero(self._on_path[:, tree.node_of_token.values].any(0))
        place = np.where(cache.selected(token), cache.place.values[:, token], Place.LOST)
        self._place.values[:] = Place.LOST
        self._place.values[:, token] = place
        for number in {*np.unique(place).tolist(), *self._tables} - {Place.LOST}:
            group, at = np.nonzero(place == number)
            self._entry.values[group, token[at]] = self._table(Place(number)).reset(
                self._pairs(group, token[at])
            )
        table = self._tables.get(Place.HBM)
        one = table is not None and table.in_order and len(cache.leaves) == 1
        in_order = self._entry.values[:, token] == np.arange(len(token))
        self._contiguous = one and bool(((place == Place.HBM) & in_order).all())

    def _update(self, group: np.ndarray, token: np.ndarray) -> None:
        cache = self._cache
        self._grow()
        pairs = self._pairs(group, token)
        wanted = pairs.on_path.any(0) & cache.selected_pairs(group, token)
        before, left = self._place.values[group, token], self._entry.values[group, token]
        place = np.where(wanted, cache.place.values[group, token], Place.LOST)
        self._place.values[group, token] = place
        for number in {*np.unique(before).tolist(), *np.unique(place).tolist()} - {Place.LOST}:
            table, gone, come = self._table(Place(number)), before == number, place == number
            if table.place.on_host:
                every = self._pairs(*np.nonzero(self._place.values == number))
                self._entry.values[every.group, every.token] = table.reset(every)
            else:
                self._entry.values[group[come], token[come]] = table.change(
                    pairs.where(gone), left[gone].astype(np.int64), pairs.where(come)
                )
        entry = self._entry.values[group, token]
        in_order = (place == Place.HBM) & (entry == cache.position.values[token])
        fresh = (before == Place.LOST) & (in_order | ~wanted)
        self._contiguous = self._contiguous and bool(fresh.all())


@dataclass(frozen=True)
class PiecePlan:
    """The reads of one pass."""

    tables: list[PieceTable]  #: of pools on the device that are read
    on_host: HostPieces
    contiguous: bool  #: all that is read is in HBM, and slot ``p`` has position ``p`` in all groups
    fresh: bool  #: tokens on the host have changed
    #: of each table: entries that its pieces look at, whose shapes then depend on these alone
    rooms: list[int | None]

    @property
    def host(self) -> list[HostTokens]:
        """By layer, if tokens on the host are read there."""
        return self.on_host.tokens

    @property
    def held(self) -> int:
        """Entries."""
        return sum(int(table.high.max()) for table in (*self.tables, *self.on_host.tables))

    def pieces(self, layer: int) -> list[PlacedPiece]:
        """A layer's reads."""
        found = [
            table.piece(layer, room)
            for table, room in zip(self.tables, self.rooms, strict=True)
            if (table.reads(layer) if room is None else table.pool.has_slab(layer))
        ]
        return found + self.on_host.brought(layer)

    @property
    def key(self) -> Hashable:
        """Changes if pieces have another shape or other memory; None if rooms are not rounded."""
        rooms = [room for room in self.rooms if room is not None]
        if len(rooms) < len(self.rooms):
            return None
        on_device = [table.key(room) for table, room in zip(self.tables, rooms, strict=True)]
        return *on_device, *self.on_host.keys()

    def entries(self, layer: int) -> Entries:
        """The entries of a contiguous plan."""
        return Entries(None, None, self.held)

    def content(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a contiguous plan, ``[kv_heads, n, head_dim]``."""
        pool = self.tables[0].pool
        keys, values = pool.slab(layer)[0][:, :, : self.held]
        return keys, values

    def plain(self) -> list[Tensor] | None:
        """Keys, then values of each layer, ``[1, kv_heads, n, head_dim]``.

        If one query reads all of the slots in HBM, and nothing else.
        """
        if len(self.tables) != 1 or self.on_host.tables:
            return None
        (table,) = self.tables
        layout, pool = table.pool.layout, table.pool
        if table.place is not Place.HBM or not table.in_order:
            return None
        per_slab = layout.groups // layout.slabs
        firsts = range(0, layout.groups, per_slab)
        if not all(table.full(slice(first, first + per_slab)) for first in firsts):
            return None
        spans = enumerate(table.high[::per_slab].tolist())
        return [part for slab, n in spans for part in pool.span(slab, 0, n).unsqueeze(1).unbind()]
