"""Who arrives, who gets a place, who loses it when memory runs out, and how it comes back."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from arborsim.core.errors import UsageError
from arborsim.core.tiers import MEMORIES
from arborsim.machine.clock import Commands, Idle, Spend, Tries
from arborsim.machine.program import Op, PricedProgram
from arborsim.machine.reuse import Reuse
from arborsim.machine.state import Restore, ServedSearch, State


@dataclass(frozen=True)
class Timed:
    """Searches that arrive at given times: seconds, and which demand; in any order."""

    arrivals: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        if any(not math.isfinite(time) or time < 0 for time, _ in self.arrivals):
            raise UsageError("searches must arrive at finite times of 0 seconds or later")


@dataclass(frozen=True)
class ClosedLoop:
    """Clients who each start the next search when their last one has ended."""

    clients: int
    searches: tuple[int, ...]  # demands in the order in which clients take them
    think_s: float = 0.0  # what a client waits before it starts the next one

    def __post_init__(self) -> None:
        if not self.think_s >= 0:
            raise UsageError(f"clients cannot think for {self.think_s} s: use 0 or more")
        if self.clients < 1:
            raise UsageError(f"{self.clients} clients ask for nothing: use 1 or more")


Arrivals = Timed | ClosedLoop


class Scheduler:
    """Queues of searches without a place, and room in HBM and on the host for those with one.

    Arrivals name `demands` by number; `peaks` is the HBM in bytes that each needs by itself.
    """

    def __init__(
        self, state: State, demands: Sequence[PricedProgram], peaks: Sequence[int], reuse: Reuse
    ) -> None:
        self._state = state
        self._demands = demands
        self._peaks = peaks
        self._reuse = reuse
        engine = state.engine
        self._reserves = engine is not None and engine.admission == "reserve"
        self._waiting: deque[ServedSearch] = deque()
        self._tickets = 0
        self._to_come = 0
        self._next_of_loop: deque[int] = deque()
        self._think_s = 0.0

    @property
    def unfinished(self) -> bool:
        """Whether a search is still to come, or to get a place."""
        return bool(self._to_come or self._waiting or self._state.displaced)

    # Arrival.

    def expect(self, arrivals: Arrivals) -> None:
        """Let searches arrive.  Call once, first; a `UsageError` names a demand that is unknown."""
        if isinstance(arrivals, Timed):
            named = [demand for _, demand in arrivals.arrivals]
        else:
            named = list(arrivals.searches)
        wrong = [demand for demand in named if not 0 <= demand < len(self._demands)]
        if wrong:
            raise UsageError(
                f"arrivals name demand {wrong[0]}, but there are {len(self._demands)}: count from 0"
            )
        if isinstance(arrivals, Timed):
            for time_s, demand in sorted(arrivals.arrivals, key=lambda pair: pair[0]):
                self._announce(demand, time_s)
            return
        self._next_of_loop.extend(named)
        self._think_s = arrivals.think_s
        for _ in range(min(arrivals.clients, len(named))):
            self._announce(self._next_of_loop.popleft(), 0.0)

    def follow(self) -> None:
        """A client whose search has ended starts the next one."""
        if self._next_of_loop:
            self._announce(self._next_of_loop.popleft(), self._state.clock.now + self._think_s)

    def _announce(self, demand: int, time_s: float) -> None:
        self._to_come += 1
        self._state.clock.at(time_s, partial(self._arrive, demand))

    def _arrive(self, demand: int) -> None:
        state = self._state
        self._to_come -= 1
        search = ServedSearch(len(state.searches), demand, self._demands[demand], state.clock.now)
        state.searches.append(search)
        if state.request_s:
            self._to_come += 1
            state.clock.at(state.clock.now + state.request_s, partial(self._known, search))
        else:
            self._enqueue(search)

    def _known(self, search: ServedSearch) -> None:
        """The scheduler knows of its request."""
        self._to_come -= 1
        self._enqueue(search)

    def _enqueue(self, search: ServedSearch) -> None:
        state, peak = self._state, self._peaks[search.demand]
        if peak > state.kv_bytes:
            self._refuse(search, f"needs {peak} bytes of HBM, of {state.kv_bytes} for KV")
        elif search.priced.peak_ddr_bytes > state.host.ddr_bytes + state.host.nvme_bytes:
            self._refuse(search, f"needs {search.priced.peak_ddr_bytes} bytes of DDR")
        elif lacking := [
            f"needs {size} bytes of {MEMORIES[memory]}"
            for memory, size in search.priced.peak_stored_bytes.items()
            if size > state.stored_capacity.get(memory, 0)
        ]:
            self._refuse(search, lacking[0])
        else:
            self._waiting.append(search)

    def _refuse(self, search: ServedSearch, reason: str) -> None:
        search.refused, search.ended = reason, True
        self.follow()

    # Admission.

    def admit(self) -> None:
        """Give places to as many as can have one."""
        state = self._state
        while state.displaced or self._waiting:
            if len(state.resident) >= state.options.max_searches:
                state.tally.first("searches")
                return
            queue = state.displaced or self._waiting
            search = queue[0]
            fits = self._fits(search)
            if not fits and (state.resident or search.outstanding):
                return
            del queue[0]
            if fits:
                self._place(search)
            else:
                state.leave_host(search)
                self._refuse(search, "what it holds has outgrown the memory")

    def _fits(self, search: ServedSearch) -> bool:
        """Whether the search can be admitted; unused prefixes are evicted for it."""
        state = self._state
        shared = state.parts_of(search)
        need = self._first_need(search) + sum(state.prefixes.missing_bytes(*p) for p in shared)
        if state.resident:
            need += max(0, state.batch.sums.hbm + state.batch.sums.hbm_g - state.decoding_bytes)
            need += self._first_growth(search) + int(state.options.watermark * state.kv_bytes)
        if self._reserves and state.resident:
            promised = sum(self._peaks[each.demand] for each in state.resident.values())
            if promised + self._peaks[search.demand] > state.kv_bytes:
                state.tally.first("hbm")
                return False
        if search.admitted_s < 0 and not self._reservable(search):
            state.tally.first("below")
            return False
        below = search.wanted_ddr_bytes + (search.restore.ddr_bytes if search.restore else 0)
        while below and state.host.free_bytes < below:
            state.tally.first("host")
            if state.resident or not self._drop_copy(search):
                return False
        free = state.free_bytes
        if free < need:
            keys = {part.key for part in shared}
            if free + state.prefixes.unused_bytes(keys) < need:
                state.tally.first("hbm")
                return False
            state.evict_prefixes(need - free, keys)
        return True

    def _reservable(self, search: ServedSearch) -> bool:
        """Whether memories below DDR have room for the most that it will hold."""
        state = self._state
        return all(
            state.reserved_bytes[memory] + size <= state.stored_capacity[memory]
            for memory, size in search.priced.peak_stored_bytes.items()
        )

    def _first_need(self, search: ServedSearch) -> int:
        if search.admitted_s >= 0:
            held = search.hbm_bytes + search.wanted_bytes
            if search.restore is None or not search.restore.tokens:
                return held
            # What is computed again is cut to what is held as it goes, where all does not fit.
            whole = self._state.price.cost.geometry.path_bytes(search.restore.tokens)
            return max(held, min(whole, self._state.kv_bytes))
        return next((op[1] for op in search.priced.ops if op[0] == Op.LEVEL), 0)

    def _first_growth(self, search: ServedSearch) -> int:
        """HBM that its next iterations take beyond what it needs to be admitted."""
        for op in search.priced.ops[search.at :]:
            if op[0] == Op.DECODE:
                held, grows = search.priced.pieces[op[1]].hbm_bytes
                return max(0, held + search.offset * grows - search.base_bytes)
            if op[0] == Op.LEVEL and search.admitted_s >= 0:
                return 0
        return 0

    def _place(self, search: ServedSearch) -> None:
        state = self._state
        self._tickets += 1
        search.ticket, search.wanted_bytes, search.wanted_ddr_bytes = self._tickets, 0, 0
        state.resident[search.ticket] = search
        if search.admitted_s < 0:
            search.admitted_s = state.clock.now
            state.reserve(search, 1)
            search.base_bytes = self._first_need(search)
        state.hold(search.hbm_bytes)
        if shared := state.parts_of(search):
            state.hold(sum(state.prefixes.acquire(*part) for part in shared))
            search.holds_prefix, search.prefix_found = True, -1
        state.ready.append(search)

    # Making room.

    def take(self, search: ServedSearch, delta: int) -> Tries:
        """Change the HBM that a search holds, or make it lose its place; whether it could."""
        state = self._state
        while delta > 0 and state.free_bytes < delta:
            state.tally.first("hbm")
            if state.evict_prefixes(delta - state.free_bytes):
                continue
            victim = state.last_admitted
            if victim is not search:
                yield from self._preempt(victim)
            elif len(state.resident) > 1:
                yield from self._preempt(search)
                search.wanted_bytes = delta
                return False
            else:
                self._stuck(search)
                return False
        state.hold(delta)
        return True

    def relieve(self) -> Commands:
        """The next iteration does not fit: prefixes or a search must go.

        Prefixes make room for a block of tokens for each search: engines take memory for a block
        at a time, not for every token by itself.
        """
        state, sums = self._state, self._state.batch.sums
        state.tally.first("hbm")
        ahead = min(state.block_tokens, state.batch.next_end()) - 1
        if state.evict_prefixes(sums.hbm + ahead * max(0, sums.hbm_g) - state.pages_left):
            return
        victim = state.last_admitted
        if len(state.resident) > 1:
            yield from self._preempt(victim)
        else:
            state.leave(victim)
            self._stuck(victim)

    def make_host_room(self, search: ServedSearch, need: int) -> Tries:
        """Make others leave the host until `need` bytes fit; whether the search keeps its place."""
        state = self._state
        while need > 0 and state.host.free_bytes < need:
            state.tally.first("host")
            if self._drop_copy(search):
                continue
            holders = [s for s in state.resident.values() if s.ddr_bytes and s is not search]
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

    def _stuck(self, search: ServedSearch) -> None:
        """No other search can go: wait for its own transfers to free HBM, or give it up."""
        if search.outstanding:
            search.parked = True
        else:
            self._give_up(search, "its memory does not fit next to what its transfers still hold")

    def _give_up(self, search: ServedSearch, reason: str) -> None:
        self._state.release(search)
        self._state.leave_host(search)
        self._refuse(search, reason)

    def _preempt(self, search: ServedSearch, drop: bool = False) -> Commands:
        """Take the place of a search; with `drop`, its part of the host, too."""
        state = self._state
        search.preemptions += 1
        search.epoch += 1
        state.tally.preemptions += 1
        state.withdraw(search)
        restore, context = search.restore or Restore(), search.context_tokens
        private, swaps = search.hbm_bytes, state.options.preemption == "swap"
        if not search.prefilled or restore.swapped_bytes or restore.tokens:
            pass  # nothing of it is in HBM yet
        elif swaps and not drop and private <= state.host.free_bytes:
            state.host.add(private)
            search.restore, restore.swapped_bytes = restore, private
            ended: list[bool] = []
            seconds = state.transfer_s(private, up=False)
            state.clock.down.send(private, seconds, partial(ended.append, True))
            while not ended:
                yield Idle()
        else:
            held = search.tokens_of(private + restore.ddr_bytes)
            restore.tokens = max(held, context)
        if drop:
            self._drop_host(search, restore)
        search.restore = restore if search.prefilled else None
        state.release(search)
        bisect.insort(state.displaced, search, key=lambda each: each.key)

    def _drop_copy(self, spared: ServedSearch) -> bool:
        """The search without a place that arrived last gives up what it has on the host."""
        for search in reversed(self._state.displaced):
            restore = search.restore or Restore()
            if search is spared or not (search.ddr_bytes or restore.swapped_bytes):
                continue
            self._state.host.add(-restore.swapped_bytes)
            restore.tokens += search.tokens_of(restore.swapped_bytes)
            restore.swapped_bytes = 0
            self._drop_host(search, restore)
            search.restore = restore
            return True
        return False

    def _drop_host(self, search: ServedSearch, restore: Restore) -> None:
        """Drop what a search has in DDR, which must be computed again."""
        if search.ddr_bytes:
            restore.tokens += search.tokens_of(search.ddr_bytes)
            restore.ddr_bytes = search.ddr_bytes
            self._state.host.add(-search.ddr_bytes)
            search.ddr_bytes = 0

    # Coming back.

    def bring_back(self, search: ServedSearch) -> Tries:
        """Whether keys and values of a search that lost its place are back."""
        state = self._state
        restore = search.restore
        assert restore is not None
        if not self._reuse.arrived(search):
            return False
        away_bytes = search.ddr_bytes + sum(search.stored_bytes.values())
        tokens, present = restore.tokens, search.tokens_of(away_bytes)
        if search.holds_prefix:
            found = self._reuse.present(search)
            present += found
            tokens += search.priced.prefix_tokens - found
        if tokens:
            seconds = state.price.prefill_s(tokens, present)
            yield Spend(seconds, Op.RECOMPUTE, search.key)
            state.tally.spent(Op.RECOMPUTE, seconds)
            restore.tokens = 0
            self._reuse.computed(search)
        if restore.ddr_bytes:
            if not (yield from self.make_host_room(search, restore.ddr_bytes)):
                return False
            state.host.add(restore.ddr_bytes)
            search.ddr_bytes, restore.ddr_bytes = restore.ddr_bytes, 0
            seconds = state.transfer_s(search.ddr_bytes, up=False)
            state.clock.down.send(search.ddr_bytes, seconds, lambda: None)  # nothing waits for it
        if restore.swapped_bytes:
            search.parked = True
            if search.swapping != search.epoch:  # else something else has woken it
                search.swapping, size = search.epoch, restore.swapped_bytes
                ended = partial(self._swapped_in, search, search.epoch)
                state.clock.up.send(size, state.transfer_s(size, up=True), ended)
            return False
        search.restore = None
        return True

    def _swapped_in(self, search: ServedSearch, epoch: int) -> None:
        """Its copy on the host is needed no more, unless it has lost its place again meanwhile."""
        if search.epoch != epoch or search.restore is None or not search.restore.swapped_bytes:
            return
        self._state.host.add(-search.restore.swapped_bytes)
        search.restore = None
        self._state.wake(search)
