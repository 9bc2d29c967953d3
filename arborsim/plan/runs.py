"""Runs of one candidate: a load and a seed in, what its searches met with out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from arborsim.machine.clock import Command
from arborsim.machine.engine import ServingEngine, Watch, play_closed_form
from arborsim.machine.options import Arrivals, ClosedLoop, Timed
from arborsim.machine.report import ServingReport
from arborsim.machine.server import Server
from arborsim.machine.state import Search
from arborsim.plan.arrivals import ClientLoop
from arborsim.plan.demands import MixDemands
from arborsim.plan.statistics import relative_error
from arborsim.plan.workload import Hardware, Target, Workload


class Verdicts:
    """Judges measured searches while a run goes on, and ends it when all of them have ended.

    Parameters
    ----------
    first, count : int
        Searches `first` .. ``count - 1``, by arrival, are measured.
    allowed : int or None
        More missed ones than that end the run at once.

    Attributes
    ----------
    within : int
        Searches within the limits so far.
    given_up : bool
    """

    def __init__(self, target: Target, first: int, count: int, allowed: int | None) -> None:
        self.within = 0
        self.given_up = False
        self._target = target
        self._first = first
        self._count = count
        self._allowed = allowed
        self._judged = 0  # all before are judged
        self._ended = 0  # all before have ended
        self._missed = 0

    def __call__(self, server: Server, command: Command, began_s: float) -> bool:
        searches = server.state.searches
        known = min(len(searches), self._count)
        while self._judged < known and self._judge(searches[self._judged], server.state.clock.now):
            self._judged += 1
        if self._allowed is not None and self._missed > self._allowed:
            self.given_up = True
            return True
        while self._ended < known and searches[self._ended].ended:
            self._ended += 1
        return self._ended == self._count

    def _judge(self, search: Search, now: float) -> bool:
        """Whether there is a verdict; an unfinished search that is late already has missed."""
        limit = self._target.search_s
        if not search.ended and (limit is None or now - search.arrival_s <= limit):
            return False
        if search.key >= self._first:
            if search.ended and self._is_within(search):
                self.within += 1
            else:
                self._missed += 1
        return True

    def _is_within(self, search: Search) -> bool:
        if search.refused:
            return False
        limit, token = self._target.search_s, self._target.token_s
        if limit is not None and search.finish_s - search.arrival_s > limit:
            return False
        iterations = search.priced.demand.iterations
        if token is None or iterations < 2:
            return True
        return (search.finish_s - search.first_token_s) / (iterations - 1) <= token


#: A run shows a steady state only while fewer of its searches are in the machine than this share.
MOST_AT_ONCE = 1 / 3
#: The machine's rate counts as known up to this relative standard error (`relative_error`).
RATE_ERROR = 0.1


@dataclass(frozen=True)
class Run:
    """One run; arrays hold the measured searches that were served, in order of arrival."""

    meets: bool  #: whether enough of the measured searches were within the target's limits
    within: int  #: how many were
    #: Float64 ``[n]``
    arrival_s: np.ndarray
    admitted_s: np.ndarray
    first_token_s: np.ndarray
    finish_s: np.ndarray
    token_s: np.ndarray
    #: Of measured searches.
    preemptions: int
    refused: int
    refusal: str
    #: Over the time in which measured searches arrived, warm-up searches included.
    served_per_s: float
    concurrency: float
    queue: float
    peak_concurrency: int
    report: ServingReport


class Bench:
    """A candidate's machine, ready for runs.

    Attributes
    ----------
    engine : ServingEngine

    Raises
    ------
    UsageError
        The model does not fit.
    """

    def __init__(self, workload: Workload, hardware: Hardware, found: MixDemands) -> None:
        self.workload, self.hardware = workload, hardware
        options = replace(workload.serving, tensor_parallel=hardware.gpus)
        self.engine = ServingEngine(found.demands, hardware.profile, workload.geometry, options)
        self.drawn = {seed: found.numbers(workload.draws(seed)) for seed in workload.seeds()}

    @property
    def allowed(self) -> int:
        """Measured searches that may miss the target's limits."""
        return self._allowed(self.workload.searches - self.workload.warm_up)

    def _allowed(self, measured: int) -> int:
        return int(measured * (100 - self.workload.target.percentile) / 100 + 1e-9)

    def run(self, load: float, seed: int, also: Watch | None = None) -> Run:
        """Serve the seed's searches at a load.

        As many again follow them, so that the last ones do not meet a machine that empties; they
        are the same ones in the same order, and only measured ones count.

        Parameters
        ----------
        also : Watch, optional
            Called after each command of the engine; what it returns is ignored.
        """
        first, count = self.workload.warm_up, self.workload.searches
        watch = Verdicts(self.workload.target, first, count, None)

        def both(server: Server, command: Command, began_s: float) -> bool:
            assert also is not None
            also(server, command, began_s)
            return watch(server, command, began_s)

        report = self._served(load, seed, count, watch if also is None else both)
        return self._measured(report, watch)

    def attempt(self, load: float, seed: int) -> Run | None:
        """The run if it meets the target; None, as soon as that is certain, if it does not."""
        first, count = self.workload.warm_up, self.workload.searches
        watch = Verdicts(self.workload.target, first, count, self.allowed)
        report = self._served(load, seed, count, watch)
        run = None if watch.given_up else self._measured(report, watch)
        return run if run is not None and run.meets else None

    def scout(self, load: float, seed: int, share: float) -> bool:
        """Whether the beginning of a run meets the target: a guess, for a share of the time."""
        first, count = (int(share * n) for n in (self.workload.warm_up, self.workload.searches))
        allowed = self._allowed(count - first)
        watch = Verdicts(self.workload.target, first, count, allowed)
        self._served(load, seed, count, watch)
        return not watch.given_up and count - first - watch.within <= allowed

    def _served(self, load: float, seed: int, count: int, watch: Watch) -> ServingReport:
        """The first `count` searches of a seed, and as many again, at a load."""
        numbers = np.tile(self.drawn[seed][:count], 2).tolist()
        when = self.workload.arrivals.at(load, 2 * count, seed)
        if isinstance(when, ClientLoop):
            assert when.clients is not None
            arrivals: Arrivals = ClosedLoop(when.clients, tuple(numbers), when.think_s)
        else:
            arrivals = Timed(tuple(zip(when.tolist(), numbers, strict=True)))
        return self.engine.run(arrivals, partial(play_closed_form, watch=watch))

    def keeps_up_with(self, seed: int) -> tuple[float, bool]:
        """Searches per second that the machine finishes when it never lacks any.

        So many clients that a run of this length can still show a steady state start one search
        after the other, without a thought.

        Returns
        -------
        float, bool
            The rate, and whether some search had to wait for a place: if none did, more clients
            might get more done.
        """
        clients = max(1, int(self.workload.searches * MOST_AT_ONCE))
        searches = tuple(np.tile(self.drawn[seed], 2).tolist())
        since: list[tuple[float, int]] = []

        def enough(server: Server, command: Command, began_s: float) -> bool:
            """Two thirds of the searches have ended; from the first third on it counts."""
            arrived = len(server.state.searches)
            if arrived >= 2 * clients and not since:
                since.append((server.state.clock.now, server.state.tally.tokens))
            return arrived >= 3 * clients

        report = self.engine.run(
            ClosedLoop(clients, searches), partial(play_closed_form, watch=enough)
        )
        begin_s, before = since[0] if since else (0.0, 0)
        # By tokens, not by searches that have ended: those under way are partly served.
        tokens = np.array([priced.demand.generated_tokens for priced in self.engine.demands])
        per_search, seconds = float(tokens[self.drawn[seed]].mean()), report.total_s - begin_s
        if not per_search or not seconds:  # of prompts only
            ended = sum(search.finish_s >= 0 for search in report.searches)
            return ended / report.total_s, bool(report.first_s)
        return (report.tokens - before) / seconds / per_search, bool(report.first_s)

    def knows_rate(self, seed: int) -> bool:
        """Whether `keeps_up_with` saw enough searches to say that there is no larger rate.

        It sees a third of a run: that must be 100 searches, and more if few of them are far larger
        than the others.
        """
        tokens = np.array([priced.demand.generated_tokens for priced in self.engine.demands])
        seen = int(self.workload.searches * MOST_AT_ONCE)
        return relative_error(tokens[self.drawn[seed]], seen) <= RATE_ERROR

    def _measured(self, report: ServingReport, watch: Verdicts) -> Run:
        first, count = self.workload.warm_up, self.workload.searches
        measured = report.searches[first:count]
        served = [s for s in measured if not s.refused]
        arrival, admitted, first_token, ended, token = (
            np.array([getattr(s, name) for s in served], dtype=np.float64)
            for name in ("arrival_s", "admitted_s", "first_token_s", "finish_s", "per_token_s")
        )
        refusals = [s.refused for s in measured if s.refused]
        return Run(
            len(measured) - watch.within <= self.allowed,
            watch.within,
            arrival,
            admitted,
            first_token,
            ended,
            token,
            sum(s.preemptions for s in measured),
            len(refusals),
            refusals[0] if refusals else "",
            *_occupation(report, measured[0].arrival_s, measured[-1].arrival_s),
            report,
        )


def _occupation(report: ServingReport, begin: float, end: float) -> tuple[float, float, float, int]:
    """Finished per second, mean searches in the machine and in the queue, the most in it."""
    searches = [s for s in report.searches if not s.refused]

    def ends(times: Sequence[float]) -> np.ndarray:
        """What has not happened is still to come."""
        found = np.array(times, dtype=np.float64)
        return np.where(found < 0, np.inf, found)

    arrived = np.array([s.arrival_s for s in searches], dtype=np.float64)
    admitted = ends([s.admitted_s for s in searches])
    finished = ends([s.finish_s for s in searches])
    length = end - begin

    def mean(start: np.ndarray, stop: np.ndarray) -> float:
        overlap = np.minimum(stop, end) - np.maximum(start, begin)
        return float(np.maximum(overlap, 0.0).sum() / length) if length > 0 else 0.0

    moments = np.concatenate([admitted, finished])
    change = np.concatenate([np.ones(len(admitted)), -np.ones(len(finished))])
    known = np.isfinite(moments)
    order = np.lexsort((change[known], moments[known]))
    inside = np.cumsum(change[known][order])
    done = float(((finished > begin) & (finished <= end)).sum())
    return (
        done / length if length > 0 else 0.0, mean(admitted, finished), mean(arrived, admitted),
        int(inside.max(initial=0)),
    )  # fmt: skip
