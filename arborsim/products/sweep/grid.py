"""The document that a sweep is asked for: a grid in TOML, whose lists multiply.

`example_grid` explains every key.  What cells a grid comes to is `arborsim.products.sweep.jobs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from arborsim.core.errors import UsageError
from arborsim.core.plugins import check_no_code
from arborsim.core.records import Text, convert, one_of, parse_toml, parsed, read_text
from arborsim.core.tiers import RECALLS, Budget
from arborsim.machine.config import KV_DTYPES
from arborsim.machine.names import a_type
from arborsim.machine.weights import WEIGHTS
from arborsim.memory.pages import MOST_PAGE_TOKENS


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


#: Keys of a cell's machine and of its layout, in the order of `Group.machines` and `.layouts`.
MACHINE = ("gpu", "host", "engine", "model", "kv_dtype", "weights")
LAYOUT = ("recall", "page_size", "tree_attention")
_Any = parsed(_listed)  # one value stands for a list of one
Names = Annotated[tuple[str, ...], _Any]
Count = Annotated[int, Meta(ge=0)]


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

    traces: Names = ()
    gpus: Names = ("h100",)
    hosts: Names = ("",)
    engines: Names = ("vllm",)
    models: Names = ("",)
    kv_dtypes: Annotated[tuple[Annotated[str, a_type("a KV cache", KV_DTYPES)], ...], _Any] = ("",)
    weights: Annotated[tuple[Annotated[str, a_type("weights", WEIGHTS)], ...], _Any] = ("",)
    recalls: Annotated[tuple[Annotated[str, one_of("recall mode", RECALLS)], ...], _Any] = (
        "stage",
    )
    page_sizes: Annotated[tuple[Annotated[int, Meta(ge=1, le=MOST_PAGE_TOKENS)], ...], _Any] = (1,)
    tree_attention: Annotated[tuple[bool, ...], _Any] = (True,)
    calibrations: Names = ()
    first: Count = 0
    episodes: Count = 0  # 0: all that follow
    quality: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value == () and name not in ("calibrations", "traces", "policies"):
                raise UsageError(f"{name} is empty: name at least one, or leave it out")

    @property
    def machines(self) -> tuple[tuple[str, ...], ...]:
        """The values of each key of `MACHINE`."""
        gpus = self.gpus, self.hosts, self.engines
        return *gpus, self.models, self.kv_dtypes, self.weights

    @property
    def layouts(self) -> tuple[tuple[Any, ...], ...]:
        """The values of each key of `LAYOUT`."""
        return self.recalls, self.page_sizes, self.tree_attention


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


def _named(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Policies and searches that a grid names, whatever else is wrong with it."""
    for block in (raw, *_listed(raw.get("cells", [])), *_listed(raw.get("live", []))):
        for key, what in (("policies", "policy"), ("search", "search")):
            for each in _listed(block.get(key, [])) if isinstance(block, Mapping) else ():
                name = each.get("use") if isinstance(each, Mapping) else each
                if isinstance(name, str):
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
        convert(Group, own)
    found = [(place, convert(Group, table, place)) for place, table in groups]
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
