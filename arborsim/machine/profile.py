"""A machine as the cost model sees it: one flat record of numbers with units in their names.

A profile is a TOML file.  Every number may name its source in a table ``[sources]``; one without a
source, or whose source begins with "assumed", is *assumed*, and reports say so.  A file that names
another profile as its ``base`` gives only what differs (`arborsim.machine.lookup.load_profile`).
``arborsim calibrate`` writes measured profiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.machine.policy_seconds import PolicySeconds
from arborsim.machine.records import BadNumber, made, parse_toml, record_values

Direction = Literal["h2d", "d2h"]
ASSUMED = "assumed"
#: No numbers, or ones that mean "a roofline" and "nothing" unless they are given.
_NEUTRAL = (
    "name", "sources", "evidence", "overlap", "decision_rows_s", "eager_per_layer_s", "policies",
)  # fmt: skip


@dataclass(frozen=True)
class HardwareProfile:
    """One GPU, its host memory, and the link between them.

    Attributes
    ----------
    name : str
    hbm_bytes, ddr_bytes : int
        Memory of the GPU and host memory that offloading may use.
    hbm_bytes_per_s, ddr_bytes_per_s : float
        Peak bandwidths.
    flops_per_s : float
        Peak of dense bf16 matrix products.
    mfu, mbu : float
        Share of the peaks that matrix products and reading weights reach.
    kv_read_efficiency : float
        Share of the HBM bandwidth that attention kernels reach when they read keys and values.
    eager_bytes_per_s : float
        Bandwidth at which attention probabilities are written out and read back.
    dequantise_bytes_per_s : float
        Quantised bytes that a dequantising pass handles per second.
    per_layer_s, per_step_s, per_sequence_s : float
        Launch and scheduling overhead of a decode iteration: per layer, once, and per sequence.
    decision_base_s, decision_per_token_s : float
        A policy's decision on the host: once, and per token it looks at.
    h2d_bytes_per_s, d2h_bytes_per_s : float
        Pinned PCIe transfers of large contiguous blocks, to and from the GPU.
    block_bytes, block_efficiency : tuple
        Points of the curve "share of that bandwidth against contiguous block size".
    pcie_latency_s : float
        Per transfer.
    pageable_factor : float
        Share of the pinned bandwidth that pageable host memory reaches.
    reserve_share : float
        Share of the HBM that nothing may use (context, fragmentation).
    overlap : float
        Share of the shorter of computing and reading memory that runs beside the longer: 1 is a
        roofline; on a CPU the two can add up.
    decision_rows_s, eager_per_layer_s : float
        Where a policy reads attention rows: what each decision takes longer, and what each layer of
        a decode iteration does beside writing the rows.
    policies : mapping of str to PolicySeconds
        Policies whose own seconds are known; they replace the three numbers of decisions.
    sources : mapping of str to str
        Where each number comes from.
    evidence : mapping
        What a measured profile was derived from, and how well it predicts; nothing computes with
        it.
    """

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    flops_per_s: float
    ddr_bytes: int
    ddr_bytes_per_s: float
    mfu: float
    mbu: float
    kv_read_efficiency: float
    eager_bytes_per_s: float
    dequantise_bytes_per_s: float
    per_layer_s: float
    per_step_s: float
    per_sequence_s: float
    decision_base_s: float
    decision_per_token_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    block_bytes: tuple[float, ...]
    block_efficiency: tuple[float, ...]
    pcie_latency_s: float
    pageable_factor: float
    reserve_share: float
    overlap: float = 1.0
    decision_rows_s: float = 0.0
    eager_per_layer_s: float = 0.0
    policies: Mapping[str, PolicySeconds] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.endswith("_per_s") or entry.name in ("hbm_bytes", "ddr_bytes"):
                self._require(entry.name, value > 0, "must be positive")
            elif entry.name in ("mfu", "mbu", "kv_read_efficiency", "pageable_factor"):
                self._require(entry.name, 0 < value <= 1, "must lie in (0, 1]")
            elif entry.name.endswith("_s"):
                self._require(entry.name, value >= 0, "must not be negative")
        self._require("overlap", 0 <= self.overlap <= 1, "must lie in [0, 1]")
        self._require("reserve_share", 0 <= self.reserve_share < 1, "must lie in [0, 1)")
        sizes, shares = self.block_bytes, self.block_efficiency
        rising = all(a < b for a, b in zip((0.0, *sizes), sizes, strict=False))
        valid = len(sizes) == len(shares) >= 1 and rising and all(0 < s <= 1 for s in shares)
        self._require("block_bytes", valid, "must rise, with a block_efficiency in (0, 1] for each")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise BadNumber(f"hardware profile '{self.name}'", name, rule, getattr(self, name))

    @property
    def usable_hbm_bytes(self) -> int:
        """HBM less the reserve."""
        return int(self.hbm_bytes * (1 - self.reserve_share))

    def policy_seconds(self, name: str, fused: bool) -> PolicySeconds:
        """What the policy takes; if nobody has measured it, a decision of a usual one.

        Parameters
        ----------
        name : str
        fused : bool
            Whether it reads no attention rows.
        """
        rows_s = 0.0 if fused else self.decision_rows_s
        usual = PolicySeconds(
            decision_base_s=self.decision_base_s + rows_s,
            decision_per_token_s=self.decision_per_token_s,
        )
        return self.policies.get(name, usual)

    def source(self, name: str) -> str:
        """Where the number `name` comes from, or "assumed"."""
        return self.sources.get(name, ASSUMED)

    def is_assumed(self, name: str) -> bool:
        """Whether nobody has published or measured the number `name`."""
        return self.source(name).startswith(ASSUMED)

    def assumed(self) -> list[str]:
        """Names of the numbers that are assumed."""
        return [name for name in self.numbers() if self.is_assumed(name)]

    def numbers(self) -> list[str]:
        """Names of the numbers that the profile must give, and of others that it names a source of.

        The others mean "a roofline" or "nothing" unless they are given.
        """
        names = (entry.name for entry in fields(self))
        return [n for n in names if n not in _NEUTRAL or n in self.sources]

    def link_bytes_per_s(
        self, block_bytes: np.ndarray | float, direction: Direction, pinned: bool = True
    ) -> np.ndarray:
        """Bandwidth of one PCIe direction for contiguous blocks of `block_bytes` each.

        Between the curve's points the share is linear in the logarithm of the block size; beyond
        them it stays what it is at the ends.
        """
        peak = self.h2d_bytes_per_s if direction == "h2d" else self.d2h_bytes_per_s
        size = np.log2(np.maximum(block_bytes, 1.0))
        share = np.interp(size, np.log2(self.block_bytes), self.block_efficiency)
        return np.asarray(peak * share * (1.0 if pinned else self.pageable_factor))

    @classmethod
    def from_toml(cls, text: str, origin: str) -> HardwareProfile:
        """Parse a whole profile; `origin` names it in error messages.

        Raises
        ------
        UsageError
            Not TOML, or a key is missing, unknown, of the wrong type, or out of its range.
        """
        values = record_values(cls, parse_toml(text, origin), origin)
        optional = (MISSING, MISSING)
        missing = [
            entry.name for entry in fields(cls)
            if entry.name not in values and (entry.default, entry.default_factory) == optional
        ]  # fmt: skip
        if missing:
            raise UsageError(
                f'{origin} lacks {", ".join(missing)}; with base = "h100", or another profile, it '
                "gives only what differs"
            )
        return made(origin, partial(cls, **values))

    def with_values(self, raw: Mapping[str, Any], origin: str) -> HardwareProfile:
        """This profile with what a TOML table gives in place of its own numbers.

        A number that is given without a source is assumed.

        Raises
        ------
        UsageError
            A key is unknown, of the wrong type, or out of its range.
        """
        values = record_values(type(self), raw, origin)
        kept = {name: text for name, text in self.sources.items() if name not in values}
        values["sources"] = {**kept, **values.get("sources", {})}
        return made(origin, partial(replace, self, **values))
