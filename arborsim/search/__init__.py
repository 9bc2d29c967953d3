"""Search algorithms over a tree of thoughts, by name: one file per family.

>>> search = make_search("tot-bfs", keep=5, children=8)

The same objects drive a live model (``arborsim record``) and a recorded bank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, Search

__all__ = ["ROOT", "Expansion", "Leaf", "Search", "make_search", "search_names", "search_options"]

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


def search_names() -> list[str]:
    """The names that `make_search` knows."""
    return sorted(_SEARCHES)


def search_options(name: str) -> dict[str, Any]:
    """Names and defaults of the options of the search called `name`; raises `UnknownName`."""
    return {f.name: f.default for f in fields(_find(name)) if f.init}


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
        kind = type(known[key])
        try:
            typed[key] = kind(given)
        except (TypeError, ValueError):
            raise UsageError(
                f"{name}: {key} must be {'an integer' if kind is int else 'a number'}, "
                f"not {given!r}"
            ) from None
    search: Search = _find(name)(**typed)
    return search


def _find(name: str) -> type:
    if name not in _SEARCHES:
        raise UnknownName("search", name, _SEARCHES)
    module, _, kind = _SEARCHES[name].partition(":")
    found: type = getattr(import_module(f"{__name__}.{module}"), kind)
    return found
