"""What the numbers of a hardware profile mean, and the units people quote them in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from arborsim.machine.profile import HardwareProfile

_DATE = re.compile(r"\b20\d\d(?:-\d\d){0,2}\b")


@dataclass(frozen=True)
class Meaning:
    """Of one number.

    Attributes
    ----------
    unit : str
        The unit people quote it in.
    scale : float
        What one such unit is in the profile's own (bytes, bytes/s, FLOP/s, s).
    about : str
    """

    unit: str
    scale: float
    about: str


MEANINGS: dict[str, Meaning] = {
    "hbm_bytes": Meaning("GB", 1e9, "memory of the GPU"),
    "hbm_bytes_per_s": Meaning("GB/s", 1e9, "its peak bandwidth"),
    "flops_per_s": Meaning("TFLOP/s", 1e12, "peak of dense bf16 matrix products"),
    "ddr_bytes": Meaning("GB", 1e9, "host memory that offloading may use"),
    "ddr_bytes_per_s": Meaning("GB/s", 1e9, "its bandwidth"),
    "reserve_share": Meaning("share", 1, "HBM that nothing may use"),
    "mfu": Meaning("share", 1, "of the peak FLOP/s that matrix products reach"),
    "mbu": Meaning("share", 1, "of the HBM bandwidth that reading weights reaches"),
    "kv_read_efficiency": Meaning("share", 1, "of the HBM bandwidth that reading KV reaches"),
    "eager_bytes_per_s": Meaning("GB/s", 1e9, "writing and reading attention probabilities"),
    "dequantise_bytes_per_s": Meaning("GB/s", 1e9, "8-bit bytes that are dequantised"),
    "overlap": Meaning("share", 1, "of computing and reading memory that overlaps"),
    "per_layer_s": Meaning("us", 1e-6, "launch overhead of each layer of an iteration"),
    "per_step_s": Meaning("us", 1e-6, "scheduling overhead of an iteration"),
    "per_sequence_s": Meaning("us", 1e-6, "the same for each sequence in it"),
    "eager_per_layer_s": Meaning("us", 1e-6, "each layer longer where attention rows are read"),
    "decision_base_s": Meaning("us", 1e-6, "a policy's decision, once"),
    "decision_per_token_s": Meaning("ns", 1e-9, "a decision, per token it looks at"),
    "decision_rows_s": Meaning("us", 1e-6, "a decision longer where attention rows are read"),
    "h2d_bytes_per_s": Meaning("GB/s", 1e9, "PCIe to the GPU: large pinned blocks"),
    "d2h_bytes_per_s": Meaning("GB/s", 1e9, "PCIe from the GPU: large pinned blocks"),
    "block_bytes": Meaning("KiB", 1024, "contiguous block sizes of the PCIe curve"),
    "block_efficiency": Meaning("share", 1, "of the PCIe bandwidth at these sizes"),
    "pcie_latency_s": Meaning("us", 1e-6, "latency of each transfer"),
    "pageable_factor": Meaning("share", 1, "of the pinned bandwidth from pageable memory"),
}


@dataclass(frozen=True)
class Number:
    """One number of a profile, ready to be shown.

    Attributes
    ----------
    name, unit, about, source : str
    value : float or list of float
        In `unit`.
    date : str
        That the source names; empty if it names none.
    assumed : bool
    """

    name: str
    value: Any
    unit: str
    about: str
    source: str
    date: str
    assumed: bool

    @property
    def text(self) -> str:
        """The value with its unit."""
        values = self.value if isinstance(self.value, list) else [self.value]
        shown = ", ".join(f"{value:.4g}" for value in values)
        return shown if self.unit == "share" else f"{shown} {self.unit}"


def numbers_of(profile: HardwareProfile) -> list[Number]:
    """The numbers of a profile in the order in which `MEANINGS` has them."""
    given = set(profile.numbers())
    found = []
    for name, meaning in MEANINGS.items():
        if name not in given:
            continue
        raw, source = getattr(profile, name), profile.source(name)
        parts = [part / meaning.scale for part in (raw if isinstance(raw, tuple) else (raw,))]
        dates = _DATE.findall(source)
        found.append(
            Number(
                name,
                parts if isinstance(raw, tuple) else parts[0],
                meaning.unit,
                meaning.about,
                source,
                dates[-1] if dates else "",
                profile.is_assumed(name),
            )
        )
    return found
