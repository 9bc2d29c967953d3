"""The rules by which many searches share one machine.

- The GPU does one thing at a time: a decode iteration in which all searches that can decode step
  together, a pass over a prompt, recovered tokens or a part of a prompt (`prefill_chunk`), a copy,
  or a wait for a policy's decision outside a run.  What a search has to do between two runs of
  iterations is done at once, before the others go on, first come first served.
- Admission: first come first served, searches that lost their place first.  A search is admitted
  when the HBM that it needs now, the growth of all in the next iteration, and the watermark are
  free; alone, it needs no watermark.
- When the next iteration (or a phase of a search) does not fit HBM, unused shared prefixes
  lose their last tokens first (`prefixes`); then the search admitted last loses its
  place, even if it is the one that asks.  Its keys and values in HBM are swapped to the host (all
  others wait for that) or dropped; back in its place it waits for them, or computes them again.
- A transfer that ends takes or frees HBM when it ends, also within an iteration.  Tokens are
  fetched, and searches go on, between iterations.
- Iterations that stream tokens from the host begin when the link up is free, and keep it.
- When the host is full, the copy of the search that lost its place last is dropped; then the
  search admitted last that holds any of the host loses its place and its part of the host.  Both
  compute it all again.  A search that does not fit the machine by itself is refused on arrival.
- Searches with the same prefix hold it once in HBM; each still reads it for itself.  What is left
  of it from earlier ones is not computed again, and what a copy in DDR has of it is copied back
  (`reuse`).  Such copies take DDR that no search wants.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from arborsim.core.geometry import UNBOUNDED, Geometry
from arborsim.machine.batch import Batch, IterationTime, Sums
from arborsim.machine.clock import (
    TOGETHER,
    Clock,
    Command,
    Commands,
    Idle,
    Iterate,
    Spend,
    Starve,
    Steps,
    Tries,
)
from arborsim.machine.cost import CostModel
from arborsim.machine.machine import KvPool, ServingOptions
from arborsim.machine.places import Arrivals, Places, Timed
from arborsim.machine.prefixes import Part, Reuse, parts
from arborsim.machine.price import Price
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import NOTHING, Op, PricedProgram, SearchDemand
from arborsim.machine.report import ServingReport, Tally, report
from arborsim.machine.state import ServedSearch, State, chunk_tokens

_SPENT = (Op.DECIDE, Op.TURN, Op.COPY, Op.RECOMPUTE, Op.MOVE)


class Server:
    """Serves searches; a driver lets time pass as its commands say.

    `peaks` is the HBM in bytes that each demand needs by itself, `kv_bytes` what there is for keys
    and values.
    """

    def __init__(
        self,
        demands: Sequence[PricedProgram],
        peaks: Sequence[int],
        price: Price,
        options: ServingOptions,
        kv_bytes: int,
        clock: Clock,
        batch: Batch,
        tally: type[Tally] = Tally,
    ) -> None:
        self.state = State(price, options, kv_bytes, clock, batch, tally)
        self._reuse = Reuse(self.state)
        self._places = Places(self.state, demands, peaks, self._reuse)

    def expect(self, arrivals: Arrivals) -> None:
        """Let searches arrive.  Call once, first."""
        self._places.expect(arrivals)

    def loop(self) -> Commands:
        """Serve until every search has ended."""
        state = self.state
        while True:
            self._places.admit()
            if state.ready:
                yield from self._proceed(state.ready.popleft())
            elif len(state.batch) or state.prefilling:
                if len(state.batch) and state.batch.sums.hbm > state.pages_left:
                    yield from self._places.relieve()
                else:
                    yield from self._iterate()
            elif state.starved is not None:
                yield Starve(state.starved.priced)
                state.ready.append(state.starved)
                state.starved = None
            elif state.resident or self._places.unfinished:
                yield Idle()
            else:
                return

    def _iterate(self) -> Commands:
        """Decode until something ends, or a part of the oldest prompt within one iteration."""
        state = self.state
        state.stream_floor_s = state.nvme_s(state.batch.sums.streamed_bytes)
        if state.prefilling:
            yield from self._prefill_parts()
        else:
            sums = state.batch.sums
            most = UNBOUNDED
            if sums.hbm_g > 0:
                most = (state.pages_left - sums.hbm) // sums.hbm_g + 1
            yield Iterate(most)
        for key in state.batch.ended():
            search = state.searches[key]
            state.piece_ended(search)
            if search.decodes:
                state.join(search)
            else:
                state.ready.append(search)

    def _prefill_parts(self) -> Commands:
        """A step with the oldest prompts, or parts of them, up to its limit of tokens."""
        state, price = self.state, self.state.price
        mixes = state.engine is None or state.engine.mixes_prefill
        left = state.chunk_tokens - (state.batch.sums.sequences if mixes else 0)
        work, ended = NOTHING, []
        for search in state.prefilling:
            tokens = min(search.prompt_left, max(1, left))
            present = search.priced.ops[search.at][1] - search.prompt_left
            search.prompt_left -= tokens
            ends = not search.prompt_left
            work = work.plus(price.chunk(tokens, present, search.priced.info, search.prompt_left))
            left -= tokens
            if ends:
                ended.append(search)
            if left <= 0:
                break
        if mixes:
            yield Iterate(1, work)
        else:
            seconds = price.alone_s(work)
            yield Spend(seconds, Op.PREFILL, state.prefilling[0].key)
            state.tally.spent(Op.PREFILL, seconds - work.policy_s)
            state.tally.busy.policy_s += work.policy_s
        for search in ended:
            state.prefilling.remove(search)
            self._prompt_done(search)
            state.ready.append(search)

    def _proceed(self, search: ServedSearch) -> Commands:
        """Go through the phases of a search until it decodes, waits, or ends."""
        state = self.state
        search.parked = False
        if search.restore and not (yield from self._places.bring_back(search)):
            return
        ops = search.priced.ops
        while search.at < len(ops):
            kind, one, two, three = ops[search.at]
            if kind == Op.DECODE:
                state.join(search)
                return
            if kind == Op.PREFILL and not search.prefilled:
                if not self._reuse.arrived(search):
                    return
                yield from self._prefill(search, one)
                if not search.prefilled:
                    return
            elif kind in _SPENT:
                seconds = search.priced.seconds[search.at]
                yield Spend(seconds, kind, search.key)
                state.tally.spent(kind, seconds)
            elif kind == Op.SEND:
                self._leg(search, one)
            elif kind == Op.WAIT or kind == Op.BEGUN:
                if not (search.begun(one) if kind == Op.BEGUN else search.arrived(one)):
                    search.parked = True
                    return
            elif kind == Op.HOLD:
                if not (yield from self._places.take(search, one)):
                    return
                search.extra_bytes += one
                if two:
                    search.staging_bytes += one
            elif kind == Op.LEVEL and not (yield from self._level(search, one, three)):
                return
            search.at += 1
        if search.priced.open:
            state.starved = search
        else:
            self._end(search)

    def _prefill(self, search: ServedSearch, tokens: int) -> Commands:
        """Compute the prompt, or let it join the queue of those computed in parts."""
        state = self.state
        present = self._reuse.present(search, tokens - 1)
        if state.chunk_tokens:
            search.prompt_left = tokens - present
            state.prefilling.append(search)
            return
        info = search.priced.info
        seconds = search.priced.seconds[search.at]
        if present:
            seconds = state.price.prefill_s(tokens - present, present, info)
        yield Spend(seconds, Op.PREFILL, search.key)
        rows_s = state.price.rows_s(tokens - present, present, info)
        state.tally.spent(Op.PREFILL, seconds - rows_s)
        state.tally.busy.policy_s += rows_s
        self._prompt_done(search)

    def _prompt_done(self, search: ServedSearch) -> None:
        search.prefilled = True
        search.prefilled_s = self.state.clock.now
        self._reuse.computed(search)

    def _level(self, search: ServedSearch, hbm_bytes: int, ddr_bytes: int) -> Tries:
        """Its pages take `hbm_bytes` from now on, and its part of DDR `ddr_bytes`."""
        if not (yield from self._places.make_host_room(search, ddr_bytes - search.ddr_bytes)):
            return False
        if not (yield from self._places.take(search, hbm_bytes - search.base_bytes)):
            return False
        search.base_bytes = hbm_bytes
        self.state.host.add(ddr_bytes - search.ddr_bytes)
        search.ddr_bytes = ddr_bytes
        return True

    def _end(self, search: ServedSearch) -> None:
        state = self.state
        search.finish_s = state.clock.now
        state.release(search)
        state.host.add(-search.ddr_bytes)
        search.ended = True
        self._places.follow()

    def _leg(self, search: ServedSearch, chain: int) -> None:
        """Start the next transfer of a chain."""
        state = self.state
        legs, i = search.priced.chains[chain], search.legs_ended[chain]
        if i == 0:
            search.outstanding += 1
        if i == len(legs):
            search.outstanding -= 1
            state.wake(search)
            return
        leg = legs[i]
        search.legs_begun[chain] += 1
        search.staging_bytes += leg.hold_before
        self._hold(search, leg.hold_before)
        state.wake(search)
        ended = partial(self._leg_ended, search, chain)
        if not leg.bytes:
            ended()
            return
        link = state.clock.up if leg.up else state.clock.down
        link.send(leg.bytes, state.transfer_s(leg.bytes, leg.up), ended)

    def _leg_ended(self, search: ServedSearch, chain: int) -> None:
        search.priced.leg_ended(chain, search.legs_ended[chain])
        leg = search.priced.chains[chain][search.legs_ended[chain]]
        search.legs_ended[chain] += 1
        self._hold(search, leg.hold_after)
        self._leg(search, chain)

    def _hold(self, search: ServedSearch, delta: int) -> None:
        """A transfer takes or frees HBM; that of a search without a place is elsewhere."""
        if search.ended:
            return
        search.extra_bytes += delta
        if search.resident:
            self.state.hold(delta)


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


class ServingEngine:
    """A machine with demands priced for it, which can run many times.

    All `demands` were recorded for `geometry`; arrivals name them by number.  `profile` is one GPU
    of the machine; `kv_bytes` takes the place of the HBM that it leaves for keys and values.

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
        self.pool = KvPool.of(cost, self.options, workspace)
        self.kv_bytes = self.pool.kv_bytes if kv_bytes is None else kv_bytes
        programs = [self.price.program(each) for each in demands]
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
