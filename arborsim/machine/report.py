"""What came of a run of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from arborsim.machine.options import KvPool
from arborsim.machine.search import Search, SearchOutcome
from arborsim.machine.server import Server
from arborsim.machine.tally import BusySeconds, PrefixTokens, ServingSeries


@dataclass(frozen=True)
class Utilisation:
    """Shares of the run's time (of its capacity, for memory).

    Attributes
    ----------
    engine : float
        Time in which the engine did anything but wait.
    compute, memory : float
        Of decode iterations, as if each were bound by it alone.
    hbm : float
        Bytes of the KV pool, times seconds.
    host : float
        The same for what DDR and NVMe offer together.
    pcie_down, pcie_up : float
    """

    engine: float
    compute: float
    memory: float
    hbm: float
    host: float
    pcie_down: float
    pcie_up: float


@dataclass(frozen=True)
class ServingReport:
    """One run.

    Attributes
    ----------
    searches : tuple of SearchOutcome
        In order of arrival.
    total_s : float
        When the last search ended.
    tokens, iterations, events, preemptions : int
    pool : KvPool
        How the memory for keys and values comes about.
    peak_hbm_bytes, peak_host_bytes : int
    to_host_bytes, from_host_bytes : int
        PCIe traffic.
    busy : BusySeconds
    used : Utilisation
    first_s : dict of str to float
        When "hbm", "host" or the allowed number of "searches" first kept somebody waiting.
    prefixes : PrefixTokens
        Where shared prefixes were found.
    series : ServingSeries
    """

    searches: tuple[SearchOutcome, ...]
    total_s: float
    tokens: int
    iterations: int
    events: int
    preemptions: int
    pool: KvPool
    peak_hbm_bytes: int
    peak_host_bytes: int
    to_host_bytes: int
    from_host_bytes: int
    busy: BusySeconds
    used: Utilisation
    first_s: dict[str, float]
    prefixes: PrefixTokens
    series: ServingSeries

    @property
    def saturated(self) -> str:
        """What kept somebody waiting first; else what was busy for the largest share of the time.

        One of hbm, host, searches, compute, memory, pcie_down, pcie_up.
        """
        if self.first_s:
            return min(self.first_s, key=lambda name: self.first_s[name])
        shares = {n: getattr(self.used, n) for n in ("compute", "memory", "pcie_down", "pcie_up")}
        return max(shares, key=lambda name: shares[name])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s if self.total_s else 0.0


def report(server: Server, pool: KvPool) -> ServingReport:
    """Of a server whose run has ended."""
    state = server.state
    tally, clock, host = state.tally, state.clock, state.host
    total_s = clock.now

    def share(seconds: float, capacity: float = 1.0) -> float:
        return seconds / (total_s * capacity) if total_s else 0.0

    used = Utilisation(
        engine=share(tally.busy.total_s),
        compute=share(tally.flops_s),
        memory=share(tally.memory_s),
        hbm=share(tally.decoding_byte_s + state.hbm.byte_s(), state.kv_bytes),
        host=share(host.level.byte_s(), host.ddr_bytes + host.nvme_bytes),
        pcie_down=share(clock.down.busy_s),
        pcie_up=share(clock.up.busy_s),
    )
    return ServingReport(
        tuple(_outcome(search) for search in state.searches),
        total_s,
        tally.tokens,
        tally.num_iterations,
        tally.events,
        tally.preemptions,
        pool,
        tally.peak_hbm_bytes,
        host.level.peak,
        clock.down.carried_bytes,
        clock.up.carried_bytes,
        tally.busy,
        used,
        tally.first_s,
        tally.prefixes,
        tally.series(),
    )


def _outcome(search: Search) -> SearchOutcome:
    return SearchOutcome(
        search.demand, search.arrival_s, search.admitted_s, search.first_token_s, search.finish_s,
        search.preemptions, search.generated, search.priced.demand.iterations, search.refused,
    )  # fmt: skip
