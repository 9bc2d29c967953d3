"""A machine as the cost model sees it: one flat record of numbers with units in their names.

A profile is a TOML file.  Every number may name its source in a table ``[sources]``; one without a
source, or whose source begins with "assumed", is *assumed*, and reports say so.  A file that names
another profile as its ``base`` gives only what differs, and a `HostProfile` replaces host memory
and PCIe (`arborsim.machine.lookup.load_profile`).  ``arborsim calibrate`` writes measured profiles.

A link carries both directions at once, each first come, first served.  The bytes of a memory below
DDR cross its own link only: they also pass PCIe, of which they take a small share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from arborsim.core.documents import digest, file_digest
from arborsim.core.errors import UsageError
from arborsim.core.records import Whole, check_ranges, located
from arborsim.core.sourced import Rate, Seconds, Sourced, meanings, meant, required
from arborsim.core.tiers import BELOW_DDR, DDR, MEMORIES
from arborsim.machine.engine import EngineProfile
from arborsim.machine.integration import PolicySeconds
from arborsim.machine.kernels import shipped_tables

_Bytes = Annotated[Whole, Meta(gt=0)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_OF_ALL_REDUCES = ("all_reduce_gpus", "all_reduce_bytes_per_s", "all_reduce_latency_s")
Direction = Literal["h2d", "d2h"]


@dataclass(frozen=True)
class Memory(Sourced):
    """One memory, as ``[[memories]]`` of a profile lists those below DDR."""

    name: str  # one of `MEMORIES`
    bytes: Annotated[Whole, Meta(gt=0), meant("memory that offloading may use", "GB", 1e9)]
    read_bytes_per_s: Annotated[Rate, meant("its link to the GPU: large blocks", "GB/s", 1e9)]
    write_bytes_per_s: Annotated[Rate, meant("its link from the GPU: large blocks", "GB/s", 1e9)]
    latency_s: Annotated[Seconds, meant("latency of each transfer", "us", 1e-6)] = 0.0
    block_bytes: Annotated[
        tuple[float, ...], meant("contiguous block sizes of its link's curve", "KiB", 1024)
    ] = (1.0,)
    block_efficiency: Annotated[tuple[float, ...], meant("of its bandwidth at these sizes")] = (
        1.0,
    )
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, f"memory {self.name}")
        check_curve(self.block_bytes, self.block_efficiency)

    @property
    def number(self) -> int:
        """Which of `MEMORIES` it is."""
        return MEMORIES.index(self.name)

    def bytes_per_s(self, block_bytes: np.ndarray | float, direction: Direction) -> np.ndarray:
        """Bandwidth of one direction for contiguous blocks of `block_bytes` each.

        Between the curve's points the share is linear in the logarithm of the block size; beyond
        them it stays what it is at the ends.
        """
        peak = self.read_bytes_per_s if direction == "h2d" else self.write_bytes_per_s
        size = np.log2(np.maximum(block_bytes, 1.0))
        return np.asarray(peak * np.interp(size, np.log2(self.block_bytes), self.block_efficiency))


def check_curve(sizes: tuple[float, ...], shares: tuple[float, ...]) -> None:
    """Raise `UsageError` unless these are a curve of shares by block size."""
    rising = all(a < b for a, b in zip((0.0, *sizes), sizes, strict=False))
    if not (len(sizes) == len(shares) >= 1 and rising and all(0 < s <= 1 for s in shares)):
        raise UsageError(
            "block_bytes must rise, with a block_efficiency in (0, 1] for each, not "
            f"{sizes!r} and {shares!r}"
        )


def check_memories(memories: tuple[Memory, ...]) -> None:
    """Raise `UsageError` unless these can be listed: memories below DDR, each once."""
    names = [each.name for each in memories]
    for at, name in enumerate(names):
        if name not in BELOW_DDR:
            raise UsageError(
                f"[[memories]] name must be one of {', '.join(BELOW_DDR)}, not {name!r}: HBM and "
                "DDR have keys of their own"
            )
        if name in names[:at]:
            raise UsageError(f"[[memories]] lists {name} twice: give each memory once")


@dataclass(frozen=True)
class HardwareProfile(Sourced):
    """One GPU, its host memory, and the link between them.

    `block_bytes` and `block_efficiency` are points of the curve "share of the PCIe bandwidth
    against contiguous block size".  `overlap` is the share of the shorter of computing and reading
    memory that runs during the longer: 1 is a roofline; on a CPU the two can add up.  `policies`
    are those whose own seconds are known, which replace the numbers of decisions.  `evidence` says
    what a measured profile was derived from, and how well it predicts.  Nothing computes with it.
    """

    name: str
    hbm_bytes: Annotated[_Bytes, meant("memory of the GPU", "GB", 1e9)]
    hbm_bytes_per_s: Annotated[Rate, meant("its peak bandwidth", "GB/s", 1e9)]
    flops_per_s: Annotated[Rate, meant("peak of dense bf16 matrix products", "TFLOP/s", 1e12)]
    ddr_bytes: Annotated[_Bytes, meant("host memory that offloading may use", "GB", 1e9)]
    ddr_bytes_per_s: Annotated[Rate, meant("its bandwidth", "GB/s", 1e9)]
    mfu: Annotated[_Share, meant("of the peak FLOP/s that matrix products reach")]
    mbu: Annotated[_Share, meant("of the HBM bandwidth that reading weights reaches")]
    kv_read_efficiency: Annotated[_Share, meant("of the HBM bandwidth that reading KV reaches")]
    eager_bytes_per_s: Annotated[
        Rate, meant("writing and reading attention probabilities", "GB/s", 1e9)
    ]
    dequantise_bytes_per_s: Annotated[Rate, meant("8-bit bytes that are dequantised", "GB/s", 1e9)]
    per_layer_s: Annotated[
        Seconds, meant("launch overhead of each layer of an iteration", "us", 1e-6)
    ]
    per_step_s: Annotated[Seconds, meant("scheduling overhead of an iteration", "us", 1e-6)]
    per_sequence_s: Annotated[Seconds, meant("the same for each sequence in it", "us", 1e-6)]
    decision_base_s: Annotated[Seconds, meant("a policy's decision, once", "us", 1e-6)]
    decision_per_token_s: Annotated[Seconds, meant("a decision, per token it looks at", "ns", 1e-9)]
    h2d_bytes_per_s: Annotated[Rate, meant("PCIe to the GPU: large pinned blocks", "GB/s", 1e9)]
    d2h_bytes_per_s: Annotated[Rate, meant("PCIe from the GPU: large pinned blocks", "GB/s", 1e9)]
    block_bytes: Annotated[
        tuple[float, ...], meant("contiguous block sizes of the PCIe curve", "KiB", 1024)
    ]
    block_efficiency: Annotated[tuple[_Share, ...], meant("of the PCIe bandwidth at these sizes")]
    pcie_latency_s: Annotated[Seconds, meant("latency of each transfer", "us", 1e-6)]
    pageable_factor: Annotated[_Share, meant("of the pinned bandwidth from pageable memory")]
    reserve_share: Annotated[float, Meta(ge=0, lt=1), meant("HBM that nothing may use")]
    overlap: Annotated[
        float, Meta(ge=0, le=1), meant("of computing and reading memory that overlaps")
    ] = 1.0
    decision_rows_s: Annotated[
        Seconds, meant("a decision longer where attention rows are read", "us", 1e-6)
    ] = 0.0
    eager_per_layer_s: Annotated[
        Seconds, meant("each layer longer where attention rows are read", "us", 1e-6)
    ] = 0.0
    wide_per_layer_s: Annotated[
        Seconds, meant("each layer longer in a pass over several tokens", "us", 1e-6)
    ] = 0.0
    #: What this project's own backend takes on the host, in the place of its engine's numbers;
    #: 0 where it was not measured
    launch_s: Annotated[
        Seconds, meant("the host's time to launch a kernel of a live step", "us", 1e-6)
    ] = 0.0
    graph_launch_s: Annotated[Seconds, meant("the same of a CUDA graph", "us", 1e-6)] = 0.0
    host_step_s: Annotated[
        Seconds, meant("the host's time for a live step beyond its launches", "us", 1e-6)
    ] = 0.0
    #: The host's own work on a transfer to or from DDR: once, for each cache group in it, and
    #: for its bytes
    move_s: Annotated[Seconds, meant("the host's work on a transfer", "us", 1e-6)] = 0.0
    move_group_s: Annotated[Seconds, meant("the same for each cache group in it", "us", 1e-6)] = 0.0
    move_byte_s: Annotated[Seconds, meant("the same for each byte", "ns", 1e-9)] = 0.0
    fp8_flops_per_s: Annotated[
        float, Meta(ge=0), meant("peak of dense fp8 products; 0 if it has none", "TFLOP/s", 1e12)
    ] = 0.0
    fp4_flops_per_s: Annotated[
        float, Meta(ge=0), meant("peak of dense fp4 products; 0 if it has none", "TFLOP/s", 1e12)
    ] = 0.0
    #: Points of two curves by GPUs that share a model; empty if the links between them are unknown
    all_reduce_gpus: Annotated[
        tuple[float, ...], meant("GPUs that share a model, in all-reduces", "GPUs", 1)
    ] = ()
    all_reduce_bytes_per_s: Annotated[
        tuple[Rate, ...], meant("bandwidth of a ring of these GPUs", "GB/s", 1e9)
    ] = ()
    all_reduce_latency_s: Annotated[
        tuple[Seconds, ...], meant("what a small all-reduce takes on them", "us", 1e-6)
    ] = ()
    #: Where its measured kernels are: the name of a GPU that arborsim has tables of, or a table
    #: file; empty for none, and then a pass is priced by the numbers above alone
    kernels: str = ""
    engine: EngineProfile | None = None  # what serves on it; no part of the file
    policies: Mapping[str, PolicySeconds] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    memories: tuple[Memory, ...] = ()  # below DDR

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, "hardware profile")
        check_memories(self.memories)
        check_curve(self.block_bytes, self.block_efficiency)
        groups = self.all_reduce_gpus
        sizes = {len(getattr(self, name)) for name in _OF_ALL_REDUCES}
        if len(sizes) > 1 or any(a >= b for a, b in zip((1.0, *groups), groups, strict=False)):
            raise UsageError(
                f"all_reduce_gpus must rise from 2, not {list(groups)!r}, with an "
                "all_reduce_bytes_per_s and an all_reduce_latency_s for each"
            )

    @property
    def digest(self) -> str:
        """A digest of all that is known of it, wherever its files lie."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.kernels.endswith(".parquet"):
            own["kernels"] = file_digest(Path(self.kernels))
        return digest(own)

    def tables(self, engine: str) -> Path:
        """The file of its measured kernels under an engine's; a `UsageError` if there is none."""
        if self.kernels.endswith(".parquet"):
            return Path(self.kernels)
        shipped = shipped_tables()
        if (self.kernels, engine) in shipped:
            return shipped[self.kernels, engine]
        known = sorted(other for gpu, other in shipped if gpu == self.kernels)
        raise UsageError(
            f"{self.name} has no measured kernels of {engine} (but of {', '.join(known)}): choose "
            "another --engine, or import them with arborsim hardware import aiconfigurator"
        )

    def served_by(self, engine: EngineProfile) -> HardwareProfile:
        """With an engine; what this project's own takes on the host is as it was measured here."""
        engine = engine.on(self.name)
        names = _OF_THE_HOST.items() if engine.as_measured else ()
        found = {name: own for name, own in names if own in self.sources}
        numbers: dict[str, Any] = {name: getattr(self, own) for name, own in found.items()}
        sources = {name: self.sources[own] for name, own in found.items()}
        engine = replace(engine, **numbers, sources={**engine.sources, **sources})
        return replace(self, engine=engine)

    def all_reduce_s(self, gpus: int, size_bytes: float) -> float:
        """Adding up `size_bytes` over a ring of `gpus`, which had a latency and a bandwidth.

        Between the curves' points both are linear in logarithms; beyond them they stay.  Raises
        `UsageError` if the profile does not know the links.
        """
        if not self.all_reduce_gpus:
            raise UsageError(
                f"{self.name} says nothing of the links between GPUs: take one GPU, or give "
                f"{', '.join(_OF_ALL_REDUCES)} in its profile (arborsim hardware h100 shows them)"
            )
        at, known = np.log(gpus), np.log(self.all_reduce_gpus)
        speed = np.exp(np.interp(at, known, np.log(self.all_reduce_bytes_per_s)))
        latency_s = np.interp(at, known, self.all_reduce_latency_s)
        return float(latency_s + 2 * (gpus - 1) / gpus * size_bytes / speed)

    @property
    def usable_hbm_bytes(self) -> int:
        """HBM less the reserve."""
        return int(self.hbm_bytes * (1 - self.reserve_share))

    def policy_seconds(self, name: str, fused: bool, eager: bool) -> PolicySeconds:
        """The time of a policy; if it was not measured, that of a usual one.

        `fused` policies read no attention rows.  `eager` ones read them of generated tokens.
        """
        rows_s = 0.0 if fused else self.decision_rows_s
        layer_s = self.eager_per_layer_s if eager else 0.0
        usual = PolicySeconds(
            decision_base_s=self.decision_base_s + rows_s,
            decision_per_token_s=self.decision_per_token_s,
            layer_s=layer_s,
            wide_layer_s=layer_s,
        )
        return self.policies.get(name, usual)

    def numbers(self) -> list[str]:
        """Names of the numbers that the profile must give, and of others that it names a source of.

        The others mean "a roofline" or "nothing" unless they are given.
        """
        needed = required(type(self))
        return [name for name in meanings(type(self)) if name in needed or name in self.sources]

    def assumed(self) -> list[str]:
        """Names of the numbers that are assumed, those of memories among them."""
        own = [name for name in self.numbers() if self.is_assumed(name)]
        return own + [
            f"{memory.name}.{name}"
            for memory in self.memories
            for name in meanings(Memory)
            if memory.is_assumed(name)
        ]

    @cached_property
    def ddr(self) -> Memory:
        """Host memory behind PCIe, as the keys of the profile have it."""
        speeds = self.h2d_bytes_per_s, self.d2h_bytes_per_s, self.pcie_latency_s
        curve = self.block_bytes, self.block_efficiency
        return Memory(MEMORIES[DDR], self.ddr_bytes, *speeds, *curve)

    @cached_property
    def beside_hbm(self) -> Mapping[int, Memory]:
        """All memories but HBM, by their number (`Tier.memory`)."""
        return {each.number: each for each in (self.ddr, *self.memories)}

    def link_bytes_per_s(
        self, block_bytes: np.ndarray | float, direction: Direction, pinned: bool = True
    ) -> np.ndarray:
        """Bandwidth of one PCIe direction for contiguous blocks of `block_bytes` each."""
        factor = 1.0 if pinned else self.pageable_factor
        return self.ddr.bytes_per_s(block_bytes, direction) * factor

    @classmethod
    def from_table(
        cls, table: Mapping[str, Any], origin: str, base: HardwareProfile | None = None
    ) -> HardwareProfile:
        """A profile from a TOML table; with a `base`, the table gives only what differs from it.

        A number that is given without a source is assumed.  `origin` names the file in messages:
        a `UsageError` if a key is missing, unknown, of the wrong type, or out of its range.
        """
        with located(origin):
            if "engine" in table:
                raise UsageError("a profile has no engine of its own: give it as --engine")
            hint = 'with base = "h100", or another profile, the file gives only what differs'
            return cls.over(base, table, hint)


#: Numbers of an engine, and those of a profile that replace them where they were measured.
_OF_THE_HOST = {"launch_s": "launch_s", "graph_s": "graph_launch_s", "step_s": "host_step_s"}


@dataclass(frozen=True)
class HostProfile(Sourced):
    """A host that GPUs can be put into: its memory, and pinned PCIe transfers it can carry.

    The names are those of `HardwareProfile`.
    """

    name: str
    ddr_bytes: _Bytes
    ddr_bytes_per_s: Rate
    h2d_bytes_per_s: Rate
    d2h_bytes_per_s: Rate
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_gpu(self, profile: HardwareProfile) -> HardwareProfile:
        """The GPU of `profile` in this host, with a link as fast as the slower of both ends."""
        link = ("h2d_bytes_per_s", "d2h_bytes_per_s")
        limited = [name for name in link if getattr(self, name) < getattr(profile, name)]
        given: dict[str, Any] = {
            name: getattr(self, name) for name in ("ddr_bytes", "ddr_bytes_per_s", *limited)
        }
        sources = {name: f"{self.source(name)} (host {self.name})" for name in given}
        given |= {"name": f"{profile.name}+{self.name}", "sources": {**profile.sources, **sources}}
        return replace(profile, **given)
