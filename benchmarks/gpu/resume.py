"""Going on from the results of an earlier call, which may have been made on another machine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.installed import sources
from arborsim.core.outputs import write_text
from benchmarks.gpu.plan import PROFILE, TRACES, Plan
from benchmarks.gpu.watchdog import Lines

Facts = dict[str, Any]


def identity(plan: Plan) -> Facts:
    """Facts that records of one run share; known before the model is loaded.

    The driver, clocks and the host may differ: another machine with the same GPU goes on.
    """
    import torch

    from arborsim_torch.hardware.facts import software
    from arborsim_torch.models import device_name

    return {
        "device": device_name(torch.device(plan.device)),
        "model": plan.model.removeprefix("config:").rpartition("/")[2],
        "new_tokens": plan.new_tokens,
        "prefill_block": plan.prefill_block,
        "sources": sources("arborsim", "arborsim_torch", "benchmarks.gpu"),
        **software(),
    }


def alike(records: list[Facts], identity: Facts) -> list[Facts]:
    """Those that were made with the same device, model and software."""
    found, same = [], False
    for record in records:
        if record["part"] == "start":
            same = record.get("identity") == identity
        if same:
            found.append(record)
    return found


def take_over(earlier: Path, lines: Lines, identity: Mapping[str, Any]) -> None:
    """Copy the records of an earlier results file, its profile and its traces to `lines`.

    Parameters
    ----------
    earlier : Path
    lines : Lines
        The new results file; it must be empty or absent.
    identity : mapping
        Of what runs here (`identity`): device, model and software.

    Raises
    ------
    UsageError
        One line: `earlier` is missing or no results file, or made with something else.
    """
    if not earlier.is_file():
        raise UsageError(f"--resume {earlier}: no such file")
    records = [r for r in Lines(earlier).read() if isinstance(r, dict) and "part" in r]
    starts = [r for r in records if r["part"] == "start" and isinstance(r.get("identity"), dict)]
    if not starts:
        raise UsageError(f"--resume {earlier}: it holds no results of this program")
    known = starts[-1]["identity"]
    apart = [
        f"{name} {known.get(name, 'unknown')} there, {identity.get(name, 'unknown')} here"
        for name in {**identity, **known} if known.get(name) != identity.get(name)
    ]  # fmt: skip
    if apart:
        raise UsageError(f"--resume {earlier}: not of this device and software: {'; '.join(apart)}")
    same = False
    for record in records:
        if record["part"] == "start":
            same = record.get("identity") == known
        if same:
            lines.write(record)
    packed = earlier.with_name(TRACES)
    if packed.is_file():
        shutil.copyfile(packed, lines.path.with_name(TRACES))


def keep_profile(records: list[Facts], folder: Path) -> None:
    """Write the profile of the last calibration that was done, if it is not there."""
    done = [r for r in records if r["part"] == "calibration" and r["outcome"] == "done"]
    path = folder / PROFILE
    if done and "toml" in done[-1] and not path.exists():
        write_text(path, done[-1]["toml"])
