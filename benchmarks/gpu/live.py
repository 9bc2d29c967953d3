"""A model with random weights under policies: real memory and time, compared with predictions.

Every search also runs on a simulated machine (as in `arborsim validate`), charged with
the profile that was just measured.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from arborsim.core.measurements import Measurements
from arborsim.core.observations import Signal
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import served_live
from arborsim.machine.machine import Machine, parts_read
from arborsim.machine.profile import HardwareProfile
from arborsim.policies.base import Policy, hints_of
from arborsim.policies.registry import build
from arborsim.products.validate.compare import PARTS, DualExecutor
from arborsim.products.validate.results import COUNTERS, PEAKS, TERMS
from arborsim.searches import make_search
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache.mover import Mover
from arborsim_torch.graphs import refused
from arborsim_torch.hardware.memory import usable_bytes
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import LiveOutcome, PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.live.validate import held
from arborsim_torch.models import LoadedModel, geometry
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.recording_plan import attention_top
from arborsim_torch.sources import RandomSource
from arborsim_torch.tiers.link import HostLink
from benchmarks.gpu.journal import Facts, peaks, synchronize
from benchmarks.gpu.packing import add
from benchmarks.gpu.plan import Arm, Load

_TREE = {"keep": 2, "children": 2}
_VECTORS = frozenset({Signal.HEAD_ATTENTION, Signal.KEYS, Signal.VALUES})
_TRACED = 12  # iteration that is traced: graphs are captured, and policies have decided


def too_large_for_host(arm: Arm, load: Load, loaded: LoadedModel) -> str:
    """Why the host cannot hold the vectors that the policy reads; empty if it can.

    Queries and keys of all layers, twice while they are put together, and the keys once more in
    float32, in a table that may have doubled.
    """
    if not build(arm.policy, dict(arm.settings)).reads() & _VECTORS:
        return ""
    shape = geometry(loaded)
    tokens = load.prompt_tokens + load.new_tokens
    per_token = shape.layers * shape.head_dim * (4 * shape.heads + 12 * shape.kv_heads)
    room = usable_bytes(torch.device("cpu")) // 2
    if tokens * per_token <= room:
        return ""
    return (
        f"queries and keys of all layers of {tokens} tokens take {tokens * per_token / 1e9:.0f} "
        f"GB of host memory; {room / 1e9:.0f} may be used"
    )


@dataclass
class _Steady:
    """Notes what a search has used when its first quarter is over, and at its end.

    By then kernels are compiled, graphs are captured and the prompt's decision is taken.
    """

    device: torch.device
    used: Callable[[], tuple[float, float, float]]  #: policy, exposed copies, simulator: seconds
    first: int
    iterations: int = 0
    tokens: int = 0
    begun: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    until: tuple[int, int] = (0, 0)  #: iterations and tokens of `last`

    def __call__(self, tokens: int) -> None:
        self.iterations += 1
        if self.begun:
            self.tokens += tokens
            # Asking takes time: not at every iteration.
            if (self.iterations - self.first) % max(1, self.first // 2) == 0:
                self.last = (time.perf_counter(), *self.used())
                self.until = self.iterations - self.first, self.tokens
        elif self.iterations == self.first:
            synchronize(self.device)
            self.begun = (time.perf_counter(), *self.used())

    def facts(self) -> Facts:
        """Tokens per second and shares, the simulator's part taken away."""
        wall, policy, exposed, simulator = (
            b - a for a, b in zip(self.begun, self.last, strict=True)
        )
        wall, policy = wall - simulator, max(0.0, policy - simulator)
        iterations, tokens = self.until
        return {
            "steady_tokens": tokens,
            "steady_s": wall,
            "tokens_per_s": tokens / wall,
            "step_s": wall / iterations,
            "policy_share": policy / wall,
            "exposed_share": exposed / wall,
        }


def run_arm(
    loaded: LoadedModel, load: Load, arm: Arm, machine: HardwareProfile, graphs: str
) -> Facts:
    """One search under one policy, live and simulated side by side.

    Raises
    ------
    BudgetInfeasible
        The budget cannot hold what the policy protects.
    """
    policy = build(arm.policy, dict(arm.settings))
    made: list[DualExecutor] = []
    movers: list[Mover] = []

    def wrap(live: LiveExecutor, mover: Mover) -> DualExecutor:
        movers.append(mover)
        simulated = _simulated(loaded, policy, machine, mover, arm, graphs)
        made.append(DualExecutor(live, simulated, lambda: held(mover)))
        return made[0]

    def used() -> tuple[float, float, float]:
        spent = search.measurements().time
        return spent.policy_s, spent.exposed_transfer_s, made[0].overhead_s

    steady = _Steady(loaded.model.device, used, max(2, load.new_tokens // 4))
    search = _search(loaded, load, arm, policy, graphs, steady, wrap)
    began = time.perf_counter()
    episode = _run(search)
    search_s = time.perf_counter() - began
    facts = _facts(search.outcome(episode), made[0])
    simulated = made[0].simulated
    measured = simulated.measurements()
    memory = search.memory(measured, geometry(loaded), simulated.most_moved)
    facts["predicted_hbm_bytes"] = memory.device_bytes(measured.weight_bytes)
    facts["predicted_peak_at"] = memory.peak.name
    replayed, copied = search.replayed_steps, _copied(movers[0].link)
    # Other arms replay only the few steps that read nothing of DDR.
    captured = arm.graphs and replayed
    facts |= {"replayed_steps": replayed, "step": "graph" if captured else "eager",
              "not_captured": refused(loaded.model)}  # fmt: skip
    return {
        "search_s": search_s, **steady.facts(), **facts, **copied, **peaks(loaded.model.device),
    }  # fmt: skip


def trace_step(loaded: LoadedModel, load: Load, arm: Arm, packed: Path) -> Facts:
    """A Chrome trace of one decode iteration, policy and bookkeeping included, put into a zip."""
    activities = [ProfilerActivity.CPU]
    if loaded.model.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, acc_events=True)
    seen = 0

    def on_tokens(tokens: int) -> None:
        nonlocal seen
        seen += 1
        if seen == _TRACED:
            synchronize(loaded.model.device)
            profiler.start()
        elif seen == _TRACED + 1:
            synchronize(loaded.model.device)
            profiler.stop()

    short = Load(load.prompt_tokens, _TRACED + 4, load.prefill_block)
    policy = build(arm.policy, dict(arm.settings))
    search = _search(loaded, short, arm, policy, "auto", on_tokens)
    began = time.perf_counter()
    _run(search)
    search_s = time.perf_counter() - began
    label = "-".join("".join(c if c.isalnum() else " " for c in arm.label).split())
    name = f"{label}-{load.prompt_tokens}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        profiler.export_chrome_trace(str(path))
        kept = add(packed, name, path.read_bytes())
    return {"search_s": search_s, "file": name if kept else "", **_of_trace(profiler)}


def _of_trace(profiler: profile) -> Facts:
    """Launches, kernels and waits in a trace, and the device's seconds; zero without CUDA."""
    events = profiler.events() or []
    count = dict.fromkeys(("launches", "graph_launches", "copies", "waits"), 0)
    kernels, device_us = 0, 0.0
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels += not event.name.startswith(("Memcpy", "Memset"))
            device_us += event.time_range.elapsed_us()
        for kind, names in _CALLS.items():
            count[kind] += event.name in names
    return {**count, "kernels": kernels, "device_s": device_us * 1e-6}


#: CUDA's functions on the host, as profiles name them.
_CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "graph_launches": ("cudaGraphLaunch",),
    "copies": ("cudaMemcpyAsync",),
    "waits": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
}


def _search(
    loaded: LoadedModel,
    load: Load,
    arm: Arm,
    policy: Policy,
    graphs: str,
    on_tokens: Callable[[int], None],
    wrap: Callable[[LiveExecutor, Mover], DualExecutor] | None = None,
) -> PolicySearch:
    source = RandomSource(loaded.model.config.vocab_size, *load.source_options)
    return PolicySearch(
        _setup(loaded, load, arm, source, graphs),
        source.problem(0),
        policy,
        arm.budget_tokens(load),
        CacheOptions(arm.recall),
        on_tokens=on_tokens,
        wrap=wrap,
    )


def _run(search: PolicySearch) -> EpisodeResult:
    ends: list[Ended] = []
    run_batched([search], 1, lambda _, ended: ends.append(ended))
    if not isinstance(ends[0], EpisodeResult):
        raise ends[0]
    return ends[0]


def _copied(link: HostLink) -> Facts:
    """Rates of the copies of a search, while they went on."""
    facts: Facts = {}
    for way, totals in (("down", link.downward), ("up", link.upward)):
        if totals.busy_s:
            timed_bytes = totals.carried_bytes - totals.untimed_bytes
            facts[f"{way}_bytes_per_s"] = timed_bytes / totals.busy_s
            facts[f"{way}_bytes"] = totals.carried_bytes
    return facts


def _setup(
    loaded: LoadedModel, load: Load, arm: Arm, source: RandomSource, graphs: str
) -> SearchSetup:
    longest = load.prompt_tokens + load.new_tokens
    return SearchSetup(
        model=loaded.model,
        source=source,
        make_search=lambda: make_search("tot-bfs", **_TREE) if arm.tree else make_search("linear"),
        temperature=1.0,
        seed=0,
        max_tokens=load.new_tokens,
        attention_top=attention_top(longest),
        prefill_block=load.prefill_block,
        graphs=graphs == "auto",
    )


def _simulated(
    loaded: LoadedModel,
    policy: Policy,
    profile: HardwareProfile,
    mover: Mover,
    arm: Arm,
    graphs: str,
) -> SimulatedExecutor:
    if loaded.model.device.type == "cuda":
        profile = served_live(profile, graphs=graphs == "auto" and arm.graphs)
    return SimulatedExecutor(
        Machine(profile, recall=arm.recall),
        geometry(loaded),
        groups=mover.cache.layout.groups,
        formats=policy.formats,
        policy=policy.name,
        fused=policy.fused,
        parts=parts_read(policy),
        bounds_page=hints_of(policy).bounds_page,
    )


def _facts(outcome: LiveOutcome, both: DualExecutor) -> Facts:
    live, simulated = outcome.measured, both.simulated.measurements()
    # The simulator ran inside the handling of events, which counts as the policy's.
    live.time.policy_s = max(0.0, live.time.policy_s - both.overhead_s)
    over_time = both.bytes_over_time()
    return {
        "generated_tokens": outcome.episode.tokens,
        "iterations": outcome.episode.iterations,
        "live_s": _by_term(live),
        "predicted_s": _by_term(simulated),
        "live_peaks": {name: getattr(live, name) for name in PEAKS},
        "predicted_peaks": {name: getattr(simulated, name) for name in PEAKS},
        "counters": {name: [getattr(live, name), getattr(simulated, name)] for name in COUNTERS},
        "calls": len(over_time),
        "calls_with_equal_bytes": over_time.equal,
        "bytes_apart": dict(zip(PARTS, over_time.off, strict=True)),
        "tiers_differ": over_time.tiers_differ,
        "kv_bytes_at_end": dict(zip(PARTS, over_time.live[-1].tolist(), strict=True)),
        "pool_bytes": outcome.allocated_bytes,
    }


def _by_term(measured: Measurements) -> dict[str, float]:
    names = (*TERMS, "hidden_transfer_s")
    return {name: getattr(measured.time, name) for name in names}
