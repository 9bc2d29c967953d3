"""Notes on figures of a simulated machine: times that are assumed, and what does not fit it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from arborsim.core.measurements import Measurements, stored_together
from arborsim.core.units import quantity

if TYPE_CHECKING:
    from arborsim.machine.profile import HardwareProfile

_MOST_NAMED = 6
_AS_IF = "The figures are those of a machine with enough memory."


def acts(measured: Measurements) -> bool:
    """Whether a policy took time, or changed what the cache holds."""
    changed = measured.evicted_tokens, measured.quantised_tokens, measured.offloaded_tokens
    return bool(measured.time.policy_s or any(changed))


def assumed_policy_time(policies: Iterable[str], profile: HardwareProfile) -> list[str]:
    """A note on policies that take time on a machine on which theirs was not measured.

    A slow decision can make a policy look slower than full retention, and is then no finding.
    """
    engine, known = profile.engine, set(profile.policies)
    built = engine is not None and bool(engine.integrations)
    if engine is not None and built:
        known = {name for name, each in engine.integrations.items() if not each.from_operations}
    named = [name for name in dict.fromkeys(policies) if name not in known]
    usual_s = profile.decision_base_s if profile.is_assumed("decision_base_s") else 0.0
    if not named or not (built or usual_s):
        return []
    whose = ", ".join(named) if len(named) <= _MOST_NAMED else f"{len(named)} policies"
    if engine is not None and built:
        return [
            f"Policy time of {whose} in {engine.name} is worked out from the operations of a "
            "decision (`arborsim policies NAME`), not measured: `arborsim validate policies` has "
            "what was."
        ]
    return [
        f"Policy time of {whose} is assumed ({quantity('seconds', usual_s)} a "
        "decision), not measured: `arborsim calibrate hardware` measures it on your machine."
    ]


def does_not_fit(searches: Iterable[tuple[str, str, Measurements]], machine: str) -> list[str]:
    """A line per trace: what does not fit in its largest search, and how much memory it lacks.

    Of each search: its trace, what ran (``"h2o at budget 0.5"``), and what it took.  `machine` is a
    name.
    """
    traces: dict[str, dict[str, list[Measurements]]] = {}
    for trace, what, measured in searches:
        if not measured.fits:
            traces.setdefault(trace, {}).setdefault(what, []).append(measured)
    return [_unfit(trace, runs, machine) for trace, runs in traces.items()]


def _unfit(trace: str, runs: Mapping[str, list[Measurements]], machine: str) -> str:
    """The line of a trace: what does not fit, by what ran."""
    first = next(iter(runs.values()))[0]
    sizes = (first.weight_bytes, first.usable_hbm_bytes, first.usable_ddr_bytes)
    weights, hbm, ddr = (quantity("bytes", size) for size in sizes)
    if over := _over(first.weight_bytes, first.usable_hbm_bytes):
        return (
            f"Nothing fits on {trace}: the weights alone are {weights}, and {machine} has {hbm} of "
            f"HBM to use, which is {quantity('bytes', over)} too little. {_AS_IF}"
        )

    def lacking(unfit: Sequence[Measurements]) -> str:
        """``"1.2 GB of HBM"``: the most that any of the searches lacks."""
        lacks = {
            "HBM": max(_over(m.needed_hbm_bytes, m.usable_hbm_bytes) for m in unfit),
            "DDR": max(_over(m.peak_ddr_bytes, m.usable_ddr_bytes) for m in unfit),
        }
        below = stored_together(unfit).items()
        lacks |= {memory: _over(each.peak_bytes, each.usable_bytes) for memory, each in below}
        return " and ".join(f"{quantity('bytes', n)} of {tier}" for tier, n in lacks.items() if n)

    named = "; ".join(f"{what} lacks {lacking(own)}" for what, own in runs.items())
    return (
        f"Does not fit on {trace}: {named}. {machine} has {hbm} of HBM and {ddr} of DDR to use; "
        f"a search needs the weights ({weights}), its activations and its KV. {_AS_IF}"
    )


def _over(needed: int, usable: int) -> int:
    """Bytes that are missing (none on a machine of unknown size)."""
    return max(0, needed - usable) if usable else 0
