"""Attention over tokens from several tiers: each layer's are gathered in the order of tokens.

What a pass reads then depends only on which tokens there are, not on where they are stored: outputs
are the same bits whatever share of the cache is in HBM (Proposition 1 of the memory-hierarchy
paper).  The copy of one layer's keys and values is workspace, freed with the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.forward import Entries
from arborsim_torch.cache.host import HostTokens
from arborsim_torch.cache.host_pieces import tokens_on_host
from arborsim_torch.cache.host_stream import HostStream
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pool import Pool
from arborsim_torch.cache.state import CacheState
from arborsim_torch.tiers.copies import to_device

_ON_HOST = np.array([place.on_host for place in Place])


@dataclass
class StoredSlots:
    """Tokens of one place: int64 Tensor ``[m]`` of slots, on the pool's device."""

    place: Place
    slots: Tensor


@dataclass
class ReadTokens:
    """The tokens that one group reads."""

    token: np.ndarray  #: int64 ``[n]``, rising
    pieces: list[StoredSlots]
    #: int64 ``[n]``: puts joined pieces into the order of tokens; None if they are
    order: Tensor | None


@dataclass(frozen=True)
class GatherPlan:
    """The reads of one pass (see `AttentionMetadata`)."""

    by_layer: list[Entries]
    assembly: GatherReader
    contiguous: bool
    held: int
    host: list[HostTokens]
    fresh: bool

    def entries(self, layer: int) -> Entries:
        return self.by_layer[layer]

    def content(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self.assembly.content(layer)
        return keys, values


class GatherReader:
    """Makes plans over all pools; `stale` once tokens have moved since the last one.

    With `split_host`, tokens on the host are not gathered with the others, but listed as
    `HostTokens`. A stream brings them to the device layer by layer.
    """

    def __init__(
        self, cache: CacheState, split_host: bool = False, stream: HostStream | None = None
    ) -> None:
        self._cache = cache
        self._split_host = split_host
        self._stream = stream
        self.stale = True
        self._host: list[HostTokens] = []
        self._arrived: Iterator[Tensor] = iter(())
        self._rows: list[ReadTokens] = []
        self._entries: list[Entries] = []
        self._contiguous = False

    def plan(self) -> GatherPlan:
        """The reads of the next pass."""
        layout, anew = self._cache.layout, self.stale
        self._look_up()
        held = max(len(row.token) for row in self._rows)
        kinds = [layout.groups_of_layer(layer).start for layer in range(layout.layers)]
        size = layout.kv_heads if layout.grouping == "head" else 1
        by_layer = [self._entries[kind // size] for kind in kinds]
        host = self._host if self._split_host else []
        if self._stream is not None:
            self._stream.begin(self._streamed, anew)
        return GatherPlan(by_layer, self, self._contiguous, held, host, anew)

    def _look_up(self) -> None:
        cache, layout = self._cache, self._cache.layout
        self.stale = False
        paths = [cache.tree.path(leaf) for leaf in cache.leaves]
        union = paths[0] if len(paths) == 1 else np.unique(np.concatenate(paths))
        wanted = cache.selected(union)
        self._rows = [self._row(group, union[wanted[group]]) for group in range(layout.groups)]
        size = layout.kv_heads if layout.grouping == "head" else 1
        self._entries = [
            self._entries_of(self._rows[first : first + size], paths)
            for first in range(0, layout.groups, size)
        ]
        self._contiguous = len(paths) == 1 and all(len(r.token) == len(union) for r in self._rows)
        if self._split_host:
            self._host = tokens_on_host(cache)

    def _row(self, group: int, union: np.ndarray) -> ReadTokens:
        cache = self._cache
        place = cache.place.values[group, union]
        read = place != Place.LOST
        if self._split_host:
            read &= ~_ON_HOST[place]
        token, place = union[read], place[read]
        pieces, order = [], []
        for kind in np.unique(place).tolist():
            pool = cache.pools[Place(kind)]
            own = np.flatnonzero(place == kind)
            slots = pool.slots.of[group, token[own]].astype(np.int64)
            pieces.append(StoredSlots(Place(kind), to_device(slots, pool.device)))
            order.append(own)
        if len(pieces) == 1:
            return ReadTokens(token, pieces, None)
        put = np.argsort(np.concatenate(order), kind="stable")
        return ReadTokens(token, pieces, to_device(put, cache.layout.device))

    def _entries_of(self, rows: list[ReadTokens], paths: list[np.ndarray]) -> Entries:
        cache = self._cache
        n = max(len(row.token) for row in rows)
        position = np.zeros((len(rows), n), dtype=np.int64)
        on_path = np.zeros((len(rows), len(paths), n), dtype=np.bool_)
        for r, row in enumerate(rows):
            own = len(row.token)
            position[r, :own] = cache.position.values[row.token]
            for seq, path in enumerate(paths):
                on_path[r, seq, :own] = True if len(paths) == 1 else np.isin(row.token, path)
        device = cache.layout.device
        everything = bool(on_path.all())
        contiguous = len(paths) == 1 and all(len(row.token) == len(paths[0]) for row in rows)
        return Entries(
            None if everything else to_device(on_path, device),
            None if contiguous else to_device(position, device),
            n,
        )

    def _streamed(self, layer: int) -> list[tuple[Pool, Tensor]]:
        """The layer's pieces on the host: pool and slots, in the order of `content`."""
        rows = self._rows[self._cache.layout.groups_of_layer(layer)]
        return [
            (self._cache.pools[piece.place], piece.slots)
            for row in rows
            for piece in row.pieces
            if piece.place.on_host
        ]

    def content(self, layer: int) -> Tensor:
        """Keys and values ``[2, kv_heads, n, head_dim]`` in the order of tokens."""
        layout = self._cache.layout
        rows = self._rows[layout.groups_of_layer(layer)]
        if self._stream is not None:
            self._arrived = iter(self._stream.take(layer))
        if len(rows) == 1:
            return self._together(rows[0], layer, slice(None))
        n = max(len(row.token) for row in rows)
        parts = []
        for head, row in enumerate(rows):
            own = self._together(row, layer, slice(head, head + 1))
            parts.append(torch.nn.functional.pad(own, (0, 0, 0, n - own.shape[2])))
        return torch.cat(parts, dim=1)

    def _together(self, row: ReadTokens, layer: int, heads: slice) -> Tensor:
        parts = [self._piece(piece, layer, heads) for piece in row.pieces]
        if row.order is None:
            return parts[0]
        return torch.cat(parts, dim=2).index_select(2, row.order)

    def _piece(self, piece: StoredSlots, layer: int, heads: slice) -> Tensor:
        """Keys and values ``[2, heads, m, head_dim]`` of one place, on the device."""
        pool, dtype = self._cache.pools[piece.place], self._cache.layout.dtype
        if self._stream is not None and piece.place.on_host:
            parts = [next(self._arrived) for _ in range(1 + pool.codec.scaled)]
        else:
            parts = pool.gather(layer, heads, piece.slots)
            parts = [part.to(self._cache.layout.device) for part in parts]
        scale = parts[1] if len(parts) > 1 else None
        return pool.codec.decode(parts[0].view(pool.codec.storage), scale, dtype)
