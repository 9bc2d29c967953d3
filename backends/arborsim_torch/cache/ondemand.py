"""Attention to the pages of host memory that could matter most to a query, as in Quest.

Bounds of the keys of every page (`arborsim_torch.kernels.ondemand`) are on the device, from when
tokens leave it.  Each layer chooses pages by them there; the host learns which, and nothing but
these pages crosses the link, whole, as one list of blocks.  The other pages are not read: an
approximation, unless all are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.forward import HostShare, LayerView, PlacedPiece
from arborsim_torch.cache.host import HostAttention, HostTokens, Part, own_mass
from arborsim_torch.cache.host_pool import PAGE_TOKENS, HostPool
from arborsim_torch.cache.host_rows import BlockList
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pairs import GroupContent, GroupTokenPairs
from arborsim_torch.cache.state import CacheState
from arborsim_torch.kernels.dense import attend
from arborsim_torch.kernels.ondemand import PageBounds, choose_pages
from arborsim_torch.tiers.copies import Ticket, to_device
from arborsim_torch.tiers.link import HostLink

PAGES_TOP = 16  #: pages that each KV head chooses in a step; their union is fetched
_AFTER_ALL = np.iinfo(np.int64).max


@dataclass(frozen=True)
class _Rows:
    """The rows that queries may read of the layers of one kind, one place after the other."""

    #: int64 ``[kv_heads or 1, rows]``: beyond every query's, if nothing that is read is there
    position: np.ndarray
    on_path: np.ndarray  #: bool ``[kv_heads or 1, seqs, rows]``
    page: Tensor  #: bool ``[kv_heads or 1, pages]``: pages with anything to read, on the device


@dataclass(frozen=True)
class _Ordered:
    """The pages of a layer that were chosen, on their way."""

    chosen: np.ndarray  #: int64 ``[kv_heads, pages_top]``: pages of each head; -1: none
    pages: np.ndarray  #: int64 ``[pages]``: all of them, in order
    #: of each place: the pool, and where its pages will lie on the device
    arriving: list[tuple[HostPool, list[Tensor], BlockList]]
    ticket: Ticket

    @property
    def row(self) -> np.ndarray:
        """Int64 ``[n]``: the rows of the pages."""
        return (self.pages[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)

    @property
    def own(self) -> np.ndarray:
        """Bool ``[kv_heads, n]``: whether the head has chosen the row's page."""
        own: np.ndarray = (self.chosen[:, :, None] == self.pages).any(1)
        return own.repeat(PAGE_TOKENS, 1)


@dataclass(frozen=True)
class _Fetched:
    """The pages of a layer that were chosen last."""

    #: ``[kv_heads, n, head_dim]``
    keys: Tensor
    values: Tensor
    mask: Tensor  #: bool ``[seqs, kv_heads, queries, n]``
    position: Tensor  #: int64 ``[kv_heads or 1, n]``


class PageAttention(HostAttention):
    """The pages' part of each layer's attention.

    Each KV head chooses `pages_top` pages in a step.  `fetched_bytes` are those of all so far.
    """

    def __init__(self, cache: CacheState, link: HostLink, pages_top: int = PAGES_TOP) -> None:
        super().__init__(cache)
        self._link, self._pages_top = link, pages_top
        self._bounds: dict[Place, PageBounds] = {}
        self._rows: dict[int, _Rows] = {}
        self._buffers: dict[Place, list[Tensor]] = {}
        self._last: _Fetched | None = None
        self.fetched_bytes = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device of bounds, and of what fetched pages lie in."""
        buffers = sum(part.nbytes for parts in self._buffers.values() for part in parts)
        return buffers + sum(bounds.nbytes for bounds in self._bounds.values())

    def bytes_of(self, place: Place, tokens: int) -> int:
        """`buffer_bytes` of a place once it has held `tokens` tokens of every group."""
        g, pool = self._cache.layout, self._pool(place)
        if not tokens:
            return 0
        of_page = g.layers * g.kv_heads * (2 * g.head_dim * g.dtype.itemsize + 1)
        return self._most_rows * pool.row_bytes + pool.pages_of(tokens) * of_page

    @property
    def _most_rows(self) -> int:
        """Rows that are fetched at most of a place: the KV heads' pages differ."""
        return self._cache.layout.kv_heads * self._pages_top * PAGE_TOKENS

    # -- bounds --------------------------------------------------------------------------------

    def enter(self, place: Place, pairs: GroupTokenPairs, contents: Iterator[GroupContent]) -> None:
        """Take keys that leave the device into the bounds of the pages where they will lie."""
        g, pool = self._cache.layout, self._pool(place)
        if place not in self._bounds:
            self._bounds[place] = PageBounds(
                pool.pages_taken, g.layers * g.kv_heads, g.head_dim, g.dtype, g.device
            )
        bounds = self._bounds[place]
        bounds.grow(pool.pages_taken)
        self._rows.clear()
        for layer, page in pool.opened_pages(pairs.group, pool.slots.of[pairs.group, pairs.token]):
            heads = slice(None) if g.grouping == "shared" else self._heads(layer)
            bounds.heads(heads).clear(to_device(page, g.device))
        for group, token, read in contents:
            block = read()
            keys = pool.codec.decode(block.data, block.scale, g.dtype)[:, 0]
            page = pool.slots.of[group, token].astype(np.int64) // PAGE_TOKENS
            size = g.layers * g.kv_heads // g.groups
            own = bounds.heads(slice(group * size, (group + 1) * size))
            own.update(to_device(page, g.device), keys.flatten(0, 1))

    def _heads(self, layer: int) -> slice:
        heads = self._cache.layout.kv_heads
        return slice(layer * heads, (layer + 1) * heads)

    # -- passes --------------------------------------------------------------------------------

    def begin(self, tokens: list[HostTokens], fresh: bool) -> None:
        if fresh or tokens is not self._tokens:
            self._rows.clear()
        super().begin(tokens, fresh)
        self._last = None

    def start(
        self, layer: int, query: Tensor, scale: float, window: int | None
    ) -> Callable[[], Part] | None:
        """Choose pages by the newest queries, and order them; see `HostAttention.start`."""
        if not self._tokens[layer].n:
            return None
        g, rows, ordered = self._cache.layout, self._rows_of(layer), self._order(layer, query)
        position = to_device(rows.position[:, ordered.row], g.device)
        on_path = to_device(rows.on_path[:, :, ordered.row], g.device)
        own = to_device(ordered.own, g.device)
        mask = self._readable(position, on_path, window) & own[None, :, None]

        def result() -> Part:
            ordered.ticket.order(self.held_up)
            parts = [
                part for part in map(self._decoded_pages, ordered.arriving) if part is not None
            ]
            keys, values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
            keys, values = (x.expand(g.kv_heads, -1, -1) for x in (keys, values))
            self._last = _Fetched(keys, values, mask, position)
            return attend(query, keys, values, scale, mask)

        return result

    def host_share(
        self, layer: int, query: Tensor, scale: float, window: int | None, mass: bool
    ) -> HostShare | None:
        """Choose pages, and order them: pieces that are read where they arrive.

        Which rows a head reads the host knows with its choice: one table of them crosses.
        """
        if not self._tokens[layer].n:
            return None
        g, rows, ordered = self._cache.layout, self._rows_of(layer), self._order(layer, query)
        position, on_path = rows.position[:, ordered.row], rows.on_path[:, :, ordered.row]
        here = [(pool, buffers, each) for pool, buffers, each in ordered.arriving if each.rows]
        if not here:
            return HostShare([])
        index = np.concatenate([each.at[0] for *_, each in here])
        index = np.where(ordered.own & on_path.any(1), index, -1)  # [kv_heads, n]
        # What no head reads stands at the path's first position, with no weight.
        position = np.where(on_path.any(1), position, 0)
        both = to_device(np.concatenate([index, position]).astype(np.int32), g.device)
        where = both[g.kv_heads :]
        found: list[PlacedPiece] = []
        several, first = on_path.shape[1] > 1, 0
        for number, (pool, buffers, blocks) in enumerate(here):
            at = slice(first, first + blocks.rows)
            first += blocks.rows
            parts = [
                part[:, 0].permute(1, 2, 0, 3).expand(-1, g.kv_heads, -1, -1) for part in buffers
            ]
            piece = replace(pool.as_piece(parts), index=both[: g.kv_heads, at], room=blocks.rows)
            if several:
                mask = to_device(on_path[:, :, at].swapaxes(0, 1), g.device)
                piece = replace(piece, mask=mask)
            if not found:
                piece = replace(piece, ready=lambda: ordered.ticket.order(self.held_up))
            spots = partial(torch.narrow, where, 1, at.start, blocks.rows)
            found.append(PlacedPiece(piece, spots, ("page", layer, number)))
        return HostShare(found, position=where)

    def rows(
        self, layer: int, query: Tensor, scale: float, window: int | None, lse: Tensor
    ) -> tuple[Tensor, LayerView]:
        """The mass of the fetched tokens; see `HostAttention.rows`."""
        last, metadata = self._last, self._metadata
        assert last is not None
        assert metadata is not None
        mass = own_mass(query, last.keys, scale, lse, last.mask)
        empty = last.keys.new_empty((len(last.keys), 0, last.keys.shape[2]))
        # Nothing is read at a position beyond the path's.
        position = last.position.clamp(max=metadata.positions - 1)
        return mass, LayerView(empty, empty, None, position, metadata.positions)

    def _readable(self, position: Tensor, on_path: Tensor, window: int | None) -> Tensor:
        """Which rows each query may read, bool ``[seqs, kv_heads or 1, queries, n]``."""
        assert self._metadata is not None
        at = self._metadata.at[:, None, :, None]
        spots = position[None, :, None]
        mask = spots <= at
        window = self._metadata.limits(window)
        if window is not None:
            mask = mask & (spots > at - window)
        return mask & on_path.transpose(0, 1)[:, :, None]

    def _order(self, layer: int, query: Tensor) -> _Ordered:
        """Choose pages of a layer by the newest queries, and have them copied to the device."""
        heads, rows = self._heads(layer), self._rows_of(layer)
        bounds = [each.heads(heads) for each in self._bounds.values()]
        chosen = choose_pages(bounds, query[:, :, -1], self._pages_top, rows.page).cpu().numpy()
        pages = np.unique(chosen)
        pages = pages[pages >= 0]
        found, copies, begin, arriving = [], [], 0, False
        for place, each in self._bounds.items():
            pool, count = self._pool(place), each.filled.shape[1]
            page = pages[(pages >= begin) & (pages < begin + count)] - begin
            begin += count
            row = (page[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
            blocks = pool.blocks_of_layer(layer, row, join=False)
            if place not in self._buffers:
                self._buffers[place] = pool.buffers(self._most_rows, self._cache.layout.device)
            buffers = [part.narrow(0, 0, blocks.rows) for part in self._buffers[place]]
            copies += pool.pairs(blocks, buffers)
            found.append((pool, buffers, blocks))
            arriving = arriving or pool.arriving_in(layer, page)
        # Pages cross whole: rows that are on their way to DDR are not read there yet.
        ticket = self._link.up_blocks(copies, after_down=arriving)
        self.fetched_bytes += sum(host.nbytes for host, _ in copies)
        return _Ordered(chosen, pages, found, ticket)

    def _decoded_pages(self, fetched: tuple[HostPool, list[Tensor], BlockList]) -> Tensor | None:
        """Keys and values ``[2, kv_heads or 1, n, head_dim]``."""
        pool, buffers, blocks = fetched
        if not blocks.rows:
            return None
        data, *scale = (part[0] for part in pool.content(buffers, blocks.at))
        return pool.codec.decode(
            data.view(pool.codec.storage), scale[0] if scale else None, self._cache.layout.dtype
        )

    def _rows_of(self, layer: int) -> _Rows:
        tokens = self._tokens[layer]
        if id(tokens) not in self._rows:
            self._rows[id(tokens)] = self._look_up(tokens)
        return self._rows[id(tokens)]

    def _look_up(self, tokens: HostTokens) -> _Rows:
        """Tables by row from those by token."""
        first: dict[Place, int] = {}
        end = 0
        for place, bounds in self._bounds.items():
            first[place], end = end, end + bounds.filled.shape[1] * PAGE_TOKENS
        kinds, seqs, _ = tokens.on_path.shape
        position = np.full((kinds, end), _AFTER_ALL, dtype=np.int64)
        on_path = np.zeros((kinds, seqs, end), dtype=np.bool_)
        for piece in tokens.pieces:
            row = piece.index.numpy().reshape(kinds, -1)
            kind, at = np.nonzero(row >= 0)
            row = row[kind, at] + first[piece.place] + self._pool(piece.place).first_of(piece.chunk)
            at += piece.span.start
            position[kind, row] = tokens.position.numpy()[kind, at]
            on_path[kind, :, row] = tokens.on_path.numpy()[kind, :, at]
        page = np.logical_or.reduce(on_path.reshape(kinds, seqs, -1, PAGE_TOKENS), axis=(1, 3))
        device = self._cache.layout.device
        return _Rows(position, on_path, to_device(page, device))
