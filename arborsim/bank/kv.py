"""The KV size of a search (Hooper et al. 2025, "ETS", figures 3 and tables 1 and 2).

At each selection: the unique tokens of all unfinished candidates and their ancestors, an ancestor
that several share counted once.  The size of a search is the sum over its selections.

A *candidate* of a selection is a thought that was completed since the selection before and that can
be continued.  In a search by levels (beam search, DVTS, REBASE, ETS, tree of thoughts breadth
first) those are all states that it chooses among.  In a search that is asked whenever a thought
ends, or that comes back to older states, this counts each thought once, when it is complete: what
waits beside it shows in peak bytes and byte-seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arborsim.search import ROOT


def unique_path_tokens(parent: Sequence[int], tokens: Sequence[int], nodes: Iterable[int]) -> int:
    """Tokens on the paths from below the prompt to `nodes`, each counted once.

    Parameters
    ----------
    parent, tokens : sequence of int
        Per node: its parent, and its own tokens.
    nodes : iterable of int
    """
    seen = {ROOT}
    total = 0
    for node in nodes:
        while node not in seen:
            seen.add(node)
            total += tokens[node]
            node = parent[node]
    return total
