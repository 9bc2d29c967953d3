"""Where a plan's figures come from: inputs and versions, assumed numbers, and cautions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from arborsim import __version__
from arborsim.planning.demands import Variant
from arborsim.planning.results import INFEASIBLE, CandidateResult
from arborsim.planning.saturation import STEP
from arborsim.planning.workload import MixEntry, Workload
from arborsim.policies.registry import values_of
from arborsim.trace.reader import TraceReader


def settings_of(workload: Workload) -> dict[str, str]:
    """Everything that determines the result, as text."""
    serving = ", ".join(
        f"{name} {value}" for name, value in asdict(workload.serving).items()
        if name not in ("tensor_parallel", "series_points")
    )  # fmt: skip
    prices = workload.prices
    found = {
        "model geometry": workload.geometry.name,
        "KV bytes per token": f"{workload.geometry.kv_bytes_per_token:,}",
        "searches per run": f"{workload.searches}, the first {workload.warm_up} not measured",
        "seeds": ", ".join(str(seed) for seed in workload.seeds()),
        "loads tried": f"{STEP - 1:.0%} apart",
        "serving": serving,
        "tokens per page": str(workload.page_tokens),
        "tree attention": "on" if workload.tree_attention else "off",
        "prices": f"{prices.currency}, {prices.date}: {prices.source}",
        "versions": ", ".join(
            [f"arborsim {__version__}"]
            + [f"{name} {version(name)}" for name in ("numpy", "pyarrow", "scipy")]
        ),
    }
    for entry in workload.mix:
        found[f"mix: {entry.name}"] = f"weight {entry.weight:g}; {_source(entry)}"
    for choice in workload.policies:
        values = ", ".join(f"{key} {value}" for key, value in values_of(choice.policy).items())
        found[f"policy {choice.name}"] = values or "no parameters"
    return found


def _source(entry: MixEntry) -> str:
    shared = f"; {entry.shared_prompt_tokens} prompt tokens in common" * (
        entry.shared_prompt_tokens > 0
    )
    if not isinstance(entry.source, Path):
        made = entry.source
        return f"{made.searches} searches generated from seed {made.seed}: {made.spec}{shared}"
    info = TraceReader(entry.source).info
    return (
        f"{entry.source.name}: {info.task}, {info.search}, recorded on {info.model} (seed "
        f"{info.seed}), sha256 {_digest(entry.source)}{shared}"
    )


def _digest(path: Path) -> str:
    """Beginning of the SHA-256 of a trace, which may be a folder of files."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.parquet")) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def assumed_numbers(workload: Workload) -> tuple[str, ...]:
    """Numbers of the profiles that nobody measured or published."""
    profiles = {hardware.profile.name: hardware.profile for hardware in workload.hardware}
    return tuple(
        f"{profile.name}: {name} {getattr(profile, name)}"
        for profile in profiles.values()
        for name in profile.assumed()
    )


def cautions(
    workload: Workload, chosen: Sequence[Variant], results: Sequence[CandidateResult]
) -> tuple[str, ...]:
    """What to know about the figures."""
    found = []
    infeasible = [each for each in results if each.status == INFEASIBLE]
    if infeasible:
        names = ", ".join(dict.fromkeys(f"{each.policy} at {each.budget}" for each in infeasible))
        found.append(
            f"{len(infeasible)} of {len(results)} candidates cannot be served under their policy "
            f"and budget: {names}."
        )
    if any(variant.offloads for variant in chosen) and any(w.gpus > 1 for w in workload.hardware):
        found.append(
            "Policies that use DDR decided what to fetch on one GPU of each kind; where several "
            "share a model, the same bytes cross PCIe at their speed."
        )
    for entry in workload.mix:
        if isinstance(entry.source, Path):
            model = TraceReader(entry.source).info.geometry.name
            if model != workload.geometry.name:
                found.append(
                    f"{entry.name} was recorded on {model} and is charged as "
                    f"{workload.geometry.name}: lengths, trees and decisions are the recorded ones."
                )
    return tuple(found)
