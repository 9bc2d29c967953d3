"""Which searches of a run were within the target's limits, decided while the run goes on."""

from __future__ import annotations

from arborsim.machine.commands import Command
from arborsim.machine.search import Search
from arborsim.machine.server import Server
from arborsim.plan.workload import Target


class Verdicts:
    """Judges measured searches while a run goes on, and ends it when all of them have ended.

    Parameters
    ----------
    target : Target
    first, count : int
        Searches `first` .. ``count - 1``, by arrival, are measured.
    allowed : int or None
        More than so many missed ones end the run at once.

    Attributes
    ----------
    within : int
        Searches within the limits so far.
    given_up : bool
    """

    def __init__(self, target: Target, first: int, count: int, allowed: int | None) -> None:
        self.within = 0
        self.given_up = False
        self._target = target
        self._first = first
        self._count = count
        self._allowed = allowed
        self._judged = 0  # all before are judged
        self._ended = 0  # all before have ended
        self._missed = 0

    def __call__(self, server: Server, command: Command, began_s: float) -> bool:
        searches = server.state.searches
        known = min(len(searches), self._count)
        while self._judged < known and self._judge(searches[self._judged], server.state.clock.now):
            self._judged += 1
        if self._allowed is not None and self._missed > self._allowed:
            self.given_up = True
            return True
        while self._ended < known and searches[self._ended].ended:
            self._ended += 1
        return self._ended == self._count

    def _judge(self, search: Search, now: float) -> bool:
        """Whether there is a verdict; an unfinished search that is late already has missed."""
        limit = self._target.search_s
        if not search.ended and (limit is None or now - search.arrival_s <= limit):
            return False
        if search.key >= self._first:
            if search.ended and self._is_within(search):
                self.within += 1
            else:
                self._missed += 1
        return True

    def _is_within(self, search: Search) -> bool:
        if search.refused:
            return False
        limit, token = self._target.search_s, self._target.token_s
        if limit is not None and search.finish_s - search.arrival_s > limit:
            return False
        iterations = search.priced.source.iterations
        if token is None or iterations < 2:
            return True
        return (search.finish_s - search.first_token_s) / (iterations - 1) <= token
