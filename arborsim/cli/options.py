"""Options that several commands share, and how their text becomes objects."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from arborsim.errors import UsageError

if TYPE_CHECKING:
    from arborsim.policies.base import Policy


def names(text: str) -> list[str]:
    """``"a, b,c"`` as names, without repetitions."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    return list(dict.fromkeys(found))


def build_policies(text: str, settings: list[str]) -> list[Policy]:
    """The policies named in `text` (``"all"``: every one), with ``--set`` values applied.

    Parameters
    ----------
    text : str
        Comma-separated names.
    settings : list of str
        ``name=value`` for every policy that has such a parameter, or ``policy.name=value``.
    """
    from dataclasses import fields

    from arborsim.policies.registry import available, build, find

    chosen = list(available()) if text.strip() == "all" else names(text)
    if not chosen:
        raise UsageError("--policy names no policy")
    values: dict[str, dict[str, str]] = {name: {} for name in chosen}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected name=value or policy.name=value")
        policy, dot, parameter = key.rpartition(".")
        if dot:
            if policy not in values:
                raise UsageError(
                    f"--set {setting}: policy {policy} is not among {', '.join(chosen)}"
                )
            values[policy][parameter] = value
            continue
        having = [name for name in chosen if key in {f.name for f in fields(find(name))}]
        if not having:
            build(chosen[0], {key: value})  # raises, naming the nearest parameters
        for name in having:
            values[name][key] = value
    return [build(name, values[name]) for name in chosen]


def check_output(path: Path | None, what: str) -> None:
    """Refuse an output path that cannot be written, before the work is done."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{what}: {path} is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"{what}: there is no directory {path.parent}")
