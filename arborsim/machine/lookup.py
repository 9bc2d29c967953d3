"""Find hardware profiles, hosts and model geometries by name, or read them from a user's file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.machine.config import geometry_from_config
from arborsim.machine.host import HostProfile, attach
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.records import parse_toml
from arborsim.trace.schema import Geometry

PROFILE_ALIASES = {
    "4090": "rtx4090", "5080": "rtx5080", "rtx-a6000": "a6000", "6000-ada": "rtx6000-ada",
    "a100": "a100-80", "a100-80gb": "a100-80", "a100-40gb": "a100-40", "h100-sxm": "h100",
    "h100-80": "h100", "h200-sxm": "h200",
}  # fmt: skip
GEOMETRY_ALIASES = {
    "llama3.1-8b": "llama-3.1-8b",
    "llama-3.1-8b-instruct": "llama-3.1-8b",
    "llama-3.1-70b-instruct": "llama-3.1-70b",
    "r1-distill-llama-70b": "llama-3.1-70b",
    "mistral-7b": "mistral-7b-v0.3",
    "deepseek-r1-distill-qwen-14b": "r1-distill-qwen-14b",
    "deepseek-r1-distill-qwen-32b": "r1-distill-qwen-32b",
    "r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-qwen-7b": "r1-distill-qwen-7b",
    "qwen2.5-7b-instruct": "qwen2.5-7b",
}


def profile_names() -> list[str]:
    """Names of the shipped hardware profiles."""
    return _shipped("profiles", ".toml")


def geometry_names() -> list[str]:
    """Names of the shipped model geometries."""
    return _shipped("geometries", ".json")


def host_names() -> list[str]:
    """Names of the shipped hosts."""
    return _shipped("hosts", ".toml")


def load_profile(name_or_path: str | Path, host: str | Path | None = None) -> HardwareProfile:
    """The hardware profile of that name or alias (``h200``), or in that TOML file.

    A file may name another profile as its ``base``; it then gives only what differs.  `host` puts
    the GPU into a host: its name, or its TOML file.

    Raises
    ------
    UnknownName
        Nothing of that name is shipped; the message names the nearest.
    UsageError
        The file cannot be read or is no hardware profile.
    """
    profile = _profile(name_or_path, ())
    return attach(profile, load_host(host)) if host else profile


def _profile(name_or_path: str | Path, above: tuple[str, ...]) -> HardwareProfile:
    """A profile; `above` are the files that name it as their base."""
    text, origin, _ = _read(name_or_path, "GPU", "profiles", ".toml", PROFILE_ALIASES)
    if origin in above:
        raise UsageError(f"{origin} is its own base: name another profile there")
    raw = parse_toml(text, origin)
    if "base" not in raw:
        return HardwareProfile.from_toml(text, origin)
    base = raw.pop("base")
    if not isinstance(base, str):
        raise UsageError(f"{origin}: base must be the name or the file of a profile, not {base!r}")
    return _profile(base, (*above, origin)).with_values(raw, origin)


def load_host(name_or_path: str | Path) -> HostProfile:
    """The host of that name (``ddr5-2tb``), or in that TOML file.

    Raises
    ------
    UnknownName
        Nothing of that name is shipped; the message names the nearest.
    UsageError
        The file cannot be read or is no host.
    """
    text, origin, _ = _read(name_or_path, "host", "hosts", ".toml", {})
    return HostProfile.from_toml(text, origin)


def load_geometry(name_or_path: str | Path) -> Geometry:
    """The geometry of that name or alias (``llama-3.1-8b``), or of that Hugging Face config.json.

    Raises
    ------
    UnknownName
        Nothing of that name is shipped; the message names the nearest.
    UsageError
        The file cannot be read, or describes a model whose cache has another form.
    """
    text, origin, name = _read(name_or_path, "model", "geometries", ".json", GEOMETRY_ALIASES)
    return geometry_from_config(text, name, origin)


def config_of(name_or_path: str | Path) -> dict[str, Any]:
    """The Hugging Face configuration behind a geometry, as a dictionary.

    Raises
    ------
    UnknownName
    UsageError
        The file cannot be read or is no JSON object.
    """
    text, origin, _ = _read(name_or_path, "model", "geometries", ".json", GEOMETRY_ALIASES)
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{origin} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{origin} is no configuration of a model: expected a JSON object")
    return config


def _shipped(folder: str, suffix: str) -> list[str]:
    entries = resources.files("arborsim.machine").joinpath(folder).iterdir()
    return sorted(e.name.removesuffix(suffix) for e in entries if e.name.endswith(suffix))


def _refuse_other_kind(given: str, what: str) -> None:
    """Say so if the name is that of a GPU, host or model where another of these was expected."""
    kinds: dict[str, tuple[list[str], str]] = {
        "GPU": ([*profile_names(), *PROFILE_ALIASES], "--gpu {0}, or arborsim hardware {0}"),
        "host": (host_names(), "--host {0}, beside a GPU"),
        "model": ([*geometry_names(), *GEOMETRY_ALIASES], "--model {0}, or arborsim models {0}"),
    }
    for kind, (names, where) in kinds.items():
        if kind != what and given.lower() in names:
            raise UsageError(
                f"'{given}' is a {kind}, not a {what}: give it as {where.format(given)}"
            )


def _read(
    name_or_path: str | Path, what: str, folder: str, suffix: str, aliases: dict[str, str]
) -> tuple[str, str, str]:
    """Text, where it is from (for messages), and the name of what it describes."""
    given = str(name_or_path)
    if isinstance(name_or_path, Path) or given.endswith(suffix) or "/" in given:
        path = Path(given)
        path = path / "config.json" if suffix == ".json" and path.is_dir() else path
        try:
            # config.json says nothing about the model: the folder it lies in does
            name = path.resolve().parent.name if path.name == "config.json" else path.stem
            return path.read_text(encoding="utf-8"), str(path), name
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UsageError(f"cannot read {path}: {reason}") from None
    name = given.lower()
    name = aliases.get(name, name)
    known = _shipped(folder, suffix)
    if name not in known:
        _refuse_other_kind(given, what)
        if suffix == ".json" and Path(given).is_dir():
            raise UsageError(f"unknown model '{given}': for the folder of that name, ./{given}")
        if Path(given).is_file():
            raise UsageError(
                f"{given}: the file of a {what} must have a name that ends in {suffix}"
            )
        raise UnknownName(what, given, [*known, *aliases])
    file = resources.files("arborsim.machine").joinpath(folder, name + suffix)
    return file.read_text(encoding="utf-8"), f"{folder}/{name}{suffix}", name
