"""From measurements to a hardware profile that a replay takes, and to the file it is kept in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.calibrate.hardware import (
    HardwareMeasurements,
    LinkRates,
    Pass,
    PassAgreement,
    agreement,
    fit_passes,
)
from arborsim.calibrate.policy_cost import (
    DecisionCost,
    PolicyCost,
    PolicyTime,
    fit_policies,
    seconds_of,
)
from arborsim.core.documents import plain, to_toml, write_text
from arborsim.machine.profile import HardwareProfile, PolicySeconds

RESERVE_SHARE = 0.1  # what fragmentation takes cannot be measured on a machine that is idle
GOOD_ERROR = 0.1  #: median error on passes held out, above which the fit is to be doubted
_DIGITS = 6


@dataclass(frozen=True)
class MeasuredProfile:
    """A profile, and how it predicts."""

    profile: HardwareProfile
    #: "decode fitted", "decode held out", "prefill fitted", "prefill held out"
    agreements: Mapping[str, PassAgreement]


def make_profile(
    name: str, measured: HardwareMeasurements, decisions: DecisionCost, date: str, command: str
) -> MeasuredProfile:
    """Put the numbers into a profile.

    Parameters
    ----------
    name : str
        Of the profile.
    measured : HardwareMeasurements
    decisions : DecisionCost
    date, command : str
        When, and by what, it was measured.

    Raises
    ------
    UsageError
        Too few passes to fit to.
    """
    kernels, link = measured.kernels, measured.link
    flops = max(kernels.matrix_flops.values())
    memory = _memory_peak(measured)
    weights = min(kernels.weights_bytes, memory)
    live = fit_policies(measured.policies)
    if live is None:
        live = PolicyCost(decisions.base_s, decisions.per_token_s, 0.0, 0.0)
    profile = HardwareProfile(
        name=name,
        hbm_bytes=measured.memory_bytes,
        hbm_bytes_per_s=memory,
        flops_per_s=flops,
        ddr_bytes=measured.host_memory_bytes,
        ddr_bytes_per_s=kernels.host_read_bytes[max(kernels.host_read_bytes)],
        mbu=weights / memory,
        eager_bytes_per_s=float(np.median(list(kernels.eager_bytes.values()))),
        dequantise_bytes_per_s=kernels.dequantise_bytes["fp8"],
        decision_base_s=live.base_s,
        decision_per_token_s=live.per_token_s,
        decision_rows_s=live.rows_s,
        eager_per_layer_s=live.eager_per_layer_s,
        policies=seconds_of(measured.policies, decisions.policies),
        h2d_bytes_per_s=max(link.h2d),
        d2h_bytes_per_s=max(link.d2h),
        block_bytes=tuple(float(size) for size in link.block_bytes),
        block_efficiency=_shares(link),
        pcie_latency_s=link.latency_s,
        pageable_factor=_pageable(link),
        reserve_share=RESERVE_SHARE,
        sources=_sources(measured, decisions, date),
        **vars(fit_passes(measured.passes, measured.geometry, flops, memory, weights)),
    )
    profile = _rounded(profile)
    found = {
        f"{kind} {where}": agreement(profile, measured.geometry, passes)
        for kind in ("decode", "prefill")
        for where, held_out in (("fitted", False), ("held out", True))
        if (passes := [p for p in measured.passes if (p.kind, p.held_out) == (kind, held_out)])
    }
    evidence = _evidence(measured, decisions, found, date, command)
    return MeasuredProfile(replace(profile, evidence=evidence), found)


def profile_toml(profile: HardwareProfile) -> str:
    """The text of a profile's file; `arborsim.machine.lookup.load_profile` reads it back."""
    head = (
        f"# {profile.name}: measured by `arborsim calibrate hardware`; what has no source in the\n"
        "# table below is assumed, and what it was derived from is under evidence.\n"
    )
    return head + to_toml(profile)


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write the file, whole or not at all; a `UsageError` says why it cannot be written."""
    write_text(path, profile_toml(profile))


def _memory_peak(measured: HardwareMeasurements) -> float:
    """On a GPU that of buffers no cache holds; on a CPU caches are part of the machine."""
    rates = (measured.kernels.read_bytes, measured.kernels.copy_bytes)
    if measured.on_cpu:
        return max(max(rate.values()) for rate in rates)
    return max(rate[max(rate)] for rate in rates)


def _shares(link: LinkRates) -> tuple[float, ...]:
    """The curve of both directions: mean of their shares, of which one is 1 nearly always."""
    up, down = np.array(link.h2d), np.array(link.d2h)
    return tuple(float(share) for share in (up / up.max() + down / down.max()) / 2)


def _pageable(link: LinkRates) -> float:
    """Share of the page-locked rate, median over both directions and all blocks."""
    if not link.pageable_h2d:
        return 1.0
    slow = np.array([*link.pageable_h2d, *link.pageable_d2h])
    return min(1.0, float(np.median(slow / np.array([*link.h2d, *link.d2h]))))


def _sources(measured: HardwareMeasurements, decisions: DecisionCost, date: str) -> dict[str, str]:
    torch = measured.versions.get("torch", "?")
    stem = f"measured {date} on {measured.device}, torch {torch}"
    same = "; device and host are two buffers in the same memory" if measured.on_cpu else ""
    peak = "best of reading and copying buffers of several sizes, caches included"
    peak = peak if measured.on_cpu else "best of reading and copying the largest buffer"
    fit = f"fitted to passes of {measured.geometry.name}"
    how = {
        "hbm_bytes": "installed memory" + (", which is the host's" if measured.on_cpu else ""),
        "hbm_bytes_per_s": peak,
        "flops_per_s": f"best square product in {measured.dtype}",
        "ddr_bytes": "installed memory",
        "ddr_bytes_per_s": "reading the largest buffer",
        "mfu": fit,
        "mbu": f"all weights of {measured.geometry.name}, one row",
        "kv_read_efficiency": fit,
        "eager_bytes_per_s": "softmax written and averaged over heads, median over lengths",
        "dequantise_bytes_per_s": "fp8 e4m3, a scale per token and KV head",
        **dict.fromkeys(("per_layer_s", "per_step_s", "per_sequence_s"), fit),
        "overlap": fit,
        **dict.fromkeys(
            ("decision_base_s", "decision_per_token_s", "decision_rows_s", "eager_per_layer_s"),
            f"searches of {measured.geometry.name} under "
            f"{len({one.name for one in measured.policies})} policies, median"
            if fit_policies(measured.policies)
            else f"decisions alone, median over {len(decisions.policies)} policies",
        ),
        "policies": f"searches of {measured.geometry.name} of one and of several sequences, with "
        "decisions and without",
        "h2d_bytes_per_s": f"best block size{same}",
        "d2h_bytes_per_s": f"best block size{same}",
        "block_bytes": f"mean of both directions{same}",
        "block_efficiency": f"mean of both directions{same}",
        "pcie_latency_s": f"an empty copy{same}",
        "pageable_factor": "a CPU has no page-locked memory of its own"
        if measured.on_cpu
        else "median over block sizes",
    }
    return {name: f"{stem}: {what}" for name, what in how.items()}


def _evidence(
    measured: HardwareMeasurements,
    decisions: DecisionCost,
    found: Mapping[str, PassAgreement],
    date: str,
    command: str,
) -> dict[str, Any]:
    def columns(kind: type, records: tuple[Any, ...]) -> dict[str, list[Any]]:
        return {each.name: [getattr(one, each.name) for one in records] for each in fields(kind)}

    evidence: dict[str, Any] = _rounded_values(
        plain({
            "command": command,
            "date": date,
            "device": measured.device,
            "model": measured.geometry.name,
            "dtype": measured.dtype,
            "notes": measured.notes,
            "versions": measured.versions,
            "agreement": found,
            "link": measured.link,
            "kernels": measured.kernels,
            "passes": columns(Pass, measured.passes),
            "policies": columns(PolicyTime, measured.policies),
            "decisions": {
                "sizes": decisions.sizes,
                "run_s": decisions.run_s,
                "base_s": {name: base for name, (base, _) in decisions.policies.items()},
                "per_token_s": {name: slope for name, (_, slope) in decisions.policies.items()},
            },
        })
    )  # fmt: skip
    return evidence


def _rounded(profile: HardwareProfile) -> HardwareProfile:
    """With as many digits as mean anything, so that what is checked is what is written."""
    numbers = {name: value for name, value in vars(profile).items() if isinstance(value, float)}
    shares = tuple(_rounded_values(profile.block_efficiency))
    policies = {
        name: PolicySeconds(**_rounded_values(asdict(taken)))
        for name, taken in profile.policies.items()
    }
    return replace(profile, block_efficiency=shares, policies=policies, **_rounded_values(numbers))


def _rounded_values(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded_values(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_rounded_values(item) for item in value]
    return value
