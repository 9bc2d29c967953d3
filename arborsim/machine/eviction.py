"""When memory runs out: who loses its place, and how it comes back."""

from __future__ import annotations

from functools import partial

from arborsim.machine.admission import Admission
from arborsim.machine.clock import Commands, Idle, Spend, Tries
from arborsim.machine.prefixes import Reuse
from arborsim.machine.program import Op
from arborsim.machine.state import Restore, Search, State


class Eviction:
    """Makes room in HBM and on the host.

    Parameters
    ----------
    state : State
    admission : Admission
    reuse : Reuse
    """

    def __init__(self, state: State, admission: Admission, reuse: Reuse) -> None:
        self._state = state
        self._admission = admission
        self._reuse = reuse

    def take(self, search: Search, delta: int) -> Tries:
        """Change the HBM that a search holds, or make it lose its place; whether it could."""
        state = self._state
        while delta > 0 and state.free_bytes < delta:
            state.tally.first("hbm")
            if state.evict_prefixes(delta - state.free_bytes):
                continue
            victim = state.last_admitted
            if victim is not search:
                yield from self.preempt(victim)
            elif len(state.resident) > 1:
                yield from self.preempt(search)
                search.wanted_bytes = delta
                return False
            else:
                self._alone(search)
                return False
        state.hold(delta)
        return True

    def relieve(self) -> Commands:
        """The next iteration does not fit: a search must go."""
        state = self._state
        state.tally.first("hbm")
        if state.evict_prefixes(self._next_need() - state.pages_left):
            return
        victim = state.last_admitted
        if len(state.resident) > 1:
            yield from self.preempt(victim)
        else:
            state.leave(victim)
            self._alone(victim)

    def _next_need(self) -> int:
        """What the batch holds after the next iterations, up to a block of tokens for each search.

        Engines take memory for a block of tokens at a time, not for every token by itself.
        """
        batch = self._state.batch
        ahead = min(self._state.options.prefix_block_tokens, batch.next_end()) - 1
        return batch.sums.hbm + ahead * max(0, batch.sums.hbm_g)

    def _alone(self, search: Search) -> None:
        """No other search can go: wait for its own transfers to free HBM, or give it up."""
        if search.outstanding:
            search.parked = True
            return
        self._give_up(search, "its memory does not fit beside what its transfers still hold")

    def _give_up(self, search: Search, reason: str) -> None:
        state = self._state
        state.release(search)
        state.host.add(-search.ddr_bytes)
        self._admission.refuse(search, reason)

    def preempt(self, search: Search, drop: bool = False) -> Commands:
        """Take the place of a search; with `drop`, its part of the host, too."""
        state = self._state
        search.preemptions += 1
        search.epoch += 1
        state.tally.preempted()
        state.withdraw(search)
        restore = search.restore or Restore()
        private, swaps = search.hbm_bytes, state.options.preemption == "swap"
        if not search.prefilled or restore.swapped_bytes or restore.tokens:
            pass  # nothing of it is in HBM yet
        elif swaps and not drop and private <= state.host.free_bytes:
            state.host.add(private)
            search.restore, restore.swapped_bytes = restore, private
            yield from self._swap_out(private)
        else:
            restore.tokens = search.tokens_of(private + restore.ddr_bytes)
        if drop:
            state.drop_host(search, restore)
        search.restore = restore if search.prefilled else None
        state.release(search)
        state.queue_returning(search)

    def _swap_out(self, size_bytes: int) -> Commands:
        state = self._state
        done: list[bool] = []
        seconds = state.transfer_s(size_bytes, up=False)
        state.clock.down.send(size_bytes, seconds, lambda: done.append(True))
        while not done:
            yield Idle()

    def bring_back(self, search: Search) -> Tries:
        """Whether keys and values of a search that lost its place are back."""
        state = self._state
        restore = search.restore
        assert restore is not None
        if not self._reuse.arrived(search):
            return False
        tokens, present = restore.tokens, search.tokens_of(search.ddr_bytes)
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
            state.clock.down.send(search.ddr_bytes, seconds, _nothing)
        if restore.swapped_bytes:
            search.parked = True
            if search.swapping != search.epoch:  # else something else has woken it
                search.swapping, size = search.epoch, restore.swapped_bytes
                ended = partial(self._swapped_in, search, search.epoch)
                state.clock.up.send(size, state.transfer_s(size, up=True), ended)
            return False
        search.restore = None
        return True

    def _swapped_in(self, search: Search, epoch: int) -> None:
        """Its copy on the host is needed no more, unless it has lost its place again meanwhile."""
        state = self._state
        if search.epoch != epoch or search.restore is None or not search.restore.swapped_bytes:
            return
        state.host.add(-search.restore.swapped_bytes)
        search.restore = None
        state.wake(search)

    def make_host_room(self, search: Search, need: int) -> Tries:
        """Make others leave the host until `need` bytes fit; whether the search keeps its place."""
        state = self._state
        while need > 0 and state.host.free_bytes < need:
            state.tally.first("host")
            if state.drop_copy(search):
                continue
            holders = [s for s in state.resident.values() if s.ddr_bytes and s is not search]
            if not holders:
                self._give_up(search, "its part of the host does not fit")
                return False
            if holders[-1].ticket > search.ticket:
                yield from self.preempt(holders[-1], drop=True)
            else:
                yield from self.preempt(search, drop=True)
                search.wanted_ddr_bytes = need
                return False
        return True


def _nothing() -> None:
    """Nothing waits for this transfer."""
