"""What a serving engine may be told, and what its machine has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arborsim.core.errors import UnknownName, UsageError
from arborsim.machine.cost import CostModel

PREEMPTIONS = ("swap", "recompute")


@dataclass(frozen=True)
class ServingOptions:
    """How searches share a machine.

    Attributes
    ----------
    max_searches : int
        Searches admitted at a time.
    prefill_chunk : int
        Tokens of one prompt that take part in a decode iteration of the others; 0 prefills a
        prompt in a pass of its own, while the others wait.
    preemption : {"swap", "recompute"}
        What happens to the keys and values in HBM of a search that loses its place.
    prefix_sharing : bool
        Hold the prefix that searches have in common once.
    prefix_block_tokens : int
        Tokens by which an unused prefix is given up, from its end.
    prefix_host_bytes : int
        DDR for copies of shared prefixes, at most; 0 for none.  Every prefix is copied there over
        PCIe once it is computed; what HBM no longer holds of it is copied back.
    prefix_load_tokens : int
        Fewer tokens than that are not copied back, but computed again.
    watermark : float
        Share of the KV pool that stays free when a search is admitted next to others.
    tensor_parallel : int
        GPUs that share weights, keys and values, FLOPs and transfers equally.
    all_reduce_bytes_per_s, all_reduce_latency_s : float
        Of the link between them: each layer adds up two activations per sequence over a ring,
        ``latency + 2 (n - 1) / n * bytes / bandwidth`` each.
    nvme_bytes : int
        Storage below DDR: takes what DDR cannot hold; 0 for none.
    nvme_bytes_per_s : float
        Reading and writing it; it works while PCIe does, the slower one counts.
    series_points : int
        Samples kept of the run's course.
    """

    max_searches: int = 1 << 30
    prefill_chunk: int = 0
    preemption: str = "swap"
    prefix_sharing: bool = True
    prefix_block_tokens: int = 16
    prefix_host_bytes: int = 0
    prefix_load_tokens: int = 10
    watermark: float = 0.01
    tensor_parallel: int = 1
    all_reduce_bytes_per_s: float = 450e9
    all_reduce_latency_s: float = 10e-6
    nvme_bytes: int = 0
    nvme_bytes_per_s: float = 6e9
    series_points: int = 1024

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
    """How the HBM for keys and values comes about; bytes of all GPUs together.

    Attributes
    ----------
    hbm_bytes, reserve_bytes, weight_bytes, workspace_bytes : int
        What the GPUs have, and what of it is kept back, holds weights, or is needed by the largest
        forward pass.
    """

    hbm_bytes: int
    reserve_bytes: int
    weight_bytes: int
    workspace_bytes: int

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
class Timed:
    """Searches that arrive at given times.

    Attributes
    ----------
    arrivals : tuple of (float, int)
        Seconds, and which demand; in any order.
    """

    arrivals: tuple[tuple[float, int], ...]

    def __post_init__(self) -> None:
        if any(not math.isfinite(time) or time < 0 for time, _ in self.arrivals):
            raise UsageError("searches must arrive at finite times of 0 seconds or later")


@dataclass(frozen=True)
class ClosedLoop:
    """Clients who each start the next search when their last one has ended.

    Attributes
    ----------
    clients : int
    searches : tuple of int
        Demands in the order in which clients take them.
    think_s : float
        What a client waits before it starts the next one.
    """

    clients: int
    searches: tuple[int, ...]
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.think_s >= 0:
            raise UsageError(f"clients cannot think for {self.think_s} s: use 0 or more")
        if self.clients < 1:
            raise UsageError(f"{self.clients} clients ask for nothing: use 1 or more")


Arrivals = Timed | ClosedLoop
