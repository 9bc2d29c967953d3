"""The results of a live run, kept as they come; on disk too if there is a log."""

from __future__ import annotations

from collections.abc import Iterable

from arborsim.live.log import LiveLog
from arborsim.live.request import LiveFacts, LiveResult
from arborsim.run.episode import Cell

Key = tuple[int, str, str]


def key_of(result: LiveResult) -> Key:
    """Problem, policy and budget: what there is one result of."""
    return result.episode, result.policy, result.budget


class Collector:
    """A `LiveObserver` that keeps all results, those of an earlier run first.

    Parameters
    ----------
    log : LiveLog, optional

    Attributes
    ----------
    facts : LiveFacts or None
        Once the model is loaded.
    episodes : int
        Problems of the whole run.
    """

    def __init__(self, log: LiveLog | None = None) -> None:
        self.facts: LiveFacts | None = None
        self.episodes = 0
        self._log = log
        self._results: dict[Key, LiveResult] = {}
        self._keep(log.records if log else ())

    @property
    def results(self) -> tuple[LiveResult, ...]:
        """In the order in which they came."""
        return tuple(self._results.values())

    def began(self, facts: LiveFacts, episodes: int) -> None:
        self.facts, self.episodes = facts, episodes
        if self._log is not None:
            self._log.began(facts, episodes)

    def wants(self, episode: int, cell: Cell) -> bool:
        return (episode, cell.policy.name, cell.budget.text) not in self._results

    def full_tokens(self, episode: int) -> int:
        known = (r.full_tokens for r in self._results.values() if r.episode == episode)
        return max(known, default=0)

    def running(self, episode: int, what: str, tokens: int) -> None:
        pass

    def finished(self, result: LiveResult) -> None:
        # One shadow search serves all cells: it hands over again what a resumed run has already.
        if key_of(result) in self._results:
            return
        if self._log is not None:
            self._log.add(result)
        self._keep([result])

    def _keep(self, results: Iterable[LiveResult]) -> None:
        for result in results:
            self._results.setdefault(key_of(result), result)
