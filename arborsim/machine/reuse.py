"""What searches find of their shared prefixes, what is copied back from DDR, and copied there.

A prefix is copied to DDR once it is computed (write-through, as in LMCache and SGLang's HiCache):
giving it up in HBM later waits for nothing, at the price of copies that nobody may ever ask for.
A search that finds less of its prefix in HBM than lies in DDR waits for the copy back, then
computes what is in neither; the others go on meanwhile, and later searches of the same prefix wait
for the same copy.  HiCache computes a layer while it copies the next one: its searches wait less
than these by at most their pass over the prompt.
"""

from __future__ import annotations

from functools import partial

from arborsim.machine.prefixes import Load, Prefix
from arborsim.machine.search import Search
from arborsim.machine.state import State


class Reuse:
    """Moves shared prefixes between HBM and DDR.

    Parameters
    ----------
    state : State
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def arrived(self, search: Search) -> bool:
        """Whether all of its prefix that is to be copied back is there; else it is parked."""
        if not search.holds_prefix:
            return True
        state, key = self._state, self._state.prefix_of(search)
        prefix, wanted = state.prefixes[key], search.priced.prefix_tokens
        if search.prefix_found == -1:
            search.prefix_found = min(prefix.filled, wanted)
        if prefix.filled >= wanted:
            return True
        if prefix.load is None:
            there = min(state.host.copied_tokens(key), wanted)
            if there - prefix.filled < state.options.prefix_load_tokens:
                return True
            prefix.load = Load(there)
            size = prefix.bytes_of(there) - prefix.bytes_of(prefix.filled)
            ended = partial(self._loaded, prefix, prefix.load)
            # A copy that gives way to a search meanwhile is still read to its end.
            state.clock.up.send(size, state.transfer_s(size, up=True), ended)
        prefix.load.waiting.append(search)
        search.parked = True
        return False

    def _loaded(self, prefix: Prefix, load: Load) -> None:
        if prefix.load is not load:  # all searches that used it have lost their places
            return
        prefix.load = None
        prefix.filled = max(prefix.filled, load.tokens)
        for search in load.waiting:
            self._state.wake(search)

    def present(self, search: Search, most: int = 1 << 62) -> int:
        """Tokens of its prefix that it need not compute, up to `most`; counted once per place."""
        if not search.holds_prefix:
            return 0
        wanted = search.priced.prefix_tokens
        prefix = self._state.prefixes[self._state.prefix_of(search)]
        present = min(prefix.filled, wanted, most)
        if search.prefix_found >= 0:
            found = min(search.prefix_found, present)
            self._state.tally.prefix(found, present - found, wanted - present)
            search.prefix_found = -2
        return present

    def computed(self, search: Search) -> None:
        """Its prefix is in HBM from now on, if it has one; what DDR lacks of it goes there."""
        if not search.holds_prefix:
            return
        state, key = self._state, self._state.prefix_of(search)
        prefix = state.prefixes[key]
        prefix.filled = max(prefix.filled, search.priced.prefix_tokens)
        size = state.host.begin_copy(key, prefix)
        if size:
            copy = state.host.copies[key]
            copy.writes += 1
            state.clock.down.send(size, state.transfer_s(size, up=False), partial(_copied, copy))


def _copied(copy: Prefix) -> None:
    """The last of its copies under way makes all that is held readable: they end in order."""
    copy.writes -= 1
    if not copy.writes:
        copy.filled = copy.held
