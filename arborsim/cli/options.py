"""Options that several commands share, and how their text becomes objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.policies.base import Policy


def names(text: str) -> list[str]:
    """``"a, b,c"`` as names, without repetitions."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    return list(dict.fromkeys(found))


def chosen_names(text: str) -> list[str]:
    """The policies of ``--policy``; ``"all"`` is every one, beside which files may stand."""
    from arborsim.policies.registry import available

    chosen = names(text)
    if "all" in chosen:
        others = [name for name in chosen if name != "all" and name not in available()]
        chosen = [*available(), *others]
    if not chosen:
        raise UsageError("--policy names no policy")
    return chosen


def policy_settings(chosen: Sequence[str], given: Iterable[str]) -> dict[str, dict[str, str]]:
    """What ``--set`` gives to each of the chosen policies.

    Parameters
    ----------
    chosen : sequence of str
        Names, files or classes, as in ``--policy``.
    given : iterable of str
        ``parameter=value`` for every chosen policy that has the parameter, or
        ``policy.parameter=value``.  Parameters of composed policies have a dot themselves
        (``allocate.alpha``), so a policy is meant only if one of that name was chosen.

    Returns
    -------
    dict
        Parameters as text, by policy; in the form that `arborsim.policies.registry.build` takes.
    """
    from arborsim.policies.registry import available, build, find

    kinds = {name: find(name) for name in chosen}
    values: dict[str, dict[str, str]] = {name: {} for name in chosen}
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected name=value or policy.name=value")
        meant, parameter = _meant(key, kinds)
        if not meant:
            head = key.partition(".")[0]
            if head in available() and head != key:
                raise UsageError(f"--set {setting}: policy {head} is not among {', '.join(chosen)}")
            build(chosen[0], {key: value})  # raises, naming the nearest parameters
        for name in meant:
            values[name][parameter] = value
    return values


def _meant(key: str, kinds: Mapping[str, type[Policy]]) -> tuple[list[str], str]:
    """The policies that a key of ``--set`` is for, and the parameter."""
    from arborsim.policies.registry import parameters

    for name, kind in kinds.items():
        for prefix in (f"{name}.", f"{kind.name}."):
            if key.startswith(prefix):
                return [name], key.removeprefix(prefix)
    return [name for name, kind in kinds.items() if key in parameters(kind)], key


def build_policies(settings: Mapping[str, Mapping[str, str]]) -> list[Policy]:
    """The policies with their settings; each must have a name of its own, which tables go by."""
    from arborsim.policies.registry import build

    policies: dict[str, Policy] = {}
    for name, values in settings.items():
        made = build(name, dict(values))
        if made.name in policies:
            raise UsageError(f"--policy {name}: there is another policy called {made.name}")
        policies[made.name] = made
    return list(policies.values())


def check_output(path: Path | None, what: str) -> None:
    """Refuse an output path that cannot be written, before the work is done."""
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{what}: {path} is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"{what}: there is no directory {path.parent}")
    # Asking for permissions would not do: read-only disks and special folders refuse all the same.
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"{what}: cannot write {path}: {error.strerror}") from None
    if not there:
        path.unlink()
