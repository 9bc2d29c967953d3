"""The course of one machine at a candidate's largest load; also as a file for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arborsim.core.outputs import write_text
from arborsim.core.records import located
from arborsim.machine.clock import Command, Iterate, Link, Spend
from arborsim.machine.program import Op
from arborsim.machine.server import Server
from arborsim.machine.state import State
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.results import CandidateResult, Slice, Timeline
from arborsim.products.plan.runs import Bench

MOST_SLICES = 50_000  # what comes later is left out
_KINDS = dict.fromkeys((Op.DECIDE, Op.TURN, Op.COPY, Op.MOVE), "policy")
_KINDS |= {Op.PREFILL: "prefill", Op.RECOMPUTE: "recompute"}


def timeline(planner: Planner, result: CandidateResult) -> Timeline:
    """The first run of a candidate of the planner's workload at its largest load."""
    assert result.largest is not None
    candidate = planner.candidates[result.number]
    bench = Bench(planner.workload, candidate.hardware, planner.demands_of(result.number))
    seed = planner.workload.seed
    recorder = Recorder()
    run = bench.run(result.largest, seed, also=recorder)
    until_s = recorder.full_s if recorder.full_s is not None else run.report.total_s
    for search, outcome in enumerate(run.report.searches):
        if outcome.refused or outcome.arrival_s >= until_s:
            continue
        end = outcome.admitted_s if outcome.admitted_s >= 0 else run.report.total_s
        if end > outcome.arrival_s:
            recorder.slices.append(Slice(outcome.arrival_s, min(end, until_s), "waiting", search))
    slices = sorted(recorder.finished(), key=lambda each: (each.start_s, each.search, each.kind))
    return Timeline(result.number, result.largest, seed, until_s, tuple(slices), run.report.series)


class Recorder:
    """Watches a run and keeps what happens as slices."""

    def __init__(self) -> None:
        self.slices: list[Slice] = []  #: that have ended
        self.full_s: float | None = None  #: when there were too many, if there were
        self._open: dict[tuple[str, int], Slice] = {}  # by kind and search, up to now
        self._links = {"down": (0, 0.0), "up": (0, 0.0)}
        self._now = 0.0

    def __call__(self, server: Server, command: Command, began_s: float) -> bool:
        if self.full_s is not None:
            return False
        state = server.state
        self._now = now = state.clock.now
        if isinstance(command, Iterate):
            self._decoded(state, command, began_s)
        else:
            self._end("decode", -1)
            if isinstance(command, Spend) and now > began_s:
                kind = _KINDS[Op(command.op)]
                self.slices.append(Slice(began_s, now, kind, command.search))
        self._transferred("down", state.clock.down)
        self._transferred("up", state.clock.up)
        self._placed(state)
        if len(self.slices) >= MOST_SLICES:
            self.full_s = now
        return False

    def finished(self) -> list[Slice]:
        """All slices, with those that still go on cut off."""
        for kind, search in list(self._open):
            self._end(kind, search)
        return self.slices

    def _extend(self, kind: str, search: int, began_s: float, amount: int = 0) -> None:
        """Note that this goes on: since `began_s`, unless it went on before."""
        if (kind, search) in self._open:
            began_s = self._open[kind, search].start_s
        self._open[kind, search] = Slice(began_s, self._now, kind, search, amount)

    def _end(self, kind: str, search: int) -> None:
        ended = self._open.pop((kind, search), None)
        if ended is not None and ended.end_s > ended.start_s:
            self.slices.append(ended)

    def _decoded(self, state: State, command: Iterate, began_s: float) -> None:
        """Iterations: of the batch, of each search in it, and of the prompt that joins them."""
        members = {s.key: s for s in state.resident.values() if s.key in state.batch}
        for kind, search in list(self._open):
            if kind == "decode" and search >= 0 and search not in members:
                self._end(kind, search)
        for key, member in members.items():
            self._extend("decode", key, began_s, member.piece.sequences)
        before = self._open.get(("decode", -1))
        sequences = max(state.batch.sums.sequences, before.amount if before else 0)
        self._extend("decode", -1, began_s, sequences)
        if command.extra.sequences:
            self._end("decode", -1)
            search, tokens = state.prefilling[0].key, command.extra.tokens
            self.slices.append(Slice(began_s, self._now, "prefill", search, tokens))

    def _transferred(self, name: str, link: Link) -> None:
        """Note what was sent meanwhile; several transfers in a row are one slice."""
        carried, busy_s = self._links[name]
        if link.carried_bytes > carried and link.busy_s > busy_s:
            end = max(link.free_s, self._now) if name == "up" else link.free_s
            size = link.carried_bytes - carried
            self.slices.append(Slice(end - (link.busy_s - busy_s), end, name, -1, size))
        self._links[name] = (link.carried_bytes, link.busy_s)

    def _placed(self, state: State) -> None:
        """Searches that lost their place, until they have one again."""
        for kind, search in list(self._open):
            if kind == "swap":
                self._extend(kind, search, self._now)
                if state.searches[search].resident:
                    self._end(kind, search)
        for lost in state.displaced:
            if ("swap", lost.key) not in self._open:
                self._end("decode", lost.key)
                self._extend("swap", lost.key, self._now)


_US = 1e6
_MACHINE, _SEARCHES = 1, 2  # processes
_GPU, _DOWN, _UP = 1, 2, 3  # threads of the machine
_THREADS = {_GPU: "GPU", _DOWN: "PCIe to the host", _UP: "PCIe from the host"}
_LINKS = {"down": _DOWN, "up": _UP}
_AMOUNTS = {"decode": "sequences", "prefill": "tokens", "down": "bytes", "up": "bytes"}
_TITLES = {"swap": "displaced", "down": "transfer", "up": "transfer", "recompute": "recompute"}


def trace_events(line: Timeline) -> dict[str, Any]:
    """The whole document."""
    events = [*_names(line), *_slices(line), *_counters(line)]
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0.0)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"load": line.load, "seed": line.seed, "until_s": line.until_s},
    }


def write_perfetto(line: Timeline, path: Path) -> None:
    """Write the timeline as JSON, or a `UsageError` if the file cannot be written."""
    text = json.dumps(trace_events(line), separators=(",", ":"), allow_nan=False)
    with located("--perfetto"):
        write_text(path, text + "\n")


def _names(line: Timeline) -> Iterator[dict[str, Any]]:
    """Names of processes and threads: the machine with its links, and each search."""
    searches = sorted({each.search for each in line.slices if each.search >= 0})
    titles = [
        ("process_name", _MACHINE, 0, "machine"),
        ("process_name", _SEARCHES, 0, "searches"),
        *(("thread_name", _MACHINE, thread, title) for thread, title in _THREADS.items()),
        *(("thread_name", _SEARCHES, search + 1, f"search {search}") for search in searches),
    ]
    for what, pid, tid, title in titles:
        yield {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": title}}


def _slices(line: Timeline) -> Iterator[dict[str, Any]]:
    for each in line.slices:
        of_search = each.search >= 0 and each.kind not in _LINKS
        threads = [(_SEARCHES, each.search + 1)] if of_search else []
        if not of_search or each.kind in ("prefill", "recompute", "policy"):  # the others wait
            threads.append((_MACHINE, _LINKS.get(each.kind, _GPU)))
        took = max(0.0, (each.end_s - each.start_s) * _US)
        event: dict[str, Any] = {"ph": "X", "cat": each.kind}
        event |= {"name": _TITLES.get(each.kind, each.kind)}
        event |= {"ts": each.start_s * _US, "dur": took}
        if each.kind in _AMOUNTS:
            event["args"] = {_AMOUNTS[each.kind]: each.amount}
        yield from (event | {"pid": process, "tid": thread} for process, thread in threads)


def _counters(line: Timeline) -> Iterator[dict[str, Any]]:
    """HBM, DDR and the batch as sampled, and the length of the queue."""
    series = line.series
    columns = {
        "HBM for keys and values (bytes)": series.hbm_kv_bytes,
        "DDR and NVMe (bytes)": series.host_bytes,
        "searches decoding": series.decoding,
    }
    found = [
        (title, time_s, value)
        for title, values in columns.items()
        for time_s, value in zip(series.time_s, values, strict=True)
        if time_s <= line.until_s
    ]
    waiting = [each for each in line.slices if each.kind == "waiting"]
    changes = [(each.start_s, 1) for each in waiting] + [(each.end_s, -1) for each in waiting]
    length = 0
    for time_s, change in sorted(changes):
        length += change
        found.append(("queue (searches)", time_s, max(0, length)))
    for title, time_s, value in found:
        event = {"ph": "C", "name": title, "pid": _MACHINE, "tid": 0, "ts": time_s * _US}
        yield event | {"args": {"value": value}}
