"""Reads of the pools on the host: brought to the device layer by layer, or there.

A pass that is to be the same as the one before (*fixed*: a CUDA graph can replay it) streams each
layer's rows whole, from the first to the last that is read, rounded up.  Then where they come from
and where they go depend on this number alone, and a table on the device says which of them are
read: it changes where tokens move.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from arborsim_torch.cache.forward import PlacedPiece
from arborsim_torch.cache.host import HostSlots, HostTokens
from arborsim_torch.cache.host_pool import PAGE_TOKENS, HostPool
from arborsim_torch.cache.host_stream import HostStream
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pieces import PieceTable, rounded
from arborsim_torch.cache.pool import Pool
from arborsim_torch.cache.state import CacheState
from arborsim_torch.tiers.codec import Packed


class HostPieces:
    """The pieces of all layers that lie on the host.

    If they `stay`, tokens are read on the host, and `tokens` lists them by layer.  Otherwise a
    stream brings them to the device ahead of their layer.  Without one they are copied when it is
    their turn.  `tables` are those of the pools that are read.
    """

    def __init__(self, cache: CacheState, stay: bool, stream: HostStream | None) -> None:
        self._cache, self._layout = cache, cache.layout
        self._stay, self._stream = stay, stream
        self._version = 0
        self._slots: list[list[Tensor]] = []  # of each table, by group
        self._fixed = False  # the pass streams rows whole
        self._rows: list[tuple[int, ...]] = []  # of each table, by layer, that it streams
        self._judged = -1, False  # a version, and whether it is worth that
        self.tables: list[PieceTable] = []
        self.tokens: list[HostTokens] = []

    def begin(self, tables: Sequence[PieceTable], fixed: bool = False) -> bool:
        """Begin a pass over tables that may be empty; whether it reads something new."""
        version = sum(table.version for table in tables)
        anew, self._version = version != self._version, version
        other, self._fixed = anew or fixed != self._fixed, fixed
        if anew:
            self.tables = [table for table in tables if table.count.any()]
            self.tokens = tokens_on_host(self._cache) if self._stay and self.tables else []
        if other and fixed:
            self._rows = [self._rows_of(table) for table in self.tables]
        elif other:
            self._slots = [table.listed() for table in self.tables]
        if self._stream is None:
            return anew
        if fixed and self.tables:
            places = tuple(table.place for table in self.tables)
            self._stream.begin_fixed(self._rows_on_host, (places, *self._rows))
        elif not fixed and (self.tables or anew):
            self._stream.begin(self._streamed, other)
        return anew

    def whole(self, tables: Sequence[PieceTable]) -> bool:
        """Whether a pass over these can stream rows whole.

        Not while copies into rows are under way, nor from memory that could not be locked; and not
        where much would cross that is not read: off the paths, or given back.
        """
        if self._stream is None or not self._stream.settled:
            return False
        version = sum(table.version for table in tables)
        if self._judged[0] != version:
            read = [table for table in tables if table.count.any()]
            self._judged = version, all(self._worth(table) for table in read)
        return self._judged[1]

    def _worth(self, table: PieceTable) -> bool:
        pool, layers = _host_pool(table), self._layout.layers
        if isinstance(pool.codec, Packed) and pool.codec.scaled:
            return False  # where its tokens stand in their groups is made out anew in each pass
        if self._layout.device.type == "cuda" and not pool.page_locked:
            return False
        read = int(table.count.sum()) * (layers if self._layout.grouping == "shared" else 1)
        return pool.worth_carrying_whole(sum(self._rows_of(table)), read, layers)

    def _rows_of(self, table: PieceTable) -> tuple[int, ...]:
        """By layer: rows up to the last that is read, rounded up; 0 if none is."""
        end, most = table.rows_read(), _host_pool(table).pages * PAGE_TOKENS
        ends = [int(end[self._layout.groups_of_layer(n)].max()) for n in range(self._layout.layers)]
        return tuple(min(rounded(each), most) if each else 0 for each in ends)

    def _rows_on_host(self, layer: int) -> list[list[Tensor]]:
        """The parts of a layer's rows, of all tables."""
        read = ((t, rows[layer]) for t, rows in zip(self.tables, self._rows, strict=True))
        found = [_host_pool(table).first_rows(layer, rows) for table, rows in read if rows]
        return [part for parts in found for part in parts]

    def keys(self) -> list[Hashable]:
        """By table: changes if pieces of a fixed pass have other shapes, or other memory."""
        pairs = zip(self.tables, self._rows, strict=True)
        made = 0 if self._stream is None else self._stream.allocations
        return [(table.key(table.room(rounded)), rows, made) for table, rows in pairs]

    def await_first(self) -> None:
        """Before a fixed pass: let the device wait for the first layer."""
        if self._stream is not None and self.tables:
            self._stream.await_first()

    def begin_again(self) -> None:
        """A fixed pass is to be computed that a capture has left half done."""
        if self._stream is not None and self.tables:
            self._stream.begin_again()

    def arrive(self, layer: int) -> None:
        """In a fixed pass, before a layer: let the device wait for it, and the next set out."""
        assert self._stream is not None
        self._stream.arrive(layer)

    def passed(self, replayed: bool) -> None:
        """After a fixed pass, or a graph's replay of it: the next one's first layer sets out."""
        if self._stream is not None and self.tables:
            self._stream.passed(replayed)

    def _of_layer(self, layer: int) -> list[tuple[PieceTable, list[Tensor]]]:
        """Each table that a layer reads, and the slots of its groups."""
        groups = self._layout.groups_of_layer(layer)
        pairs = zip(self.tables, self._slots, strict=True)
        return [(table, slots[groups]) for table, slots in pairs if table.reads(layer)]

    def _streamed(self, layer: int) -> list[tuple[Pool, Tensor]]:
        return [(table.pool, own) for table, slots in self._of_layer(layer) for own in slots]

    def brought(self, layer: int) -> list[PlacedPiece]:
        """A layer's pieces, on the device; of a fixed pass, where they will be on its turn."""
        if self._stay or not self.tables:
            return []
        if self._fixed:
            return self._in_rows(layer)
        arrived = iter([] if self._stream is None else self._stream.take(layer))
        found = []
        for table, slots in self._of_layer(layer):
            pool, room = table.pool, max(len(own) for own in slots)
            heads = []
            for head, own in enumerate(slots):
                if self._stream is not None:
                    parts = [next(arrived) for _ in range(1 + pool.codec.scaled)]
                else:
                    heads_of = slice(None) if len(slots) == 1 else slice(head, head + 1)
                    parts = pool.gather(layer, heads_of, own)
                    parts = [part.to(self._layout.device) for part in parts]
                if len(own) < room:
                    parts = [F.pad(part, (0, 0, 0, room - len(own))) for part in parts]
                heads.append(parts)
            parts = heads[0]
            if len(heads) > 1:
                parts = [torch.cat(own, dim=1) for own in zip(*heads, strict=True)]
            found.append(table.brought(layer, parts))
        return found

    def _in_rows(self, layer: int) -> list[PlacedPiece]:
        assert self._stream is not None
        parts, found = iter(self._stream.places[layer]), []
        for table, rows in zip(self.tables, self._rows, strict=True):
            if rows[layer]:
                own = [next(parts) for _ in range(_host_pool(table).parts)]
                found.append(table.piece(layer, table.room(rounded), own))
        return found


def _host_pool(table: PieceTable) -> HostPool:
    assert isinstance(table.pool, HostPool)
    return table.pool


def tokens_on_host(cache: CacheState) -> list[HostTokens]:
    """The active paths' reads of the host, by layer."""
    layout, paths = cache.layout, [cache.tree.path(leaf) for leaf in cache.leaves]
    union = paths[0] if len(paths) == 1 else np.unique(np.concatenate(paths))
    wanted, found = cache.selected(union), {}
    for layer in range(layout.layers):
        groups = layout.groups_of_layer(layer)
        if groups.start not in found:
            own = range(groups.start, groups.stop)
            found[groups.start] = _tokens_of(cache, own, union, wanted, paths)
    return [found[layout.groups_of_layer(layer).start] for layer in range(layout.layers)]


def _tokens_of(
    cache: CacheState, groups: range, union: np.ndarray, wanted: np.ndarray, paths: list[np.ndarray]
) -> HostTokens:
    """The tokens of a layer's groups on the host, padded to the longest."""
    pieces, position, on_path, first = [], [], [], 0
    for place, chunk, own in _chunks(cache, groups, union, wanted):
        m = max(len(token) for token in own)
        slots = np.full((len(own), m), -1, dtype=np.int64)
        spots = np.full((len(own), m), np.iinfo(np.int64).max)  # padding: after every query
        on = np.zeros((len(own), len(paths), m), dtype=np.bool_)
        pool = cache.pools[place]
        assert isinstance(pool, HostPool)
        for r, (group, token) in enumerate(zip(groups, own, strict=True)):
            slots[r, : len(token)] = pool.slots.of[group, token] - pool.first_of(chunk)
            spots[r, : len(token)] = cache.position.values[token]
            for seq, path in enumerate(paths):
                on[r, seq, : len(token)] = np.isin(token, path)
        index = torch.from_numpy(slots if len(own) > 1 else slots[0])
        pieces.append(HostSlots(place, chunk, index, slice(first, first + m), _run(slots)))
        position.append(spots)
        on_path.append(on)
        first += m
    if not pieces:
        none = torch.zeros((1, 0), dtype=torch.int64)
        return HostTokens([], none, torch.zeros((1, 1, 0), dtype=torch.bool), 0)
    return HostTokens(
        pieces,
        torch.from_numpy(np.concatenate(position, axis=1)),
        torch.from_numpy(np.concatenate(on_path, axis=2)),
        first,
    )


def _run(slots: np.ndarray) -> slice | None:
    """The rows of tokens of all heads ``[1, m]``, if each is the next after the one before."""
    if len(slots) > 1 or np.any(np.diff(slots[0]) != 1):
        return None
    return slice(int(slots[0, 0]), int(slots[0, -1]) + 1)


def _chunks(
    cache: CacheState, groups: range, union: np.ndarray, wanted: np.ndarray
) -> Iterator[tuple[Place, int, list[np.ndarray]]]:
    """Tokens of each group by place and chunk on the host, as far as there are any."""
    for place, pool in cache.pools.items():
        if not isinstance(pool, HostPool):
            continue
        own = [union[wanted[g] & (cache.place.values[g, union] == place)] for g in groups]
        chunk = [
            pool.chunk_of(pool.slots.of[g, token]) for g, token in zip(groups, own, strict=True)
        ]
        for each in np.unique(np.concatenate(chunk)).tolist():
            yield (
                place,
                each,
                [token[where == each] for token, where in zip(own, chunk, strict=True)],
            )
