"""The sums of a run: seconds by cause, peaks, memory over time, what ran out first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise

from arborsim.core.measurements import check_share, impossible
from arborsim.machine.batch import Span, Sums
from arborsim.machine.clock import Clock
from arborsim.machine.machine import KvPool
from arborsim.machine.program import Op

_ROUNDING = 1e-6  # of sums of seconds
_CAUSE = dict.fromkeys((Op.DECIDE, Op.TURN, Op.COPY), "policy_s")
_CAUSE |= {Op.PREFILL: "prefill_s", Op.RECOMPUTE: "recompute_s", Op.MOVE: "exposed_s"}


@dataclass
class BusySeconds:
    """Where the engine's time went; what is left of the run, it waited."""

    prefill_s: float = 0.0  # passes over prompts
    recompute_s: float = 0.0  # passes over evicted or dropped tokens
    decode_s: float = 0.0  # iterations, without what follows
    policy_s: float = 0.0  # policies, and what they write or read that the model does not
    #: Iterations that waited for streamed tokens, or attention on the CPU; the host's work on moves
    exposed_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.recompute_s + self.decode_s + self.policy_s + self.exposed_s


@dataclass
class PrefixTokens:
    """Where searches that got a place found the tokens of their shared prefixes."""

    hbm: int = 0  # still there
    ddr: int = 0  # copied back
    computed: int = 0  # nowhere, so computed, by the first search or again


@dataclass
class ServingSeries:
    """The run's course, sampled between events; all lists have the same length."""

    time_s: list[float] = field(default_factory=list)
    hbm_kv_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)


class Tally:
    """Counts while the engine runs."""

    def __init__(self, clock: Clock, points: int) -> None:
        self.busy = BusySeconds()
        self.prefixes = PrefixTokens()
        #: What computing and reading memory would take by themselves, in decode iterations.
        self.flops_s, self.memory_s = 0.0, 0.0
        self.joined_s = 0.0  # of the seconds of prompts, those in decode iterations
        self.decoding_byte_s = 0.0  # bytes held by the pages of searches that decode, x seconds
        self.idle_s = 0.0  # without anything to do
        self.moving_s = 0.0  # the host's work on moves, part of what is exposed
        self.link_wait_s = 0.0  # iterations that waited for the link before they streamed
        self.peak_hbm_bytes = 0
        self.num_iterations = 0
        self.tokens = 0
        self.events = 0
        self.preemptions = 0
        self.first_s: dict[str, float] = {}  # as in `ServingReport`
        self._clock = clock
        self._points = points
        self._samples: list[tuple[float, int, int, int]] = []
        self._stride = 1

    def iterations(self, span: Span, k: int, sums: Sums) -> None:
        """`k` iterations have passed."""
        self.busy.policy_s += span.policy_s
        self.busy.exposed_s += span.exposed_s
        self.busy.prefill_s += span.prefill_s
        self.joined_s += span.prefill_s
        self.busy.decode_s += span.seconds - span.policy_s - span.exposed_s - span.prefill_s
        self.flops_s += span.flops_s
        self.memory_s += span.memory_s
        self.decoding_byte_s += span.hbm_byte_s
        self.num_iterations += k
        self.tokens += k * sums.sequences

    def spent(self, op: int, seconds: float) -> None:
        """The engine has done something for one search."""
        cause = _CAUSE[Op(op)]
        setattr(self.busy, cause, getattr(self.busy, cause) + seconds)
        self.moving_s += seconds * (op == Op.MOVE)

    def hbm(self, used_bytes: int, decoding: bool = False) -> None:
        """Memory in use, now or in iterations that are about to pass."""
        if used_bytes > self.peak_hbm_bytes:
            self.peak_hbm_bytes = used_bytes

    def first(self, what: str) -> None:
        """Something keeps a search waiting now."""
        if what not in self.first_s:
            self.first_s[what] = self._clock.now

    def sample(self, hbm_bytes: int, host_bytes: int, decoding: int) -> None:
        """Note the state; of too many notes every other one goes."""
        self.events += 1
        if self.events % self._stride:
            return
        self._samples.append((self._clock.now, hbm_bytes, host_bytes, decoding))
        if len(self._samples) >= 2 * self._points:
            self._samples = self._samples[1::2]
            self._stride *= 2

    def series(self) -> ServingSeries:
        """At most the number of points asked for."""
        samples = self._samples
        while len(samples) > self._points:
            samples = samples[1::2]
        return ServingSeries(*(list(column) for column in zip(*samples, strict=True)))


@dataclass(frozen=True)
class SearchOutcome:
    """The outcome of one search; times in seconds since the run began, -1 if it never happened."""

    demand: int  # which of the demands it was
    arrival_s: float
    admitted_s: float
    first_token_s: float
    finish_s: float
    preemptions: int  # how often it lost its place
    generated_tokens: int
    iterations: int
    refused: str  # why it could never be served; "" if it was
    #: When its prompt had been computed: a serving engine has its first token then, a search
    #: generates its own in the iterations that follow.
    prefilled_s: float = -1.0

    @property
    def waiting_s(self) -> float:
        """From arrival to admission."""
        return self.admitted_s - self.arrival_s

    @property
    def latency_s(self) -> float:
        """From arrival to the end."""
        return self.finish_s - self.arrival_s

    @property
    def to_first_token_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def per_token_s(self) -> float:
        """Mean time of an iteration after the first (each sequence of it decodes one token)."""
        if self.iterations < 2:
            return 0.0
        return (self.finish_s - self.first_token_s) / (self.iterations - 1)


@dataclass(frozen=True)
class Utilisation:
    """Shares of the run's time (of its capacity, for memory)."""

    engine: float  # time in which the engine did anything but wait
    compute: float  # decode iterations, as if each were bound by it alone ...
    memory: float  # ... or by reading memory
    hbm: float  # bytes of the KV pool, times seconds
    host: float  # the same for what DDR and NVMe offer together
    pcie_down: float
    pcie_up: float
    #: Of memories below DDR, by name: bytes held, times seconds, of what there is; and of their
    #: links, the time in which the busier direction carries something
    below: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServingReport:
    """One run."""

    searches: tuple[SearchOutcome, ...]  # in order of arrival
    total_s: float  # when the last search ended
    tokens: int
    iterations: int
    events: int
    preemptions: int
    pool: KvPool
    peak_hbm_bytes: int
    peak_host_bytes: int
    to_host_bytes: int  # PCIe traffic
    from_host_bytes: int
    busy: BusySeconds
    used: Utilisation
    #: When "hbm", "host", "below" (memories below DDR) or the allowed number of "searches" first
    #: kept a search waiting.
    first_s: dict[str, float]
    prefixes: PrefixTokens
    series: ServingSeries
    joined_s: float = 0.0  # of the seconds of prompts, those in decode iterations

    def __post_init__(self) -> None:
        """Raise `ResultError` for figures that no run can have."""
        slack_s = _ROUNDING * max(1.0, self.total_s)
        for number, each in enumerate(self.searches):
            known = (each.arrival_s, each.admitted_s, each.first_token_s, each.finish_s)
            times = [*(t for t in known if t >= 0), self.total_s]
            if any(after < before - slack_s for before, after in pairwise(times)):
                raise impossible(
                    f"search {number} of a run", f"its times are out of order: {times}"
                )
        if self.busy.total_s > self.total_s + slack_s:
            why = f"the engine was busy for {self.busy.total_s:.6g} of {self.total_s:.6g} s"
            raise impossible("a run", why)
        for part in fields(self.used):
            share = getattr(self.used, part.name)
            # Where measured kernels are faster than the profile's rates, what an iteration would
            # take by these alone can be a little more than it takes.
            by_rate = part.name in ("compute", "memory")
            for value in share.values() if isinstance(share, Mapping) else (share,):
                value = min(value, 1.0) if by_rate else value
                check_share(value, f"use of {part.name}", "a run")
        for what, held, most in (
            ("peak_hbm_bytes", self.peak_hbm_bytes, self.pool.kv_bytes),
            ("joined_s", self.joined_s, self.busy.prefill_s + slack_s),
        ):
            if not 0 <= held <= most:
                raise impossible("a run", f"{what} is {held:.6g}, not between 0 and {most:.6g}")

    @property
    def saturated(self) -> str:
        """The resource that kept a search waiting first, else the one that was busy the longest.

        One of hbm, host, below, searches, compute, memory, pcie_down, pcie_up.
        """
        if self.first_s:
            return min(self.first_s, key=lambda name: self.first_s[name])
        shares = {n: getattr(self.used, n) for n in ("compute", "memory", "pcie_down", "pcie_up")}
        return max(shares, key=lambda name: shares[name])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s if self.total_s else 0.0
