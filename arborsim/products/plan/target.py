"""Latency targets: limits that a percentile of the searches must be within, and who meets them.

Limits with one percentile belong together: that share of the searches must meet all of them.  The
share that meets every limit, whatever its percentile, is the goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from arborsim.machine.state import ServedSearch


class Times(NamedTuple):
    """Times of a search that targets are about, in seconds."""

    search: float  #: from arrival to the answer
    ttft: float  #: from arrival to the first token
    tpot: float  #: mean per output token of each sequence, once the first is there


class Kind(NamedTuple):
    """How a time is called, and the unit that people give it in."""

    axis: str
    short: str
    per: str
    mark: str
    unit: str
    per_s: float  #: of these units


KINDS = {
    "search": Kind("arrival to answer", "answer", "per search", "", "s", 1.0),
    "ttft": Kind("arrival to first token", "TTFT", "to the first token", " TTFT", "ms", 1e3),
    "tpot": Kind("time per output token", "TPOT", "per token", "/tok", "ms", 1e3),
}


@dataclass(frozen=True)
class Limit:
    """One limit of a target."""

    kind: str  #: a field of `Times`
    seconds: float
    percentile: float  #: in (0, 100): the share of searches that must be within it

    def allows(self, times: Times) -> bool:
        return bool(getattr(times, self.kind) <= self.seconds)

    @property
    def text(self) -> str:
        """``"TTFT within 500 ms"``, ``"answer within 60 s"``."""
        kind = KINDS[self.kind]
        large = self.seconds >= 1
        unit, value = ("s", self.seconds) if large else (kind.unit, kind.per_s * self.seconds)
        return f"{kind.short} within {value:.4g} {unit}"


@dataclass(frozen=True)
class Target:
    """Limits to be met by a percentile of the searches."""

    percentile: float  #: of the limits that have none of their own, in (0, 100)
    search_s: float | None = None  #: from a search's arrival to its answer
    token_s: float | None = None  #: mean time per output token of a search, after its first
    first_token_s: float | None = None  #: from a search's arrival to its first token
    percentiles: Mapping[str, float] = field(default_factory=dict)  #: by field of `Times`

    @property
    def limits(self) -> tuple[Limit, ...]:
        given = {"search": self.search_s, "ttft": self.first_token_s, "tpot": self.token_s}
        return tuple(
            Limit(kind, seconds, self.of(kind))
            for kind, seconds in given.items()
            if seconds is not None
        )

    @property
    def groups(self) -> tuple[tuple[Limit, ...], ...]:
        """The limits that must be met together, by percentile."""
        ranks = dict.fromkeys(limit.percentile for limit in self.limits)
        return tuple(tuple(x for x in self.limits if x.percentile == rank) for rank in ranks)

    def of(self, kind: str) -> float:
        """The percentile that counts for a kind of time."""
        return self.percentiles.get(kind, self.percentile)

    @property
    def strictest(self) -> float:
        """The largest percentile of a limit."""
        return max(limit.percentile for limit in self.limits)


def missable(limits: Sequence[Limit], measured: int) -> int:
    """How many of the measured searches may miss limits that belong together."""
    return int(measured * (100 - limits[0].percentile) / 100 + 1e-9)


@dataclass
class Judge:
    """Counts measured searches within limits while a run goes on, in order of arrival."""

    limits: tuple[Limit, ...]
    first: int  #: searches `first` to ``count - 1`` are measured
    count: int
    within: int = 0
    missed: int = 0
    _judged: int = 0  # all before are judged

    @property
    def met(self) -> bool:
        """Whether enough of the measured searches are within the limits."""
        measured = self.count - self.first
        return measured - self.within <= missable(self.limits, measured)

    @property
    def lost(self) -> bool:
        """Whether too many have missed already, whatever the others do."""
        return self.missed > missable(self.limits, self.count - self.first)

    def look(self, searches: Sequence[ServedSearch], now: float) -> None:
        """Judge those that can be."""
        known = min(len(searches), self.count)
        while self._judged < known and self._verdict(searches[self._judged], now):
            self._judged += 1

    def _verdict(self, search: ServedSearch, now: float) -> bool:
        """Whether there is a verdict; an unfinished search that is late already has missed."""
        if not search.ended and not self._late(search, now - search.arrival_s):
            return False
        if search.key >= self.first:
            if search.ended and self._allows(search):
                self.within += 1
            else:
                self.missed += 1
        return True

    def _late(self, search: ServedSearch, since_s: float) -> bool:
        return any(
            since_s > limit.seconds
            for limit in self.limits
            if limit.kind == "search" or (limit.kind == "ttft" and search.first_token_s < 0)
        )

    def _allows(self, search: ServedSearch) -> bool:
        if search.refused:
            return False
        steps = search.priced.demand.iterations - 1
        token_s = (search.finish_s - search.first_token_s) / steps if steps > 0 else 0.0
        first_s = search.first_token_s - search.arrival_s
        times = Times(search.finish_s - search.arrival_s, first_s, token_s)
        return all(limit.allows(times) for limit in self.limits)
