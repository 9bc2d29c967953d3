"""Tokens in DDR cross to the device in every pass, a layer ahead of the computation."""

from __future__ import annotations

from torch import Tensor

from arborsim_torch.cache.assembly import gathered
from arborsim_torch.cache.pool import Pool
from arborsim_torch.tiers.link import Link
from arborsim_torch.tiers.stream import LayerStream

Pieces = list[tuple[Pool, slice, Tensor]]


class HostStream:
    """Feeds a `LayerStream` from host pools.

    Parameters
    ----------
    link : Link
    layers : int
    """

    def __init__(self, link: Link, layers: int) -> None:
        self._link, self._layers = link, layers
        self._stream = LayerStream(link, layers)
        self._pieces: list[Pieces] = []
        self._ahead: int | None = None  # the layer that is under way

    @property
    def exposed_s(self) -> float:
        """Seconds that attention waited for tokens to arrive."""
        return self._stream.exposed_s

    @property
    def buffer_bytes(self) -> int:
        return self._stream.buffer_bytes

    def begin(self, pieces: list[Pieces], anew: bool) -> None:
        """What each layer of the next pass needs; `anew` if tokens have moved since the last."""
        if anew:
            self._stream.discard()
            self._ahead = None
        self._pieces = pieces
        if self._ahead is None:
            self._prefetch(0)

    def take(self, layer: int) -> list[Tensor]:
        """The layer's tensors on the device, while the next layer's set out."""
        arrived = self._stream.take(layer)
        self._prefetch(self._stream.after(layer))
        return arrived

    def _prefetch(self, layer: int) -> None:
        parts = []
        for pool, heads, slots in self._pieces[layer]:
            for part in gathered(pool, layer, heads, slots):
                host = self._link.host_empty(part.shape, part.dtype)
                parts.append(host.copy_(part) if self._link.pinned else part)
        self._stream.prefetch(layer, parts)
        self._ahead = layer
