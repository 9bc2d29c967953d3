"""Predict the loads that were measured, and fit an engine's constants to the difference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from arborsim.core.outputs import whole
from arborsim.machine.scheduler import ClosedLoop
from arborsim.machine.serving import ServingEngine
from arborsim.products.observe.client import Answered
from arborsim.products.validate.published import ServedMachine, request


@dataclass(frozen=True)
class Observed:
    """A load: medians over its requests as they were measured and predicted, seconds."""

    clients: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float
    tpot_s: float
    predicted_ttft_s: float
    predicted_tpot_s: float

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted over measured, less one, of TTFT and TPOT."""
        return self.predicted_ttft_s / self.ttft_s - 1, self.predicted_tpot_s / self.tpot_s - 1


def observed(answered: Sequence[Answered], machine: ServedMachine) -> list[Observed]:
    """The loads that were measured, with what the machine's model says of each."""
    found = []
    for clients in sorted({each.clients for each in answered}):
        own = [each for each in answered if each.clients == clients and each.answer_tokens > 1]
        if not own:
            continue
        prompt, answer = (
            max(2, round(float(np.median(values))))
            for values in zip(*((e.prompt_tokens, e.answer_tokens) for e in own), strict=True)
        )
        ttft_s, tpot_s = (
            float(np.median([getattr(e, name) for e in own])) for name in ("ttft_s", "tpot_s")
        )
        predicted = _predicted(machine, prompt, answer, clients, len(own))
        found.append(Observed(clients, len(own), prompt, answer, ttft_s, tpot_s, *predicted))
    return found


def _predicted(
    machine: ServedMachine, prompt: int, answer: int, clients: int, count: int
) -> tuple[float, float]:
    """Medians of TTFT and TPOT of these clients on the simulated server."""
    engine = ServingEngine([request(machine.geometry, prompt, answer)], *machine)
    searches = engine.run(ClosedLoop(clients, (0,) * max(count, clients))).searches
    first = [each.prefilled_s - each.arrival_s for each in searches]
    later = [(each.finish_s - each.prefilled_s) / (answer - 1) for each in searches]
    return float(np.median(first)), float(np.median(later))


def fitted(
    answered: Sequence[Answered], machine: ServedMachine
) -> tuple[ServedMachine, dict[str, float]]:
    """The machine with an engine whose steps and requests take what was measured beyond kernels.

    A step takes `step_s`, and `sequence_s` for each sequence in it, by least squares without
    negative values over the loads; `request_s` is what is left of the least load's TTFT.  Where
    tokens come faster than kernels alone are predicted to make them, constants stay as they are.
    """
    engine = machine.profile.engine
    assert engine is not None
    loads = observed(answered, machine)
    clients = np.array([each.clients for each in loads], dtype=float)
    had = engine.step_s + engine.sequence_s * clients
    beyond = np.array([each.tpot_s - each.predicted_tpot_s for each in loads]) + had
    shape = np.stack([np.ones(len(loads)), clients], axis=1)[:, : len(loads)]
    parts = [*nnls(shape, beyond)[0].tolist(), 0.0]
    if beyond.max() <= 0:
        parts = [engine.step_s, engine.sequence_s]
    found = {"step_s": parts[0], "sequence_s": parts[1]}
    least = observed(answered, _with(machine, found))[0]
    found["request_s"] = max(0.0, engine.request_s + least.ttft_s - least.predicted_ttft_s)
    found = {
        name: float(f"{value:.4g}")
        for name, value in found.items()
        if value != getattr(engine, name)  # what stayed as it was keeps its source
    }
    return _with(machine, found), found


def _with(machine: ServedMachine, constants: dict[str, float]) -> ServedMachine:
    engine = machine.profile.engine
    assert engine is not None
    changed = replace(engine, **constants)  # type: ignore[arg-type]
    return machine._replace(profile=replace(machine.profile, engine=changed))


def write_log(path: Path, answered: Sequence[Answered]) -> None:
    """A line of JSON for each request, in order of arrival."""
    rows = sorted((each.row() for each in answered), key=lambda row: float(row["timestamp"]))
    with whole(path) as part:
        part.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_engine(path: Path, base: str, constants: dict[str, float], said: str, log: str) -> None:
    """An engine file that gives the fitted constants, and how far predictions were off."""
    source = f"fitted to arborsim observe ({log})"
    lines = [f"base = {json.dumps(base)}", f"name = {json.dumps(path.stem)}"]
    lines += [f"{name} = {value!r}" for name, value in constants.items()]
    lines += [f"observed = {json.dumps(said)}", "", "[sources]"]
    lines += [f"{name} = {json.dumps(source)}" for name in constants]
    with whole(path) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")


def off(loads: Sequence[Observed]) -> str:
    """How far predictions were off: means of absolute errors, as ``"TTFT 12%, TPOT 8%"``."""
    means = np.mean(np.abs([each.errors for each in loads]), axis=0)
    return ", ".join(
        f"{name} {mean:.0%}" for name, mean in zip(("TTFT", "TPOT"), means, strict=True)
    )
