"""Tokens that stay in host memory while a forward pass reads them.

``stream``: they are copied to the device in every pass, a layer ahead of the computation.
``near``: the CPU attends to them where they are, and gives a partial output with its log-sum-exp,
which merges exactly with the device's part.  So does ``ondemand``, which fetches some of them
(`arborsim_torch.cache.ondemand`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata, HostShare, LayerView, PlacedElsewhere
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pairs import GroupContent, GroupTokenPairs
from arborsim_torch.cache.state import CacheState
from arborsim_torch.kernels.near import HostPiece, NearAttention, Pending
from arborsim_torch.kernels.piece import Elsewhere
from arborsim_torch.tiers.codec import Packed
from arborsim_torch.tiers.copies import HeldUp

Part = tuple[Tensor, Tensor]  # output [seqs, heads, queries, head_dim] and its log-sum-exp


@dataclass(frozen=True)
class HostSlots:
    """Tokens of one place on the host."""

    place: Place
    chunk: int  #: the part of the host's memory that they lie in
    index: Tensor  #: int64 ``[m]`` or ``[kv_heads, m]``: rows there; -1 is padding
    span: slice  #: the piece's entries among all of the layer's
    #: the rows, if those of all heads follow each other: they need not be looked up
    run: slice | None

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """The piece's part of a mask ``[..., n]``."""
        return None if mask is None else mask[..., self.span]


@dataclass(frozen=True)
class HostTokens:
    """The tokens of one layer that stay on the host; tensors are there, too."""

    pieces: list[HostSlots]
    position: Tensor  #: int64 ``[kv_heads or 1, n]``
    on_path: Tensor  #: bool ``[kv_heads or 1, seqs, n]``
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

    `held_up` has the time that passes waited for copies of tokens.
    """

    def __init__(self, cache: CacheState) -> None:
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
        pieces = []
        for piece, index, data, scales in self._pieces(layer, host):
            k_scale, v_scale = (None, None) if scales is None else scales[..., 0]
            mask = piece.of_mask(host.mask)
            pieces.append(HostPiece(data[0], data[1], index, mask, k_scale, v_scale))
        return self._near.start(query, pieces, scale, logits=logits)

    def rows(
        self, layer: int, query: Tensor, scale: float, window: int | None, lse: Tensor
    ) -> tuple[Tensor, LayerView]:
        """The mass of the host's tokens, once the log-sum-exp of the whole is known.

        Returns float32 ``[kv_heads, seqs, group, queries, n]``, and a view of the entries of its
        last axis, whose keys and values are left empty.
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

    Returns float32 Tensor ``[kv_heads, seqs, group, queries, n]``.
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
