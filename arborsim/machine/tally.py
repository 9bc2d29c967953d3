"""What a run of the engine adds up: seconds by cause, peaks, what ran out first, its course."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arborsim.machine.batch import Span, Sums
from arborsim.machine.program import Op

if TYPE_CHECKING:
    from arborsim.machine.state import State

_CAUSE = {
    Op.PREFILL: "prefill_s", Op.RECOMPUTE: "recompute_s", Op.DECIDE: "policy_s",
    Op.TURN: "policy_s", Op.COPY: "policy_s",
}  # fmt: skip


@dataclass
class BusySeconds:
    """Where the engine's time went; what is left of the run, it waited.

    Attributes
    ----------
    prefill_s, recompute_s : float
        Passes over prompts; over evicted or dropped tokens.
    decode_s : float
        Iterations, without what follows.
    policy_s : float
        Policies, and what they write or read beside the model.
    exposed_s : float
        Iterations that waited for streamed tokens, or for attention on the CPU.
    """

    prefill_s: float = 0.0
    recompute_s: float = 0.0
    decode_s: float = 0.0
    policy_s: float = 0.0
    exposed_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.recompute_s + self.decode_s + self.policy_s + self.exposed_s


@dataclass
class PrefixTokens:
    """Where searches that got a place found the tokens of their shared prefixes.

    Attributes
    ----------
    hbm, ddr : int
        Still there; copied back.
    computed : int
        Nowhere, so computed, by the first search or again.
    """

    hbm: int = 0
    ddr: int = 0
    computed: int = 0


@dataclass
class ServingSeries:
    """The run's course, sampled between events; all lists have the same length."""

    time_s: list[float] = field(default_factory=list)
    hbm_kv_bytes: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)


class Tally:
    """Counts while the engine runs.

    Attributes
    ----------
    busy : BusySeconds
    prefixes : PrefixTokens
    flops_s, memory_s : float
        What computing and reading memory would take by themselves, in decode iterations.
    decoding_byte_s : float
        Bytes held by the pages of searches that decode, times seconds.
    idle_s, link_wait_s : float
        Without anything to do; iterations that waited for the link before they streamed.
    peak_hbm_bytes : int
    num_iterations, tokens, events, preemptions : int
    first_s : dict of str to float
        When memory, or the number of searches, first kept somebody waiting.
    """

    def __init__(self, state: State, points: int) -> None:
        self.busy = BusySeconds()
        self.prefixes = PrefixTokens()
        self.flops_s = 0.0
        self.memory_s = 0.0
        self.decoding_byte_s = 0.0
        self.idle_s = 0.0
        self.link_wait_s = 0.0
        self.peak_hbm_bytes = 0
        self.num_iterations = 0
        self.tokens = 0
        self.events = 0
        self.preemptions = 0
        self.first_s: dict[str, float] = {}
        self._clock = state.clock
        self._points = points
        self._samples: list[tuple[float, int, int, int]] = []
        self._stride = 1

    def iterations(self, span: Span, k: int, sums: Sums) -> None:
        """`k` iterations have passed."""
        self.busy.policy_s += span.policy_s
        self.busy.exposed_s += span.exposed_s
        self.busy.decode_s += span.seconds - span.policy_s - span.exposed_s
        self.flops_s += span.flops_s
        self.memory_s += span.memory_s
        self.decoding_byte_s += span.hbm_byte_s
        self.num_iterations += k
        self.tokens += k * sums.sequences

    def spent(self, op: int, seconds: float) -> None:
        """The engine has done something for one search."""
        cause = _CAUSE[Op(op)]
        setattr(self.busy, cause, getattr(self.busy, cause) + seconds)

    def held(self, byte_s: float) -> None:
        self.decoding_byte_s += byte_s

    def hbm(self, used_bytes: int, decoding: bool = False) -> None:
        """So much is in use, or will be in iterations that are about to pass."""
        if used_bytes > self.peak_hbm_bytes:
            self.peak_hbm_bytes = used_bytes

    def prefix(self, found: int, loaded: int, computed: int) -> None:
        """What became of the shared prefix of a search, in tokens."""
        self.prefixes.hbm += found
        self.prefixes.ddr += loaded
        self.prefixes.computed += computed

    def preempted(self) -> None:
        self.preemptions += 1

    def first(self, what: str) -> None:
        """Something keeps somebody waiting now."""
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
