"""The work is done in a process of its own, which is ended and replaced when it hangs or dies.

A kernel that never ends, a segmentation fault or an illegal access on the device takes the process
with it.  This side needs neither PyTorch nor the device: it writes every record down as it comes,
says of a lost attempt how it was lost, and lets a new process go on after it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
#: Records that a later call need not repeat, with the same code on the same device.
FINAL = frozenset({"done", "does not fit", "refused"})
#: Between two attempts, a process may import, load and release for so long.
IDLE_S = 120.0
_GRACE_S = 10.0  # past its limit, an attempt may still end by itself
_MOST_LOST = 8  # processes; each start costs seconds


@dataclass
class Lines:
    """A file with a record per line; each is on the disk when `write` returns.

    A line that an interruption cut short is dropped when the file is read.
    """

    path: Path

    def read(self) -> list[Facts]:
        """All whole lines."""
        found = []
        with suppress(FileNotFoundError):
            for line in self.path.read_bytes().split(b"\n"):
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a line, by one write."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            cut = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, b"\n" * cut + json.dumps(record).encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)


#: What a process runs: the pipe to this side, the records so far, when all has to be over.
Work = Callable[[Connection, list[Facts], float], None]


@dataclass
class Watchdog:
    """Runs `work` to its end, in as many processes as it takes.

    Attributes
    ----------
    work : callable
        At the top of a module, or a `functools.partial` of one: it is started afresh.
    end : float
        When everything has to be over, by `time.monotonic`.
    keep : callable
        Gets every record.
    records : list of dict
        What is known: a process does not repeat it.
    idle_s, grace_s : float
    """

    work: Work
    end: float
    keep: Callable[[Facts], None]
    records: list[Facts] = field(default_factory=list)
    idle_s: float = IDLE_S
    grace_s: float = _GRACE_S

    def run(self) -> None:
        """Until a process says that it is done, or the time is over."""
        for _ in range(_MOST_LOST):
            before = len(self.records)
            if self._one_process() or time.monotonic() >= self.end:
                return
            if len(self.records) == before + 1 and "of" not in self.records[-1]:
                return  # it was lost before it began anything: the next one would be, too
        self._keep({"part": "watchdog", "outcome": "failed", "why": f"{_MOST_LOST} were lost"})

    def _one_process(self) -> bool:
        """Whether it came to its end."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        arguments = there, list(self.records), self.end
        process = context.Process(target=self.work, args=arguments, daemon=True)
        process.start()
        there.close()
        began: Facts | None = None
        deadline = time.monotonic() + self.idle_s
        try:
            while True:
                until = min(deadline, self.end + self.grace_s)
                if not here.poll(max(0.0, until - time.monotonic())):
                    over = deadline > self.end + self.grace_s
                    self._lost(began, "out of time" if over else "hung", {})
                    return False
                message = json.loads(here.recv_bytes())
                if "began" in message:
                    began = message["began"]
                    deadline = time.monotonic() + message["limit_s"] + self.grace_s
                elif "part" not in message:
                    return not message["ended"]  # why another process must go on, or nothing
                else:
                    if began is not None and message.get("of") == began["of"]:
                        began, deadline = None, time.monotonic() + self.idle_s
                    self._keep(message)
        except EOFError:
            process.join(self.grace_s)
            self._lost(began, "died", {"exit_code": process.exitcode})
            return False
        finally:
            process.kill()
            process.join()
            here.close()

    def _lost(self, began: Facts | None, outcome: str, facts: Facts) -> None:
        if began is None:
            self._keep({"part": "watchdog", "outcome": outcome, **facts})
        else:
            self._keep({"part": began["part"], "outcome": outcome, "of": began["of"], **facts})

    def _keep(self, record: Facts) -> None:
        self.records.append(record)
        self.keep(record)
