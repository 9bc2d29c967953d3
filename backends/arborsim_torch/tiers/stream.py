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

Where an iteration is to be the same each time (`places`, `restart`), a layer has the same buffer in
all of them, so that a CUDA graph can hold the copies of all layers but the first: that one is
under way when the graph begins (`await_next`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    ticket: Ticket | None  #: None once the device has been told to wait for it


class LayerStream:
    """Streams the parts of layers that are in the host's memory.

    `held_up` has the time that `take` waited, `allocations` counts buffers made anew.
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
        self.allocations = 0

    @property
    def buffer_bytes(self) -> int:
        """Bytes of both buffers on the device."""
        return sum(buffer.numel() for buffer in self._buffers)

    def after(self, layer: int) -> int:
        """The layer that is streamed next; after the last one, the first."""
        return (layer + 1) % self._layers

    def prefetch(self, layer: int, host_parts: Sequence[Sequence[Tensor]]) -> None:
        """Begin to copy the parts of a layer, the one after that prefetched before, to the device.

        A part is a list of blocks in the host's memory, contiguous, of one type and alike but for
        their first axis.  There are none if nothing of the layer is there.  They must stay as they
        are until the layer has been taken.  Raises `ValueError` if it is not the layer's turn, or
        both buffers are in use.
        """
        self._check_turn(layer)
        places = self._places(host_parts, self._turn)
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
        Raises `ValueError` if the layer is not the next that was prefetched.
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

    def forget(self) -> None:
        """Drop copies ordered while a capture failed: they never start, so nothing may wait."""
        self._arriving.clear()
        self._in_use, self._turn = None, 0

    def await_next(self) -> None:
        """Let the device wait for the layer that is taken next, before a graph takes it."""
        self._wait(self._arriving[0])

    def restart(self) -> None:
        """An iteration is over, or nothing is under way; the next begins with the first buffer."""
        self.discard()
        self._turn = 0

    def places(self, layers: Sequence[Sequence[Sequence[Tensor]]]) -> list[list[Tensor]]:
        """Where the parts of every layer arrive in iterations that begin with the first buffer.

        Valid until `allocations` changes.
        """
        for layer, parts in enumerate(layers):  # so that none grows when its tensors are known
            self._places(parts, layer % _BUFFERS)
        return [self._places(parts, layer % _BUFFERS) for layer, parts in enumerate(layers)]

    def _wait(self, arrival: _Arrival) -> None:
        if arrival.ticket is not None:
            arrival.ticket.order(self.held_up)
            arrival.ticket = None

    def _check_turn(self, layer: int) -> None:
        if not 0 <= layer < self._layers:
            raise ValueError(f"layer {layer} of {self._layers}")
        last = self._arriving[-1].layer if self._arriving else self._in_use
        if last is not None and layer != self.after(last):
            raise ValueError(f"layer {layer} prefetched after layer {last}")
        if len(self._arriving) + (self._in_use is not None) >= _BUFFERS:
            raise ValueError(f"no buffer for layer {layer}: take {self._arriving[0].layer} first")

    def _places(self, parts: Sequence[Sequence[Tensor]], turn: int) -> list[Tensor]:
        """A tensor for each of `parts` in a buffer, which grows if it must."""
        sizes = [sum(block.nbytes for block in part) for part in parts]
        starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        buffer = self._buffers[turn]
        if starts[-1] > buffer.numel():
            room = max(starts[-1], int(_GROWTH * buffer.numel()))
            # Given up first: both would take memory.  Its readers are earlier on the same stream.
            self._buffers[turn] = buffer = buffer.new_empty(0)
            self._buffers[turn] = buffer = buffer.new_empty(room)
            self.allocations += 1
        flat = [buffer[at : at + size] for at, size in zip(starts, sizes, strict=False)]
        return [  # also parts that are empty
            each.view(part[0].dtype).view(sum(map(len, part)), *part[0].shape[1:])
            for each, part in zip(flat, parts, strict=True)
        ]
