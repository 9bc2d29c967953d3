"""Attention over the pool in place: no copies, a mask where the pool holds other tokens too.

With one path and no gaps there is no mask either, and an entry's slot is its position as long as
nothing was evicted.  So full retention costs what a plain cache costs, and so does a policy that
evicts a token whenever one enters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from arborsim_torch.cache.forward import Entries
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pool import Pool
from arborsim_torch.tiers.copies import to_device

if TYPE_CHECKING:
    from arborsim_torch.cache.tiered import TieredCache


_SHARED = 4  # slots in the pool per token of the longest path, from which paths are read apart
_ROOM = 64  # positions to grow into


@dataclass(frozen=True)
class InPlacePlan:
    """What one pass reads; see `AttentionMetadata` for the two functions.

    Attributes
    ----------
    contiguous : bool
        Entry ``p`` has position ``p``, in all groups.
    held : int
        Entries.
    paths : int64 Tensor ``[seqs, positions]`` or None
        See `AttentionMetadata`.
    """

    by_layer: list[Entries]
    contents: list[Tensor]  # keys, then values of each layer: [1, kv_heads, n, head_dim]
    contiguous: bool
    held: int
    paths: Tensor | None = None
    ragged: Pool | None = None  # in place of `contents` if some slab of it is ragged

    def entries(self, layer: int) -> Entries:
        return self.by_layer[layer]

    def content(self, layer: int) -> tuple[Tensor, Tensor]:
        if self.ragged is None:
            return self.contents[2 * layer][0], self.contents[2 * layer + 1][0]
        pool, n = self.ragged, self.by_layer[layer].n
        if pool.ragged(pool.layout.slab_of_layer(layer)[0]):
            keys, values = pool.padded(layer, n)
        else:
            keys, values = pool.slab(layer)[0][:, :, :n]
        return keys, values

    @property
    def plain(self) -> list[Tensor] | None:
        """`contents` if a path reads all of them; see `AttentionMetadata`."""
        masked = self.paths is not None or any(own.on_path is not None for own in self.by_layer)
        masked |= self.ragged is not None
        return None if masked else self.contents


class InPlaceReader:
    """Makes `InPlacePlan`s over the pool in HBM.

    Parameters
    ----------
    cache : TieredCache
    by_path : bool
        Let sequences read their paths one by one where the pool holds `_SHARED` times as much.

    Attributes
    ----------
    stale : bool
        Tokens moved since the last plan.
    """

    def __init__(self, cache: TieredCache, by_path: bool = False) -> None:
        self._cache = cache
        self._by_path = by_path and cache.layout.groups == 1
        self._paths: np.ndarray | None = None  # int64 [seqs, positions]: slots
        self.stale = True
        self._full = False  # every slot up to the highest is read by the one sequence
        self._contiguous = False
        self._on_path: Tensor | None = None  # bool [groups, seqs, capacity]
        self._position: Tensor | None = None  # int64 [groups, capacity]

    def plan(self, fresh: np.ndarray) -> InPlacePlan:
        """What the next pass reads; `fresh` are its new tokens."""
        if self._by_path and self._read_paths(fresh):
            return self._plan_by_path()
        if self.stale:
            self._look_up()
        elif len(fresh):
            self._enter(fresh)
        cache, layout = self._cache, self._cache.layout
        pool = cache.pools[Place.HBM]
        high = pool.slots.high.reshape(layout.slabs, -1).max(axis=1).tolist()
        by_slab = []
        for slab, n in enumerate(high):
            size = layout.groups // layout.slabs
            groups = slice(slab * size, (slab + 1) * size)
            on_path = None if self._on_path is None else self._on_path[groups, :, :n]
            position = None if self._position is None else self._position[groups, :n]
            by_slab.append(Entries(on_path, position, n))
        by_layer = [entries for entries in by_slab for _ in range(layout.slab_layers)]
        contents: list[Tensor] = []
        if any(pool.ragged(slab) for slab in range(layout.slabs)):
            return InPlacePlan(by_layer, contents, self._contiguous, max(high), ragged=pool)
        for slab, n in enumerate(high):
            contents += pool.span(slab, 0, n).unsqueeze(1).unbind()
        return InPlacePlan(by_layer, contents, self._contiguous, max(high))

    def _read_paths(self, fresh: np.ndarray) -> bool:
        """Bring the slots of all paths up to date; False if they should not be read one by one."""
        cache, slots = self._cache, self._cache.pools[Place.HBM].slots
        seqs, longest = len(cache.leaves), cache.seen_tokens
        if seqs < 2 or int(slots.high[0]) < _SHARED * longest or len(fresh) != seqs:
            self.stale = self.stale or self._paths is not None
            self._paths = None
            return False
        if self._paths is None or self.stale:
            paths = [cache.tree.path(leaf) for leaf in cache.leaves]
            self._paths = np.zeros((seqs, longest + _ROOM), dtype=np.int64)
            for seq, path in enumerate(paths):
                self._paths[seq, : len(path)] = slots.of[0, path]
            cache.tree.forget_paths(cache.leaves)
            self.stale = False
        else:
            if longest > self._paths.shape[1]:
                room = np.zeros((seqs, _ROOM + longest // 2), dtype=np.int64)
                self._paths = np.concatenate([self._paths, room], axis=1)
            self._paths[np.arange(seqs), cache.position.values[fresh]] = slots.of[0, fresh]
        if self._paths.min() < 0:  # a token that is not here would have to be masked
            self._paths, self.stale = None, True
            return False
        return True

    def _plan_by_path(self) -> InPlacePlan:
        cache, layout = self._cache, self._cache.layout
        assert self._paths is not None
        pool = cache.pools[Place.HBM]
        high = int(pool.slots.high[0])
        own = np.ascontiguousarray(self._paths[:, : cache.seen_tokens])
        paths = to_device(own, layout.device)
        contents = list(pool.span(0, 0, high).unsqueeze(1).unbind())
        no_entries: list[Entries] = []  # attention does not ask for them
        return InPlacePlan(no_entries, contents, False, high, paths)

    def _look_up(self) -> None:
        """Look up which slots are read, by which sequence, and at which position."""
        cache, slots = self._cache, self._cache.pools[Place.HBM].slots
        paths = [cache.tree.path(leaf) for leaf in cache.leaves]
        self.stale = False
        self._on_path = self._position = None
        self._contiguous = False
        if len(paths) == 1:
            own = slots.of[:, paths[0]]
            # Heads of a layer are read as one: a shorter one must not have slots beyond its own.
            by_slab = slots.high.reshape(cache.layout.slabs, -1)
            self._full = bool(((own >= 0).sum(axis=1) == slots.high).all()) and bool(
                (by_slab == by_slab[:, :1]).all()
            )
            if self._full:
                self._contiguous = bool((own == np.arange(own.shape[1])).all())
                if not self._contiguous:
                    self._set_positions(paths)
                return
        self._full = False
        self._set_positions(paths)
        self._set_on_path(paths)

    def _capacity(self) -> int:
        pool = self._cache.pools[Place.HBM]
        return max(pool.capacity(slab) for slab in range(self._cache.layout.slabs))

    def _set_positions(self, paths: list[np.ndarray]) -> None:
        cache, slots = self._cache, self._cache.pools[Place.HBM].slots.of
        table = np.zeros((cache.layout.groups, self._capacity()), dtype=np.int64)
        for path in paths:
            group, at = np.nonzero(slots[:, path] >= 0)
            table[group, slots[group, path[at]]] = at
        self._position = to_device(table, cache.layout.device)

    def _set_on_path(self, paths: list[np.ndarray]) -> None:
        cache, slots = self._cache, self._cache.pools[Place.HBM].slots.of
        table = np.zeros((cache.layout.groups, len(paths), self._capacity()), dtype=np.bool_)
        for seq, path in enumerate(paths):
            group, at = np.nonzero(slots[:, path] >= 0)
            table[group, seq, slots[group, path[at]]] = True
        self._on_path = to_device(table, cache.layout.device)

    def _enter(self, fresh: np.ndarray) -> None:
        """Take in new tokens without looking at the others again."""
        cache, slots = self._cache, self._cache.pools[Place.HBM].slots
        if self._full and self._position is None and self._contiguous:
            if (slots.of[:, fresh] == cache.position.values[fresh]).all():
                return
            self._look_up()
            return
        table = self._on_path if self._on_path is not None else self._position
        if table is None or self._capacity() > table.shape[-1]:
            self._look_up()
            return
        own, width = slots.of[:, fresh], len(cache.leaves)
        group, at = np.indices(own.shape).reshape(2, -1)
        where = np.stack([group, own.reshape(-1), at % width, cache.position.values[fresh[at]]])
        group_t, slot_t, seq_t, spot_t = to_device(where.astype(np.int64), cache.layout.device)
        if self._position is not None:
            self._position[group_t, slot_t] = spot_t
        if self._on_path is not None:
            self._on_path[group_t, seq_t, slot_t] = True
