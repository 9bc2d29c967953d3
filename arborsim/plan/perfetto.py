"""A timeline in the format of Chrome's trace events, which https://ui.perfetto.dev opens.

The format: "Trace Event Format" by Nat Duca and Dan Sinclair, Google, 2016.  Complete events (X)
carry microseconds; metadata (M) names processes and threads; counters (C) are series.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.plan.course import Slice, Timeline

_US = 1e6
_MACHINE, _SEARCHES = 1, 2  # processes
_GPU, _DOWN, _UP = 1, 2, 3  # threads of the machine
_THREADS = {_GPU: "GPU", _DOWN: "PCIe to the host", _UP: "PCIe from the host"}
_LINKS = {"down": _DOWN, "up": _UP}
_AMOUNTS = {"decode": "sequences", "prefill": "tokens", "down": "bytes", "up": "bytes"}
_TITLES = {"swap": "displaced", "down": "transfer", "up": "transfer", "recompute": "recompute"}


def trace_events(line: Timeline, name: str = "") -> dict[str, Any]:
    """The whole document.

    Parameters
    ----------
    line : Timeline
    name : str
        Of the machine.
    """
    events = [*_metadata(line, name), *_slices(line), *_counters(line)]
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"load": line.load, "seed": line.seed, "until_s": line.until_s},
    }


def write_perfetto(line: Timeline, path: Path, name: str = "") -> None:
    """Write the timeline as JSON.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    text = json.dumps(trace_events(line, name), separators=(",", ":"), allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--perfetto {path}: cannot write: {error.strerror}") from None


def _metadata(line: Timeline, name: str) -> Iterator[dict[str, Any]]:
    def named(what: str, pid: int, tid: int, value: str) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": value}}

    yield named("process_name", _MACHINE, 0, name or "machine")
    yield named("process_name", _SEARCHES, 0, "searches")
    for thread, title in _THREADS.items():
        yield named("thread_name", _MACHINE, thread, title)
    for search in sorted({each.search for each in line.slices if each.search >= 0}):
        yield named("thread_name", _SEARCHES, search + 1, f"search {search}")


def _slices(line: Timeline) -> Iterator[dict[str, Any]]:
    for each in line.slices:
        if each.kind in _LINKS:
            yield _complete(each, _MACHINE, _LINKS[each.kind])
        elif each.search < 0:
            yield _complete(each, _MACHINE, _GPU)
        else:
            yield _complete(each, _SEARCHES, each.search + 1)
            if each.kind in ("prefill", "recompute", "policy"):  # the others wait meanwhile
                yield _complete(each, _MACHINE, _GPU)


def _complete(each: Slice, process: int, thread: int) -> dict[str, Any]:
    event = {
        "ph": "X", "name": _TITLES.get(each.kind, each.kind), "cat": each.kind,
        "pid": process, "tid": thread, "ts": each.start_s * _US,
        "dur": max(0.0, (each.end_s - each.start_s) * _US),
    }  # fmt: skip
    if each.kind in _AMOUNTS:
        event["args"] = {_AMOUNTS[each.kind]: each.amount}
    return event


def _counters(line: Timeline) -> Iterator[dict[str, Any]]:
    """HBM, DDR and the batch as sampled, and the length of the queue."""
    series = line.series
    columns = {
        "HBM for keys and values (bytes)": series.hbm_kv_bytes,
        "DDR and NVMe (bytes)": series.host_bytes,
        "searches decoding": series.decoding,
    }
    for title, values in columns.items():
        for time_s, value in zip(series.time_s, values, strict=True):
            if time_s <= line.until_s:
                yield _counter(title, time_s, value)
    changes = [(each.start_s, 1) for each in line.slices if each.kind == "waiting"]
    changes += [(each.end_s, -1) for each in line.slices if each.kind == "waiting"]
    length = 0
    for time_s, change in sorted(changes):
        length += change
        yield _counter("queue (searches)", time_s, max(0, length))


def _counter(title: str, time_s: float, value: int) -> dict[str, Any]:
    return {
        "ph": "C", "name": title, "pid": _MACHINE, "tid": 0, "ts": time_s * _US,
        "args": {"value": value},
    }  # fmt: skip
