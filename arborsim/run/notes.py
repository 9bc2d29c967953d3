"""What a run says of its own figures: times that are assumed, and what does not fit a machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from arborsim.core.measurements import Measurements
from arborsim.core.units import quantity

if TYPE_CHECKING:
    from arborsim.machine.profile import HardwareProfile

#: The setting that tells GPU, host, model and type of its cache in a line.
MACHINE = "simulated on"
_MOST_NAMED = 6
_AS_IF = "The figures are those of a machine with enough memory."


def assumed_policy_time(policies: Iterable[str], profile: HardwareProfile) -> list[str]:
    """A note on policies that take time on a machine on which theirs was not measured.

    A slow decision can make a policy look slower than full retention, and is then no finding.
    """
    named = [name for name in dict.fromkeys(policies) if name not in profile.policies]
    if not named or not profile.is_assumed("decision_base_s"):
        return []
    whose = ", ".join(named) if len(named) <= _MOST_NAMED else f"{len(named)} policies"
    return [
        f"Policy time of {whose} is assumed ({quantity('seconds', profile.decision_base_s)} a "
        "decision), not measured: `arborsim calibrate hardware` measures it on your machine."
    ]


def does_not_fit(searches: Iterable[tuple[str, str, Measurements]], machine: str) -> list[str]:
    """A line per trace: what does not fit in its largest search, and how much memory it lacks.

    Parameters
    ----------
    searches : iterable of (str, str, Measurements)
        Trace, what ran (``"h2o at budget 0.5"``), and what one search took.
    machine : str
        What to call it.
    """
    traces: dict[str, list[tuple[str, Measurements]]] = {}
    for trace, what, measured in searches:
        if not measured.fits:
            traces.setdefault(trace, []).append((what, measured))
    return [_line(trace, unfit, machine) for trace, unfit in traces.items()]


def _line(trace: str, unfit: Sequence[tuple[str, Measurements]], machine: str) -> str:
    first = unfit[0][1]
    weights, hbm, ddr = (
        quantity("bytes", size)
        for size in (first.weight_bytes, first.usable_hbm_bytes, first.usable_ddr_bytes)
    )
    if beyond := _over(first.weight_bytes, first.usable_hbm_bytes):
        over = quantity("bytes", beyond)
        return (
            f"Nothing fits on {trace}: the weights alone are {weights}, and {machine} has {hbm} of "
            f"HBM to use, which is {over} too little. {_AS_IF}"
        )
    runs: dict[str, list[Measurements]] = {}
    for what, measured in unfit:
        runs.setdefault(what, []).append(measured)
    lacking = "; ".join(f"{what} lacks {_lacking(own)}" for what, own in runs.items())
    return (
        f"Does not fit on {trace}: {lacking}. {machine} has {hbm} of HBM and {ddr} of DDR to use; "
        f"a search needs the weights ({weights}), its activations and its KV. {_AS_IF}"
    )


def _lacking(unfit: Sequence[Measurements]) -> str:
    """``"1.2 GB of HBM"``: what the search lacks that lacks most."""
    hbm = max(_over(m.needed_hbm_bytes, m.usable_hbm_bytes) for m in unfit)
    ddr = max(_over(m.peak_ddr_bytes, m.usable_ddr_bytes) for m in unfit)
    lacks = (("HBM", hbm), ("DDR", ddr))
    return " and ".join(f"{quantity('bytes', over)} of {tier}" for tier, over in lacks if over)


def _over(needed: int, usable: int) -> int:
    """Bytes that are missing; a machine of unknown size lacks nothing."""
    return max(0, needed - usable) if usable else 0
