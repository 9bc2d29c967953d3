"""The document that a sweep is asked for: a grid in TOML, whose lists multiply.

`example_grid` explains every key.  What cells a grid comes to is `arborsim.products.sweep.jobs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from arborsim.core.errors import UsageError
from arborsim.core.plugins import check_no_code
from arborsim.core.records import Text, convert, parse_toml, parsed, read_text
from arborsim.core.tiers import Budget
from arborsim.products.declare import declared
from arborsim.products.options import MachineOptions
from arborsim.products.replay.ask import ReplayOptions


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


#: The options of a cell's machine, with their defaults: each is a key of a grid that takes a list.
MACHINE = {each.name: each.default for each in declared(MachineOptions)}
#: The options that say which searches of a trace a cell replays: keys that take one value.
PART = ("first", "episodes", "quality")
_Any = parsed(_listed)  # one value stands for a list of one


def key_of(option: str) -> str:
    """The key that lists values of an option: ``"gpus"`` of ``"gpu"``; flags keep their name."""
    single = option.endswith("s") or isinstance(MACHINE[option], bool)
    return option if single else f"{option}s"


@dataclass(frozen=True)
class PolicyTable:
    """A policy with settings, of which lists multiply as well."""

    use: Text
    set: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Budgets:
    """Policies and budgets, of replays and of live runs."""

    policies: Annotated[tuple[Text | PolicyTable, ...], _Any] = ()
    budgets: Annotated[tuple[Annotated[Budget, parsed(Budget.stated)], ...], _Any] = (
        Budget("0.5", share=0.5),
    )


@dataclass(frozen=True)
class Group(Budgets):
    """Cells that are replayed: all combinations of the lists."""

    traces: Annotated[tuple[str, ...], _Any] = ()
    calibrations: Annotated[tuple[str, ...], _Any] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value == () and name not in ("calibrations", "traces", "policies"):
                raise UsageError(f"{name} is empty: name at least one, or leave it out")

    @property
    def machines(self) -> list[tuple[Any, ...]]:
        """The values of each option of `MACHINE`."""
        return [getattr(self, key_of(name)) for name in MACHINE]

    @property
    def part(self) -> dict[str, Any]:
        """The options of `PART`."""
        return {name: getattr(self, name) for name in PART}


def _fields() -> Iterator[tuple[str, Any, Any]]:
    """The keys of a group that are options of a replay."""
    for each in declared(ReplayOptions):
        if each.name in MACHINE:
            values: Any = Annotated[tuple[each.kind, ...], _Any]  # type: ignore[name-defined]
            yield key_of(each.name), values, field(default=(each.default,))
        elif each.name in PART:
            least = Meta(ge=each.option.least)
            value: Any = each.kind if each.option.least is None else Annotated[each.kind, least]
            yield each.name, value, field(default=each.default or each.kind())


_GROUP: type[Group] = make_dataclass("Group", _fields(), bases=(Group,), frozen=True)


@dataclass(frozen=True)
class Grid:
    """The cells that a grid asks for, each part with its place in the file."""

    groups: tuple[tuple[str, Group], ...]  #: ``("[[cells]] 1", ...)``; "" is the top of the file
    live: tuple[tuple[str, Mapping[str, Any]], ...]  #: arguments of `arborsim.live`


def example_grid() -> str:
    """The text of the shipped example, with every key explained."""
    return (resources.files("arborsim.products.sweep") / "example.toml").read_text(encoding="utf-8")


def read_toml(path: Path, allow_code: bool) -> dict[str, Any]:
    """The tables of a file; names of code to import are refused unless they are allowed."""
    raw = parse_toml(read_text(path), "this")
    if not allow_code:
        for what, name in _named(raw):
            check_no_code(what, name)
        for block in (raw, *_listed(raw.get("live", []))):
            if isinstance(block, Mapping) and block.get("trust_remote_code"):
                raise UsageError(
                    "trust_remote_code runs code that comes with a model: if you trust it, give "
                    "--allow-code (allow_code=True)"
                )
    return raw


_CODE = {"policies": "policy", "search": "search", "judge": "judge"}


def _named(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Policies, searches and judges that a grid names, whatever else is wrong with it."""
    for block in (raw, *_listed(raw.get("cells", [])), *_listed(raw.get("live", []))):
        for key, what in _CODE.items():
            for each in _listed(block.get(key, [])) if isinstance(block, Mapping) else ():
                name = each.get("use") if isinstance(each, Mapping) else each
                if isinstance(name, str) and not name.startswith("regex:"):
                    yield what, name


def grid_of(raw: Mapping[str, Any]) -> Grid:
    """The grid that `tomllib` made of a file; a `UsageError` names the block."""
    own = {key: value for key, value in raw.items() if key not in ("cells", "live")}
    blocks = {name: _blocks(raw.get(name, []), name) for name in ("cells", "live")}
    groups = [(f"[[cells]] {i}", {**own, **each}) for i, each in enumerate(blocks["cells"], 1)]
    alone = "traces" in own and "policies" in own
    if alone or not (groups or blocks["live"]):
        groups.insert(0, ("", own))
    else:
        convert(_GROUP, own)
    found = [(place, convert(_GROUP, table, place)) for place, table in groups]
    for place, group in found:
        for key in ("traces", "policies"):
            if not getattr(group, key):
                raise UsageError(f"{place} {key} names nothing: give at least one".strip())
    live = [(f"[[live]] {number}", table) for number, table in enumerate(blocks["live"], 1)]
    return Grid(tuple(found), tuple(live))


def _blocks(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UsageError(f"{name} must be blocks: [[{name}]], and its keys below it")
    return value
