"""Tokens that stay in host memory while a forward pass reads them.

``stream``: they are copied to the device in every pass, a layer ahead of the computation.
``near``: the CPU attends to them where they are, and gives a partial output with its log-sum-exp,
which merges exactly with the device's part.  So does ``ondemand``, which fetches some of them
(`arborsim_torch.cache.ondemand`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata, HostShare, LayerView, PlacedElsewhere
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pool import Pool
from arborsim_torch.kernels.near import HostPiece, NearAttention, Pending
from arborsim_torch.kernels.piece import Elsewhere
from arborsim_torch.tiers.codec import Packed
from arborsim_torch.tiers.copies import HeldUp
from arborsim_torch.tiers.link import HostLink
from arborsim_torch.tiers.stream import LayerStream

if TYPE_CHECKING:
    from arborsim_torch.cache.pairs import GroupContent, GroupTokenPairs
    from arborsim_torch.cache.tiered import TieredCache


Part = tuple[Tensor, Tensor]  # output [seqs, heads, queries, head_dim] and its log-sum-exp


@dataclass(frozen=True)
class HostSlots:
    """Tokens of one place on the host.

    Attributes
    ----------
    place : Place
    chunk : int
        The part of the host's memory that they lie in.
    index : int64 Tensor ``[m]`` or ``[kv_heads, m]``
        Rows there; -1 is padding.
    span : slice
        The piece's entries among all of the layer's.
    run : slice or None
        The rows, if those of all heads follow each other: they need not be looked up.
    """

    place: Place
    chunk: int
    index: Tensor
    span: slice
    run: slice | None

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """The piece's part of a mask ``[..., n]``."""
        return None if mask is None else mask[..., self.span]


@dataclass(frozen=True)
class HostTokens:
    """The tokens of one layer that stay on the host; tensors are there, too.

    Attributes
    ----------
    pieces : list of HostSlots
    position : int64 Tensor ``[kv_heads or 1, n]``
    on_path : bool Tensor ``[kv_heads or 1, seqs, n]``
    n : int
    """

    pieces: list[HostSlots]
    position: Tensor
    on_path: Tensor
    n: int

    @property
    def real(self) -> Tensor:
        """Bool ``[kv_heads or 1, n]``: False for padding, which lies on no path."""
        return self.on_path.any(1)


@dataclass
class _Host:
    """The host's tokens of one layer as one pass reads them."""

    tokens: HostTokens
    mask: Tensor | None  # bool [seqs or 1, kv_heads or 1, queries, n], on the host


class HostAttention:
    """The CPU's part of each layer's attention, over tokens on the host.

    Parameters
    ----------
    cache : TieredCache

    Attributes
    ----------
    held_up : HeldUp
        Time that passes waited for copies of tokens.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._near = NearAttention(cache.layout.device)
        self._metadata: AttentionMetadata | None = None
        self._at = torch.empty((0, 0), dtype=torch.int64)
        self._tokens: list[HostTokens] = []
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self.held_up = HeldUp()

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device."""
        return 0

    def enter(self, place: Place, pairs: GroupTokenPairs, contents: Iterator[GroupContent]) -> None:
        """Tokens have got rows on the host, and their copies there are under way."""

    def begin(self, tokens: list[HostTokens], fresh: bool) -> None:
        """The host's tokens of each layer for the next pass; `fresh` if they have changed."""
        self._tokens = tokens
        self._masks.clear()

    def attach(self, metadata: AttentionMetadata, at: Tensor) -> None:
        """The pass that is about to run, and its `AttentionMetadata.at` on the host."""
        self._metadata, self._at = metadata, at

    def close(self) -> None:
        self._near.close()

    def start(
        self, layer: int, query: Tensor, scale: float, window: int | None
    ) -> Callable[[], Part] | None:
        """Begin; the function returned waits for the result.  None if the host holds nothing."""
        pending = self._begin(layer, query, scale, window, logits=False)
        return None if pending is None else pending.result

    def host_share(
        self, layer: int, query: Tensor, scale: float, window: int | None, mass: bool
    ) -> HostShare | None:
        """Begin on what the host holds of a layer; None if that is nothing.

        With `mass` the logits come along, 4 bytes per query head: fewer than the keys would be.
        """
        pending = self._begin(layer, query, scale, window, logits=mass)
        if pending is None:
            return None
        tokens, metadata = self._tokens[layer], self._metadata
        assert metadata is not None
        last = metadata.positions - 1  # nothing is read beyond

        def position() -> Tensor:
            return sent(tokens.position.clamp(max=last), query)

        there = Elsewhere(pending.packed, tokens.n if mass else 0)
        return HostShare([], PlacedElsewhere(there, position, ("host", id(tokens))))

    def _begin(
        self, layer: int, query: Tensor, scale: float, window: int | None, *, logits: bool
    ) -> Pending | None:
        host = self._host(layer, window)
        if not host.tokens.n:
            return None
        pieces = [
            HostPiece(
                data[0], data[1], index, piece.of_mask(host.mask),
                None if scales is None else scales[0, :, :, 0],
                None if scales is None else scales[1, :, :, 0],
            )
            for piece, index, data, scales in self._pieces(layer, host)
        ]  # fmt: skip
        return self._near.start(query, pieces, scale, logits=logits)

    def rows(
        self, layer: int, query: Tensor, scale: float, window: int | None, lse: Tensor
    ) -> tuple[Tensor, LayerView]:
        """What the host's tokens received, once the log-sum-exp of the whole is known.

        Returns
        -------
        float32 Tensor ``[kv_heads, seqs, group, queries, n]``
        LayerView
            The entries of its last axis; keys and values are left empty.
        """
        host = self._host(layer, window)
        keys = sent(self._decoded(layer, host)[0], query)
        mask = None if host.mask is None else sent(host.mask, query)
        mass = own_mass(query, keys, scale, lse, mask)
        empty = keys.new_empty((len(keys), 0, keys.shape[2]))
        assert self._metadata is not None
        positions = self._metadata.positions
        position = sent(host.tokens.position.clamp(max=positions - 1), query)
        return mass, LayerView(empty, empty, None, position, positions)

    def _host(self, layer: int, window: int | None) -> _Host:
        tokens, metadata = self._tokens[layer], self._metadata
        assert metadata is not None
        if window is not None and metadata.positions <= window:
            window = None
        key = (id(tokens), window)
        if key not in self._masks:
            at = self._at[:, None, :, None]
            spots = tokens.position[None, :, None]
            mask = spots <= at
            if window is not None:
                mask = mask & (spots > at - window)
            mask = mask & tokens.on_path.transpose(0, 1)[:, :, None]
            self._masks[key] = None if bool(mask.all()) else mask
        return _Host(tokens, self._masks[key])

    def _pieces(
        self, layer: int, host: _Host
    ) -> Iterator[tuple[HostSlots, Tensor | None, Tensor, Tensor | None]]:
        """Each piece with the slots to read in data, and scales if the kernel applies them."""
        for piece in host.tokens.pieces:
            pool = self._pool(piece.place)
            if isinstance(pool.codec, Packed):  # which the kernel cannot read
                order = torch.arange(piece.index.shape[-1]).expand(piece.index.shape)
                data = self._decoded_piece(layer, piece)
                yield piece, torch.where(piece.index < 0, piece.index, order), data, None
                continue
            parts = self._parts(layer, piece)
            if piece.run is not None:
                parts = [part[:, :, piece.run] for part in parts]
            index = None if piece.run is not None else piece.index
            data = parts[0].view(pool.codec.storage)
            yield piece, index, data, parts[1] if len(parts) > 1 else None

    def _pool(self, place: Place) -> HostPool:
        pool = self._cache.pools[place]
        assert isinstance(pool, HostPool)
        return pool

    def _parts(self, layer: int, piece: HostSlots) -> list[Tensor]:
        """The rows of a layer, ``[records, kv_heads, rows, ...]``: views."""
        heads = self._cache.layout.kv_heads
        return [
            part.permute(1, 2, 0, 3).expand(-1, heads, -1, -1)
            for part in self._pool(piece.place).layer_rows(layer, piece.chunk)
        ]

    def _decoded_piece(self, layer: int, piece: HostSlots) -> Tensor:
        pool, index = self._pool(piece.place), piece.index
        own = [_gather(part, index) for part in self._parts(layer, piece)]
        scale = own[1] if len(own) > 1 else None
        return pool.codec.decode(own[0].view(pool.codec.storage), scale, self._cache.layout.dtype)

    def _decoded(self, layer: int, host: _Host) -> Tensor:
        """Keys and values ``[2, kv_heads, n, head_dim]``, on the host."""
        parts = [self._decoded_piece(layer, piece) for piece in host.tokens.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def own_mass(query: Tensor, keys: Tensor, scale: float, lse: Tensor, mask: Tensor | None) -> Tensor:
    """Weights of some keys in an attention whose log-sum-exp is known.

    Returns
    -------
    float32 Tensor ``[kv_heads, seqs, group, queries, n]``
    """
    seqs, _, queries, dim = query.shape
    kv_heads, n, _ = keys.shape
    packed = query.view(seqs, kv_heads, -1, queries, dim).transpose(0, 1)
    logits = torch.matmul(packed.flatten(1, 3), keys.transpose(1, 2)).float().mul_(scale)
    total = lse.view(seqs, kv_heads, -1, queries).transpose(0, 1)
    mass = (logits.view(kv_heads, seqs, -1, queries, n) - total[..., None]).exp_()
    if mask is not None:
        mass.masked_fill_(~mask.transpose(0, 1)[:, :, None], 0.0)
    return mass


def sent(x: Tensor, query: Tensor) -> Tensor:
    """A tensor of ordinary memory on the queries' device; the host does not wait for that."""
    return x.to(query.device, non_blocking=True)


def _gather(part: Tensor, index: Tensor) -> Tensor:
    """Slots ``[n]`` or, per head, ``[kv_heads, n]`` (-1: any) of ``[2, kv_heads, capacity, m]``."""
    if index.dim() == 1:
        return part.index_select(2, index)
    wide = index.clamp(min=0)[None, :, :, None].expand(2, -1, -1, part.shape[3])
    return part.gather(2, wide)


Pieces = list[tuple[Pool, Tensor]]  # slots of a host pool, which are on the host, too


@dataclass(frozen=True)
class _Arriving:
    """A piece of a layer: its blocks on the host, and the place of each token among them.

    `order` is that place on the device: it is needed in every pass, until tokens move.
    """

    pool: HostPool
    at: np.ndarray
    order: Tensor | slice
    parts: list[list[Tensor]]


class HostStream:
    """Feeds a `LayerStream` from host pools.

    Parameters
    ----------
    link : HostLink
    layers : int

    Attributes
    ----------
    places : list of lists of Tensor
        Where each layer's parts arrive in passes that are the same.
    """

    def __init__(self, link: HostLink, layers: int) -> None:
        self._link, self._layers = link, layers
        self._stream = LayerStream(link, layers)
        self._pieces: list[list[_Arriving]] = []
        self._parts: list[list[list[Tensor]]] = []  # of each layer: blocks of each part
        self._fixed: Hashable = None  # the key of passes that are the same, if this is one of them
        self.places: list[list[Tensor]] = []
        self._ahead: int | None = None  # the layer that is under way
        self._moved = False  # rows between those of the pieces may be written from now on

    @property
    def held_up(self) -> HeldUp:
        """Time that attention waited for tokens to arrive."""
        return self._stream.held_up

    @property
    def buffer_bytes(self) -> int:
        return self._stream.buffer_bytes

    @property
    def allocations(self) -> int:
        """How often buffers were made: until the next time, `places` stay."""
        return self._stream.allocations

    def begin(self, pieces: Callable[[int], Pieces], anew: bool) -> None:
        """The next pass begins; `anew` if tokens have moved since the last.

        Parameters
        ----------
        pieces : callable
            What a layer needs: pools and slots.
        anew : bool
        """
        if anew or self._moved or self._fixed is not None:
            self.discard()
            self._moved, self._fixed = False, None
            self._pieces = [
                [self._piece(layer, pool, slots) for pool, slots in pieces(layer)]
                for layer in range(self._layers)
            ]
            self._parts = [[part for piece in own for part in piece.parts] for own in self._pieces]
        if self._ahead is None:
            self._prefetch(0)

    @property
    def settled(self) -> bool:
        """Whether no copy writes to rows on the host: any of them may be read."""
        return self._link.down_idle

    def begin_fixed(self, parts: Callable[[int], list[list[Tensor]]], key: Hashable) -> None:
        """The next pass begins, and is the same as the last if `key` is.

        Parameters
        ----------
        parts : callable
            Blocks of each part of a layer.
        key : hashable
            Says where all blocks are.
        """
        if key != self._fixed:
            self.discard()
            self._fixed = key
            self._parts = [parts(layer) for layer in range(self._layers)]
            self.places = []  # of buffers that may be made anew
            self.places = self._stream.places(self._parts)
        self._moved = False
        if self._ahead is None:
            self._stream.restart()
            self._prefetch(0)

    def await_first(self) -> None:
        """Let the device wait for the first layer of a fixed pass."""
        self._stream.await_next()

    def begin_again(self) -> None:
        """A fixed pass is to be computed that a capture has left half done."""
        self._stream.forget()
        self._prefetch(0)
        self._stream.await_next()

    def arrive(self, layer: int) -> None:
        """Let the device wait for a layer of a fixed pass, while the next one sets out."""
        self._stream.take(layer)
        if layer + 1 < self._layers:
            self._prefetch(layer + 1)

    def passed(self, replayed: bool) -> None:
        """A fixed pass has been computed, or a graph of it replayed; prefetch for the next."""
        if replayed:
            blocks = [block for own in self._parts[1:] for part in own for block in part]
            self._link.up_replayed(len(blocks), sum(block.nbytes for block in blocks))
        self._stream.restart()
        self._prefetch(0)

    def discard(self) -> None:
        """Tokens are about to move: what is under way is not needed, and must have ended."""
        self._stream.discard()
        self._ahead, self._moved = None, True

    def take(self, layer: int) -> list[Tensor]:
        """The layer's tensors on the device, while the next layer's set out.

        Returns
        -------
        list of Tensor ``[records, heads, m, ...]``
            Of each piece as `Pool.gather` returns them.
        """
        arrived = iter(self._stream.take(layer))
        found: list[Tensor] = []
        for piece in self._pieces[layer]:
            buffers = [next(arrived) for _ in piece.parts]
            buffers = buffers or piece.pool.buffers(0, self._link.device)
            found += [part[0] for part in piece.pool.content(buffers, piece.at, piece.order)]
        self._prefetch(self._stream.after(layer))
        return found

    def _prefetch(self, layer: int) -> None:
        self._stream.prefetch(layer, self._parts[layer])
        self._ahead = layer

    def _piece(self, layer: int, pool: Pool, slots: Tensor) -> _Arriving:
        assert isinstance(pool, HostPool)
        blocks = pool.blocks_of_layer(layer, slots.numpy())
        order = pool.order(blocks.at, self._link.device)
        # A head of which nothing is there has no part.
        return _Arriving(pool, blocks.at, order, pool.views(blocks) if blocks.rows else [])
