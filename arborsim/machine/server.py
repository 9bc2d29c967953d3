"""The rules by which many searches share one machine.

- The GPU does one thing at a time: a decode iteration in which all searches that can decode step
  together, a pass over a prompt, recovered tokens or a part of a prompt (`prefill_chunk`), a copy,
  or a wait for a policy's decision outside a run.  What a search has to do between two runs of
  iterations is done at once, before the others go on, first come first served.
- Admission: first come first served, searches that lost their place first.  A search is admitted
  when the HBM that it needs now, the growth of all in the next iteration, and the watermark are
  free; alone, it needs no watermark.
- When the next iteration (or a phase of a search) does not fit HBM, unused shared prefixes
  lose their last tokens first (`prefixes`).  Then the search admitted last loses its
  place, even if it is the one that asks.  Its keys and values in HBM are swapped to the host (all
  others wait for that) or dropped.  Back in its place it waits for them, or computes them again.
- A transfer that ends takes or frees HBM when it ends, also within an iteration.  Tokens are
  fetched, and searches go on, between iterations.
- Iterations that stream tokens from the host begin when the link up is free, and keep it.
- When the host is full, the copy of the search that lost its place last is dropped.  Then the
  search admitted last that holds any of the host loses its place and its part of the host.  Both
  compute it all again.  A search that does not fit the machine by itself is refused on arrival.
- Searches with the same prefix hold it once in HBM.  Each still reads it for itself.  What is left
  of it from earlier ones is not computed again, and what a copy in DDR has of it is copied back
  (`reuse`).  Such copies take DDR that no search wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from arborsim.core.geometry import UNBOUNDED
from arborsim.machine.batch import Batch
from arborsim.machine.clock import (
    Clock,
    Commands,
    Idle,
    Iterate,
    Spend,
    Starve,
    Tries,
)
from arborsim.machine.machine import ServingOptions
from arborsim.machine.price import Price
from arborsim.machine.program import NOTHING, Op, PricedProgram
from arborsim.machine.report import Tally
from arborsim.machine.reuse import Reuse
from arborsim.machine.scheduler import Arrivals, Scheduler
from arborsim.machine.state import ServedSearch, State

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
        self._scheduler = Scheduler(self.state, demands, peaks, self._reuse)

    def expect(self, arrivals: Arrivals) -> None:
        """Let searches arrive.  Call once, first."""
        self._scheduler.expect(arrivals)

    def loop(self) -> Commands:
        """Serve until every search has ended."""
        state = self.state
        while True:
            self._scheduler.admit()
            if state.ready:
                yield from self._proceed(state.ready.popleft())
            elif len(state.batch) or state.prefilling:
                if len(state.batch) and state.batch.sums.hbm > state.pages_left:
                    yield from self._scheduler.relieve()
                else:
                    yield from self._iterate()
            elif state.starved is not None:
                yield Starve(state.starved.priced)
                state.ready.append(state.starved)
                state.starved = None
            elif state.resident or self._scheduler.unfinished:
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
        if search.restore and not (yield from self._scheduler.bring_back(search)):
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
                if not (yield from self._scheduler.take(search, one)):
                    return
                search.extra_bytes += one
                if two:
                    search.staging_bytes += one
            elif kind == Op.STORE:
                state.store(search, one, two)
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
        if not (yield from self._scheduler.make_host_room(search, ddr_bytes - search.ddr_bytes)):
            return False
        if not (yield from self._scheduler.take(search, hbm_bytes - search.base_bytes)):
            return False
        search.base_bytes = hbm_bytes
        self.state.host.add(ddr_bytes - search.ddr_bytes)
        search.ddr_bytes = ddr_bytes
        return True

    def _end(self, search: ServedSearch) -> None:
        state = self.state
        search.finish_s = state.clock.now
        state.release(search)
        state.leave_host(search)
        search.ended = True
        self._scheduler.follow()

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
        link = state.clock.link(leg.memory, leg.up)
        link.send(leg.bytes, state.transfer_s(leg.bytes, leg.up, leg.memory), ended)

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
