"""What one machine does over time, at the largest load of a candidate."""

from __future__ import annotations

from arborsim.machine.clock import Link
from arborsim.machine.commands import Command, Decode, Spend
from arborsim.machine.demand import Op
from arborsim.machine.server import Server
from arborsim.plan.course import Slice, Timeline
from arborsim.plan.plan import Planner
from arborsim.plan.results import CandidateResult
from arborsim.plan.runs import Bench

MOST_SLICES = 50_000  # what comes after so many is left out
_KINDS = {
    Op.PREFILL: "prefill", Op.RECOMPUTE: "recompute", Op.DECIDE: "policy", Op.TURN: "policy",
    Op.COPY: "policy",
}  # fmt: skip


def timeline(planner: Planner, result: CandidateResult) -> Timeline:
    """The first run of a candidate at its largest load.

    Parameters
    ----------
    planner : Planner
        Of the workload that `result` belongs to.
    result : CandidateResult
        With a largest load.
    """
    assert result.largest is not None
    _, hardware, _ = planner.candidates[result.number]
    bench = Bench(planner.workload, hardware, planner.demands_of(result.number))
    seed = planner.workload.seed
    recorder = Recorder()
    run = bench.run(result.largest, seed, also=recorder)
    assert run is not None
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
    """Watches a run and keeps what happens as slices.

    Attributes
    ----------
    slices : list of Slice
        That have ended.
    full_s : float or None
        When there were too many, if there were.
    """

    def __init__(self) -> None:
        self.slices: list[Slice] = []
        self.full_s: float | None = None
        self._decoding: dict[int, tuple[float, float, int]] = {}  # search -> start, end, sequences
        self._displaced: dict[int, float] = {}  # search -> since when it has no place
        self._batch: tuple[float, float, int] | None = None
        self._links = {"down": (0, 0.0), "up": (0, 0.0)}
        self._now = 0.0

    def __call__(self, server: Server, command: Command, began_s: float) -> bool:
        if self.full_s is not None:
            return False
        state = server.state
        self._now = now = state.clock.now
        if isinstance(command, Decode):
            self._decoded(server, command, began_s)
        else:
            self._end_batch()
            if isinstance(command, Spend) and now > began_s:
                kind = _KINDS[Op(command.op)]
                self.slices.append(Slice(began_s, now, kind, command.search))
        self._transferred("down", state.clock.down)
        self._transferred("up", state.clock.up)
        self._placed(server)
        if len(self.slices) >= MOST_SLICES:
            self.full_s = now
        return False

    def finished(self) -> list[Slice]:
        """All slices, with those that still go on cut off."""
        self._end_batch()
        for search in list(self._decoding):
            self._end_decoding(search)
        for search in list(self._displaced):
            self._end_displaced(search)
        return self.slices

    def _decoded(self, server: Server, command: Decode, began_s: float) -> None:
        """Iterations: of the batch, of each search in it, and of the prompt that joins them."""
        state, now = server.state, self._now
        members = {s.key: s for s in state.resident.values() if s.key in state.batch}
        for search in [key for key in self._decoding if key not in members]:
            self._end_decoding(search)
        for key, member in members.items():
            start = self._decoding[key][0] if key in self._decoding else began_s
            self._decoding[key] = (start, now, member.piece.sequences)
        sequences = state.batch.sums.sequences
        start, _, most = self._batch or (began_s, now, 0)
        self._batch = (start, now, max(most, sequences))
        if command.extra.sequences:
            self._end_batch()
            search = state.prefilling[0].key
            self.slices.append(Slice(began_s, now, "prefill", search, command.extra.tokens))

    def _end_batch(self) -> None:
        if self._batch is not None:
            start, end, sequences = self._batch
            self.slices.append(Slice(start, end, "decode", -1, sequences))
            self._batch = None

    def _end_decoding(self, search: int) -> None:
        start, end, sequences = self._decoding.pop(search)
        self.slices.append(Slice(start, end, "decode", search, sequences))

    def _transferred(self, name: str, link: Link) -> None:
        """What was sent meanwhile; several transfers in a row are one slice."""
        carried, busy_s = self._links[name]
        if link.carried_bytes > carried and link.busy_s > busy_s:
            end = max(link.free_s, self._now) if name == "up" else link.free_s
            size = link.carried_bytes - carried
            self.slices.append(Slice(end - (link.busy_s - busy_s), end, name, -1, size))
        self._links[name] = (link.carried_bytes, link.busy_s)

    def _placed(self, server: Server) -> None:
        """Searches that lost their place, until they have one again."""
        state = server.state
        for key in [k for k in self._displaced if state.searches[k].resident]:
            self._end_displaced(key)
        for search in state.displaced:
            if search.key not in self._displaced:
                if search.key in self._decoding:
                    self._end_decoding(search.key)
                self._displaced[search.key] = self._now

    def _end_displaced(self, search: int) -> None:
        start = self._displaced.pop(search)
        if self._now > start:
            self.slices.append(Slice(start, self._now, "swap", search))
