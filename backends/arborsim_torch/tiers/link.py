"""Real copies between the device and the host's memory, and how long they held things up.

::

    with HostLink(device) as link:
        ticket = link.down(keys, link.host_empty(keys.shape, keys.dtype))
        ...                      # computes meanwhile
        ticket.wait()            # now `keys` may be overwritten, and the host has them

Each direction carries its copies first in, first out; the two directions run concurrently.
The link never reuses a caller's tensors: until a ticket is done, its source must not be written and
its target not be touched.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from arborsim.core.errors import UsageError
from arborsim_torch.tiers.copies import (
    Block,
    CopyEngine,
    CopyQueue,
    CopyTotals,
    StreamEngine,
    ThreadEngine,
    Ticket,
)


class HostLink:
    """Carries tensors between a device and the host's memory, in the background.

    On CUDA each direction is a side stream; on the CPU, where both ends are the same memory, a
    thread: real copies that overlap with computing just as well.  If `pinned`, `host_empty`
    allocates page-locked memory on CUDA.  Copies to and from ordinary memory are right, too, but
    slower, and hold the host up.  Raises `UsageError` if there is no such device.
    """

    def __init__(self, device: torch.device | str, pinned: bool = True) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise UsageError(f"no copies to device '{self.device}': choose cpu or cuda")
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise UsageError("device 'cuda': PyTorch sees no GPU here; choose cpu")
            if self.device.index is None:
                # PyTorch's stubs say that a device always has an index.
                self.device = torch.device(  # type: ignore[unreachable]
                    "cuda", torch.cuda.current_device()
                )
        self.pinned = pinned and self.device.type == "cuda"
        self._down, self._up = CopyQueue(self._engine("down")), CopyQueue(self._engine("up"))
        self._closed = False

    def _engine(self, direction: str) -> CopyEngine:
        if self.device.type == "cuda":
            return StreamEngine(self.device)
        return ThreadEngine(direction)

    def __enter__(self) -> HostLink:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the host's memory, page-locked if this link's are (see `host_empty`)."""
        return host_empty(shape, dtype, self.pinned)

    def down(self, source: Tensor, out: Tensor) -> Ticket:
        """Copy from the device to the host: to a contiguous tensor of the same shape and type.

        Raises `ValueError` if the tensors do not fit each other or this link, or it is closed.
        """
        return self.down_blocks([(source, out)])

    def up(self, source: Tensor, out: Tensor) -> Ticket:
        """Copy from the host (`source`, contiguous) to the device (`out`), as `down` does."""
        return self.up_blocks([(source, out)])

    def down_blocks(self, blocks: Sequence[Block]) -> Ticket:
        """`down` of several (source, out), one after the other, with one ticket for all."""
        for source, out in blocks:
            self._check(on_device=source, on_host=out)
        return self._down.send(blocks)

    def up_blocks(self, blocks: Sequence[Block], *, after_down: bool = False) -> Ticket:
        """`up` of several (source, out), one after the other, with one ticket for all.

        With `after_down` they begin once all copies to the host ordered so far have ended.

        While a CUDA graph is captured they become a branch of it, which the ticket's `order` joins:
        this must come before the capture ends.  Sources have to be page-locked then.
        """
        for source, out in blocks:
            self._check(on_device=out, on_host=source)
        if after_down:
            self._up.follow(self._down)
        return self._up.send(blocks)

    @property
    def down_idle(self) -> bool:
        """Whether every copy to the host has ended."""
        return self._down.idle()

    def up_replayed(self, copies: int, carried_bytes: int) -> None:
        """A CUDA graph was launched, in whose capture these copies were ordered (`up_blocks`)."""
        self._up.replayed(copies, carried_bytes)

    def wait_all(self) -> float:
        """Wait for every copy ordered so far; raise the first error that no ticket has told.

        Returns float: seconds that the caller was held up.
        """
        held_up_s = self._down.wait_all() + self._up.wait_all()
        for ticket in self._down.failed() + self._up.failed():
            ticket.wait()
        return held_up_s

    def close(self) -> None:
        """Finish the copies on their way and take no more; calling it again does nothing.

        Raises nothing: whether copies have failed, their tickets and `wait_all` tell.
        """
        if not self._closed:
            self._closed = True
            self._down.close()
            self._up.close()

    @property
    def downward(self) -> CopyTotals:
        """Totals of the copies to the host."""
        return self._down.traffic()

    @property
    def upward(self) -> CopyTotals:
        """Totals of the copies to the device."""
        return self._up.traffic()

    def _check(self, on_device: Tensor, on_host: Tensor) -> None:
        if self._closed:
            raise ValueError("the link is closed")
        if on_device.device != self.device or on_host.device.type != "cpu":
            raise ValueError(
                f"copy between {on_device.device} and {on_host.device} on a link of {self.device}"
            )
        if on_device.shape != on_host.shape or on_device.dtype != on_host.dtype:
            raise ValueError(
                f"copy between {on_device.dtype} {tuple(on_device.shape)} on the device and "
                f"{on_host.dtype} {tuple(on_host.shape)} on the host"
            )
        if not on_host.is_contiguous():
            # PyTorch would go through a temporary tensor, and on CUDA not wait for it.
            raise ValueError("the host's tensor must be contiguous")


def host_empty(shape: Sequence[int], dtype: torch.dtype, pinned: bool = True) -> Tensor:
    """An uninitialised tensor in the host's memory, page-locked where there is CUDA.

    Warns, and returns ordinary memory, where locking fails (a container's limit, say).  PyTorch
    rounds page-locked blocks up to powers of two: large ones may take twice their size.
    """
    if pinned and torch.cuda.is_available():
        try:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            warnings.warn(
                f"no page-locked memory, copies will be slower: {why}", RuntimeWarning, stacklevel=2
            )
    return torch.empty(tuple(shape), dtype=dtype)
