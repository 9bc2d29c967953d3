"""From measurements to a hardware profile that a replay takes, and to the file it is kept in.

A backend measures (`MeasuringBackend`), `fit_passes` finds rates and overheads in forward passes
that were timed, and `make_profile` puts all numbers together.

`arborsim.machine.cost.CostModel` says that a pass takes ``max(compute, memory)``, plus the part of
the shorter one that is not hidden, plus overheads.  Where it is known which is longer, that is
linear in the unknown times per FLOP, byte, layer, step and sequence.  So: guess which, solve
bounded non-negative least squares of the relative errors, look again, until nothing changes (as
convex piecewise-linear fits are made: Magnani and Boyd 2009, section 2).  The share that overlaps
is tried on a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from arborsim.core.documents import plain, to_toml
from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry
from arborsim.core.statistics import nonnegative_least_squares
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_engine
from arborsim.machine.profile import HardwareProfile
from arborsim.products.calibrate.backend import (
    HardwareMeasurements,
    Launches,
    LinkRates,
    Moved,
    Pass,
    PolicyTime,
)
from arborsim.products.calibrate.documents import rounded
from arborsim.products.calibrate.policy_cost import DecisionCost, fit_policies, seconds_of

OVERLAPS = tuple(i / 10 for i in range(11))
_ROUNDS = 30
#: Unknowns: seconds per FLOP, per byte of keys and values, per layer, step and sequence, and per
#: layer of a pass over several tokens.
_COMPUTE, _MEMORY, _OVERHEAD = 0, 1, slice(2, 6)
_UNKNOWNS = 6
#: Fields of a `HardwareProfile` that follow from timed passes.
_FITTED = (
    *("mfu", "kv_read_efficiency", "overlap"),
    *("per_layer_s", "per_step_s", "per_sequence_s", "wide_per_layer_s"),
)
RESERVE_SHARE = 0.1  # what fragmentation takes cannot be measured on a machine that is idle
GOOD_ERROR = 0.1  #: median error on passes held out, above which the fit is to be doubted
_DIGITS = ".6g"  # as many as mean anything


@dataclass(frozen=True)
class PassAgreement:
    """Predictions against measurements."""

    passes: int
    #: Share of the variance of the seconds that is explained; NaN for fewer than two passes
    r2: float
    #: Of the relative errors ``|predicted - measured| / measured``
    median: float
    largest: float


def fit_passes(
    passes: Sequence[Pass],
    geometry: Geometry,
    flops_per_s: float,
    bytes_per_s: float,
    weights_bytes_per_s: float,
) -> dict[str, float]:
    """Fields of a `HardwareProfile`, fitted to the passes that are not held out.

    `geometry` is the whole model's. `flops_per_s` and `bytes_per_s` are peaks that no rate may
    exceed.  `weights_bytes_per_s`, at which weights are read for one row, is measured apart: time
    that depends on the layers alone looks the same as overhead.  Raises `UsageError` if there are
    fewer passes than unknowns.
    """
    used = [each for each in passes if not each.held_out]
    if len(used) < _UNKNOWNS or {each.kind for each in used} != {"decode", "prefill"}:
        raise UsageError(
            f"{len(used)} timed passes are too few for {_UNKNOWNS} unknowns: "
            "choose a smaller model, or run without --quick"
        )
    work = np.array([_work(each, geometry) for each in used])
    weights_bytes = np.array([_shape(each, geometry).weight_bytes for each in used])
    weights_s = weights_bytes / weights_bytes_per_s
    seconds = np.array([each.seconds for each in used])
    least = np.array([1 / flops_per_s, 1 / bytes_per_s, *[0.0] * (_UNKNOWNS - 2)])
    tried = [
        (*_alternate(work, weights_s, seconds, least, overlap, start), overlap)
        for overlap in OVERLAPS
        for start in (True, False)
    ]
    _, x, overlap = min(tried, key=lambda each: each[0])
    values = (*(least[:2] / x[:2]), overlap, *x[_OVERHEAD])
    return dict(zip(_FITTED, map(float, values), strict=True))


def fit_launches(launches: Launches | None) -> dict[str, float]:
    """Fields of a `HardwareProfile`: what the host takes to launch a live step.

    Of a step's time, what a layer adds is divided by the launches of a layer that the engine
    ``live`` counts. What is left besides all launches is the step's own.  Where no steps were
    measured (a CPU computes before a call returns), a launch is that of a small kernel alone.
    """
    if launches is None:
        return {}
    found = {"launch_s": launches.kernel.median}
    if launches.graph is not None:
        found["graph_launch_s"] = launches.graph.median
    if len(launches.steps) < 2:
        return found
    engine = load_engine("live")
    (few, fast), (many, slow) = min(launches.steps.items()), max(launches.steps.items())
    layer_s = (slow.median - fast.median) / (many - few)
    per_layer = engine.layer_launches + engine.search_launches
    # Launching one takes no less than launching a kernel that nothing surrounds.
    launch_s = max(layer_s / per_layer, launches.kernel.median)
    launched_s = (many * per_layer + engine.step_launches) * launch_s
    return found | {"launch_s": launch_s, "host_step_s": max(0.0, slow.median - launched_s)}


#: What the host's work on moves is linear in: transfers, cache groups in them, and bytes.
_MOVES = ("move_s", "move_group_s", "move_byte_s")


def fit_moves(moves: Sequence[Moved]) -> dict[str, float]:
    """Fields of a `HardwareProfile`: the host's work on transfers, by least relative errors."""
    if len(moves) < len(_MOVES):
        return {}
    seconds = np.array([one.seconds for one in moves])
    counts = [[one.transfers, one.transfers * one.groups, one.size_bytes] for one in moves]
    rows = np.array(counts) / seconds[:, None]
    unit = rows.max(axis=0)
    x = nonnegative_least_squares(rows / unit, np.ones(len(seconds)))
    return dict(zip(_MOVES, map(float, x / unit), strict=True))


def predicted_s(profile: HardwareProfile, geometry: Geometry, one: Pass) -> float:
    """Seconds of a pass by the cost model, as replays use it."""
    model = CostModel(profile, _shape(one, geometry))
    if one.kind == "prefill":
        return model.prefill_s(one.tokens)
    kv_bytes = one.shared * model.geometry.kv_bytes_per_token
    return float(model.decode_s(one.lanes, one.lanes * one.attended, kv_bytes))


def agreement(
    profile: HardwareProfile, geometry: Geometry, passes: Sequence[Pass]
) -> PassAgreement:
    """How well `profile` predicts `passes`. At least one."""
    measured = np.array([each.seconds for each in passes])
    predicted = np.array([predicted_s(profile, geometry, each) for each in passes])
    relative = np.abs(predicted - measured) / measured
    spread = float(((measured - measured.mean()) ** 2).sum())
    missed = float(((measured - predicted) ** 2).sum())
    return PassAgreement(
        len(passes),
        1 - missed / spread if spread > 0 else float("nan"),
        float(np.median(relative)),
        float(relative.max()),
    )


def _shape(one: Pass, geometry: Geometry) -> Geometry:
    """The geometry of the model that was run: the first layers of the whole one."""
    return replace(geometry, layers=one.layers, parameters=one.parameters)


def _work(one: Pass, geometry: Geometry) -> list[float]:
    """The factor of each unknown."""
    shape = _shape(one, geometry)
    flops = 2.0 * one.parameters * one.lanes * one.tokens
    pairs = one.lanes * one.attended
    if one.kind == "prefill":
        pairs = one.tokens * (one.tokens + 1) / 2
    return [
        flops + 4.0 * shape.layers * shape.heads * shape.head_dim * pairs,
        one.shared * shape.kv_bytes_per_token,
        float(one.layers),
        1.0,
        float(one.lanes),
        float(one.layers * (one.lanes * one.tokens > 1)),
    ]


def _alternate(
    work: np.ndarray,
    weights_s: np.ndarray,
    seconds: np.ndarray,
    least: np.ndarray,
    overlap: float,
    compute_bound: bool,
) -> tuple[float, np.ndarray]:
    """Sum of squared relative errors and the unknowns, starting from one guess for all passes."""
    bound = np.full(len(seconds), compute_bound)
    best = (np.inf, least)
    for _ in range(_ROUNDS):
        of_memory = np.where(bound, 1 - overlap, 1.0)
        rows = work.copy()
        rows[:, _COMPUTE] *= np.where(bound, 1.0, 1 - overlap)
        rows[:, _MEMORY] *= of_memory
        rows /= seconds[:, None]
        target = 1 - of_memory * weights_s / seconds
        # Units of which one explains a pass: the unknowns differ by twelve orders of magnitude.
        largest = rows.max(axis=0)
        unit = 1 / np.where(largest > 0, largest, 1.0)
        found = nonnegative_least_squares(rows * unit, target, least / unit)
        x = np.maximum(found * unit, least)
        compute = work[:, _COMPUTE] * x[_COMPUTE]
        memory = weights_s + work[:, _MEMORY] * x[_MEMORY]
        hidden = overlap * np.minimum(compute, memory)
        predicted = compute + memory - hidden + work[:, _OVERHEAD] @ x[_OVERHEAD]
        error = float((((predicted - seconds) / seconds) ** 2).sum())
        if error < best[0]:
            best = (error, x)
        if ((compute >= memory) == bound).all():
            break
        bound = compute >= memory
    return best


def make_profile(
    name: str, measured: HardwareMeasurements, decisions: DecisionCost, date: str, command: str
) -> tuple[HardwareProfile, dict[str, PassAgreement]]:
    """The numbers as a profile, and how it predicts passes ("decode held out", ...).

    `date` and `command` are when and how they were measured.  Raises `UsageError` if there are too
    few passes to fit to.
    """
    kernels, link = measured.kernels, measured.link
    flops = max(kernels.matrix_flops.values())
    memory = _memory_peak(measured)
    weights = min(kernels.weights_bytes, memory)
    alone = {"decision_base_s": decisions.base_s, "decision_per_token_s": decisions.per_token_s}
    fitted: dict[str, Any] = fit_passes(measured.passes, measured.geometry, flops, memory, weights)
    fitted |= fit_policies(measured.policies) or alone
    up, down = np.array(link.h2d), np.array(link.d2h)
    table = dict(
        name=name,
        hbm_bytes=measured.memory_bytes,
        hbm_bytes_per_s=memory,
        flops_per_s=flops,
        ddr_bytes=measured.host_memory_bytes,
        ddr_bytes_per_s=kernels.host_read_bytes[max(kernels.host_read_bytes)],
        mbu=weights / memory,
        eager_bytes_per_s=float(np.median(list(kernels.eager_bytes.values()))),
        dequantise_bytes_per_s=kernels.dequantise_bytes["fp8"],
        policies=seconds_of(measured.policies, decisions.policies),
        h2d_bytes_per_s=max(link.h2d),
        d2h_bytes_per_s=max(link.d2h),
        block_bytes=link.block_bytes,
        # Mean of both directions' shares, of which one is 1 nearly always.
        block_efficiency=((up / up.max() + down / down.max()) / 2).tolist(),
        pcie_latency_s=link.latency_s,
        pageable_factor=_pageable(link),
        reserve_share=RESERVE_SHARE,
        sources=_sources(measured, decisions, date),
        **fitted,
        **fit_launches(measured.launches),
        **fit_moves(measured.moves),
    )
    # Rounded before it is checked, so that what is checked is what is written.
    profile = HardwareProfile.from_table(rounded(plain(table), _DIGITS), name)
    found = {
        f"{kind} {where}": agreement(profile, measured.geometry, passes)
        for kind in ("decode", "prefill")
        for where, held_out in (("fitted", False), ("held out", True))
        if (passes := [p for p in measured.passes if (p.kind, p.held_out) == (kind, held_out)])
    }
    evidence = _evidence(measured, decisions, found, date, command)
    return replace(profile, evidence=evidence), found


def profile_toml(profile: HardwareProfile) -> str:
    """The text of a profile's file. `arborsim.machine.lookup.load_profile` reads it back."""
    head = (
        f"# {profile.name}: measured by `arborsim calibrate hardware`; what has no source in the\n"
        "# table below is assumed, and what it was derived from is under evidence.\n"
    )
    return head + to_toml(profile)


def _spreads(launches: Launches) -> dict[str, Any]:
    """Seconds with their spread. Steps by layers."""
    alone = {"kernel": launches.kernel, "graph": launches.graph}
    found = {name: one for name, one in alone.items() if one is not None}
    found |= {f"step_of_{layers}_layers": one for layers, one in launches.steps.items()}
    return {name: one._asdict() for name, one in found.items()}


def _memory_peak(measured: HardwareMeasurements) -> float:
    """On a GPU that of buffers no cache holds. On a CPU caches are part of the machine."""
    rates = (measured.kernels.read_bytes, measured.kernels.copy_bytes)
    if measured.on_cpu:
        return max(max(rate.values()) for rate in rates)
    return max(rate[max(rate)] for rate in rates)


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
    buffers = "buffers of several sizes, caches included"
    buffers = buffers if measured.on_cpu else "the largest buffer"
    fit = f"fitted to passes of {measured.geometry.name}"
    how = {
        "hbm_bytes": "installed memory" + (", which is the host's" if measured.on_cpu else ""),
        "hbm_bytes_per_s": f"best of reading and copying {buffers}",
        "flops_per_s": f"best square product in {measured.dtype}",
        "ddr_bytes": "installed memory",
        "ddr_bytes_per_s": "reading the largest buffer",
        "mbu": f"all weights of {measured.geometry.name}, one row",
        "eager_bytes_per_s": "softmax written and averaged over heads, median over lengths",
        "dequantise_bytes_per_s": "fp8 e4m3, a scale per token and KV head",
        **dict.fromkeys(_FITTED, fit),
        **dict.fromkeys(
            ("decision_base_s", "decision_per_token_s", "decision_rows_s", "eager_per_layer_s"),
            f"searches of {measured.geometry.name} under "
            f"{len({one.name for one in measured.policies})} policies, median"
            if fit_policies(measured.policies)
            else f"decisions alone, median over {len(decisions.policies)} policies",
        ),
        "policies": f"searches of {measured.geometry.name} of one and of several sequences, with "
        "decisions and without",
        **dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), f"best block size{same}"),
        **dict.fromkeys(("block_bytes", "block_efficiency"), f"mean of both directions{same}"),
        "pcie_latency_s": f"an empty copy{same}",
        **_host_sources(measured),
        "pageable_factor": "a CPU has no page-locked memory of its own"
        if measured.on_cpu
        else "median over block sizes",
    }
    return {name: f"{stem}: {what}" for name, what in how.items()}


def _host_sources(measured: HardwareMeasurements) -> dict[str, str]:
    """Sources of the numbers of `fit_launches` and `fit_moves`."""
    how = dict.fromkeys(fit_launches(measured.launches), "a small kernel, until it is launched")
    if measured.launches is not None and measured.launches.steps:
        depths = " and ".join(map(str, sorted(measured.launches.steps)))
        steps = f"decode steps of {measured.geometry.name} with {depths} layers, until launched"
        how |= dict.fromkeys(("launch_s", "host_step_s"), steps)
    if "graph_launch_s" in how:
        how["graph_launch_s"] = "a graph of small kernels, until it is launched"
    moves = "tokens moved to DDR and staged again, without waits"
    return how | dict.fromkeys(fit_moves(measured.moves), moves)


def _evidence(
    measured: HardwareMeasurements,
    decisions: DecisionCost,
    found: Mapping[str, PassAgreement],
    date: str,
    command: str,
) -> dict[str, Any]:
    def columns(kind: type, records: tuple[Any, ...]) -> dict[str, list[Any]]:
        return {each.name: [getattr(one, each.name) for one in records] for each in fields(kind)}

    by_policy = decisions.policies.items()
    alone = {
        "sizes": decisions.sizes,
        "run_s": decisions.run_s,
        "base_s": {name: base for name, (base, _) in by_policy},
        "per_token_s": {name: slope for name, (_, slope) in by_policy},
    }
    evidence: dict[str, Any] = {
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
        **({} if measured.launches is None else {"launches": _spreads(measured.launches)}),
        **({"moves": columns(Moved, measured.moves)} if measured.moves else {}),
        "passes": columns(Pass, measured.passes),
        "policies": columns(PolicyTime, measured.policies),
        "decisions": alone,
    }
    return dict(rounded(plain(evidence), _DIGITS))
