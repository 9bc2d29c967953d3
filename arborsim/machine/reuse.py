"""Shared prefixes on their way between HBM and DDR: what a search finds, waits for and leaves."""

from __future__ import annotations

from functools import partial

from arborsim.core.geometry import UNBOUNDED
from arborsim.machine.prefixes import Load, Prefix
from arborsim.machine.state import ServedSearch, State


class Reuse:
    """Moves shared prefixes between HBM and DDR."""

    def __init__(self, state: State) -> None:
        self._state = state

    def arrived(self, search: ServedSearch) -> bool:
        """Whether all of its prefix that is to be copied back is there; else it is parked."""
        if not search.holds_prefix:
            return True
        state = self._state
        if search.prefix_found == -1:
            search.prefix_found = self._filled(search)
        last = None
        for key, wanted, _ in state.parts_of(search):
            prefix = state.prefixes[key]
            if prefix.filled >= wanted:
                continue
            if prefix.load is None:
                copy = state.host.copies.get(key)
                there = min(copy.filled, wanted) if copy else 0
                if there - prefix.filled < state.options.prefix_load_tokens:
                    break
                prefix.load = Load(there)
                size = prefix.bytes_of(there) - prefix.bytes_of(prefix.filled)
                ended = partial(self._loaded, prefix, prefix.load)
                # A copy that is evicted meanwhile is still read to its end.
                state.clock.up.send(size, state.transfer_s(size, up=True), ended)
            last = prefix.load
            if last.tokens < wanted:
                break
        if last is None:
            return True
        last.waiting.append(partial(state.wake, search))  # copies end in order
        search.parked = True
        return False

    def _filled(self, search: ServedSearch) -> int:
        """Tokens from the beginning of its prefix on that can be read."""
        found = 0
        for key, wanted, _ in self._state.parts_of(search):
            there = min(self._state.prefixes[key].filled, wanted)
            found += there
            if there < wanted:
                break
        return found

    def _loaded(self, prefix: Prefix, load: Load) -> None:
        if prefix.load is not load:  # all searches that used it have lost their places
            return
        prefix.load = None
        prefix.filled = max(prefix.filled, load.tokens)
        for wake in load.waiting:
            wake()

    def present(self, search: ServedSearch, most: int = UNBOUNDED) -> int:
        """Tokens of its prefix that it need not compute, up to `most`; counted once per place."""
        if not search.holds_prefix:
            return 0
        present = min(self._filled(search), most)
        if search.prefix_found >= 0:
            found = min(search.prefix_found, present)
            counted = self._state.tally.prefixes
            counted.hbm += found
            counted.ddr += present - found
            counted.computed += search.priced.prefix_tokens - present
            search.prefix_found = -2
        return present

    def computed(self, search: ServedSearch) -> None:
        """Its prefix is in HBM from now on, if it has one; what DDR lacks of it goes there."""
        if not search.holds_prefix:
            return
        state = self._state
        keys = {part.key: None for part in state.parts_of(search)}
        for key, tokens, _ in state.parts_of(search):
            prefix = state.prefixes[key]
            prefix.filled = max(prefix.filled, tokens)
            size = state.host.begin_copy(key, prefix, keys)
            if size:
                copy = state.host.copies[key]
                copy.writes += 1
                state.clock.down.send(
                    size, state.transfer_s(size, up=False), partial(_copied, copy)
                )
        for key in reversed(keys):  # what follows a part goes before it
            if key in state.host.copies:
                state.host.copies.move_to_end(key)


def _copied(copy: Prefix) -> None:
    """The last of its copies under way makes all that is held readable: they end in order."""
    copy.writes -= 1
    if not copy.writes:
        copy.filled = copy.held
