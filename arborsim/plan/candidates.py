"""``[candidates]``, ``[serving]`` and ``[prices]`` of a workload: where to serve, how, for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from arborsim.calibrate.document import Calibration
from arborsim.calibrate.load import apply, read_calibration
from arborsim.core.errors import UsageError
from arborsim.core.fields import Section, located
from arborsim.machine.lookup import load_profile, profile_names
from arborsim.machine.options import ServingOptions
from arborsim.machine.prices import Prices, load_prices
from arborsim.machine.profile import HardwareProfile
from arborsim.plan.workload import Hardware, MixEntry, PolicyChoice
from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Geometry

_POLICY = ("use", "name", "set")
KEYS = ("gpus", "hosts", "tensor_parallel", "policies", "calibrations", "budgets", "recalls")
#: Of `ServingOptions`; what is left out belongs to a candidate, or to how results are shown.
SERVING = tuple(
    each.name
    for each in fields(ServingOptions)
    if each.name not in ("tensor_parallel", "series_points")
)


def read_gpus(candidates: Section, base: Path) -> list[HardwareProfile]:
    """Each GPU in each host; in the host of its own profile if none is named.

    Raises
    ------
    UsageError
        An unknown name, a broken file, or the same GPU under two names.
    """
    hosts = candidates.texts("hosts") if "hosts" in candidates else [""]
    found: list[HardwareProfile] = []
    for gpu in candidates.texts("gpus"):
        with located(candidates.at("gpus")):
            load_profile(_name_or_path(gpu, base))
        for host in hosts:
            with located(candidates.at("hosts")):
                profile = load_profile(_name_or_path(gpu, base), _name_or_path(host, base))
            if any(profile.name == other.name for other in found):
                raise UsageError(f"{candidates.at('gpus')}: {profile.name} is named twice")
            found.append(profile)
    return found


def _name_or_path(given: str, base: Path) -> str:
    """Files lie beside the workload; anything else is a name."""
    return str(base / given) if given.endswith(".toml") or "/" in given else given


def read_prices(raw: Any, base: Path, gpus: Sequence[HardwareProfile]) -> Prices:
    """The shipped prices, or those of a file, with the workload's own in their place.

    Raises
    ------
    UsageError
        A price for an unknown GPU, or prices in two currencies.
    """
    section = Section(raw, "[prices]", ("file", "currency", "per_hour"))
    file = base / section.text("file") if "file" in section else None
    with located("[prices] file"):
        listed = load_prices(file)
    names = [profile.name.partition("+")[0] for profile in gpus]
    own: dict[str, tuple[float, float]] = {}
    if "per_hour" in section:
        # GPUs that are no candidates now may be others again.
        known = list(dict.fromkeys([*names, *profile_names(), *listed.per_hour]))
        given = Section(section.value("per_hour"), "[prices.per_hour]", known)
        own = {name: _range(given, name) for name in known if name in given}
    currency = section.text("currency") if "currency" in section else listed.currency
    for name in names:
        if currency != listed.currency and name not in own and listed.of(name) is not None:
            raise UsageError(
                f"[prices] currency is {currency}, but the price of {name} is listed in "
                f"{listed.currency}: give it under [prices.per_hour]"
            )
    return replace(listed, currency=currency, per_hour={**listed.per_hour, **own})


def _range(prices: Section, name: str) -> tuple[float, float]:
    """One price, or the lowest and the highest."""
    found = prices.numbers(name)
    if len(found) > 2 or found != sorted(found) or found[0] < 0:
        raise UsageError(
            f"{prices.at(name)} must be a price of at least 0, or the lowest and the highest "
            f"([2.5, 4.0]), not {found}"
        )
    return found[0], found[-1]


def read_hardware(
    candidates: Section, gpus: Sequence[HardwareProfile], geometry: Geometry, prices: Prices
) -> tuple[Hardware, ...]:
    """Each GPU, alone and in every group that was asked for.

    Raises
    ------
    UsageError
        A number of GPUs among which the model's heads cannot be divided.
    """
    groups = candidates.items("tensor_parallel") if "tensor_parallel" in candidates else [1]
    where = candidates.at("tensor_parallel")
    for group in groups:
        if not isinstance(group, int) or isinstance(group, bool) or group < 1:
            raise UsageError(f"{where} must be whole numbers of GPUs, not {group!r:.40}")
        if geometry.heads % group:
            raise UsageError(
                f"{where}: the {geometry.heads} heads of {geometry.name} cannot be divided among "
                f"{group} GPUs"
            )
    if len(set(groups)) < len(groups):
        raise UsageError(f"{where} names a number twice")
    found = []
    for profile, group in product(gpus, groups):
        each = prices.of(profile.name)
        price = None if each is None else (group * each[0], group * each[1])
        name = profile.name if group == 1 else f"{group}x {profile.name}"
        found.append(Hardware(name, profile, group, price))
    return tuple(found)


def read_serving(raw: Any) -> tuple[ServingOptions, int, bool]:
    """How searches share a machine; tokens per KV page; whether shared ancestors are read once.

    Raises
    ------
    UsageError
    """
    section = Section(raw, "[serving]", (*SERVING, "page_size", "tree_attention"))
    values: dict[str, Any] = {}
    for name in SERVING:
        default = getattr(ServingOptions, name)
        if name not in section:
            continue
        if isinstance(default, bool):
            values[name] = section.flag(name)
        elif isinstance(default, int):
            values[name] = section.whole(name, 0, 1 << 62)
        elif isinstance(default, float):
            values[name] = section.number(name)
        else:
            values[name] = section.text(name)
    page_tokens = section.whole("page_size", 1) if "page_size" in section else 1
    tree = section.flag("tree_attention") if "tree_attention" in section else True
    return ServingOptions(**values), page_tokens, tree


def read_calibrations(
    candidates: Section, base: Path, more: Sequence[str] = ()
) -> tuple[Calibration, ...]:
    """Measured settings of policies: files or names of shipped ones, `more` among them.

    Raises
    ------
    UsageError
        A file is missing or no calibration, or one is named twice.
    """
    named = candidates.texts("calibrations") if "calibrations" in candidates else []
    found: list[Calibration] = []
    for each in [*(_name_or_path(one, base) for one in named), *more]:
        with located(candidates.at("calibrations")):
            made = read_calibration(each)
            if any(made.source == other.source for other in found):
                raise UsageError(f"{each} is named twice")
        found.append(made)
    return tuple(found)


def layers_of(mix: Sequence[MixEntry], geometry: Geometry) -> dict[str, int]:
    """Layers of the model of each entry of the mix; generated searches have those of `geometry`."""
    return {
        entry.name: TraceReader(entry.source).info.geometry.layers
        if isinstance(entry.source, Path)
        else geometry.layers
        for entry in mix
    }


def read_policies(
    candidates: Section,
    base: Path,
    calibrations: Sequence[Calibration] = (),
    recorded: Mapping[str, int] | None = None,
) -> tuple[PolicyChoice, ...]:
    """Policies by name, file or class; a table ``{use = ..., name = ..., set = {...}}`` sets some.

    Parameters
    ----------
    candidates : Section
    base : Path
        Folder that relative paths start from.
    calibrations : sequence of Calibration
        Settings of policies that their tables do not set.
    recorded : mapping of str to int
        Layers of the model of each entry of the mix (`layers_of`).

    Raises
    ------
    UsageError
        An unknown policy or setting, two choices of one name, or a calibration that is for none of
        them or of a model of another depth.
    """
    place = candidates.at("policies")
    given = candidates.items("policies") if "policies" in candidates else ["full"]
    tables = [_table(each, place) for each in given]
    names = [_built(table, {}, place, base).name for table in tables]
    measured: Mapping[str, Mapping[str, str]] = {name: {} for name in names}
    if calibrations:
        with located(candidates.at("calibrations")):
            measured = apply(measured, calibrations, recorded or {})
    found: list[PolicyChoice] = []
    for table, name in zip(tables, names, strict=True):
        policy = _built(table, measured[name], place, base)
        choice = PolicyChoice(table.text("name") if "name" in table else name, policy)
        if any(choice.name == other.name for other in found):
            raise UsageError(
                f"{place}: there is another one called '{choice.name}'; "
                'give it a name: {use = "...", name = "..."}'
            )
        found.append(choice)
    return tuple(found)


def _table(given: Any, place: str) -> Section:
    if not isinstance(given, str | dict):
        raise UsageError(f"{place}: {given!r:.40} is neither a name nor a table with use and set")
    return Section({"use": given} if isinstance(given, str) else given, place, _POLICY)


def _built(table: Section, measured: Mapping[str, str], place: str, base: Path) -> Policy:
    """The policy of a table, whose own settings go before measured ones."""
    use = table.text("use")
    own = _settings(table.value("set"), table.at("set")) if "set" in table else {}
    with located(place):
        return build(str(base / use) if use.endswith(".toml") else use, {**measured, **own})


def _settings(raw: Any, place: str) -> dict[str, str]:
    """Settings as text, as ``--set`` has them; ``allocate.alpha`` may be a table in a table."""
    if not isinstance(raw, dict):
        raise UsageError(f"{place} must be a table, such as {{ recent = 64 }}, not {raw!r:.40}")
    flat: dict[str, object] = {}
    for key, value in raw.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{key}.{name}" if name else key: each for name, each in inner}
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in flat.items()
    }
