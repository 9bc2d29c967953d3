"""Work for the watchdog's tests: it is started in processes that need not import PyTorch."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Facts = dict[str, Any]
#: Longer than any test.
FOREVER_S = 600.0


def _attempts(
    connection: Connection, records: list[Facts], ends: dict[str, Callable[[], None]]
) -> None:
    """Attempt each name that has no record yet."""

    def send(message: Facts) -> None:
        connection.send_bytes(json.dumps(message).encode())

    for name, end in ends.items():
        of = {"name": name}
        if any(record.get("of") == of for record in records):
            continue
        send({"began": {"part": "test", "of": of}, "limit_s": 0.2})
        end()
        # A figure that is called as a message of the protocol is a figure still.
        send({"part": "test", "outcome": "done", "of": of, "ended": "memory", "pid": os.getpid()})
    send({"ended": ""})


def _raise() -> None:
    raise RuntimeError("what no handler knows")


def hangs_and_dies(connection: Connection, records: list[Facts], end: float) -> None:
    """Some end, one sleeps, one is killed by a signal, one leaves and one raises."""
    ends: dict[str, Callable[[], None]] = {
        "first": lambda: None,
        "sleeps": lambda: time.sleep(FOREVER_S),
        "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "leaves": lambda: os._exit(3),
        "raises": _raise,
        "last": lambda: None,
    }
    _attempts(connection, records, ends)


def loses_its_device(connection: Connection, records: list[Facts], end: float) -> None:
    """Says so once, and then does the rest."""
    if not any(record.get("of") for record in records):
        message = {"part": "test", "outcome": "failed", "of": {"name": "first"}}
        connection.send_bytes(json.dumps(message).encode())
        connection.send_bytes(json.dumps({"ended": "the device no longer answers"}).encode())
        return
    _attempts(connection, records, {"first": lambda: None, "second": lambda: None})


def never_begins(connection: Connection, records: list[Facts], end: float) -> None:
    """As where PyTorch cannot be imported."""
    raise ImportError("no such thing")


def never_ends(connection: Connection, records: list[Facts], end: float) -> None:
    """Nothing is under way, and nothing is told."""
    time.sleep(FOREVER_S)
