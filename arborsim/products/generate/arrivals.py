"""Which searches arrive, and when.

Which: episodes of a mix of traces, drawn by weight.  When: Poisson, as a log of requests recorded
it, or as clients come back.  Both depend on the seed, on nothing that a candidate could change:
every candidate serves the same searches at the same moments (common random numbers), and what
separates two candidates is not which searches they happened to get.

A process is asked for its arrivals at a load, because a planner looks for the largest load that
meets a target.  With the same seed another load moves arrivals closer together or further apart and
leaves their pattern as it is: results differ by the load, not by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from arborsim.core.errors import UnknownName, UsageError
from arborsim.trace.columns import numbers_of
from arborsim.trace.importers.request_logs import FORMATS, read_requests
from arborsim.trace.importers.sources import refuse_damage
from arborsim.trace.reader import TraceReader, open_trace


class Stream(IntEnum):
    """Purposes of random draws. The numbers are part of every result and stay as they are."""

    SEARCHES = 0  # lengths and trees of generated searches
    MIX = 1  # which search arrives
    ARRIVALS = 2  # when it arrives
    BANKS = 3  # thoughts of drawn banks


def stream(seed: int, purpose: Stream, number: int = 0) -> np.random.Generator:
    """The generator for one purpose, and for one item (`number`) of it."""
    sequence = np.random.SeedSequence(seed, spawn_key=(int(purpose), number))
    return np.random.default_rng(sequence)


def draw_mix(
    weights: Sequence[float], episodes: Sequence[int], count: int, seed: int
) -> np.ndarray:
    """Draw searches, each independently: a trace by weight, then any of its episodes.

    Of the weights, one per trace and above 0, only ratios count.  Fewer draws are the beginning of
    more: a longer run goes on where a shorter one ended.  Returns the trace and episode of each, in
    order of arrival: int64 ``[count, 2]``.
    """
    draws = stream(seed, Stream.MIX).random((count, 2))
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    entry = np.searchsorted(edges[:-1] / edges[-1], draws[:, 0], side="right")
    sizes = np.asarray(episodes, dtype=np.int64)[entry]
    # A product of a number below 1 can round up to the size itself.
    episode = np.minimum((draws[:, 1] * sizes).astype(np.int64), sizes - 1)
    return np.stack([entry, episode], axis=1)


def beginning(seed: int, length: int) -> int:
    """Number of the recorded arrival, of `length`, that a run begins with."""
    return int(stream(seed, Stream.ARRIVALS).integers(length))


TRACE = "trace"  #: The format of a trace's column `arrival_s`, in addition to those of `FORMATS`.

# Every process of arrivals has the `unit` of its load; the load that the workload has `stated`, or
# None if only the largest one is sought; the same process ``with_load``; and ``at(load, count,
# seed)``: when `count` searches arrive at a load above 0, in seconds, never falling (or a loop).


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals: exponential gaps."""

    unit: ClassVar[str] = "searches/s"
    rate_per_s: float | None = None  #: the stated load

    @property
    def stated(self) -> float | None:
        return self.rate_per_s

    def with_load(self, load: float) -> Poisson:
        return Poisson(_positive(load))

    def at(self, load: float, count: int, seed: int) -> np.ndarray:
        gaps = stream(seed, Stream.ARRIVALS).exponential(size=count)
        return np.asarray(np.cumsum(gaps) / load)


@dataclass(frozen=True)
class Recorded:
    """The moments of a log, faster or slower, from one of its arrivals on.

    The seed chooses where a run begins, so that several runs see several stretches of a long log.
    That arrival is at 0.  When the log ends it begins again, a mean gap after its last arrival.
    All gaps are stretched by one factor, so bursts and lulls stay.  The load that the log itself
    has is ``rate_per_s``, and at that load its gaps come out as recorded.
    """

    unit: ClassVar[str] = "searches/s"
    #: Sorted, the first one 0, the last one above 0.
    moments_s: tuple[float, ...] = field(repr=False)
    scale: float = 1.0  #: the stated load, as a multiple of the log's own

    @property
    def rate_per_s(self) -> float:
        """The log's own load: gaps over the time they take."""
        return (len(self.moments_s) - 1) / self.moments_s[-1]

    @property
    def stated(self) -> float | None:
        return self.scale * self.rate_per_s

    def with_load(self, load: float) -> Recorded:
        return Recorded(self.moments_s, _positive(load) / self.rate_per_s)

    def at(self, load: float, count: int, seed: int) -> np.ndarray:
        moments = np.asarray(self.moments_s)
        first = beginning(seed, len(moments))
        number = first + np.arange(count)
        period_s = moments[-1] + 1 / self.rate_per_s
        times = moments[number % len(moments)] + number // len(moments) * period_s
        return np.asarray((times - moments[first]) * (self.rate_per_s / load))


@dataclass(frozen=True)
class ClientLoop:
    """Clients that wait for an answer before they ask again. The load is their number."""

    unit: ClassVar[str] = "clients"
    clients: int | None = None  #: the stated load
    think_s: float = 0.0  #: from an answer to the client's next search

    @property
    def stated(self) -> float | None:
        return self.clients

    def with_load(self, load: float) -> ClientLoop:
        if load != int(load):
            raise UsageError(f"a load of {load:g} clients is no whole number")
        return ClientLoop(int(_positive(load)), self.think_s)

    def at(self, load: float, count: int, seed: int) -> ClientLoop:
        return ClientLoop(max(1, round(load)), self.think_s)


Arrivals = Poisson | Recorded | ClientLoop


def _positive(load: float) -> float:
    if not 0 < load < math.inf:
        raise UsageError(f"a load must be above 0 and finite, not {load:g}")
    return load


def read_arrivals(path: Path, format: str = "", scale: float = 1.0) -> Recorded:
    """The arrivals of a log of requests, or of a trace made from one.

    The format is one of `FORMATS` or `TRACE`, or empty: then the file tells.  Refuses a log that
    has no two moments that differ.
    """
    if format == TRACE or (not format and (path.suffix == ".parquet" or path.is_dir())):
        moments = _of_trace(open_trace(path))
    elif not format or format in FORMATS:
        contents = read_requests(path, format)
        refuse_damage(path, contents)
        moments = np.array([request.arrival_s for request in contents.searches])
        if np.isnan(moments).any():
            raise UsageError(f"{path}: the log has no arrivals; name another kind, such as poisson")
    else:
        raise UnknownName("format of arrivals", format, [*FORMATS, TRACE])
    moments = np.sort(moments)
    if len(moments) < 2 or moments[0] == moments[-1]:
        raise UsageError(
            f"{path}: its arrivals ({len(moments)}) are all at one moment: no rate; name a "
            "longer log"
        )
    return Recorded(tuple((moments - moments[0]).tolist()), scale)


def _of_trace(reader: TraceReader) -> np.ndarray:
    if "arrival_s" not in reader.columns:
        raise UsageError(
            f"{reader.path}: the trace has no arrivals; name one that arborsim import "
            "requests has made"
        )
    tables = [reader.first_row(number, ["arrival_s"]) for number in range(reader.num_episodes)]
    moments = numbers_of(pa.concat_tables(tables)["arrival_s"])
    missing = np.flatnonzero(~np.isfinite(moments))
    if len(missing):
        raise UsageError(
            f"{reader.path}: episode {missing[0]} has no arrival_s; import the log again"
        )
    return moments
