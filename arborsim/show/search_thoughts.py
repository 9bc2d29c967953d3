"""What the page of a search says about recorded thoughts, and which of them it draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arborsim.bank.bank import Bank
from arborsim.bank.walk import Walk
from arborsim.run.results import NodeRecord
from arborsim.show import trees
from arborsim.trace.schema import End, Kind

#: Thoughts of one problem that are drawn, and characters of each that are shown.
MOST_NODES = 2_000
MOST_TEXT = 600


def drawn_nodes(bank: Bank, walks: Sequence[Walk]) -> list[int]:
    """At most `MOST_NODES` thoughts, in order of number; with a thought come its ancestors.

    Those come first that most searches opened: whoever opens a thought has opened its ancestors.
    """
    count = np.zeros(len(bank.parent), dtype=int)
    for done in walks:
        count[list(done.bank_node)] += 1
    order = np.lexsort((np.arange(len(count)), -count))  # the prompt is first
    return sorted(order[:MOST_NODES].tolist())


def records(bank: Bank, drawn: Sequence[int]) -> list[NodeRecord]:
    """The drawn thoughts as blocks of a tree."""
    place = {node: i for i, node in enumerate(drawn)}
    return [
        NodeRecord(
            place.get(bank.parent[n], -1), bank.depth[n], bank.tokens[n], bank.score[n],
            pruned=False, closed=bank.complete[n],
        )
        for n in drawn
    ]  # fmt: skip


def layout_of(bank: Bank, drawn: Sequence[int], nodes: Sequence[NodeRecord]) -> dict[str, Any]:
    """Places and facts of the drawn thoughts, for the page's scripts."""
    return {**trees.layout(nodes), **trees.facts(nodes), **_said(bank, drawn)}


def _said(bank: Bank, drawn: Sequence[int]) -> dict[str, Any]:
    """What the thoughts are: numbers in the trace, depths, ends, verdicts, answers and texts."""
    episode = bank.episode
    text: dict[int, str] = {}
    for row in np.flatnonzero(episode.kind == Kind.BOUNDARY).tolist():
        said = None if episode.text is None else episode.text[row]
        if said:
            text[int(episode.node[row])] = _shortened(said)
    return {
        "number": list(drawn),
        "depth": [bank.depth[n] for n in drawn],
        "end": [bank.end[n] for n in drawn],
        "verdict": [bank.verdict[n] for n in drawn],
        "answer": [_shortened(bank.answer[n] or "") for n in drawn],
        "text": [text.get(n, "") for n in drawn],
    }


def _shortened(text: str) -> str:
    text = text.strip()
    if len(text) <= MOST_TEXT:
        return text
    return f"{text[:MOST_TEXT]} … ({len(text):,} characters)"


def fate(bank: Bank, done: Walk, node: int) -> int:
    """Why a search could not go on with a complete thought.

    Returns
    -------
    int
        0: it could; 1: the thought repeats a sibling; 2: it was recorded as a dead end, or its
        recording broke off; 3: more continuations were asked for than were recorded.
    """
    recorded = done.bank_node[node]
    if not done.dead[node]:
        return 0
    if bank.end[recorded] == End.DEAD or not bank.complete[recorded]:
        return 2
    # Nobody asks a repeated thought for continuations.
    asked = bank.end[recorded] != End.FINISHED and node in done.parent
    return 1 if bank.twin[recorded] != recorded and not asked else 3
