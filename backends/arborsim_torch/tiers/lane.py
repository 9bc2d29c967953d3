"""One direction of a link: what is on its way, who waits for it, and what has been carried.

A lane knows when copies end and what they cost; how they are made is its engine's business
(`arborsim_torch.tiers.copies`), and which tensors may be copied the link's.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from arborsim_torch.tiers.copies import Copy, Engine


@dataclass(frozen=True)
class Traffic:
    """What one direction of a link has finished carrying.

    Attributes
    ----------
    copies, carried_bytes : int
    busy_s : float
        Sum of the times of the copies themselves, without waiting in the queue.
    """

    copies: int = 0
    carried_bytes: int = 0
    busy_s: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.copies + other.copies,
            self.carried_bytes + other.carried_bytes,
            self.busy_s + other.busy_s,
        )


class Ticket:
    """A copy that has been ordered."""

    def __init__(self, lane: Lane, copy: Copy, source: Tensor, out: Tensor) -> None:
        self._lane, self._copy = lane, copy
        self._tensors: tuple[Tensor, Tensor] | None = (source, out)  # alive until done
        self._bytes = source.numel() * source.element_size()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether the copy has finished, or failed."""
        return self._copy.done()

    def wait(self) -> float:
        """Wait for the copy; raise its error if it failed.

        Returns
        -------
        float
            Seconds that the caller was held up: the *exposed* part of the copy.  On CUDA, seconds
            that the device's current stream stood idle at this point; the host waits as well.
        """
        held_up_s = self.join()
        self._lane.settle(held_up_s)
        if self._error is not None:
            self._lane.told(self)
            raise self._error
        return held_up_s

    def join(self) -> float:
        """Wait without accounts and errors; seconds held up."""
        return self._copy.join()

    def settle(self) -> Traffic | Exception:
        """Let go of the tensors; what a finished copy has carried, or why it failed."""
        self._tensors = None
        try:
            return Traffic(1, self._bytes, self._copy.busy_s())
        except Exception as error:
            self._error = error
            return error


class Lane:
    """One direction: its engine, the copies on their way, and its accounts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: deque[Ticket] = deque()
        self._failed: list[Ticket] = []  # whose errors nobody has been told
        self._lock = threading.RLock()
        self._traffic = Traffic()
        self._exposed_s = 0.0

    def send(self, source: Tensor, out: Tensor) -> Ticket:
        with self._lock:
            self.settle()
            ticket = Ticket(self, self._engine.start(source, out), source, out)
            self._pending.append(ticket)
            return ticket

    def settle(self, held_up_s: float = 0.0) -> None:
        """Book the copies that are done, and time that a caller was held up."""
        with self._lock:
            self._exposed_s += held_up_s
            while self._pending and self._pending[0].done():
                ticket = self._pending.popleft()
                result = ticket.settle()
                if isinstance(result, Traffic):
                    self._traffic += result
                else:
                    self._failed.append(ticket)

    def told(self, ticket: Ticket) -> None:
        """The caller knows of this ticket's error."""
        with self._lock:
            self._failed = [other for other in self._failed if other is not ticket]

    def wait_all(self) -> float:
        with self._lock:
            waiting = list(self._pending)
        held_up_s = sum(ticket.join() for ticket in waiting)
        self.settle(held_up_s)
        return held_up_s

    def failed(self) -> list[Ticket]:
        """Copies whose errors nobody has been told, oldest first; told now."""
        with self._lock:
            failed, self._failed = self._failed, []
            return failed

    def traffic(self) -> Traffic:
        self.settle()
        return self._traffic

    def exposed_s(self) -> float:
        return self._exposed_s

    def close(self) -> None:
        self._engine.close()
        self.settle()
