"""The machine that searches are simulated on, how they share it, and its memory for KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.geometry import UNBOUNDED, Geometry
from arborsim.core.records import check_ranges
from arborsim.core.row_uses import ALL_QUERIES
from arborsim.core.sourced import Rate
from arborsim.core.tiers import DDR, HBM, MEMORIES, Tier
from arborsim.machine.cost import CostModel
from arborsim.machine.profile import HardwareProfile
from arborsim.policies.base import row_uses

if TYPE_CHECKING:
    from arborsim.policies.base import Policy
    from arborsim.trace.schema import TraceInfo

_Count = Annotated[int, Meta(ge=1)]
_Amount = Annotated[int, Meta(ge=0)]

PREEMPTIONS = ("swap", "recompute")
#: HBM of driver and libraries: 0.15 GiB for dense models in BLIS (read 2026-11).
CONTEXT_BYTES = int(0.15 * 2**30)


@dataclass(frozen=True)
class Machine:
    """The machine that one search at a time is replayed on."""

    profile: HardwareProfile
    #: Model whose bytes and seconds are charged; None for the recorded model's own.
    geometry: Geometry | None = None
    recall: str = "stage"  # how tokens in DDR take part in attention: `arborsim.core.tiers.RECALLS`
    page_tokens: int = 1  # KV slots per page
    tree_attention: bool = True  # read shared ancestors once per batch, not once per branch
    event_by_event: bool = False  # play every iteration by itself: slower, the same to rounding
    explain: bool = False  # keep every term of the time (`EpisodeResult.terms`)
    #: A prefill that writes attention matrices out holds those of all layers at once.
    keep_matrices: bool = False
    overlap: bool = True  # False waits for every transfer, as the memory-hierarchy prototype does

    def charged(self, recorded: TraceInfo) -> Geometry:
        """The model whose bytes and seconds are charged for a trace."""
        return self.geometry or recorded.geometry


def unsuited(policy: Policy, geometry: Geometry, machine: Machine | None = None) -> str:
    """Why `policy` has no meaning on a model, or cannot run on a machine; empty if it can."""
    tiers = policy.tiers
    if not geometry.kv_bytes_per_token:
        return (
            f"{geometry.name} keeps no token, only a state of {geometry.state_bytes:,} bytes per "
            "sequence: there is no cache to run; arborsim models has its bytes"
        )
    if not geometry.full_layers and any(tier != Tier.HBM for tier in tiers):
        return (
            f"every layer of {geometry.name} forgets what its window of {geometry.window} tokens "
            f"has passed: there is nothing left that policy {policy.name} could manage"
        )
    if geometry.latent_dim and policy.grouping == "head":
        return (
            f"policy {policy.name} decides for each KV head, and {geometry.name} keeps one latent "
            "vector of a token for all heads: use a policy that decides per layer or for the model"
        )
    quantises = any(tier.quantised and tier.in_hbm for tier in tiers)
    if geometry.kv_bytes_per_element == 1 and quantises and policy.formats[0].bits == 8:
        return (
            f"policy {policy.name} moves tokens to 8 bits, and the cache of {geometry.name} is in "
            "8 bits already: use a policy that does not, or a cache in bf16"
        )
    return "" if machine is None else _unplaced(policy, machine)


def _unplaced(policy: Policy, machine: Machine) -> str:
    """Why a machine cannot hold what `policy` places where; empty if it can."""
    offloaded = {tier.memory for tier in policy.tiers if tier.offloaded}
    has = {HBM, *machine.profile.beside_hbm}
    missing = sorted(MEMORIES[memory] for memory in offloaded - has)
    if missing:
        known = " and ".join(MEMORIES[memory] for memory in sorted(has))
        return (
            f"policy {policy.name} places tokens on {', '.join(missing)}; {machine.profile.name} "
            f"has {known}: list the memory under [[memories]] in a profile of your own"
        )
    below = sorted(MEMORIES[memory] for memory in offloaded - {DDR})
    if below and machine.recall != "stage":
        return (
            f"policy {policy.name} places tokens on {', '.join(below)}; recall {machine.recall} "
            "reads them in DDR only: use recall stage"
        )
    return ""


def parts_read(policy: Policy) -> int:
    """In how many parts attention reads the cache: one per tier that the policy keeps tokens in."""
    return len({Tier.HBM, *policy.tiers} - {Tier.EVICTED})


def parts_in_ddr(policy: Policy) -> int:
    """How many of them lie in memories other than HBM."""
    return sum(tier.offloaded for tier in policy.tiers)


def row_queries(policy: Policy) -> int:
    """How many of a prompt's last tokens a policy that is not fused reads attention rows of."""
    uses = row_uses(policy)
    wanted = (use.prompt for use in uses if use.keeps != "queries")
    return max(wanted, default=0 if uses else ALL_QUERIES)


def decode_rows(policy: Policy) -> bool:
    """Whether a policy that is not fused reads attention rows of generated tokens."""
    uses = row_uses(policy)
    return not uses or any(use.generated and use.keeps != "queries" for use in uses)


def num_groups(policy: Policy, recorded: TraceInfo) -> int:
    """Cache groups that the plans of `policy` distinguish on a trace: see `Policy.grouping`."""
    layers = len(recorded.qkv_layers)
    if policy.grouping != "shared" and not layers:
        raise UsageError(
            f"policy {policy.name} decides for each {policy.grouping}, and no layer of this trace "
            "was captured: record it with --capture qkv --qkv-layers all"
        )
    groups = {"shared": 1, "layer": layers, "head": layers * recorded.geometry.kv_heads}
    return groups[policy.grouping]


@dataclass(frozen=True)
class ServingOptions:
    """How searches share a machine."""

    max_searches: _Count = 1 << 30  # admitted at a time
    #: Tokens of one prompt that take part in a decode iteration of the others; 0 prefills a prompt
    #: in a pass of its own, while the others wait.
    prefill_chunk: _Amount = 0
    #: What happens to the keys and values in HBM of a search that loses its place: `PREEMPTIONS`.
    preemption: str = "swap"
    prefix_sharing: bool = True  # hold the prefix that searches have in common once
    #: Tokens by which an unused prefix is given up, from its end; 0 for the engine's blocks, or 16
    prefix_block_tokens: _Amount = 0
    #: DDR for copies of shared prefixes, at most; 0 for none.  Every prefix is copied there over
    #: PCIe once it is computed; what HBM no longer holds of it is copied back.
    prefix_host_bytes: _Amount = 0
    prefix_load_tokens: _Count = 10  # fewer tokens than that are computed again, not copied back
    #: Share of the KV pool left free when others have a place already
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    tensor_parallel: _Count = 1  # GPUs that share weights, KV, FLOPs and transfers equally
    #: GPUs that share the experts of a mixture whole; the others have a part of each expert
    expert_parallel: _Count = 1
    #: Each GPU attends for sequences of its own, with all weights of attention, and keeps their
    #: cache alone.  Its memory is counted.  Seconds stay those of tensor parallelism.
    data_parallel_attention: bool = False
    nvme_bytes: _Amount = 0  # storage below DDR: takes what DDR cannot hold; 0 for none
    nvme_bytes_per_s: Rate = 6e9  # it works while PCIe does, the slower one counts
    series_points: Annotated[int, Meta(ge=2)] = 1024  # samples kept of the run's course

    def __post_init__(self) -> None:
        if self.preemption not in PREEMPTIONS:
            raise UnknownName("preemption", self.preemption, PREEMPTIONS)
        check_ranges(self, "serving")


@dataclass(frozen=True)
class KvPool:
    """How the HBM for keys and values comes about; bytes of all GPUs together."""

    hbm_bytes: int
    reserve_bytes: int  # kept back
    weight_bytes: int
    workspace_bytes: int  # of the largest forward pass, and of methods built into the engine
    copies: float = 1.0  #: of keys and values: KV heads that GPUs repeat, and latent vectors

    @property
    def kv_bytes(self) -> int:
        """Room for keys and values, each counted once."""
        rest = self.reserve_bytes + self.weight_bytes + self.workspace_bytes
        return int((self.hbm_bytes - rest) / self.copies)

    @classmethod
    def of(
        cls, cost: CostModel, options: ServingOptions, workspace_bytes: int, built_bytes: int = 0
    ) -> KvPool:
        """The pool of a machine whose forward passes need `workspace_bytes` on each GPU.

        Methods that are built into its engine take `built_bytes` of all GPUs together.

        Raises `UsageError` if nothing is left for keys and values.
        """
        gpus, profile = options.tensor_parallel, cost.profile
        hbm, usable = gpus * profile.hbm_bytes, gpus * profile.usable_hbm_bytes
        split = options.data_parallel_attention
        pool = cls(
            hbm,
            hbm - usable,
            cost.geometry.weight_bytes_on(gpus, split),
            gpus * workspace_bytes + built_bytes,
            1.0 if split else cost.geometry.kv_copies(gpus),
        )
        if pool.kv_bytes <= 0:
            raise UsageError(
                f"{cost.geometry.name} does not fit: {pool.weight_bytes / 1e9:.2f} GB of weights + "
                f"{pool.workspace_bytes / 1e9:.2f} GB of workspace leave nothing for keys and "
                f"values on {gpus} x {profile.name}, and {usable / 1e9:.2f} GB are usable; take "
                "larger or more GPUs"
            )
        return pool


@dataclass(frozen=True)
class KvRoom:
    """Where the memory of one GPU goes, with what its driver keeps."""

    hbm_bytes: int
    reserve_bytes: int  # what the profile's `reserve_share` keeps free
    weight_bytes: int
    activation_bytes: int  # of the largest pass, see `CostModel.workspace_bytes`
    context_bytes: int  # of driver and libraries
    tokens: int  # tokens of one sequence that fit into the pool; `UNBOUNDED` if it stops growing

    @property
    def pool_bytes(self) -> int:
        """Room for the cache; negative if the rest does not fit."""
        rest = self.reserve_bytes + self.weight_bytes + self.activation_bytes + self.context_bytes
        return self.hbm_bytes - rest

    @property
    def unbounded(self) -> bool:
        return self.tokens == UNBOUNDED


def kv_room(profile: HardwareProfile, geometry: Geometry, *, pass_tokens: int = 8192) -> KvRoom:
    """The room for the cache of `geometry`; `pass_tokens` are computed together at most."""
    activations = CostModel(profile, geometry).workspace_bytes(pass_tokens)
    reserve = profile.hbm_bytes - profile.usable_hbm_bytes
    parts = (profile.hbm_bytes, reserve, geometry.weight_bytes, activations, CONTEXT_BYTES)
    return KvRoom(*parts, tokens=geometry.tokens_in(KvRoom(*parts, tokens=0).pool_bytes))
