"""The engine: plays demands on one machine, many iterations at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arborsim.machine.batch import Batch, IterationTime, Sums
from arborsim.machine.clock import TOGETHER, Clock, Command, Decode, Idle, Starve, Steps
from arborsim.machine.cost import CostModel
from arborsim.machine.machine import KvPool, ServingOptions
from arborsim.machine.places import Arrivals, Timed
from arborsim.machine.price import Price
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import Op, PricedProgram, SearchDemand
from arborsim.machine.report import ServingReport, report
from arborsim.machine.server import Server
from arborsim.trace.schema import Geometry

_UNLIMITED = 1 << 62
Play = Callable[[Sequence[PricedProgram], Sequence[int], Price, ServingOptions, int, Arrivals],
                Server]  # fmt: skip
Watch = Callable[[Server, Command, float], bool]


class ServingEngine:
    """A machine with demands priced for it: runs as often as one likes.

    Parameters
    ----------
    demands : sequence of SearchDemand
        What may arrive, all recorded for `geometry`; arrivals name them by number.
    profile, geometry
        The machine (one GPU of it) and the model.
    kv_bytes : int, optional
        HBM for keys and values, in place of what the machine leaves for them.

    Raises
    ------
    UsageError
        The model does not fit, or a demand is of another model.
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
        workspace = self.price.workspace_bytes(demands, self.options.prefill_chunk)
        self.pool = KvPool.of(cost, self.options, workspace)
        self.kv_bytes = self.pool.kv_bytes if kv_bytes is None else kv_bytes
        shares = self.options.prefix_sharing
        self.demands = [_private(self.price.program(d), shares) for d in demands]
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
        options = replace(self.options, nvme_bytes=_UNLIMITED, prefix_host_bytes=0)
        server = play_closed_form(
            [priced], [0], self.price, options, _UNLIMITED, Timed(((0.0, 0),))
        )
        return Alone(server.state.searches[0].finish_s, server.state.tally.peak_hbm_bytes)


@dataclass(frozen=True)
class Alone:
    """A search by itself on an idle machine: what it takes, and the most HBM that it needs."""

    seconds: float
    peak_hbm_bytes: int


def _private(priced: PricedProgram, shares: bool) -> PricedProgram:
    """Without the shared prefix, which the engine holds once for all."""
    if not shares or not priced.prefix_tokens:
        return priced
    ops = [(op[0], op[1] - op[2], 0, op[3]) if op[0] == Op.LEVEL else op for op in priced.ops]
    return replace(priced, ops=ops, pieces=[piece.without_prefix() for piece in priced.pieces])


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
    clock.env.run(until=clock.env.process(serving(server, price, watch)))
    return server


def serving(server: Server, price: Price, watch: Watch | None = None) -> Steps:
    """The server's process: let time pass as its rules say."""
    clock, tally, time = server.state.clock, server.state.tally, IterationTime(price)
    yield from clock.settle()
    for command in server.loop():
        before = clock.now
        if isinstance(command, Decode):
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


def _decode(server: Server, time: IterationTime, command: Decode) -> Steps:
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
            k = _iterations_until(time, sums, k, next_s - clock.now - TOGETHER * next_s)
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
