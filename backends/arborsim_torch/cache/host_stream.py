"""Tokens in DDR on their way to the device, a layer ahead of the computation that reads them.

`HostStream` feeds an `arborsim_torch.tiers.stream.LayerStream` from host pools.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.pool import Pool
from arborsim_torch.tiers.copies import HeldUp
from arborsim_torch.tiers.link import HostLink
from arborsim_torch.tiers.stream import LayerStream

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
    """Feeds a `LayerStream`; `places` are where parts arrive in passes that are the same."""

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
        """Begin the next pass, whose layers need the `pieces`; `anew` if tokens have moved."""
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
        """Begin the next pass, the same as the last if `key` is.

        The key says where all blocks are; `parts` gives those of each part of a layer.
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

        Returns ``[records, heads, m, ...]`` of each piece, as `Pool.gather` does.
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
