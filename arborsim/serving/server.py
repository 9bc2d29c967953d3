"""The rules by which many searches share one machine.

- The GPU does one thing at a time: a decode iteration in which all searches that can decode step
  together, a pass over a prompt, recovered tokens or a part of a prompt (`prefill_chunk`), a copy,
  or a wait for a policy's decision outside a run.  What a search has to do between two runs of
  iterations is done at once, before the others go on, first come first served.
- Admission: first come first served, searches that lost their place first.  A search is admitted
  when the HBM that it needs now, the growth of all in the next iteration, and the watermark are
  free; alone, it needs no watermark.
- When the next iteration (or a phase of a search) does not fit HBM, shared prefixes that nobody
  uses go first, the longest unused before the others; then the search admitted last loses its
  place, even if it is the one that asks.  Its keys and values in HBM are swapped to the host (all
  others wait for that) or dropped; back in its place it waits for them, or computes them again.
- A transfer that ends takes or frees HBM when it ends, also within an iteration.  Tokens are
  fetched, and searches go on, between iterations.
- Iterations that stream tokens from the host begin when nobody else uses the link up, and keep it.
- When the host is full, the copy of the search that lost its place last is dropped; then the
  search admitted last that holds any of the host loses its place and its part of the host.  Both
  compute it all again.  A search that does not fit the machine by itself is refused on arrival.
- Searches with the same prefix hold it once in HBM; each still reads it for itself.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

from arborsim.serving.batch import Batch, Span
from arborsim.serving.demand import Op
from arborsim.serving.memory import Host, Level, Prefixes
from arborsim.serving.options import Arrivals, ServingOptions, Timed
from arborsim.serving.pricing import NOTHING, Extra, Piece, PricedDemand, Pricing
from arborsim.serving.search import Restore, Search
from arborsim.serving.tally import Tally
from arborsim.serving.world import World


@dataclass(frozen=True, slots=True)
class Spend:
    """Let so many seconds pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode up to so many iterations, one if something joins it."""

    most: int
    extra: Extra = NOTHING


@dataclass(frozen=True, slots=True)
class Idle:
    """Let time pass up to the next event."""


Command = Spend | Decode | Idle
Commands = Generator[Command, None, None]
Tries = Generator[Command, None, bool]
_SPENT = (Op.DECIDE, Op.COPY, Op.RECOMPUTE)


class Server:
    """Serves searches; a driver lets time pass as its commands say.

    Parameters
    ----------
    demands : sequence of PricedDemand
    peaks : sequence of int
        HBM that each needs by itself.
    pricing : Pricing
    options : ServingOptions
    kv_bytes : int
        HBM for keys and values.
    world : World
    batch : Batch
    """

    def __init__(
        self,
        demands: Sequence[PricedDemand],
        peaks: Sequence[int],
        pricing: Pricing,
        options: ServingOptions,
        kv_bytes: int,
        world: World,
        batch: Batch,
    ) -> None:
        self.batch = batch
        self.world = world
        self.searches: list[Search] = []
        self.hbm = Level(world)  # all but the pages of searches in the batch
        self.host = Host(world, pricing.cost.profile.ddr_bytes, options.nvme_bytes)
        self.tally = Tally(world, options.series_points)
        self.decoding_bytes = 0  # pages of searches in the batch
        self.stream_floor_s = 0.0  # what the NVMe takes for what iterations stream
        self.kv_bytes = kv_bytes
        self.prefixes = Prefixes()
        self._demands = demands
        self._peaks = peaks
        self._pricing = pricing
        self._options = options
        self._waiting: deque[Search] = deque()
        self._returning: list[tuple[int, Search]] = []  # by order of arrival
        self._ready: deque[Search] = deque()
        self._prefilling: deque[Search] = deque()
        self._resident: dict[int, Search] = {}  # by order of admission
        self._tickets = 0
        self._to_come = 0
        self._next_of_loop: deque[int] = deque()
        self._think_s = 0.0

    # Arrivals

    def expect(self, arrivals: Arrivals) -> None:
        """Let searches arrive.  Call once, first."""
        if isinstance(arrivals, Timed):
            for time_s, demand in sorted(arrivals.arrivals, key=lambda pair: pair[0]):
                self._to_come += 1
                self.world.at(time_s, partial(self._arrive, demand))
            return
        self._next_of_loop.extend(arrivals.searches)
        self._think_s = arrivals.think_s
        for _ in range(min(arrivals.clients, len(arrivals.searches))):
            self._to_come += 1
            self.world.at(0.0, partial(self._arrive, self._next_of_loop.popleft()))

    def _arrive(self, demand: int) -> None:
        self._to_come -= 1
        search = Search(len(self.searches), demand, self._demands[demand], self.world.now)
        self.searches.append(search)
        if self._peaks[demand] > self.kv_bytes:
            self._refuse(
                search, f"needs {self._peaks[demand]} bytes of HBM, of {self.kv_bytes} for KV"
            )
        elif search.priced.source.peak_ddr_bytes > self.host.ddr_bytes + self.host.nvme_bytes:
            self._refuse(search, f"needs {search.priced.source.peak_ddr_bytes} bytes of DDR")
        else:
            self._waiting.append(search)

    def _refuse(self, search: Search, reason: str) -> None:
        search.refused, search.ended = reason, True
        self._follow()

    def _follow(self) -> None:
        """A client whose search has ended starts the next one."""
        if self._next_of_loop:
            self._to_come += 1
            arrive = partial(self._arrive, self._next_of_loop.popleft())
            self.world.at(self.world.now + self._think_s, arrive)

    # The loop

    def loop(self) -> Commands:
        """Serve until every search has ended."""
        while True:
            self._admit()
            if self._ready:
                yield from self._proceed(self._ready.popleft())
            elif len(self.batch) or self._prefilling:
                if len(self.batch) and self.hbm.value + self.batch.sums.hbm > self.kv_bytes:
                    yield from self._relieve()
                else:
                    yield from self._iterate()
            elif self._to_come or self._resident or self._waiting or self._returning:
                yield Idle()
            else:
                return

    def _iterate(self) -> Commands:
        """Decode until something ends, or a part of the oldest prompt beside one iteration."""
        share = self.host.below_share
        self.stream_floor_s = (
            self._pricing.nvme_s(int(share * self.batch.sums.streamed_bytes)) if share else 0.0
        )
        if self._prefilling:
            search = self._prefilling[0]
            tokens = min(search.prompt_left, self._options.prefill_chunk)
            yield Decode(1, self._chunk(search, tokens))
            search.prompt_left -= tokens
            if not search.prompt_left:
                self._prefilling.popleft()
                self._prompt_done(search)
                self._ready.append(search)
        else:
            sums = self.batch.sums
            most = 1 << 62
            if sums.hbm_g > 0:
                most = (self.kv_bytes - self.hbm.value - sums.hbm) // sums.hbm_g + 1
            yield Decode(most)
        for key in self.batch.ended():
            self._piece_ended(self.searches[key])

    def passing(self, k: int) -> None:
        """The driver is about to let `k` iterations pass."""
        sums = self.batch.sums
        last = sums.hbm + (k - 1) * sums.hbm_g
        self.decoding_bytes = max(sums.hbm, last)
        self._note_hbm()
        self.decoding_bytes = last

    def passed(self, span: Span, k: int) -> None:
        """The driver has let `k` iterations pass."""
        self.tally.iterations(span, k, self.batch.sums)
        self.world.up.carried_bytes += k * self.batch.sums.streamed_bytes
        self.world.up.busy_s += k * self.batch.sums.stream
        self.batch.advance(k)
        self.tally.sample(self.used_bytes, self.host.level.value, len(self.batch))

    def spent(self, seconds: float) -> None:
        """The driver has let time pass without an iteration."""
        self.tally.held(self.decoding_bytes * seconds)
        self.tally.sample(self.used_bytes, self.host.level.value, len(self.batch))

    @property
    def used_bytes(self) -> int:
        return self.hbm.value + self.decoding_bytes

    def _note_hbm(self) -> None:
        self.tally.hbm(self.used_bytes)

    def _hold(self, delta: int) -> None:
        """HBM outside the batch changes."""
        self.hbm.add(delta)
        self._note_hbm()

    # Admission

    def _admit(self) -> None:
        while self._returning or self._waiting:
            if len(self._resident) >= self._options.max_searches:
                self.tally.first("searches")
                return
            search = self._returning[0][1] if self._returning else self._waiting[0]
            fits = self._fits(search)
            if not fits and (self._resident or search.outstanding):
                return
            if self._returning:
                self._returning.pop(0)
            else:
                self._waiting.popleft()
            if fits:
                self._place(search)
            else:
                self.host.level.add(-search.ddr_bytes)
                self._refuse(search, "what it holds has outgrown the memory")

    def _fits(self, search: Search) -> bool:
        """Whether the search can be admitted; unused prefixes give way."""
        key = self._prefix_of(search)
        need = self._first_need(search)
        if key and key not in self.prefixes:
            need += self._prefix_bytes(search)
        if self._resident:
            need += max(0, self.batch.sums.hbm + self.batch.sums.hbm_g - self.decoding_bytes)
            need += self._first_growth(search) + int(self._options.watermark * self.kv_bytes)
        below = search.wanted_ddr_bytes + (search.restore.ddr_bytes if search.restore else 0)
        while below and self.host.free_bytes < below:
            self.tally.first("host")
            if self._resident or not self._drop_copy(search):
                return False
        free = self.kv_bytes - self.used_bytes
        if free < need and free + self.prefixes.unused_bytes(key) < need:
            self.tally.first("hbm")
            return False
        while self.kv_bytes - self.used_bytes < need:
            self._hold(-self.prefixes.evict(key))
        return True

    def _first_need(self, search: Search) -> int:
        if search.admitted_s >= 0:
            return search.hbm_bytes + search.wanted_bytes
        return next((op[1] for op in search.priced.ops if op[0] == Op.LEVEL), 0)

    def _first_growth(self, search: Search) -> int:
        """What its next iterations take beyond what it needs to come in."""
        for op in search.priced.ops[search.at :]:
            if op[0] == Op.DECODE:
                held, grows = search.priced.pieces[op[1]].hbm_bytes
                return max(0, held + search.offset * grows - search.base_bytes)
            if op[0] == Op.LEVEL and search.admitted_s >= 0:
                return 0
        return 0

    def _place(self, search: Search) -> None:
        self._tickets += 1
        search.ticket, search.wanted_bytes, search.wanted_ddr_bytes = self._tickets, 0, 0
        self._resident[search.ticket] = search
        if search.admitted_s < 0:
            search.admitted_s = self.world.now
            search.base_bytes = self._first_need(search)
        self._hold(search.hbm_bytes)
        if key := self._prefix_of(search):
            self._hold(self.prefixes.acquire(key, self._prefix_bytes(search)))
            search.holds_prefix = True
        self._ready.append(search)

    def _prefix_of(self, search: Search) -> str:
        shared = self._options.prefix_sharing and search.priced.prefix_tokens
        return search.priced.source.info.prefix if shared else ""

    def _prefix_bytes(self, search: Search) -> int:
        return search.priced.prefix_bytes

    # Phases of a search

    def _proceed(self, search: Search) -> Commands:
        """Go through the phases of a search until it decodes, waits, or ends."""
        search.parked = False
        if search.restore and not (yield from self._bring_back(search)):
            return
        ops = search.priced.ops
        while search.at < len(ops):
            kind, one, _, three = ops[search.at]
            if kind == Op.DECODE:
                self._join(search)
                return
            if kind == Op.PREFILL and not search.prefilled:
                yield from self._prefill(search, one)
                if not search.prefilled:
                    return
            elif kind in _SPENT:
                yield Spend(search.priced.seconds[search.at])
                self.tally.spent(Op(kind), search.priced.seconds[search.at])
            elif kind == Op.SEND:
                self._leg(search, one)
            elif kind == Op.WAIT or kind == Op.BEGUN:
                if not self._arrived(search, kind, one):
                    search.parked = True
                    return
            elif kind == Op.HOLD:
                if not (yield from self._take(search, one)):
                    return
                search.extra_bytes += one
            elif kind == Op.LEVEL and not (yield from self._level(search, one, three)):
                return
            search.at += 1
        self._end(search)

    def _arrived(self, search: Search, kind: int, chain: int) -> bool:
        if kind == Op.BEGUN:
            return search.chain_begun(chain)
        return search.chain_ended(chain) if chain >= 0 else not search.outstanding

    def _join(self, search: Search) -> None:
        """Take part in the iterations from now on."""
        self.hbm.add(-search.base_bytes)
        self.decoding_bytes += search.base_bytes
        self.batch.add(search.key, search.piece, search.offset)

    def _leave(self, search: Search) -> None:
        """Stop decoding within a piece."""
        done = self.batch.remove(search.key)
        self.decoding_bytes -= self._held(search, search.piece, done)
        search.offset = done
        self.hbm.add(search.base_bytes)

    def _held(self, search: Search, piece: Piece, done: int) -> int:
        """Bytes of its pages after `done` iterations of a piece."""
        if done > search.offset:
            search.base_bytes = piece.hbm_bytes[0] + (done - 1) * piece.hbm_bytes[1]
        return search.base_bytes

    def _piece_ended(self, search: Search) -> None:
        piece = search.piece
        self.decoding_bytes -= self._held(search, piece, piece.iterations)
        search.offset = 0
        search.generated += piece.iterations * piece.sequences
        self.hbm.add(search.base_bytes)
        if search.first_token_s < 0:
            search.first_token_s = self.world.now
        search.at += 1
        ops = search.priced.ops
        if search.at < len(ops) and ops[search.at][0] == Op.DECODE:
            self._join(search)
        else:
            self._ready.append(search)

    def _prefill(self, search: Search, tokens: int) -> Commands:
        """Compute the prompt, or let it join the queue of those computed in parts."""
        present = 0
        if search.holds_prefix and self.prefixes[self._prefix_of(search)].computed:
            present = min(search.priced.prefix_tokens, tokens - 1)
        if self._options.prefill_chunk:
            search.prompt_left = tokens - present
            self._prefilling.append(search)
            return
        fused = search.priced.source.info.fused
        seconds = search.priced.seconds[search.at]
        if present:
            seconds = self._pricing.prefill_s(tokens - present, present, fused)
        yield Spend(seconds)
        self.tally.spent(Op.PREFILL, seconds)
        self._prompt_done(search)

    def _chunk(self, search: Search, tokens: int) -> Extra:
        """What the next `tokens` of a prompt add to an iteration."""
        total = search.priced.ops[search.at][1]
        present = total - search.prompt_left
        return self._pricing.chunk(tokens, present, search.priced.source.info.fused)

    def _prompt_done(self, search: Search) -> None:
        search.prefilled = True
        if search.holds_prefix:
            self.prefixes[self._prefix_of(search)].computed = True

    def _level(self, search: Search, hbm_bytes: int, ddr_bytes: int) -> Tries:
        """Its pages take `hbm_bytes` from now on, and its part of DDR `ddr_bytes`."""
        if not (yield from self._make_host_room(search, ddr_bytes - search.ddr_bytes)):
            return False
        if not (yield from self._take(search, hbm_bytes - search.base_bytes)):
            return False
        search.base_bytes = hbm_bytes
        self.host.level.add(ddr_bytes - search.ddr_bytes)
        search.ddr_bytes = ddr_bytes
        return True

    def _end(self, search: Search) -> None:
        search.finish_s = self.world.now
        self._release(search)
        self.host.level.add(-search.ddr_bytes)
        search.ended = True
        self._follow()

    def _release(self, search: Search) -> None:
        """Give up its place and its HBM; it must not be in the batch."""
        del self._resident[search.ticket]
        search.ticket = -1
        self._hold(-search.hbm_bytes)
        if search.holds_prefix:
            search.holds_prefix = False
            self._hold(-self.prefixes.release(self._prefix_of(search)))

    # Transfers in the background

    def _leg(self, search: Search, chain: int) -> None:
        """Start the next transfer of a chain."""
        legs, i = search.priced.chains[chain], search.legs_ended[chain]
        if i == 0:
            search.outstanding += 1
        if i == len(legs):
            search.outstanding -= 1
            self._wake(search)
            return
        leg = legs[i]
        search.legs_begun[chain] += 1
        self._beside(search, leg.hold_before)
        self._wake(search)
        ended = partial(self._leg_ended, search, chain)
        if not leg.bytes:
            ended()
            return
        link = self.world.up if leg.up else self.world.down
        below_s = self._pricing.nvme_s(int(leg.bytes * self.host.below_share))
        link.send(leg.bytes, max(leg.seconds, below_s), ended)

    def _leg_ended(self, search: Search, chain: int) -> None:
        leg = search.priced.chains[chain][search.legs_ended[chain]]
        search.legs_ended[chain] += 1
        self._beside(search, leg.hold_after)
        self._leg(search, chain)

    def _beside(self, search: Search, delta: int) -> None:
        """A transfer takes or frees HBM; that of a search without a place is elsewhere."""
        if search.ended:
            return
        search.extra_bytes += delta
        if search.resident:
            self._hold(delta)

    def _wake(self, search: Search) -> None:
        if search.parked and search.resident:
            search.parked = False
            self._ready.append(search)

    # When memory runs out

    def _take(self, search: Search, delta: int) -> Tries:
        """Change the HBM that a search holds, or make it lose its place; whether it could."""
        while delta > 0 and self.kv_bytes - self.used_bytes < delta:
            self.tally.first("hbm")
            if freed := self.prefixes.evict():
                self._hold(-freed)
                continue
            victim = next(reversed(self._resident.values()))
            if victim is not search:
                yield from self._preempt(victim)
            elif len(self._resident) > 1:
                yield from self._preempt(search)
                search.wanted_bytes = delta
                return False
            else:
                self._alone(search)
                return False
        self._hold(delta)
        return True

    def _relieve(self) -> Commands:
        """The next iteration does not fit: somebody must go."""
        self.tally.first("hbm")
        if freed := self.prefixes.evict():
            self._hold(-freed)
            return
        victim = next(reversed(self._resident.values()))
        if len(self._resident) > 1:
            yield from self._preempt(victim)
        else:
            self._leave(victim)
            self._alone(victim)

    def _alone(self, search: Search) -> None:
        """Nobody else can go: wait for its own transfers to free HBM, or give it up."""
        if search.outstanding:
            search.parked = True
            return
        self._give_up(search, "its memory does not fit beside what its transfers still hold")

    def _give_up(self, search: Search, reason: str) -> None:
        self._release(search)
        self.host.level.add(-search.ddr_bytes)
        self._refuse(search, reason)

    def _preempt(self, search: Search, drop: bool = False) -> Commands:
        """Take the place of a search; with `drop`, its part of the host, too."""
        search.preemptions += 1
        search.epoch += 1
        self.tally.preempted()
        self._withdraw(search)
        restore = search.restore or Restore()
        private = search.hbm_bytes
        if not search.prefilled or restore.swapped_bytes or restore.tokens:
            pass  # nothing of it is in HBM yet
        elif self._options.preemption == "swap" and not drop and private <= self.host.free_bytes:
            self.host.level.add(private)
            search.restore, restore.swapped_bytes = restore, private
            yield from self._swap_out(private)
        else:
            restore.tokens = self._tokens(search, private + restore.ddr_bytes)
        if drop:
            self._drop_host(search, restore)
        search.restore = restore if search.prefilled else None
        self._release(search)
        bisect.insort(self._returning, (search.key, search), key=lambda pair: pair[0])

    def _withdraw(self, search: Search) -> None:
        """Take a search out of whatever it takes part in."""
        search.parked = False
        if search.key in self.batch:
            self._leave(search)
        if search in self._ready:
            self._ready.remove(search)
        if search in self._prefilling:
            self._prefilling.remove(search)

    def _swap_out(self, size_bytes: int) -> Commands:
        done: list[bool] = []
        below_s = self._pricing.nvme_s(int(size_bytes * self.host.below_share))
        seconds = max(self._pricing.transfer_s(size_bytes, up=False), below_s)
        self.world.down.send(size_bytes, seconds, lambda: done.append(True))
        while not done:
            yield Idle()

    def _tokens(self, search: Search, size_bytes: int) -> int:
        return -(-size_bytes // search.priced.source.info.kv_bytes_per_token)

    def _bring_back(self, search: Search) -> Tries:
        """Whether keys and values of a search that lost its place are back."""
        restore = search.restore
        assert restore is not None
        tokens = restore.tokens
        if search.holds_prefix and not self.prefixes[self._prefix_of(search)].computed:
            tokens += search.priced.prefix_tokens
        if tokens:
            present = self._tokens(search, search.ddr_bytes)
            seconds = self._pricing.prefill_s(tokens, present)
            yield Spend(seconds)
            self.tally.spent(Op.RECOMPUTE, seconds)
            restore.tokens = 0
            if search.holds_prefix:
                self.prefixes[self._prefix_of(search)].computed = True
        if restore.ddr_bytes:
            if not (yield from self._make_host_room(search, restore.ddr_bytes)):
                return False
            self.host.level.add(restore.ddr_bytes)
            search.ddr_bytes, restore.ddr_bytes = restore.ddr_bytes, 0
            seconds = self._pricing.transfer_s(search.ddr_bytes, up=False)
            self.world.down.send(search.ddr_bytes, seconds, _nothing)
        if restore.swapped_bytes:
            search.parked = True
            size = restore.swapped_bytes
            below_s = self._pricing.nvme_s(int(size * self.host.below_share))
            seconds = max(self._pricing.transfer_s(size, up=True), below_s)
            self.world.up.send(size, seconds, partial(self._swapped_in, search, search.epoch))
            return False
        search.restore = None
        return True

    def _swapped_in(self, search: Search, epoch: int) -> None:
        """Its copy on the host is needed no more, unless it has lost its place again meanwhile."""
        if search.epoch != epoch or search.restore is None or not search.restore.swapped_bytes:
            return
        self.host.level.add(-search.restore.swapped_bytes)
        search.restore = None
        self._wake(search)

    def _make_host_room(self, search: Search, need: int) -> Tries:
        """Make others leave the host until `need` bytes fit; whether the search keeps its place."""
        while need > 0 and self.host.free_bytes < need:
            self.tally.first("host")
            if self._drop_copy(search):
                continue
            holders = [s for s in self._resident.values() if s.ddr_bytes and s is not search]
            if not holders:
                self._give_up(search, "its part of the host does not fit")
                return False
            if holders[-1].ticket > search.ticket:
                yield from self._preempt(holders[-1], drop=True)
            else:
                yield from self._preempt(search, drop=True)
                search.wanted_ddr_bytes = need
                return False
        return True

    def _drop_copy(self, spared: Search) -> bool:
        """The search without a place that arrived last gives up what it has on the host."""
        for _, search in reversed(self._returning):
            restore = search.restore
            swapped = restore.swapped_bytes if restore else 0
            if search is spared or not (search.ddr_bytes or swapped):
                continue
            restore = restore or Restore()
            if swapped:
                self.host.level.add(-swapped)
                restore.swapped_bytes = 0
                restore.tokens += self._tokens(search, swapped)
            self._drop_host(search, restore)
            search.restore = restore
            return True
        return False

    def _drop_host(self, search: Search, restore: Restore) -> None:
        """What a search has in DDR must be computed again."""
        if search.ddr_bytes:
            restore.tokens += self._tokens(search, search.ddr_bytes)
            restore.ddr_bytes = search.ddr_bytes
            self.host.level.add(-search.ddr_bytes)
            search.ddr_bytes = 0


def _nothing() -> None:
    """Nobody waits for this transfer."""
