"""Hardware profiles, hosts, model geometries and prices: by name, or from a user's file.

A name that is not shipped is an `UnknownName` with the nearest ones; a file that cannot be read, or
holds something else, is a `UsageError` of one line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.geometry import Geometry
from arborsim.core.outputs import real_path
from arborsim.core.records import (
    Text,
    from_toml,
    is_number,
    parse_toml,
    parsed,
    read_text,
    read_toml,
)
from arborsim.machine.config import geometry_from_config, parse_config
from arborsim.machine.engine import EngineProfile
from arborsim.machine.names import aliases, known_as, plain
from arborsim.machine.profile import HardwareProfile, HostProfile


class _Kind(NamedTuple):
    """Something that is looked up by name, and how to give it on the command line."""

    what: str
    folder: str
    suffix: str
    given_as: str
    added_as: str  # how a user adds one

    def names(self) -> list[str]:
        entries = resources.files("arborsim.machine").joinpath(self.folder).iterdir()
        found = (e.name for e in entries if e.name.endswith(self.suffix))
        return sorted(name.removesuffix(self.suffix) for name in found)


_GPU = _Kind(
    "GPU",
    "profiles",
    ".toml",
    "--gpu {0}, or arborsim hardware {0}",
    'another one is a file mine.toml with name = "mine", base = "h100" and what differs, or comes '
    "from `arborsim hardware import`",
)
_ENGINE = _Kind(
    "engine",
    "engines",
    ".toml",
    "--engine {0}",
    'another one is a file mine.toml with name = "mine", base = "vllm" and what differs',
)
_HOST = _Kind(
    "host", "hosts", ".toml", "--host {0}, next to a GPU", "another one is a file mine.toml"
)
_MODEL = _Kind(
    "model",
    "geometries",
    ".json",
    "--model {0}, or arborsim models {0}",
    "another one is the path of its config.json",
)
#: Names of what is shipped.
profile_names, host_names, geometry_names = _GPU.names, _HOST.names, _MODEL.names
engine_names = _ENGINE.names


def profile_name(given: str) -> str | None:
    """The shipped profile of a GPU, as drivers, engines or people call it; None if there is none.

    Another card with the same chip (``NVIDIA H100 PCIe``) has another profile, or none.
    """
    return known_as(_GPU.folder, given, _GPU.names())


def load_profile(
    name_or_path: str | Path, host: str | Path | None = None, engine: str | Path = ""
) -> HardwareProfile:
    """The hardware profile of that name or alias (``h200``), or in that TOML file.

    A file may name another profile as its ``base``; it then gives only what differs.  `host` puts
    the GPU into a host: its name, or its TOML file.  `engine` is what serves on it, a name or TOML
    file: a pass then takes what its measured kernels take, where the profile has them.  Without, a
    pass is priced by the profile's numbers.
    """
    profile = _profile(name_or_path, ())
    if engine:
        profile = profile.served_by(load_engine(engine))
        if profile.kernels and profile.engine is not None:
            profile.tables(profile.engine.kernels)
    return load_host(host).with_gpu(profile) if host else profile


def served_live(profile: HardwareProfile, graphs: bool) -> HardwareProfile:
    """The profile with this project's own backend on it."""
    return profile.served_by(load_engine("live-graphs" if graphs else "live"))


def load_engine(name_or_path: str | Path) -> EngineProfile:
    """The inference engine of that name (``vllm``), or in that TOML file."""
    return _engine(name_or_path, ())


def _engine(name_or_path: str | Path, above: tuple[str, ...]) -> EngineProfile:
    table, origin, base = _with_base(name_or_path, _ENGINE, above)
    above = (*above, origin)
    return EngineProfile.from_table(table, origin, _engine(base, above) if base else None)


def _profile(name_or_path: str | Path, above: tuple[str, ...]) -> HardwareProfile:
    """A profile; `above` are the files that name it as their base."""
    table, origin, base = _with_base(name_or_path, _GPU, above)
    kernels = table.get("kernels")
    if isinstance(kernels, str) and kernels.endswith(".parquet"):  # it lies next to the profile
        table["kernels"] = str(Path(origin).parent / kernels)
    above = (*above, origin)
    return HardwareProfile.from_table(table, origin, _profile(base, above) if base else None)


def _with_base(
    name_or_path: str | Path, kind: _Kind, above: tuple[str, ...]
) -> tuple[dict[str, Any], str, str]:
    """The table of a file without its ``base``, where it is from, and that base or empty."""
    text, origin, _ = _read(name_or_path, kind)
    if origin in above:
        raise UsageError(f"{origin} is its own base: name another {kind.what} there")
    table = parse_toml(text, origin)
    name = table.pop("base", "")
    if not isinstance(name, str):
        what = f"the name or the file of a {kind.what}"
        raise UsageError(f"{origin}: base must be {what}, not {name!r}")
    return table, origin, name


def load_host(name_or_path: str | Path) -> HostProfile:
    """The host of that name (``ddr5-2tb``), or in that TOML file."""
    text, origin, _ = _read(name_or_path, _HOST)
    return from_toml(HostProfile, text, origin)


def load_geometry(name_or_path: str | Path) -> Geometry:
    """The geometry of that name or alias (``llama-3.1-8b``), or in that Hugging Face config.

    ``config.json as llama`` reads it as a model of another family than it names.
    """
    given, _, family = str(name_or_path).partition(" as ")
    text, origin, name = _read(given if family else name_or_path, _MODEL)
    return geometry_from_config(text, name, origin, family)


def config_of(name_or_path: str | Path) -> dict[str, Any]:
    """The Hugging Face configuration behind a geometry, as a dictionary; raises as that does."""
    text, origin, _ = _read(name_or_path, _MODEL)
    return parse_config(text, origin)


#: What ids of the Hugging Face hub add to the name of a geometry.
_HUB_WORDS = re.compile(
    r"-(instruct|it|chat|base|hf|thinking|fp8|bf16|awq|gptq|int4|gguf|\d{4})(?=-|$)"
)
_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?[bm])(?![\w.])")
_FAMILY = re.compile(r"[a-z]+")


def geometries_like(hub_id: str) -> list[str]:
    """Names of the shipped geometries that a model of the Hugging Face hub may have.

    The last part of the id counts (``meta-llama/Llama-3.1-8B-Instruct``).  One name if it is that
    of a geometry, but for words such as "Instruct"; else the nearest ones of the same size.
    """
    known = _MODEL.names()
    name = hub_id.rstrip("/").rpartition("/")[2].lower().removesuffix(".json").replace("_", "-")
    bare = _HUB_WORDS.sub("", name)
    for each in (name, bare, bare.removeprefix("meta-"), bare.removeprefix("deepseek-")):
        found = aliases(_MODEL.folder).get(each, each)
        if found in known:
            return [found]
    size = _SIZE.search(name)
    family = _FAMILY.match(bare)
    alike = [
        each
        for each in known
        if (not size or size[1] in _SIZE.findall(each))
        and (not family or each.startswith(family[0]))  # Mixtral is no Mistral
    ]
    return difflib.get_close_matches(bare, alike, n=3, cutoff=0.6)


def _hub_id(given: str, path: Path) -> bool:
    """Whether a model that is no file looks like an id of the hub: ``organisation/model``."""
    organisation, slash, model = given.partition("/")
    named = organisation.strip(".") and model and "/" not in model
    return bool(slash and named) and path.suffix != ".json" and not path.exists()


def _read(name_or_path: str | Path, kind: _Kind) -> tuple[str, str, str]:
    """Text, where it is from (for messages), and the name of what it describes."""
    given, what, suffix = str(name_or_path), kind.what, kind.suffix
    if isinstance(name_or_path, Path) or given.endswith(suffix) or "/" in given:
        path = Path(given)
        if kind is _MODEL and _hub_id(given, path):
            like = " or ".join(geometries_like(given))
            meant = f"did you mean {like}? Or" if like else "arborsim models lists those shipped;"
            raise UsageError(
                f"no model '{given}' here: names are looked up on this machine, not on a hub; "
                f"{meant} give the path of its config.json"
            )
        path = path / "config.json" if suffix == ".json" and path.is_dir() else path
        # config.json says nothing about the model: the folder it lies in does
        name = real_path(path).parent.name if path.name == "config.json" else path.stem
        return read_text(path), str(path), name
    known = kind.names()
    shipped = known_as(kind.folder, given, known)
    if shipped is not None:
        file = resources.files("arborsim.machine").joinpath(kind.folder, shipped + suffix)
        return file.read_text(encoding="utf-8"), f"{kind.folder}/{shipped}{suffix}", shipped
    for other in (_GPU, _HOST, _ENGINE, _MODEL):
        if other is not kind and known_as(other.folder, given, other.names()):
            where = other.given_as.format(given)
            raise UsageError(f"'{given}' is a {other.what}, not a {what}: give it as {where}")
    if suffix == ".json" and Path(given).is_dir():
        raise UsageError(f"unknown model '{given}': for the folder of that name, ./{given}")
    if Path(given).is_file():
        raise UsageError(f"{given}: the file of a {what} must have a name that ends in {suffix}")
    near = aliases("cards without a profile").get(plain(given), "") if kind is _GPU else ""
    raise UnknownName(what, given, [near] if near else known, kind.added_as, near or plain(given))


def _price_range(value: object) -> tuple[float, float]:
    found: list[Any] = value if isinstance(value, list) else [value, value]
    if len(found) != 2 or not all(map(is_number, found)) or not 0 <= found[0] <= found[1]:
        raise ValueError(
            "must be a price of at least 0, or the lowest and the highest ([0.5, 0.8])"
        )
    return float(found[0]), float(found[1])


#: Lowest and highest price; in a file also one number for both.
PriceRange = Annotated[tuple[float, float], parsed(_price_range)]


@dataclass(frozen=True)
class Prices:
    """The prices of an hour of each GPU: a dated list."""

    currency: Text
    date: Text
    source: Text
    per_hour: Mapping[str, PriceRange]  # lowest and highest price by name of the GPU's profile
    notes: Mapping[str, Text] = field(default_factory=dict)  # what to know about a GPU's price

    def __post_init__(self) -> None:
        named = {profile_name(gpu) or gpu: each for gpu, each in self.per_hour.items()}
        object.__setattr__(self, "per_hour", named)

    def of(self, gpu: str) -> tuple[float, float] | None:
        """Lowest and highest price per hour; None if the list does not have the GPU.

        A GPU in another host (``h100+ddr5-2tb``) costs what the GPU costs.
        """
        return self.per_hour.get(gpu.partition("+")[0])


def load_prices(path: Path | None = None) -> Prices:
    """The shipped prices, or those of a TOML file of the same form."""
    if path is not None:
        return read_toml(Prices, path)
    file = resources.files("arborsim.machine").joinpath("prices.toml")
    return from_toml(Prices, file.read_text(encoding="utf-8"), "prices.toml")
