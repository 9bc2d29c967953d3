"""Parts of a long run: each has a time limit, and its result is told before the next one begins.

A part that runs out of memory or time is a result like any other, and the run goes on.  What never
comes back to Python is the watchdog's (`benchmarks.gpu.watchdog`).
"""

from __future__ import annotations

import gc
import json
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from arborsim.core.errors import ArborsimError

Facts = dict[str, Any]
LEAST_S = 2.0  #: nothing is started in less time
_TRACEBACK_LINES, _LINE, _SAID = 24, 300, 2000  # compilers say a lot
_AGAIN_S = 5.0  # an alarm that was lost where Python drops exceptions is raised once more


class OutOfTime(BaseException):
    """A part took longer than it may; no `Exception`, so that no handler of errors catches it."""


class Journal:
    """Runs parts one after the other and tells about each in a line of JSON.

    Parameters
    ----------
    end : float
        When everything has to be over, by `time.monotonic`.
    device : torch.device
    send : callable
        Gets every line: what begins and how long it may take (``began``), and every record.
    earlier : iterable of dict
        Records of what is done already; it is not done again.

    Attributes
    ----------
    records : list of dict
        All so far, the earlier ones first.
    broken : str
        Why the device no longer answers; empty while it does.
    """

    def __init__(
        self,
        end: float,
        device: torch.device,
        send: Callable[[Facts], None],
        earlier: Iterable[Facts] = (),
    ) -> None:
        self.records: list[Facts] = list(earlier)
        self.device = device
        self.broken = ""
        self._end, self._send = end, send
        self._known = {key_of(r["part"], r["of"]): r for r in self.records if "of" in r}

    @property
    def left_s(self) -> float:
        """Seconds that are left of the budget, or of what `within` allows."""
        return self._end - time.monotonic()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Parts in here share `seconds`, if as many are left."""
        before = self._end
        self._end = min(before, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._end = before

    def attempt(
        self,
        part: str,
        of: Mapping[str, Any],
        limit_s: float,
        work: Callable[[], Facts],
        expected_s: float = 0.0,
    ) -> Facts:
        """Run one part and record how it ended, unless that is known already.

        Parameters
        ----------
        part : str
        of : mapping
            What is run, which tells it from other attempts; part of the record.
        limit_s : float
            The part is stopped after so long, or when the budget ends.
        work : callable
            Returns what it found.
        expected_s : float
            The part is not started if the budget has less left.

        Returns
        -------
        dict
            The record; its ``outcome`` is "done", "does not fit", "out of time", "refused",
            "failed" or "left out", or the watchdog's "hung" or "died".
        """
        known = self._known.get(key_of(part, of))
        if known is not None:
            return known
        limit_s = min(limit_s, self.left_s)
        if limit_s < max(LEAST_S, expected_s):
            why = f"{max(0.0, self.left_s):.0f} s left, {max(LEAST_S, expected_s):.0f} s needed"
            return self.write(part, "left out", {"why": why}, of)
        self._send({"began": {"part": part, "of": dict(of)}, "limit_s": limit_s})
        began = time.monotonic()
        outcome, found = _ended(work, limit_s, self.device)
        taken_s = time.monotonic() - began
        self._look_after_device()
        record = self.write(part, outcome, {"seconds": round(taken_s, 3), **found}, of)
        self.check_device()
        return record

    def check_device(self) -> None:
        """Give unused memory back; raises `DeviceLost` if the device no longer answers."""
        if not self.broken:
            self._look_after_device()
        if self.broken:
            raise DeviceLost(self.broken)

    def _look_after_device(self) -> None:
        try:
            release(self.device)
        except RuntimeError as error:  # after an illegal access CUDA answers every call with it
            self.broken = f"the device no longer answers: {str(error).splitlines()[0]}"

    def write(
        self, part: str, outcome: str, facts: Mapping[str, Any], of: Mapping[str, Any] | None = None
    ) -> Facts:
        """Add a record; `of` says what it is about, if it is not to be done again."""
        record: Facts = {"part": part, "outcome": outcome}
        if of is not None:
            record["of"] = dict(of)
            self._known[key_of(part, of)] = record
        record |= facts
        self.records.append(record)
        self._send(record)
        return record


class DeviceLost(Exception):
    """The device answers nothing any more: only another process may go on."""


def key_of(part: str, of: Mapping[str, Any]) -> str:
    """What tells one attempt from another."""
    return json.dumps([part, of], sort_keys=True, default=plain)


def _ended(work: Callable[[], Facts], limit_s: float, device: torch.device) -> tuple[str, Facts]:
    """How `work` ended.  Nothing of its frames is alive afterwards, so its memory can be freed."""
    try:
        with time_limit(limit_s):
            reset_peak(device)
            return "done", work()
    except OutOfTime:
        return "out of time", {"limit_s": round(limit_s, 1)}
    except ArborsimError as error:
        return "refused", {"error": str(error)}
    except (RuntimeError, MemoryError) as error:  # the first covers torch's
        if out_of_memory(error):
            return "does not fit", memory_facts(error, device)
        return "failed", failure(error)
    except Exception as error:
        return "failed", failure(error)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return any(text in said for text in ("out of memory", "not enough memory", "can't allocate"))


def memory_facts(error: BaseException, device: torch.device) -> Facts:
    """What was asked for when memory ran out, and what was free."""
    asked = re.search(r"[Tt]ried to allocate (?:about )?([\d.]+ \w+)", str(error))
    lines = str(error).splitlines()
    facts: Facts = {"asked": asked[1] if asked else "", "error": lines[0] if lines else ""}
    if device.type == "cuda":
        with suppress(RuntimeError):  # a device that no longer answers
            free, total = torch.cuda.mem_get_info(device)
            facts |= {"free_bytes": free, "total_bytes": total}
            facts["held_bytes"] = torch.cuda.memory_allocated(device)
    return facts


def failure(error: BaseException) -> Facts:
    """The error, and the end of its traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return {
        "error": f"{type(error).__name__}: {error}"[:_SAID],
        "where": [line[:_LINE] for line in lines[-_TRACEBACK_LINES:]],
    }


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the main thread after `seconds`, between two steps of Python."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Forget the largest memory so far."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release(device: torch.device) -> None:
    """Give unused memory of a GPU back; page-locked memory of the host is kept for the next part.

    Raises errors of work that was not waited for.
    """
    if device.type != "cuda":
        return  # the host's goes with its last user
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def peaks(device: torch.device) -> Facts:
    """Largest memory of PyTorch's allocator since the part began: in tensors, and reserved."""
    if device.type != "cuda":
        return {"allocator_peak_bytes": 0, "allocator_reserved_bytes": 0}
    return {
        "allocator_peak_bytes": torch.cuda.max_memory_allocated(device),
        "allocator_reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def plain(value: Any) -> Any:
    """NumPy's numbers and arrays as JSON has them."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
