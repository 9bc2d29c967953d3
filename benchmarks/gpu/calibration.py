"""`arborsim calibrate hardware` on the device, from Python."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from arborsim.core.outputs import write_text
from arborsim.products.calibrate.backend import HardwareRequest
from arborsim.products.calibrate.hardware import make_profile, profile_toml
from arborsim.products.calibrate.policy_cost import measure_decisions
from arborsim_torch.hardware.measure import measure
from benchmarks.gpu.journal import Facts


def calibrate(
    model: str, device: str, quick: bool, policies: tuple[str, ...], path: Path, command: str
) -> Facts:
    """Measure, fit, and write the profile; `model` is one with random weights.

    Searches under `policies` are timed, however long they take.  The record holds the profile's
    text, too: a run that goes on elsewhere has the records alone.
    """

    began, begun_s = time.perf_counter(), dict[str, float]()

    def progress(what: str, done: int, total: int) -> None:
        begun_s.setdefault(what, round(time.perf_counter() - began, 1))

    measured = measure(HardwareRequest(model, device, quick, policies), progress)
    decisions = measure_decisions(quick, progress)
    profile, agreements = make_profile(
        path.stem, measured, decisions, time.strftime("%Y-%m-%d"), command
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    text = profile_toml(profile)
    write_text(path, text)
    return {
        "profile": path.name,
        "toml": text,
        "quick": quick,
        "agreement": {name: asdict(each) for name, each in agreements.items()},
        "notes": list(measured.notes),
        "begun_s": begun_s,
    }
