"""Search algorithms over a tree of thoughts: one small file each, by name.

>>> search = make_search("tot-bfs", keep=5, children=8)

The same objects drive a live model (``arborsim record``) and a recorded bank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.search.base import ROOT, Expansion, Leaf, Search
from arborsim.search.beam import Beam4, BeamSqrt
from arborsim.search.best_of_n import BestOfN
from arborsim.search.dpts import Dpts
from arborsim.search.dvts import Dvts4, DvtsSqrt
from arborsim.search.ets import Ets
from arborsim.search.ets_kv import EtsKv
from arborsim.search.linear import Linear
from arborsim.search.mcts import Mcts
from arborsim.search.rebase import Rebase
from arborsim.search.self_consistency import SelfConsistency
from arborsim.search.tot_bfs import TotBfs
from arborsim.search.tot_dfs import TotDfs
from arborsim.search.weighted_vote import WeightedVote

__all__ = ["ROOT", "Expansion", "Leaf", "Search", "make_search", "search_names", "search_options"]

_SEARCHES: Mapping[str, type] = {
    kind.name: kind
    for kind in (
        Linear, BestOfN, SelfConsistency, WeightedVote,
        Beam4, BeamSqrt, Dvts4, DvtsSqrt, Rebase, Ets, EtsKv,
        TotBfs, TotDfs, Dpts, Mcts,
    )
}  # fmt: skip


def search_names() -> list[str]:
    """The names that `make_search` knows."""
    return sorted(_SEARCHES)


def search_options(name: str) -> dict[str, Any]:
    """Names and defaults of the options of the search called `name`.

    Raises
    ------
    UnknownName
    """
    if name not in _SEARCHES:
        raise UnknownName("search", name, _SEARCHES)
    return {f.name: f.default for f in fields(_SEARCHES[name]) if f.init}


def make_search(name: str, **options: Any) -> Search:
    """A new search for one problem.

    Raises
    ------
    UnknownName
        There is no search, or no option, of that name.
    UsageError
        An option's value cannot work.
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
    search: Search = _SEARCHES[name](**typed)
    return search
