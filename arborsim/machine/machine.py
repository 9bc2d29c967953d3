"""What searches are simulated on: a machine, how many share it, and what memory it has for KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.geometry import UNBOUNDED, Geometry
from arborsim.core.tiers import Tier
from arborsim.machine.cost import CostModel
from arborsim.machine.profile import HardwareProfile

if TYPE_CHECKING:
    from arborsim.machine.executor import SimulatedExecutor
    from arborsim.policies.base import Policy
    from arborsim.trace.schema import TraceInfo

PREEMPTIONS = ("swap", "recompute")
#: HBM of driver and libraries: 0.15 GiB for dense models in BLIS (read 2026-11).
CONTEXT_BYTES = int(0.15 * 2**30)


@dataclass(frozen=True)
class Machine:
    """What one search at a time is replayed on."""

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

    def executor(
        self,
        policy: Policy,
        recorded: TraceInfo,
        *,
        record: bool = False,
        prefix_tokens: int = 0,
    ) -> SimulatedExecutor:
        """A simulated machine for one search of a trace under `policy`.

        `record` and `prefix_tokens` are those of `SimulatedExecutor`.

        Raises
        ------
        UsageError
            The policy has no meaning on the model: see `unsuited`.
        """
        from arborsim.machine.executor import SimulatedExecutor

        geometry = self.charged(recorded)
        if why := unsuited(policy, geometry):
            raise UsageError(why)
        return SimulatedExecutor(
            self,
            geometry,
            groups=num_groups(policy, recorded),
            policy=policy.name,
            fused=policy.fused,
            record=record,
            prefix_tokens=prefix_tokens,
        )


def unsuited(policy: Policy, geometry: Geometry) -> str:
    """Why `policy` has no meaning on a model of this geometry; empty if it has."""
    tiers = policy.method.tiers
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
    if geometry.kv_bytes_per_element == 1 and Tier.HBM_QUANTISED in tiers:
        return (
            f"policy {policy.name} moves tokens to 8 bits, and the cache of {geometry.name} is in "
            "8 bits already: use a policy that does not, or a cache in bf16"
        )
    return ""


def num_groups(policy: Policy, recorded: TraceInfo) -> int:
    """Cache groups that the plans of `policy` distinguish on a trace: see `Policy.grouping`."""
    layers = len(recorded.qkv_layers)
    return {"shared": 1, "layer": layers, "head": layers * recorded.geometry.kv_heads}[
        policy.grouping
    ]


@dataclass(frozen=True)
class ServingOptions:
    """How searches share a machine."""

    max_searches: int = 1 << 30  # admitted at a time
    #: Tokens of one prompt that take part in a decode iteration of the others; 0 prefills a prompt
    #: in a pass of its own, while the others wait.
    prefill_chunk: int = 0
    #: What happens to the keys and values in HBM of a search that loses its place: `PREEMPTIONS`.
    preemption: str = "swap"
    prefix_sharing: bool = True  # hold the prefix that searches have in common once
    prefix_block_tokens: int = 16  # tokens by which an unused prefix is given up, from its end
    #: DDR for copies of shared prefixes, at most; 0 for none.  Every prefix is copied there over
    #: PCIe once it is computed; what HBM no longer holds of it is copied back.
    prefix_host_bytes: int = 0
    prefix_load_tokens: int = 10  # fewer tokens than that are computed again, not copied back
    watermark: float = 0.01  # share of the KV pool left free when others have a place already
    tensor_parallel: int = 1  # GPUs that share weights, KV, FLOPs and transfers equally
    #: Of the link between them: each layer adds up two activations per sequence over a ring,
    #: ``latency + 2 (n - 1) / n * bytes / bandwidth`` each.
    all_reduce_bytes_per_s: float = 450e9
    all_reduce_latency_s: float = 10e-6
    nvme_bytes: int = 0  # storage below DDR: takes what DDR cannot hold; 0 for none
    nvme_bytes_per_s: float = 6e9  # it works while PCIe does, the slower one counts
    series_points: int = 1024  # samples kept of the run's course

    def __post_init__(self) -> None:
        if self.preemption not in PREEMPTIONS:
            raise UnknownName("preemption", self.preemption, PREEMPTIONS)
        rules = {
            "max_searches": (self.max_searches >= 1, "must be 1 or more"),
            "prefill_chunk": (self.prefill_chunk >= 0, "must not be negative"),
            "prefix_block_tokens": (self.prefix_block_tokens >= 1, "must be 1 or more"),
            "prefix_host_bytes": (self.prefix_host_bytes >= 0, "must not be negative"),
            "prefix_load_tokens": (self.prefix_load_tokens >= 1, "must be 1 or more"),
            "watermark": (0 <= self.watermark < 1, "must lie in [0, 1)"),
            "tensor_parallel": (self.tensor_parallel >= 1, "must be 1 or more"),
            "all_reduce_bytes_per_s": (self.all_reduce_bytes_per_s > 0, "must be positive"),
            "all_reduce_latency_s": (self.all_reduce_latency_s >= 0, "must not be negative"),
            "nvme_bytes": (self.nvme_bytes >= 0, "must not be negative"),
            "nvme_bytes_per_s": (self.nvme_bytes_per_s > 0, "must be positive"),
            "series_points": (self.series_points >= 2, "must be 2 or more"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UsageError(f"serving: {name} {getattr(self, name)} {rule}")


@dataclass(frozen=True)
class KvPool:
    """How the HBM for keys and values comes about; bytes of all GPUs together."""

    hbm_bytes: int
    reserve_bytes: int  # kept back
    weight_bytes: int
    workspace_bytes: int  # of the largest forward pass

    @property
    def kv_bytes(self) -> int:
        return self.hbm_bytes - self.reserve_bytes - self.weight_bytes - self.workspace_bytes

    @classmethod
    def of(cls, cost: CostModel, options: ServingOptions, workspace_bytes: int) -> KvPool:
        """The pool of a machine whose forward passes need `workspace_bytes` on each GPU.

        Raises
        ------
        UsageError
            Nothing is left for keys and values.
        """
        gpus, profile = options.tensor_parallel, cost.profile
        hbm, usable = gpus * profile.hbm_bytes, gpus * profile.usable_hbm_bytes
        pool = cls(hbm, hbm - usable, cost.geometry.weight_bytes, gpus * workspace_bytes)
        if pool.kv_bytes <= 0:
            raise UsageError(
                f"{cost.geometry.name} leaves no HBM for keys and values on {gpus} x "
                f"{profile.name}: {usable} bytes usable - {pool.weight_bytes} weights - "
                f"{pool.workspace_bytes} workspace; use more or larger GPUs"
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
