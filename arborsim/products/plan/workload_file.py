"""Workloads in TOML files; `example_workload` is one with every key explained.

What its tables (`plan.workload`) name, such as a model or a policy, is looked up here.
Paths are relative to the folder that the file lies in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.observations import Signal
from arborsim.core.records import convert, given_values, located, parse_toml, read_text
from arborsim.core.settings import setting_text
from arborsim.core.sourced import meanings
from arborsim.machine.config import with_types
from arborsim.machine.lookup import (
    Prices,
    load_engine,
    load_geometry,
    load_prices,
    load_profile,
    profile_name,
    profile_names,
)
from arborsim.machine.machine import ServingOptions
from arborsim.machine.profile import HardwareProfile
from arborsim.play import served
from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from arborsim.products.calibrate.documents import Calibration, apply, read_calibration
from arborsim.products.generate.arrivals import Arrivals, ClientLoop, Poisson, read_arrivals
from arborsim.products.generate.lengths import MOST, TreeSpec, generated_info, parse_counts
from arborsim.products.plan.answers import counted
from arborsim.products.plan.log import imported
from arborsim.products.plan.workload import (
    SERVING,
    ArrivalsTable,
    CandidatesTable,
    Generated,
    GeneratedTable,
    Hardware,
    LayoutTable,
    MixEntry,
    PolicyChoice,
    PolicyTable,
    PricesTable,
    Workload,
    WorkloadTable,
    fewest_gpus,
)
from arborsim.trace.reader import TraceReader, open_trace
from arborsim.trace.schema import Geometry, recording_options

_NEEDED = ("model", "mix", "arrivals", "candidates", "target")
#: Keys at the top of a file that are fields of a `Workload`.
RUNS = ("searches", "warm_up", "runs", "seed", "resolution")


def example_workload() -> str:
    """The text of the shipped example, with every key explained."""
    file = resources.files("arborsim.products.plan").joinpath("example.toml")
    return file.read_text(encoding="utf-8")


def read_workload(
    path: Path | str,
    gpus: Sequence[str] = (),
    calibrations: Sequence[str] = (),
    allow_code: bool = False,
    replaced: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> Workload:
    """The workload that a TOML file describes, checked down to every name and number in it.

    `gpus`, if any are given, take the place of those that the file names; `calibrations` are used
    in addition to the file's; `replaced` changes its tables.  With `allow_code`, policies may be
    ``package.module:Class``.  A `UsageError` is one line that names the file, the table and the
    key, and what to do.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(
            f"{path}: cannot be read (No such file or directory); `arborsim plan --example` "
            "prints a workload to begin with"
        )
    text = read_text(path)
    with located(str(path)):
        tables = text, path.parent, path.stem, gpus, calibrations, allow_code
        return parse_workload(*tables, replaced=replaced)


def parse_workload(
    text: str,
    base: Path,
    name: str = "workload",
    gpus: Sequence[str] = (),
    calibrations: Sequence[str] = (),
    allow_code: bool = False,
    replaced: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> Workload:
    """`read_workload`, from a text with paths relative to `base`, and this name if it has none."""
    raw = parse_toml(text, "this")
    if gpus and isinstance(raw.get("candidates"), dict):
        raw["candidates"]["gpus"] = list(gpus)
    return workload_of(replaced(raw), base, name, calibrations, allow_code)


def workload_of(
    raw: dict[str, Any],
    base: Path,
    name: str,
    calibrations: Sequence[str] = (),
    allow_code: bool = False,
) -> Workload:
    """`parse_workload`, from what `tomllib` made of the text."""
    for table in _NEEDED:
        if table not in raw:
            shown = "[[mix]]" if table == "mix" else f"[{table}]"
            raise UsageError(f"{shown} is missing; arborsim plan --example shows one")
    file = convert(WorkloadTable, raw)
    layout, serving = _serving(file.serving)
    model = file.model.name
    with located("[model] name"):
        is_path = model.endswith(".json") or ("/" in model and (base / model).exists())
        geometry = load_geometry(base / model if is_path else model)
    geometry = with_types(geometry, file.model.weights or "", file.model.kv_dtype or "")
    gpus = _gpus(file.candidates, base, layout.engine)
    prices = _prices(file.prices, base, gpus)
    mix = _mix(file, base, str(base / model) if is_path else model)
    measured = _calibrations(file.candidates, base, calibrations, allow_code)

    def layers(source: Path | Generated) -> int:
        charged = open_trace(source).info.geometry if isinstance(source, Path) else geometry
        return charged.layers

    depths = {entry.name: layers(entry.source) for entry in mix if measured}
    workload = Workload(
        name=file.name or name,
        geometry=geometry,
        mix=mix,
        arrivals=_arrivals(file.arrivals, base, mix),
        hardware=_hardware(file.candidates, gpus, geometry, prices),
        policies=_policies(file.candidates, base, measured, depths, allow_code),
        budgets=file.candidates.budgets,
        recalls=file.candidates.recalls,
        target=file.target.target(),
        prices=prices,
        calibrations=measured,
        serving=serving,
        page_tokens=layout.page_size,
        tree_attention=layout.tree_attention,
        answers=file.answers,
        replicas=file.candidates.replicas,
        **{name: getattr(file, name) for name in RUNS},
    )
    if file.answers is not None and not any(counted(workload).values()):
        raise UsageError(f"[answers]: no live answers are known of {file.answers.text}")
    _check_signals(workload)
    return workload


def _name_or_path(given: str, base: Path) -> str:
    """Files lie next to the workload; anything else is a name."""
    return str(base / given) if given.endswith(".toml") or "/" in given else given


def _arrivals(table: ArrivalsTable, base: Path, mix: Sequence[MixEntry]) -> Arrivals:
    """As the table says; recorded ones without a file are those of the only log of the mix.

    A log without moments arrives at random, at the stated rate.
    """
    rate = table.rate_per_s
    if table.kind == "poisson":
        return Poisson(rate)
    if table.kind == "closed-loop":
        return ClientLoop(table.clients, table.think_s or 0.0)
    file = None if table.file is None else base / table.file
    if file is None:
        source = mix[0].source
        if len(mix) > 1 or not isinstance(source, Path):
            raise UsageError("[arrivals] file is missing")
        file = source
    try:
        with located("[arrivals] file"):
            found = read_arrivals(file, table.format or "", table.scale or 1.0)
    except UsageError:
        if table.file is None and rate is not None:
            return Poisson(rate)
        raise
    return found if rate is None else found.with_load(rate)


def _serving(raw: Mapping[str, Any]) -> tuple[LayoutTable, ServingOptions]:
    known = (*SERVING, *(each.name for each in fields(LayoutTable)))
    for key in raw:
        if key in meanings(HardwareProfile):
            raise UsageError(
                f'[serving] {key} is a number of the GPU: give it in a file with base = "h100", or '
                "another GPU, and name the file under [candidates] gpus"
            )
        if key not in known:
            raise UnknownName("key of [serving]", key, known)
    options = {key: value for key, value in raw.items() if key in SERVING}
    layout = {key: value for key, value in raw.items() if key not in SERVING}
    serving = ServingOptions(**given_values(ServingOptions, options, "[serving]"))
    return convert(LayoutTable, layout, "[serving]"), serving


# ------------------------------------------------------------------------- the mix


def _mix(file: WorkloadTable, base: Path, model: str) -> tuple[MixEntry, ...]:
    """Every entry; recorded traces are opened, so that a missing one is noticed now."""
    entries: list[MixEntry] = []
    for number, table in enumerate(file.mix, 1):
        place = f"[[mix]] {number}"
        source: Path | Generated
        in_order, log = False, None
        if (given := table.trace or table.log) is not None:
            source, name = base / given, (base / given).stem
            if table.log is not None:
                with located(f"{place} log"):
                    log, source = source, imported(source, model)
            with located(f"{place} trace"):
                blocks = open_trace(source).info.prefix_block_tokens
            in_order = bool(blocks) and not table.shared_prompt_tokens
        else:
            assert table.generated is not None
            # Unless they say otherwise, entries draw from seeds of their own.
            source = _generated(table.generated, f"{place} generated", base, file.seed + number - 1)
            name = f"generated {number}"
        shared = table.shared_prompt_tokens
        entry = MixEntry(table.name or name, table.weight, source, shared, in_order, log)
        if any(entry.name == other.name for other in entries):
            raise UsageError(f"{place}: there is another entry called '{entry.name}'")
        entries.append(entry)
    return tuple(entries)


def _generated(table: GeneratedTable, place: str, base: Path, seed: int) -> Generated:
    def shares(given: float | tuple[float, ...]) -> tuple[float, ...]:
        return given if isinstance(given, tuple) else (given,)

    counts: dict[str, Any] = {
        key: parse_counts(getattr(table, key), f"{place} {key}", base)
        for key in MOST
        if key != "first" or table.first is not None
    }
    with located(place):
        spec = TreeSpec(
            **counts,
            pruned=shares(table.pruned),
            finished=shares(table.finished),
            parallel=table.parallel,
            rewards=table.rewards == "uniform",
            solved=table.solved,
        )
    return Generated(spec, table.searches, seed if table.seed is None else table.seed)


def _check_signals(workload: Workload) -> None:
    """Refuse a policy that reads what a trace of the mix does not hold."""
    for number, entry in enumerate(workload.mix, 1):
        source = open_trace(entry.source) if isinstance(entry.source, Path) else entry.source
        for choice in workload.policies:
            with located(f"[[mix]] {number} ({entry.name})"):
                if isinstance(source, TraceReader):
                    served.require(choice.policy, source, f"policy {choice.name}", in_file=True)
                else:
                    _require(source, choice, workload.geometry)


def _require(made: Generated, choice: PolicyChoice, geometry: Geometry) -> None:
    """Generated searches have rewards at most: everything else must have been recorded."""
    held = {Signal.REWARD} if made.spec.rewards else set()
    missing = sorted(served.needed(choice.policy) - held)
    if not missing:
        return
    if missing == [Signal.REWARD]:
        remedy = 'set rewards = "uniform"'
    else:
        info = generated_info(made.spec.parameters(), made.seed, geometry)
        remedy = f"record a trace with {' '.join(recording_options(missing, info))} and name it"
    raise UsageError(
        f"policy {choice.name} reads {' and '.join(missing)}, which generated searches do not "
        f"have: {remedy}"
    )


# ------------------------------------------------------------------ the candidates


def _gpus(table: CandidatesTable, base: Path, engine: str) -> list[HardwareProfile]:
    """Each GPU in each host, served by an engine; without a host, in that of its own profile."""
    with located("[serving] engine"):
        load_engine(_name_or_path(engine, base))
    found: list[HardwareProfile] = []
    for gpu in table.gpus:
        with located("[candidates] gpus"):
            load_profile(_name_or_path(gpu, base))
        for host in table.hosts:
            with located("[candidates] hosts"):
                profile = load_profile(*(_name_or_path(each, base) for each in (gpu, host, engine)))
            if any(profile.name == other.name for other in found):
                raise UsageError(f"[candidates] gpus: {profile.name} is named twice")
            found.append(profile)
    return found


def _prices(table: PricesTable, base: Path, gpus: Sequence[HardwareProfile]) -> Prices:
    """The shipped prices, or those of a file, with the workload's own in their place."""
    with located("[prices] file"):
        listed = load_prices(None if table.file is None else base / table.file)
    names = [profile.name.partition("+")[0] for profile in gpus]
    # GPUs that are no candidates now may be others again.
    known = [*names, *profile_names(), *listed.per_hour]
    own = {profile_name(name) or name: price for name, price in table.per_hour.items()}
    for name in own:
        if name not in known:
            raise UnknownName("key of [prices.per_hour]", name, dict.fromkeys(known))
    currency = table.currency or listed.currency
    for name in names:
        foreign = name not in own and listed.of(name) is not None
        if currency != listed.currency and foreign:
            raise UsageError(
                f"[prices] currency is {currency}, but the price of {name} is listed in "
                f"{listed.currency}: give it under [prices.per_hour]"
            )
    return replace(listed, currency=currency, per_hour={**listed.per_hour, **own})


def _hardware(
    table: CandidatesTable, gpus: Sequence[HardwareProfile], geometry: Geometry, prices: Prices
) -> tuple[Hardware, ...]:
    """Each GPU, alone and in every group that was asked for."""
    found = []
    wanted = table.tensor_parallel
    pairs: Iterable[tuple[HardwareProfile, int]]
    if wanted == "auto":
        pairs = [(profile, fewest_gpus(profile, geometry) or 1) for profile in gpus]
    else:
        pairs = product(gpus, wanted)
    for profile, group in pairs:
        if geometry.heads % group:
            raise UsageError(
                f"[candidates] tensor_parallel: the {geometry.heads} heads of {geometry.name} "
                f"cannot be divided among {group} GPUs"
            )
        if group > 1 and not (profile.kernels and profile.engine):
            with located("[candidates] tensor_parallel"):
                profile.all_reduce_s(group, 0.0)  # refuses unknown links
        each = prices.of(profile.name)
        price = None if each is None else (group * each[0], group * each[1])
        name = profile.name if group == 1 else f"{group}x {profile.name}"
        found.append(Hardware(name, profile, group, price))
    return tuple(found)


def _calibrations(
    table: CandidatesTable, base: Path, more: Sequence[str], allow_code: bool
) -> tuple[Calibration, ...]:
    """Measured settings of policies: files or names of shipped ones, `more` among them."""
    found: list[Calibration] = []
    for each in [*(_name_or_path(one, base) for one in table.calibrations), *more]:
        with located("[candidates] calibrations"):
            made = read_calibration(each, code=allow_code)
            if any(made.source == other.source for other in found):
                raise UsageError(f"{each} is named twice")
        found.append(made)
    return tuple(found)


def _policies(
    table: CandidatesTable,
    base: Path,
    calibrations: Sequence[Calibration],
    layers: Mapping[str, int],
    allow_code: bool,
) -> tuple[PolicyChoice, ...]:
    """Policies by name, file or class, with their own settings before calibrated ones."""
    tables = [PolicyTable(each) if isinstance(each, str) else each for each in table.policies]
    names = [_built(each, {}, base, allow_code).name for each in tables]
    measured: Mapping[str, Mapping[str, str]] = {name: {} for name in names}
    if calibrations:
        with located("[candidates] calibrations"):
            measured = apply(measured, calibrations, layers)
    found: list[PolicyChoice] = []
    for each, name in zip(tables, names, strict=True):
        choice = PolicyChoice(each.name or name, _built(each, measured[name], base, allow_code))
        if any(choice.name == other.name for other in found):
            raise UsageError(
                f"[candidates] policies: there is another one called '{choice.name}'; "
                'give it a name: {use = "...", name = "..."}'
            )
        found.append(choice)
    return tuple(found)


def _built(table: PolicyTable, measured: Mapping[str, str], base: Path, allow_code: bool) -> Policy:
    use = str(base / table.use) if table.use.endswith(".toml") else table.use
    with located("[candidates] policies"):
        return build(use, {**measured, **_settings(table.set)}, code=allow_code)


def _settings(table: Mapping[str, Any]) -> dict[str, str]:
    """Settings as text, as ``--set`` has them; ``allocate.alpha`` may be a table in a table."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{key}.{name}" if name else key: setting_text(each) for name, each in inner}
    return flat
