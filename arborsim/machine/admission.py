"""Who arrives, and who gets a place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from arborsim.core.errors import UsageError
from arborsim.machine.options import Arrivals, Timed
from arborsim.machine.priced import PricedProgram
from arborsim.machine.program import Op
from arborsim.machine.state import Search, State


class Admission:
    """Queues of searches without a place.

    Parameters
    ----------
    state : State
    demands : sequence of PricedProgram
    peaks : sequence of int
        HBM that each needs by itself.
    """

    def __init__(
        self, state: State, demands: Sequence[PricedProgram], peaks: Sequence[int]
    ) -> None:
        self._state = state
        self._demands = demands
        self._peaks = peaks
        self._waiting: deque[Search] = deque()
        self._tickets = 0
        self._to_come = 0
        self._next_of_loop: deque[int] = deque()
        self._think_s = 0.0

    @property
    def unfinished(self) -> bool:
        """Whether a search is still to come, or to get a place."""
        return bool(self._to_come or self._waiting or self._state.returning)

    def expect(self, arrivals: Arrivals) -> None:
        """Let searches arrive.  Call once, first.

        Raises
        ------
        UsageError
            They name a demand that does not exist.
        """
        state = self._state
        named = (
            [demand for _, demand in arrivals.arrivals]
            if isinstance(arrivals, Timed)
            else list(arrivals.searches)
        )
        wrong = [demand for demand in named if not 0 <= demand < len(self._demands)]
        if wrong:
            raise UsageError(
                f"arrivals name demand {wrong[0]}, but there are {len(self._demands)}: count from 0"
            )
        if isinstance(arrivals, Timed):
            for time_s, demand in sorted(arrivals.arrivals, key=lambda pair: pair[0]):
                self._to_come += 1
                state.clock.at(time_s, partial(self._arrive, demand))
            return
        self._next_of_loop.extend(arrivals.searches)
        self._think_s = arrivals.think_s
        for _ in range(min(arrivals.clients, len(arrivals.searches))):
            self._to_come += 1
            state.clock.at(0.0, partial(self._arrive, self._next_of_loop.popleft()))

    def _arrive(self, demand: int) -> None:
        state = self._state
        self._to_come -= 1
        search = Search(len(state.searches), demand, self._demands[demand], state.clock.now)
        state.searches.append(search)
        if self._peaks[demand] > state.kv_bytes:
            self.refuse(
                search, f"needs {self._peaks[demand]} bytes of HBM, of {state.kv_bytes} for KV"
            )
        elif search.priced.peak_ddr_bytes > state.host.ddr_bytes + state.host.nvme_bytes:
            self.refuse(search, f"needs {search.priced.peak_ddr_bytes} bytes of DDR")
        else:
            self._waiting.append(search)

    def refuse(self, search: Search, reason: str) -> None:
        search.refused, search.ended = reason, True
        self.follow()

    def follow(self) -> None:
        """A client whose search has ended starts the next one."""
        state = self._state
        if self._next_of_loop:
            self._to_come += 1
            arrive = partial(self._arrive, self._next_of_loop.popleft())
            state.clock.at(state.clock.now + self._think_s, arrive)

    def admit(self) -> None:
        """Give places to as many as can have one."""
        state = self._state
        while state.returning or self._waiting:
            if len(state.resident) >= state.options.max_searches:
                state.tally.first("searches")
                return
            search = state.returning or self._waiting[0]
            fits = self._fits(search)
            if not fits and (state.resident or search.outstanding):
                return
            if state.returning:
                state.take_returning()
            else:
                self._waiting.popleft()
            if fits:
                self._place(search)
            else:
                state.host.add(-search.ddr_bytes)
                self.refuse(search, "what it holds has outgrown the memory")

    def _fits(self, search: Search) -> bool:
        """Whether the search can be admitted; unused prefixes give way."""
        state = self._state
        key = state.prefix_of(search)
        need = self._first_need(search)
        if key:
            priced = search.priced
            need += state.prefixes.missing_bytes(key, priced.prefix_tokens, priced.prefix_bytes)
        if state.resident:
            need += max(0, state.batch.sums.hbm + state.batch.sums.hbm_g - state.decoding_bytes)
            need += self._first_growth(search) + int(state.options.watermark * state.kv_bytes)
        below = search.wanted_ddr_bytes + (search.restore.ddr_bytes if search.restore else 0)
        while below and state.host.free_bytes < below:
            state.tally.first("host")
            if state.resident or not state.drop_copy(search):
                return False
        free = state.free_bytes
        if free < need and free + state.prefixes.unused_bytes(key) < need:
            state.tally.first("hbm")
            return False
        if free < need:
            state.evict_prefixes(need - free, key)
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
        state = self._state
        self._tickets += 1
        search.ticket, search.wanted_bytes, search.wanted_ddr_bytes = self._tickets, 0, 0
        state.resident[search.ticket] = search
        if search.admitted_s < 0:
            search.admitted_s = state.clock.now
            search.base_bytes = self._first_need(search)
        state.hold(search.hbm_bytes)
        if key := state.prefix_of(search):
            priced = search.priced
            state.hold(state.prefixes.acquire(key, priced.prefix_tokens, priced.prefix_bytes))
            search.holds_prefix, search.prefix_found = True, -1
        state.ready.append(search)
