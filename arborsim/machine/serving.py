"""Drivers of a server, and the report of a run: a machine on which priced demands are played."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import UNBOUNDED, Geometry
from arborsim.core.tiers import MEMORIES
from arborsim.machine.batch import Batch, IterationTime, Sums
from arborsim.machine.clock import SAME_MOMENT, Clock, Command, Idle, Iterate, Starve, Steps
from arborsim.machine.cost import CostModel
from arborsim.machine.machine import KvPool, ServingOptions
from arborsim.machine.prefixes import parts
from arborsim.machine.price import Price
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import Op, Part, PricedProgram, SearchDemand
from arborsim.machine.report import SearchOutcome, ServingReport, Utilisation
from arborsim.machine.scheduler import Arrivals, ClosedLoop, Timed
from arborsim.machine.server import Server
from arborsim.machine.state import ServedSearch, chunk_tokens

Watch = Callable[["Server", Command, float], bool]
Play = Callable[
    [Sequence[PricedProgram], Sequence[int], Price, ServingOptions, int, Arrivals], "Server"
]


def play_closed_form(
    demands: Sequence[PricedProgram],
    peaks: Sequence[int],
    price: Price,
    options: ServingOptions,
    kv_bytes: int,
    arrivals: Arrivals,
    watch: Watch | None = None,
) -> Server:
    """Let searches arrive and be served, all iterations up to the next event at once.

    `watch` is called after each command with the server, the command and when it began; what has
    not happened when it returns True never does.
    """
    clock = Clock()
    server = Server(demands, peaks, price, options, kv_bytes, clock, Batch())
    server.expect(arrivals)
    clock.env.run(until=clock.env.process(serving(server, watch)))
    return server


def serving(server: Server, watch: Watch | None = None) -> Steps:
    """The server's process: let time pass as its rules say."""
    clock, tally = server.state.clock, server.state.tally
    time = IterationTime(server.state.price)
    yield from clock.settle()
    for command in server.loop():
        before = clock.now
        if isinstance(command, Iterate):
            yield from _decode(server, time, command)
        elif isinstance(command, Starve):
            yield command.program.starve()
        else:
            if isinstance(command, Idle):
                yield from clock.skip()
                tally.idle_s += clock.now - before
            else:
                yield from clock.spend(command.seconds)
            server.state.spent(clock.now - before)
        if watch is not None and watch(server, command, before):
            break


def _decode(server: Server, time: IterationTime, command: Iterate) -> Steps:
    """Iterations up to the end of a piece, or those in which the next event lies."""
    state, clock = server.state, server.state.clock
    sums = state.batch.sums
    most = command.most
    while sums.streamed_bytes and clock.up.free_s > clock.now:  # what streams waits for a free link
        waited_s = clock.up.free_s - clock.now
        yield from clock.spend(waited_s)
        state.spent(waited_s)
        state.tally.busy.exposed_s += waited_s
        state.tally.link_wait_s += waited_s
        most = 1  # a search may be able to join the next iteration
    time.stream_floor_s = state.stream_floor_s
    extra = command.extra
    if extra.sequences:
        k, span = 1, time.one(sums, extra)
    else:
        k = min(most, state.batch.next_end())
        next_s = clock.next_s
        if k > 1 and next_s < float("inf"):
            k = _iterations_until(time, sums, k, next_s - clock.now - SAME_MOMENT * next_s)
        span = time.span(sums, k)
    state.passing(k)
    if sums.streamed_bytes:
        clock.up.free_s = clock.now + span.seconds
    yield from clock.spend(span.seconds)
    state.passed(span, k)


def _iterations_until(time: IterationTime, sums: Sums, most: int, seconds: float) -> int:
    """The fewest iterations that take at least `seconds`, up to `most`."""
    if time.terms(sums, 0)[0] >= seconds:
        return 1
    if time.seconds(sums, most) < seconds:
        return most
    return 1 + bisect_left(range(1, most), seconds, key=lambda k: time.seconds(sums, k))


class ServingEngine:
    """A machine with demands priced for it, which can run many times.

    All `demands` were recorded for `geometry`; arrivals name them by number.  `profile` is one GPU
    of the machine.  `kv_bytes` takes the place of the HBM that it leaves for keys and values.

    Raises `UsageError` if the model does not fit, or a demand is of another model.
    """

    def __init__(
        self,
        demands: Sequence[SearchDemand],
        profile: HardwareProfile,
        geometry: Geometry,
        options: ServingOptions | None = None,
        *,
        kv_bytes: int | None = None,
    ) -> None:
        self.options = options or ServingOptions()
        cost = CostModel(profile, geometry)
        self.price = Price(cost, self.options)
        workspace = self.price.workspace_bytes(demands, chunk_tokens(self.options, profile.engine))
        programs = [self.price.program(each) for each in demands]
        pool = KvPool.of(cost, self.options, workspace)
        built = max(
            (self.price.built_in_bytes(each, pool.kv_bytes) for each in programs), default=0
        )
        self.pool = KvPool.of(cost, self.options, workspace, built) if built else pool
        self.kv_bytes = self.pool.kv_bytes if kv_bytes is None else kv_bytes
        if self.options.prefix_sharing:
            shared = parts(programs)
            programs = [_private(*each) for each in zip(programs, shared, strict=True)]
        self.demands = programs
        self.alone = tuple(self._alone(priced) for priced in self.demands)

    def run(self, arrivals: Arrivals, play: Play | None = None) -> ServingReport:
        """Play the demands; `play` may be another driver of the same rules."""
        peaks = [alone.peak_hbm_bytes for alone in self.alone]
        server = (play or play_closed_form)(
            self.demands, peaks, self.price, self.options, self.kv_bytes, arrivals
        )
        return report(server, self.pool)

    def _alone(self, priced: PricedProgram) -> Alone:
        """Play one search on the machine as if memory had no end."""
        options = replace(self.options, nvme_bytes=UNBOUNDED, prefix_host_bytes=0)
        server = play_closed_form([priced], [0], self.price, options, UNBOUNDED, Timed(((0.0, 0),)))
        tally = server.state.tally
        waited_s = tally.idle_s + tally.link_wait_s
        return Alone(server.state.searches[0].finish_s, tally.peak_hbm_bytes, waited_s)


@dataclass(frozen=True)
class Alone:
    """A search by itself on an idle machine: what it takes, and the most HBM that it needs."""

    seconds: float
    peak_hbm_bytes: int
    waited_s: float = 0.0  #: of the seconds, for transfers in the background


def _private(priced: PricedProgram, shared: tuple[Part, ...]) -> PricedProgram:
    """Without the shared prefix, which the engine holds once for all."""
    if not shared:
        return priced
    ops = [(op[0], op[1] - op[2], 0, op[3]) if op[0] == Op.LEVEL else op for op in priced.ops]
    pieces = [piece.without_prefix() for piece in priced.pieces]
    return replace(priced, ops=ops, pieces=pieces, parts=shared)


def report(server: Server, pool: KvPool) -> ServingReport:
    """The report of a server whose run has ended."""
    state = server.state
    tally, clock, host = state.tally, state.clock, state.host
    total_s = clock.now

    def share(seconds: float, capacity: float = 1.0) -> float:
        return seconds / (total_s * capacity) if total_s else 0.0

    used = Utilisation(
        engine=share(tally.busy.total_s),
        compute=share(tally.flops_s),
        memory=share(tally.memory_s),
        hbm=share(tally.decoding_byte_s + state.hbm.byte_s(), state.kv_bytes),
        host=share(host.level.byte_s(), host.ddr_bytes + host.nvme_bytes),
        pcie_down=share(clock.down.busy_s),
        pcie_up=share(clock.up.busy_s),
        below={
            MEMORIES[memory]: share(level.byte_s(), state.stored_capacity[memory])
            for memory, level in state.stored.items()
        },
        links={
            MEMORIES[memory]: share(max(clock.link(memory, up).busy_s for up in (False, True)))
            for memory in state.stored
        },
    )
    return ServingReport(
        tuple(map(_outcome, state.searches)),
        total_s,
        tally.tokens,
        tally.num_iterations,
        tally.events,
        tally.preemptions,
        pool,
        tally.peak_hbm_bytes,
        host.level.peak,
        clock.down.carried_bytes,
        clock.up.carried_bytes,
        tally.busy,
        used,
        tally.first_s,
        tally.prefixes,
        tally.series(),
        tally.joined_s,
    )


def _outcome(search: ServedSearch) -> SearchOutcome:
    times = search.arrival_s, search.admitted_s, search.first_token_s, search.finish_s
    counts = search.preemptions, search.generated, search.priced.demand.iterations
    return SearchOutcome(search.demand, *times, *counts, search.refused, search.prefilled_s)


#: Searches that are played at once, at most; where twice as many fit, memory limits nothing.
MOST = 2048


@dataclass(frozen=True)
class FullGpu:
    """One GPU with as many searches as its memory holds."""

    searches: int  #: at once: the pool for keys and values over the mean peak of a search
    tokens_per_s: float  #: generated by all of them together, or by `MOST`


def full_gpu(
    demands: Sequence[SearchDemand], profile: HardwareProfile, geometry: Geometry
) -> FullGpu | None:
    """Fill a GPU with searches that ask for `demands`, drawn in turn, at the prices of plans.

    A search by itself presses no memory: what its policy frees is worth what others do with it.

    Each that ends makes room for the next; a third of three times as many searches as fit are
    measured, after the machine has filled and their phases have spread.  None where twice `MOST`
    would fit, or not even one does.
    """
    try:
        engine = ServingEngine(demands, profile, geometry)
    except UsageError:  # the model does not fit
        return None
    peaks = [each.peak_hbm_bytes for each in engine.alone]
    searches = int(engine.kv_bytes / max(float(np.mean(peaks)), 1.0))
    if not 0 < searches <= 2 * MOST or max(peaks) > engine.kv_bytes:
        return None
    since: list[tuple[float, int]] = []
    clients = min(searches, MOST)

    def enough(server: Server, command: Command, began_s: float) -> bool:
        arrived = len(server.state.searches)
        if arrived >= 2 * clients and not since:
            since.append((server.state.clock.now, server.state.tally.tokens))
        return arrived >= 3 * clients

    drawn = tuple(np.resize(np.arange(len(demands)), 3 * clients).tolist())
    report = engine.run(ClosedLoop(clients, drawn), partial(play_closed_form, watch=enough))
    begin_s, before = since[0]
    seconds = report.total_s - begin_s
    return FullGpu(searches, (report.tokens - before) / seconds) if seconds else None
