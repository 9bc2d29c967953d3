"""Finding policies by name, and what can be set on them.

A policy is found because `MODULES` names its file in ``methods/``, because a composition of that
name lies in ``compositions/*.toml``, because a wheel registers it under the entry-point group
``arborsim.policies``, or because the user names its class, ``package.mod:Class``, or its file,
``path/to/file.toml``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from arborsim.core.errors import ArborsimError, UnknownName, UsageError
from arborsim.core.plugins import find_plugin, installed
from arborsim.core.settings import Setting, default_of, parsed, setting_text, settings_of
from arborsim.policies.base import Policy

MODULES: dict[str, str] = {
    name: module
    for module, names in {
        "arborkv": "arborkv",
        "arkv": "arkv arkv-origin arkv-quant",
        "attention": "h2o raas tova vatp",
        "baselines": "full needed oracle random streaming-llm",
        "duoattention": "duoattention",
        "epikv": "attn-hs band-adaptive epikv hs-cosine hs-variance kv-key kv-value",
        "expected_attention": "expected-attention",
        "hierarchy": "attn-val-redundancy hierarchy redundancy",
        "keys": "key-norm keydiff lag-kv lag-kv-official",
        "kivi": "kivi",
        "pages": "freekv quest",
        "random_attention": "random-attention",
        "rkv": "rkv",
        "snapkv": "adakv pyramidkv snapkv",
        "thinkv": "segment-hs thinkv",
        "thinkv_paper": "thinkv-paper",
    }.items()
    for name in names.split()
}
"""Module of each method in ``methods/``, so that asking for one imports no other."""
GROUP = "arborsim.policies"
COMPOSITIONS = Path(__file__).parent / "compositions"


@cache
def names() -> tuple[str, ...]:
    """Names of all policies: those of this package, then those of installed wheels."""
    composed = sorted(file.stem for file in COMPOSITIONS.glob("*.toml"))
    return tuple(dict.fromkeys((*sorted(MODULES), *composed, *installed(GROUP))))


def available() -> dict[str, type[Policy]]:
    """All policies by name.  Imports every one."""
    return {name: _named(name) for name in names()}


@cache
def _named(name: str) -> type[Policy]:
    """The policy of one of `names`."""
    if name in MODULES:
        module = importlib.import_module(f"arborsim.policies.methods.{MODULES[name]}")
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, Policy) and item.name == name:
                return item
        raise AssertionError(f"{module.__name__} has no policy '{name}'")
    if (COMPOSITIONS / f"{name}.toml").exists():
        return _composed(COMPOSITIONS / f"{name}.toml")
    return _plugin(name)


def _composed(file: Path) -> type[Policy]:
    from arborsim.policies.composition import read_composition

    return read_composition(file)


def find(name: str, *, code: bool = True) -> type[Policy]:
    """The policy class called `name`, at ``package.module:Class``, or composed in ``file.toml``.

    Imports that policy alone.  Without `code`, for names that stand in a file, no module is
    imported that only the name says.

    Raises `UnknownName`, with the nearest name, if no policy has that name, and `UsageError` if the
    module or class cannot be imported or is no policy, or the file is missing or wrong.
    """
    if name.endswith(".toml"):
        return _composed(Path(name))
    if ":" not in name:
        if name.endswith(".py"):
            raise UsageError(
                f"policy {name}: name its class, e.g. {Path(name).stem}:MyPolicy, and have the "
                "file's folder in PYTHONPATH"
            )
        if name not in names():
            raise UnknownName("policy", name, names())
        return _named(name)
    return _plugin(name, code)


def _plugin(name: str, code: bool = True) -> type[Policy]:
    return find_plugin("policy", name, Policy, GROUP, code=code)


@dataclass(frozen=True)
class Parameter:
    """One thing that can be set: a field of a policy, or ``block.field`` of a composition."""

    name: str
    kind: Any
    default: Any
    setting: Setting


def parameters(kind: type) -> dict[str, Parameter]:
    """The parameters of a policy by name, dotted for the fields of a composition's blocks."""
    types, found = get_type_hints(kind), {}
    for field, made in settings_of(kind):
        default = default_of(field)
        if is_dataclass(default):
            for inner, each in parameters(type(default)).items():
                name = f"{field.name}.{inner}"
                found[name] = replace(each, name=name, default=getattr(default, inner))
        else:
            found[field.name] = Parameter(field.name, types[field.name], default, made)
    return found


def parameter_name(kind: type, key: str) -> str | None:
    """The parameter that `key` means: a composition's without its block if only one block has it.

    None if there is none.
    """
    known = parameters(kind)
    meant = [key] if key in known else [name for name in known if name.partition(".")[2] == key]
    return meant[0] if len(meant) == 1 else None


def values_of(policy: Policy) -> dict[str, Any]:
    """The values that a policy has, by the names of `parameters`."""
    values: dict[str, Any] = {}
    for field in fields(policy):
        value = getattr(policy, field.name)
        if is_dataclass(value):
            for inner in fields(value):
                values[f"{field.name}.{inner.name}"] = getattr(value, inner.name)
        else:
            values[field.name] = value
    return values


def resolved(policy: Policy) -> dict[str, Any]:
    """All settings of a policy, as JSON holds them."""
    return _as_json(values_of(policy))


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(dict(values), default=str)))


@cache
def defaults_of(name: str) -> dict[str, Any]:
    """The settings that its authors run (`resolved`); none for a policy that is not known here."""
    try:
        return resolved(build(name, code=False))
    except ArborsimError:
        return {}


def changed(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `settings` that are not the defaults: in these it is not what its authors run."""
    own, theirs = _as_json(settings), defaults_of(name)
    differs = (key for key in own if key not in theirs or theirs[key] != own[key])
    return {key: own[key] for key in differs} if theirs else {}


def titled(name: str, settings: Mapping[str, Any]) -> str:
    """``"h2o per=shared"``: the policy with the settings that are not its authors'.

    ``"epikv inverted"`` is EpiKV with its two layers swapped: the contrast has the other sign.
    """
    own, theirs = changed(name, settings), defaults_of(name)
    pairs = (("layer_a", "layer_b"), ("layer_b", "layer_a"))
    inverted = all(one in own and own[one] == theirs[other] for one, other in pairs)
    if inverted:
        del own["layer_a"], own["layer_b"]
    said = (f"{key}={setting_text(value)}" for key, value in sorted(own.items()))
    return " ".join((name, *["inverted"] * inverted, *said))


def build(name: str, settings: dict[str, str] | None = None, *, code: bool = True) -> Policy:
    """The policy called `name` with parameters set from text, e.g. ``{"sinks": "8"}``.

    Parameters of a composition are dotted, ``{"allocate.alpha": "2"}``.  The block may be left out
    where no other has a parameter of that name.  `code` is as in `find`.

    Raises `UsageError` if a value has the wrong type or the policy refuses it, and `UnknownName` if
    there is no such policy or parameter.
    """
    kind = find(name, code=code)
    known = parameters(kind)
    values: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for given, text in (settings or {}).items():
        key = parameter_name(kind, given)
        if key is None:
            raise UnknownName(f"parameter of {name}", given, known)
        value = parsed(name, key, known[key].kind, text)
        block, dot, field = key.partition(".")
        if dot:
            inner.setdefault(block, {})[field] = value
        else:
            values[key] = value
    for block, changed in inner.items():
        values[block] = replace(getattr(kind, block), **changed)
    return kind(**values)
