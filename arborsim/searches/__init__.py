"""Search algorithms over a tree of thoughts, by name: one file per family.

Other searches are installed under the entry-point group ``arborsim.searches``, or named by their
class, ``package.module:Class``.

>>> search = make_search("tot-bfs", keep=5, children=8)

The same objects drive a live model (``arborsim record``) and a recorded bank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.plugins import find_plugin, installed
from arborsim.core.settings import default_of, parsed
from arborsim.searches.base import ROOT, Expansion, Leaf, Search, ask, handed_in

__all__ = [
    "ROOT",
    "SHIPPED",
    "Expansion",
    "Leaf",
    "Search",
    "ask",
    "find_search",
    "handed_in",
    "make_search",
    "search_names",
    "search_options",
]

#: Where each search is; a module is imported when one of its searches is asked for.
_SEARCHES: Mapping[str, str] = {
    "linear": "chains:Linear",
    "best-of-n": "chains:BestOfN",
    "self-consistency": "chains:SelfConsistency",
    "weighted-vote": "chains:WeightedVote",
    "beam-4": "levels:Beam4",
    "beam-sqrt": "levels:BeamSqrt",
    "dvts-4": "levels:Dvts4",
    "dvts-sqrt": "levels:DvtsSqrt",
    "rebase": "levels:Rebase",
    "ets": "ets:Ets",
    "ets-kv": "ets:EtsKv",
    "tot-bfs": "tot:TotBfs",
    "tot-dfs": "tot:TotDfs",
    "dpts": "dpts:Dpts",
    "mcts": "mcts:Mcts",
}


SHIPPED = tuple(sorted(_SEARCHES))
GROUP = "arborsim.searches"


def search_names() -> list[str]:
    """The names that `find_search` knows: shipped searches, and those of installed packages."""
    return sorted({*_SEARCHES, *installed(GROUP)})


def find_search(name: str, *, code: bool = True) -> type[Search]:
    """The class of the search called `name`, or at ``package.module:Class``.  Imports that alone.

    Without `code`, for names that stand in a file, no module is imported that only the name says.

    Raises `UnknownName`, with the nearest name, if no search has that name, and `UsageError` if it
    cannot be imported or lacks what a search needs.
    """
    if name in _SEARCHES:
        module, _, attribute = _SEARCHES[name].partition(":")
        found: type[Search] = getattr(import_module(f"{__name__}.{module}"), attribute)
        return found
    if ":" not in name and name not in search_names():
        raise UnknownName("search", name, search_names())
    kind = find_plugin("search", name, Search, GROUP, code=code)  # type: ignore[type-abstract]
    if lacking := _lacking(kind):
        raise UsageError(f"search '{name}' {lacking} (CONTRIBUTING.md shows one)")
    return kind


def _lacking(kind: type[Search]) -> str:
    """The fault of a class that is to be a search, empty if there is none."""
    made: Any = kind
    if not is_dataclass(made):
        return "is no dataclass"
    for name, wanted in (("name", str), ("synchronous", bool)):
        if not isinstance(getattr(kind, name, None), wanted):
            return f"does not say its {name}"
    if kind.name in _SEARCHES:
        return f"is called {kind.name}, as one that ships with arborsim: rename it"
    if missing := sorted(kind.__abstractmethods__):
        return f"has no {' and no '.join(missing)}"
    options = {each.name: default_of(each) for each in fields(made) if each.init}
    for name, default in options.items():
        if not isinstance(default, bool | int | float | str):
            return f"has an option {name} whose default is no number, no text, not true or false"
    width: str = kind.width_option
    if width and width not in options:
        return f"has no option {width}, its width"
    return ""


def search_options(name: str, *, code: bool = True) -> dict[str, Any]:
    """Names and defaults of a search's options, with `code` and errors as in `find_search`."""
    kind: Any = find_search(name, code=code)
    return {each.name: default_of(each) for each in fields(kind) if each.init}


def make_search(name: str, **options: Any) -> Search:
    """A new search for one problem.

    Raises `UnknownName` if there is no search or option of that name, `UsageError` if an option's
    value cannot work.
    """
    known = search_options(name)
    typed: dict[str, Any] = {}
    for key, given in options.items():
        if key not in known:
            raise UnknownName(f"option of {name}", key, known)
        typed[key] = parsed(name, key, type(known[key]), str(given))
    return find_search(name)(**typed)
