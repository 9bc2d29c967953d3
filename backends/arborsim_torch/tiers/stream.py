"""Tokens in DDR cross to the device layer by layer, in every iteration, through a double buffer.

::

    stream.prefetch(0, parts[0])
    for layer in range(layers):                 # of every iteration
        held = stream.take(layer)
        stream.prefetch(stream.after(layer), parts[stream.after(layer)])
        ...                                     # attends to `held` while the next layer arrives

Two layers are on the device at a time: one in use, one arriving.  The last layer of an iteration
prefetches the first of the next.  A part is a list of blocks of the host's memory, which arrive one
after the other.  On CUDA the device waits for what arrives; the host does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arborsim_torch.tiers.copies import HeldUp, Ticket
from arborsim_torch.tiers.link import HostLink

_BUFFERS = 2
_ALIGNMENT = 256  # bytes; what CUDA's allocator gives, and vector loads like
_GROWTH = 1.25  # so that tokens which arrive one at a time do not grow the buffers each time


@dataclass
class _Arrival:
    """A layer that has been prefetched and not taken yet."""

    layer: int
    tensors: list[Tensor]
    ticket: Ticket


class LayerStream:
    """Streams the parts of layers that are in the host's memory.

    Parameters
    ----------
    link : HostLink
    layers : int
        Of the model.

    Attributes
    ----------
    held_up : HeldUp
        Time that `take` waited.
    """

    def __init__(self, link: HostLink, layers: int) -> None:
        self._link, self._layers = link, layers
        self._buffers = [
            torch.empty(0, dtype=torch.uint8, device=link.device) for _ in range(_BUFFERS)
        ]
        self._turn = 0  # the buffer that the next prefetch writes
        self._arriving: deque[_Arrival] = deque()
        self._in_use: int | None = None  # layer
        self.held_up = HeldUp()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of both buffers on the device."""
        return sum(buffer.numel() for buffer in self._buffers)

    def after(self, layer: int) -> int:
        """The layer that is streamed next; after the last one, the first."""
        return (layer + 1) % self._layers

    def prefetch(self, layer: int, host_parts: Sequence[Sequence[Tensor]]) -> None:
        """Begin to copy a layer's parts to the device.

        Parameters
        ----------
        layer : int
            The one after the layer prefetched before.
        host_parts : sequence of sequences of Tensor
            Blocks of each part, contiguous, of one type and alike but for their first axis, in the
            host's memory; no parts if nothing of the layer is there.  They must stay as they are
            until the layer has been taken.

        Raises
        ------
        ValueError
            If it is not the layer's turn, or both buffers are in use.
        """
        self._check_turn(layer)
        places = self._places(host_parts)
        blocks = [
            (block, target)
            for part, place in zip(host_parts, places, strict=True)
            for block, target in zip(part, place.split([len(b) for b in part]), strict=True)
        ]
        self._arriving.append(_Arrival(layer, places, self._link.up_blocks(blocks)))
        self._turn = (self._turn + 1) % _BUFFERS

    def take(self, layer: int) -> list[Tensor]:
        """The layer's parts on the device; waits for them if need be.

        They are valid until the next `take`, which gives their buffer up.

        Raises
        ------
        ValueError
            If the layer is not the next that was prefetched.
        """
        if not self._arriving or self._arriving[0].layer != layer:
            expected = self._arriving[0].layer if self._arriving else "none"
            raise ValueError(f"layer {layer} taken, but the next one prefetched is {expected}")
        arrival = self._arriving.popleft()
        self._in_use = layer
        self._wait(arrival)
        return arrival.tensors

    def discard(self) -> None:
        """Forget what has been prefetched, because tokens have moved; start anew at any layer."""
        while self._arriving:
            self._wait(self._arriving.popleft())
        self._in_use = None

    def _wait(self, arrival: _Arrival) -> None:
        arrival.ticket.order(self.held_up)

    def _check_turn(self, layer: int) -> None:
        if not 0 <= layer < self._layers:
            raise ValueError(f"layer {layer} of {self._layers}")
        last = self._arriving[-1].layer if self._arriving else self._in_use
        if last is not None and layer != self.after(last):
            raise ValueError(f"layer {layer} prefetched after layer {last}")
        if len(self._arriving) + (self._in_use is not None) >= _BUFFERS:
            raise ValueError(f"no buffer for layer {layer}: take {self._arriving[0].layer} first")

    def _places(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """A tensor for each of `parts` in the buffer whose turn it is, which grows if it must."""
        sizes = [sum(block.nbytes for block in part) for part in parts]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
        buffer = self._buffers[self._turn]
        if starts[-1] > buffer.numel():
            room = max(starts[-1], int(_GROWTH * buffer.numel()))
            # What was computed from the old one comes first on the stream that gets its memory.
            buffer = torch.empty(room, dtype=torch.uint8, device=self._link.device)
            self._buffers[self._turn] = buffer
        return [
            buffer[start : start + size].view(part[0].dtype).view(_shape(part))
            for part, start, size in zip(parts, starts, sizes, strict=False)
        ]


def _shape(part: Sequence[Tensor]) -> tuple[int, ...]:
    """Of blocks one after the other."""
    return (sum(len(block) for block in part), *part[0].shape[1:])
