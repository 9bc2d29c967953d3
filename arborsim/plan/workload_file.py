"""Workloads in TOML files; `example_workload` is one with every key explained.

Paths in the file are relative to the folder that it lies in.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from arborsim.core.budget import Budget
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.fields import MOST_SEED, Section, located
from arborsim.machine.config import KV_DTYPES, with_kv_dtype
from arborsim.machine.lookup import load_geometry
from arborsim.machine.recording import RECORDED_RECALLS
from arborsim.plan.arrivals import TRACE, Arrivals, ClientLoop, Poisson, read_arrivals
from arborsim.plan.candidates import (
    KEYS,
    layers_of,
    read_calibrations,
    read_gpus,
    read_hardware,
    read_policies,
    read_prices,
    read_serving,
)
from arborsim.plan.mix_file import check_signals, read_mix
from arborsim.plan.workload import Target, Workload, check_run_length
from arborsim.trace.importers.requests import FORMATS
from arborsim.trace.schema import Geometry

_TABLES = ("model", "mix", "arrivals", "candidates", "serving", "target", "prices")
_RUNS = ("name", "seed", "searches", "warm_up", "runs")
_ARRIVALS: dict[str, tuple[str, ...]] = {
    "poisson": ("rate_per_s",),
    "recorded": ("file", "format", "scale"),
    "closed-loop": ("clients", "think_s"),
}


def example_workload() -> str:
    """The text of the shipped example, with every key explained."""
    file = resources.files("arborsim.plan").joinpath("example.toml")
    return file.read_text(encoding="utf-8")


def read_workload(
    path: Path | str, gpus: Sequence[str] = (), calibrations: Sequence[str] = ()
) -> Workload:
    """The workload that a TOML file describes, checked down to every name and number in it.

    Parameters
    ----------
    path : path
    gpus : sequence of str
        In place of the GPUs that the file names, if any are given.
    calibrations : sequence of str
        Beside those that the file names.

    Raises
    ------
    UsageError
        One line that names the file, the table and the key, and what to do.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); `arborsim plan --example` prints a "
            "workload to begin with"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: cannot be read: it is not UTF-8 text") from None
    with located(str(path)):
        return parse_workload(text, path.parent, path.stem, gpus, calibrations)


def parse_workload(
    text: str,
    base: Path,
    name: str = "workload",
    gpus: Sequence[str] = (),
    calibrations: Sequence[str] = (),
) -> Workload:
    """The workload that a text describes.

    Parameters
    ----------
    text : str
        TOML.
    base : Path
        Folder that relative paths start from.
    name : str
        Its name, unless the text gives one.
    gpus : sequence of str
        In place of the GPUs that the text names, if any are given.
    calibrations : sequence of str
        Beside those that the text names.

    Raises
    ------
    UsageError
    """
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise UsageError(f"this is not valid TOML: {error}") from None
    if gpus and isinstance(raw.get("candidates"), dict):
        raw["candidates"]["gpus"] = list(gpus)
    return workload_of(raw, base, name, calibrations)


def workload_of(
    raw: dict[str, Any], base: Path, name: str, calibrations: Sequence[str] = ()
) -> Workload:
    """`parse_workload`, from what `tomllib` made of the text."""
    top = Section(raw, "", (*_RUNS, *_TABLES))
    seed = top.whole("seed", 0, MOST_SEED) if "seed" in top else 0
    geometry = _model(_table(raw, "model"), base)
    candidates = Section(_table(raw, "candidates"), "[candidates]", KEYS)
    gpus = read_gpus(candidates, base)
    prices = read_prices(raw.get("prices", {}), base, gpus)
    serving, page_tokens, tree_attention = read_serving(raw.get("serving", {}))
    mix = read_mix(raw.get("mix"), base, seed)
    measured = read_calibrations(candidates, base, calibrations)
    workload = Workload(
        name=top.text("name") if "name" in top else name,
        geometry=geometry,
        mix=mix,
        arrivals=_arrivals(_table(raw, "arrivals"), base),
        hardware=read_hardware(candidates, gpus, geometry, prices),
        policies=read_policies(
            candidates, base, measured, layers_of(mix, geometry) if measured else {}
        ),
        budgets=_budgets(candidates),
        recalls=_recalls(candidates),
        target=_target(_table(raw, "target")),
        prices=prices,
        calibrations=measured,
        serving=serving,
        page_tokens=page_tokens,
        tree_attention=tree_attention,
        searches=top.whole("searches", 1) if "searches" in top else Workload.searches,
        warm_up=top.whole("warm_up", 0) if "warm_up" in top else Workload.warm_up,
        runs=top.whole("runs", 1) if "runs" in top else Workload.runs,
        seed=seed,
    )
    check_run_length(workload.searches, workload.warm_up, workload.runs)
    check_signals(workload.mix, workload.policies, geometry)
    return workload


def _table(raw: dict[str, Any], name: str) -> Any:
    if name not in raw:
        raise UsageError(f"the table [{name}] is missing; arborsim plan --example shows one")
    return raw[name]


def _model(raw: Any, base: Path) -> Geometry:
    section = Section(raw, "[model]", ("name", "kv_dtype"))
    name = section.text("name")
    with located(section.at("name")):
        found = load_geometry(base / name if "/" in name or name.endswith(".json") else name)
    if "kv_dtype" not in section:
        return found
    return with_kv_dtype(found, section.choice("kv_dtype", "type of a KV cache", tuple(KV_DTYPES)))


def _arrivals(raw: Any, base: Path) -> Arrivals:
    every = tuple(key for keys in _ARRIVALS.values() for key in keys)
    section = Section(raw, "[arrivals]", ("kind", *every))
    kind = section.choice("kind", "kind of arrivals", tuple(_ARRIVALS))
    for key in every:
        if key in section and key not in _ARRIVALS[kind]:
            owner = next(other for other, keys in _ARRIVALS.items() if key in keys)
            raise UsageError(f'[arrivals] {key} belongs to kind = "{owner}", not to "{kind}"')
    if kind == "poisson":
        rate = section.number("rate_per_s", above=0) if "rate_per_s" in section else None
        return Poisson(rate)
    if kind == "closed-loop":
        clients = section.whole("clients", 1) if "clients" in section else None
        return ClientLoop(clients, section.number("think_s", 0) if "think_s" in section else 0.0)
    scale = section.number("scale", above=0) if "scale" in section else 1.0
    formats = (*FORMATS, TRACE)
    format = section.choice("format", "format", formats) if "format" in section else ""
    file = base / section.text("file")
    with located("[arrivals] file"):
        return read_arrivals(file, format, scale)


def _target(raw: Any) -> Target:
    section = Section(raw, "[target]", ("percentile", "search", "token"))
    search = section.duration_s("search") if "search" in section else None
    token = section.duration_s("token") if "token" in section else None
    if search is None and token is None:
        raise UsageError('[target] needs search = "60 s", token = "100 ms", or both')
    percentile = section.number("percentile", above=0, below=100)
    return Target(percentile, search, token)


def _budgets(candidates: Section) -> tuple[Budget, ...]:
    if "budgets" not in candidates:
        return (Budget.parse("0.5"),)
    found = []
    for value in candidates.items("budgets"):
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise UsageError(f"[candidates] budgets: {value!r:.40} is no budget: 2048, or 0.25")
        with located("[candidates] budgets"):
            found.append(Budget.parse(str(value)))
    if len({(budget.tokens, budget.share) for budget in found}) < len(found):
        raise UsageError("[candidates] budgets names a budget twice")
    return tuple(found)


def _recalls(candidates: Section) -> tuple[str, ...]:
    names = candidates.texts("recalls") if "recalls" in candidates else ["stage"]
    for name in names:
        if name not in RECORDED_RECALLS:
            with located("[candidates] recalls"):
                raise UnknownName("recall mode", name, RECORDED_RECALLS)
    return tuple(names)
