"""The numbers of a profile and of its memories, as people quote them, with their sources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from arborsim.core.sourced import Sourced, meanings
from arborsim.machine.profile import HardwareProfile

_DATE = re.compile(r"\b20\d\d(?:-\d\d){0,2}\b")


@dataclass(frozen=True)
class Number:
    """One number of a profile, ready to be shown."""

    name: str
    value: Any  # in `unit`
    unit: str
    about: str
    source: str
    date: str  # that the source names; empty if it names none
    assumed: bool

    @property
    def text(self) -> str:
        """The value with its unit."""
        values = self.value if isinstance(self.value, list) else [self.value]
        shown = ", ".join(f"{value:.4g}" for value in values)
        return shown if self.unit == "share" else f"{shown} {self.unit}"

    @property
    def called(self) -> str:
        """Its meaning in words, and its name: ``"peak bandwidth (hbm_bytes_per_s)"``."""
        share = "share " if self.about.startswith("of ") else ""
        return f"{share}{self.about} ({self.name})"


#: Numbers that are shown with others of their kind: after which one.
_AFTER = {
    name: after
    for after, names in {
        "flops_per_s": "fp8_flops_per_s fp4_flops_per_s",
        "ddr_bytes_per_s": "reserve_share",
        "dequantise_bytes_per_s": "overlap",
        "per_sequence_s": "eager_per_layer_s wide_per_layer_s launch_s graph_launch_s host_step_s",
        "decision_per_token_s": "decision_rows_s",
        "pcie_latency_s": "move_s move_group_s move_byte_s",
    }.items()
    for name in names.split()
}


def numbers_of(profile: HardwareProfile) -> list[Number]:
    """The numbers of a profile, in the units people quote them in."""
    order = list(meanings(type(profile)))
    names = sorted(profile.numbers(), key=lambda n: (order.index(_AFTER.get(n) or n), n in _AFTER))
    found = [_number(profile, name) for name in names]
    for memory in profile.memories:
        for name in meanings(type(memory)):
            found.append(_number(memory, name, f"{memory.name}."))
    return found


def _number(record: Sourced, name: str, before: str = "") -> Number:
    """A number of a record, its name with something `before` it."""
    (about, unit, scale), raw = meanings(type(record))[name], getattr(record, name)
    value = [part / scale for part in raw] if isinstance(raw, tuple) else raw / scale
    source, assumed = record.source(name), record.is_assumed(name)
    date = (_DATE.findall(source) or [""])[-1]
    return Number(before + name, value, unit, about, source, date, assumed)


def assumed_numbers(profile: HardwareProfile) -> tuple[str, ...]:
    """The assumed numbers of a profile: names with values, as `arborsim hardware` has them."""
    return tuple(
        f"{number.called}: {number.text.replace(' us', ' µs')}"
        for number in numbers_of(profile)
        if number.assumed
    )
