"""A model with random weights under policies: real memory and time, compared with predictions.

Every search also runs on a simulated machine (as in `arborsim validate`), charged with
the profile that was just measured.  transformers' own cache with its fused attention is the
yardstick.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from arborsim.core.measurements import Measurements
from arborsim.core.observations import Signal
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.machine.profile import HardwareProfile
from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from arborsim.search import make_search
from arborsim.validate.compare import PARTS, DualExecutor
from arborsim.validate.results import COUNTERS, PEAKS, TERMS
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache.mover import Mover
from arborsim_torch.hardware.memory import usable_bytes
from arborsim_torch.kernels.fused import pinned
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import CacheOptions, LiveOutcome, PolicySearch, SearchSetup
from arborsim_torch.live.validate import held
from arborsim_torch.models import LoadedModel, geometry
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.recording_plan import DENSE_UP_TO
from arborsim_torch.sources import RandomSource
from benchmarks.gpu.journal import Facts, peaks, synchronize

YARDSTICK = "transformers' DynamicCache"
_OFFLOAD = str(Path(__file__).with_name("offload.toml"))
_TOP = 256  # positions kept per attention row of long paths
_TREE = {"keep": 2, "children": 2}
_THOUGHTS = 4  # per path
_VECTORS = frozenset({Signal.HEAD_ATTENTION, Signal.KEYS, Signal.VALUES})


@dataclass(frozen=True)
class Load:
    """What is searched.

    Attributes
    ----------
    prompt_tokens, new_tokens : int
        New tokens per path.
    prefill_block : int
        Prompt tokens per forward pass.
    """

    prompt_tokens: int
    new_tokens: int
    prefill_block: int

    @property
    def source_options(self) -> tuple[int, int, int]:
        return self.prompt_tokens, self.new_tokens, -(-self.new_tokens // _THOUGHTS)


@dataclass(frozen=True)
class Arm:
    """A policy, its settings, and its budget as a share of the prompt and of one path's tokens.

    What comes later is searched when all others have been, at every length.
    """

    policy: str
    prompt_share: float = 1.0
    new_share: float = 1.0
    settings: Mapping[str, str] = field(default_factory=dict)
    recall: str = "stage"
    tree: bool = False
    later: bool = False

    @property
    def label(self) -> str:
        name = Path(self.policy).stem
        ddr = "" if name not in ("hierarchy", "offload") else f", {self.recall}"
        return f"{name}{ddr}{' (tree)' if self.tree else ''}"

    def budget_tokens(self, load: Load) -> int:
        return int(self.prompt_share * load.prompt_tokens + self.new_share * load.new_tokens)


def arms(new_tokens: int) -> tuple[Arm, ...]:
    """What is compared; protected windows and intervals are shares of what is generated."""
    few = str(max(4, new_tokens // 6))
    window = {"recent": few, "interval": few}
    return (
        Arm("full"),
        Arm("streaming-llm", 0.25, 0.25),
        Arm("h2o", 0.25, 0.25),
        Arm("epikv", 1.0, 0.5, {"recent": few}),
        Arm("hierarchy", 1.0, 1.0, window),
        Arm("hierarchy", 1.0, 1.0, window, recall="stream"),
        Arm("full", tree=True),
        Arm("arborkv", 1.0, 2.0, tree=True),
        Arm("arkv", 0.25, 0.25, {"window": few}),
        Arm(_OFFLOAD, 0.5, 0.5, later=True),
        Arm(_OFFLOAD, 0.5, 0.5, recall="stream", later=True),
        Arm(_OFFLOAD, 0.5, 0.5, recall="near", later=True),
    )


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


def run_arm(loaded: LoadedModel, load: Load, arm: Arm, profile: HardwareProfile) -> Facts:
    """One search under one policy, live and simulated side by side.

    Raises
    ------
    BudgetInfeasible
        The budget cannot hold what the policy protects.
    """
    policy = build(arm.policy, dict(arm.settings))
    made: list[DualExecutor] = []

    def wrap(live: LiveExecutor, mover: Mover) -> DualExecutor:
        simulated = _simulated(loaded, policy, profile, mover, arm.recall)
        made.append(DualExecutor(live, simulated, lambda: held(mover)))
        return made[0]

    source = RandomSource(loaded.model.config.vocab_size, *load.source_options)
    search = PolicySearch(
        _setup(loaded, load, arm, source),
        source.problem(0),
        policy,
        arm.budget_tokens(load),
        CacheOptions(arm.recall),
        wrap=wrap,
    )
    ends: list[Ended] = []
    run_batched([search], 1, lambda _, ended: ends.append(ended))
    if not isinstance(ends[0], EpisodeResult):
        raise ends[0]
    facts = _facts(search.outcome(ends[0]), made[0])
    return {**facts, **peaks(loaded.model.device)}


def _setup(loaded: LoadedModel, load: Load, arm: Arm, source: RandomSource) -> SearchSetup:
    longest = load.prompt_tokens + load.new_tokens
    return SearchSetup(
        model=loaded.model,
        source=source,
        make_search=lambda: make_search("tot-bfs", **_TREE) if arm.tree else make_search("linear"),
        temperature=1.0,
        seed=0,
        max_tokens=load.new_tokens,
        attention_top=0 if longest <= DENSE_UP_TO else _TOP,
        prefill_block=load.prefill_block,
    )


def _simulated(
    loaded: LoadedModel, policy: Policy, profile: HardwareProfile, mover: Mover, recall: str
) -> SimulatedExecutor:
    return SimulatedExecutor(
        Machine(profile, recall=recall),
        geometry(loaded),
        groups=mover.cache.layout.groups,
        policy=policy.name,
        fused=policy.fused,
    )


def _facts(outcome: LiveOutcome, both: DualExecutor) -> Facts:
    live, simulated = outcome.measured, both.simulated.measurements()
    # The simulator ran inside the handling of events, which counts as the policy's.
    live.time.policy_s = max(0.0, live.time.policy_s - both.overhead_s)
    over_time = both.bytes_over_time()
    episode, total_s = outcome.episode, live.time.total_s
    carried_s = live.time.exposed_transfer_s + live.time.hidden_transfer_s
    return {
        "generated_tokens": episode.tokens,
        "iterations": episode.iterations,
        "decode_tokens_per_s": episode.tokens / (total_s - live.time.prefill_s),
        "iteration_s": live.time.decode_s / max(1, episode.iterations),
        "policy_share": live.time.policy_s / total_s,
        "transfer_hidden_share": live.time.hidden_transfer_s / carried_s if carried_s else 0.0,
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
        "predicted_hbm_bytes": simulated.needed_hbm_bytes,
    }


def _by_term(measured: Measurements) -> dict[str, float]:
    names = (*TERMS, "hidden_transfer_s")
    return {name: getattr(measured.time, name) for name in names}


@torch.inference_mode()
def run_yardstick(loaded: LoadedModel, load: Load) -> Facts:
    """The same prompt and as many tokens through transformers alone: one pass, then one by one."""
    from transformers import DynamicCache

    model, device = loaded.model, loaded.model.device
    if model.config._attn_implementation != "sdpa":
        model.set_attn_implementation("sdpa")
    source = RandomSource(model.config.vocab_size, *load.source_options)
    ids = torch.tensor([source.problem(0).prompt], device=device)
    cache: Any = DynamicCache(config=model.config)

    def advance(tokens: Any) -> Any:
        logits = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    synchronize(device)
    with pinned(device):
        began = time.perf_counter()
        token = advance(ids)
        int(token)
        prefill_s = time.perf_counter() - began
        for _ in range(load.new_tokens):
            token = advance(token)
            int(token)  # as a search does, which looks at every token
        decode_s = time.perf_counter() - began - prefill_s
    kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {
        "generated_tokens": load.new_tokens,
        "iterations": load.new_tokens,
        "decode_tokens_per_s": load.new_tokens / decode_s,
        "iteration_s": decode_s / load.new_tokens,
        "live_s": {"prefill_s": prefill_s, "decode_s": decode_s, "total_s": prefill_s + decode_s},
        "pool_bytes": kv_bytes,
        **peaks(device),
    }
