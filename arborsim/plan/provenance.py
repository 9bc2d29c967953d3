"""Where a plan's figures come from: inputs and versions, and assumed numbers."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from arborsim import __version__
from arborsim.core.units import quantity
from arborsim.machine.numbers import numbers_of
from arborsim.machine.options import ServingOptions
from arborsim.plan.generate import TreeSpec
from arborsim.plan.saturation import STEP
from arborsim.plan.workload import MixEntry, Workload
from arborsim.policies.registry import values_of
from arborsim.trace.reader import TraceReader


def settings_of(workload: Workload) -> dict[str, str]:
    """Everything that determines the result, as text."""
    serving = ", ".join(
        f"{name} {_serving_text(name, value)}" for name, value in asdict(workload.serving).items()
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
    for calibration in workload.calibrations:
        found[f"calibration {Path(calibration.source).name}"] = (
            f"{calibration.kind} of {', '.join(calibration.policies)}, measured on "
            f"{calibration.model} ({calibration.layers} layers, seed {calibration.seed}), sha256 "
            f"{_digest(Path(calibration.source))}"
        )
    for choice in workload.policies:
        values = ", ".join(
            f"{key} {_plain_text(value)}" for key, value in values_of(choice.policy).items()
        )
        found[f"policy {choice.name}"] = values or "no parameters"
    return found


def _serving_text(name: str, value: object) -> str:
    """A serving option in the unit that its name ends with, as people write it."""
    if name == "max_searches" and value == ServingOptions.max_searches:
        return "as many as fit"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _plain_text(value)
    if name.endswith("_bytes_per_s"):
        return f"{quantity('bytes', value)}/s"
    if name.endswith("_bytes"):
        return quantity("bytes", value)
    if name.endswith("_s"):
        return quantity("seconds", value)
    return _plain_text(value)


def _plain_text(value: object) -> str:
    """A setting as a TOML file would have it: no quotes, digits only where they matter."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_plain_text, value)) + "]"
    return str(value)


def _spec_text(spec: TreeSpec) -> str:
    """A distribution as a workload states it; what says nothing is left out."""
    silent = {"parallel": 0, "rewards": "none", "pruned": [0.0], "finished": [0.0]}
    return ", ".join(
        f"{name} {_plain_text(value)}"
        for name, value in spec.parameters().items()
        if value is not None and silent.get(name) != value
    )


def _source(entry: MixEntry) -> str:
    shared = f"; {entry.shared_prompt_tokens} prompt tokens in common" * (
        entry.shared_prompt_tokens > 0
    )
    if not isinstance(entry.source, Path):
        made, spec = entry.source, _spec_text(entry.source.spec)
        return f"{made.searches} searches generated from seed {made.seed}: {spec}{shared}"
    info = TraceReader(entry.source).info
    return (
        f"{entry.source.name}: {info.task}, {info.search}, recorded on {info.model} (seed "
        f"{info.seed}), sha256 {_digest(entry.source)}{shared}"
    )


def _digest(path: Path) -> str:
    """Beginning of the SHA-256 of a file, or of a trace that is a folder of files."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.parquet")) if path.is_dir() else [path]:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]


def assumed_numbers(workload: Workload) -> tuple[str, ...]:
    """Numbers of the profiles that nobody measured or published, as `arborsim hardware` shows."""
    profiles = {hardware.profile.name: hardware.profile for hardware in workload.hardware}
    return tuple(
        f"{profile.name}: {number.name} {number.text.replace(' us', ' µs')}"
        for profile in profiles.values()
        for number in numbers_of(profile)
        if number.assumed
    )
