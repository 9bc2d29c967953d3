"""Finding policies by name.

A policy is found because its file lies in this package, because a wheel registers it under the
entry-point group ``arborsim.policies``, or because the user names its class: ``package.mod:Class``.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from arborsim.errors import UnknownName, UsageError
from arborsim.policies.base import Policy


@cache
def available() -> dict[str, type[Policy]]:
    """All policies by name: those of this package, then those of installed wheels."""
    package = importlib.import_module("arborsim.policies")
    found: dict[str, type[Policy]] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        for item in vars(importlib.import_module(f"arborsim.policies.{module}")).values():
            if isinstance(item, type) and issubclass(item, Policy) and item.name:
                found[item.name] = item
    for point in entry_points(group="arborsim.policies"):
        found.setdefault(point.name, point.load())
    return found


def find(name: str) -> type[Policy]:
    """The policy class called `name`, or at ``package.module:Class``.

    Raises
    ------
    UnknownName
        No policy has that name; the message names the nearest.
    UsageError
        The module or class cannot be imported, or is no policy.
    """
    if ":" not in name:
        try:
            return available()[name]
        except KeyError:
            raise UnknownName("policy", name, available()) from None
    module, _, attribute = name.partition(":")
    try:
        item = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"policy '{name}' cannot be imported: {error}") from None
    if not (isinstance(item, type) and issubclass(item, Policy)):
        raise UsageError(f"'{name}' is not a subclass of arborsim.policies.base.Policy")
    return item


def build(name: str, settings: dict[str, str] | None = None) -> Policy:
    """The policy called `name` with hyper-parameters set from text, e.g. ``{"sinks": "8"}``.

    Raises
    ------
    UsageError
        A value has the wrong type or the policy refuses it.
    UnknownName
        No such policy or hyper-parameter.
    """
    kind = find(name)
    types = get_type_hints(kind)
    known = {field.name: types[field.name] for field in fields(kind)}
    values: dict[str, Any] = {}
    for key, text in (settings or {}).items():
        if key not in known:
            raise UnknownName(f"parameter of {name}", key, known)
        values[key] = _parse(name, key, known[key], text)
    return kind(**values)


def _parse(policy: str, key: str, kind: Any, text: str) -> Any:
    """`text` as a value of type `kind` (bool, int, float, str, or one of them or None)."""
    options = getattr(kind, "__args__", (kind,))
    if text.lower() == "none" and type(None) in options:
        return None
    for option in options:
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float, str):
            try:
                return option(text)
            except ValueError:
                continue
    expected = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise UsageError(f"{policy}: {key} must be {expected}, not '{text}'")
