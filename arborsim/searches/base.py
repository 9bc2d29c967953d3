"""The contract between a search algorithm and what grows its tree.

A *driver* owns the tree: a live model that decodes thoughts, or a recorded bank that hands them
out.  It shows the search every node that is complete and not given up (the *frontier*, in order of
completion) and how many thoughts may run at once.  The search answers with an `Expansion`.  The
search knows no tokens, no model and no clock, so the same object drives both.

::

    frontier = [root]
    while True:
        answer = search.expand(frontier, free_width)
        # give up answer.dropped, open answer.children, stop if answer.done, or if nothing runs
        # let the open nodes run until one is complete (all of them, if search.synchronous)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np

from arborsim.core.errors import PlanError

ROOT = 0


@dataclass(frozen=True)
class Leaf:
    """A complete node, as a search sees it."""

    #: As in `arborsim.core.tree.ThoughtTree`: node 0 is the prompt, its parent is -1
    node: int
    parent: int
    depth: int
    score: float  # search value, higher is better; NaN for the root
    finished: bool = False  # the reasoning ended here: it holds an answer
    #: It cannot be continued although it is not finished (the cap on tokens; on a bank, no recorded
    #: child left).  Whether it can still *succeed* is what a search has to find out
    dead: bool = False
    visits: int = 0  # children opened so far, those that still run included
    tokens: int = 0  # generated on the path from the prompt to here
    #: Float [size]: mean last hidden state of the block
    embedding: np.ndarray | None = field(default=None, compare=False, repr=False)
    answer: str | None = None  # its text, if it can be read: equal texts vote together
    text: str | None = None  # of the block itself; None on a bank that recorded none
    #: Of the model's distribution of the next token after the block's last one, nats; NaN: unknown
    entropy: float = math.nan
    #: Mean over the block's tokens of the log-probability that the model (at temperature 1) gave
    #: each, nats; NaN for the root, or if unknown
    logprob: float = math.nan
    #: The first complete sibling with the same text; the node itself or None if there is none
    twin: int | None = field(default=None, compare=False)

    @property
    def expandable(self) -> bool:
        return not self.finished and not self.dead


Leaves = Sequence[Leaf]
Children = Mapping[int, int]  # numbers of children by node


@dataclass(frozen=True)
class Expansion:
    """A search's next wish."""

    children: Children = field(default_factory=dict)  # to open now, in this order
    dropped: tuple[int, ...] = ()  # nodes given up for good, deepest first; they leave the frontier
    done: bool = False  # the search is over, whatever still runs


class Search(ABC):
    """A search over one problem: make a new object for each (it may remember what it saw).

    A dataclass.  Fields that its constructor takes are options, each with a default that is a
    number, a text, true or false.
    """

    name: ClassVar[str]
    synchronous: ClassVar[bool]
    """True: `expand` is called when nothing runs, or if False whenever a thought completes."""
    width_option: ClassVar[str] = ""
    """The option that makes it larger: the thoughts that run together at first, or what those are
    a multiple of (`at_width`).  Empty: it is as large as it is, whatever width is asked for."""
    as_published: ClassVar[bool] = False
    """Whether its defaults are a paper's: a bank for it holds what it asks for at these, too."""
    by_levels: ClassVar[bool] = False
    """Whether each selection chooses among all that is kept, as searches by levels and chains do:
    then KV sizes can be compared (`arborsim.searches.walk`)."""
    keeps_duplicates: ClassVar[bool] = False
    """Whether a thought that repeats a sibling goes on, and votes."""

    @property
    def uses_embeddings(self) -> bool:
        """Whether a driver has to give leaves their embeddings."""
        return False

    @property
    @abstractmethod
    def slots(self) -> int:
        """Thoughts that may run at once."""

    @classmethod
    def at_width(cls, width: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options that make `width` thoughts run together at first, besides those `given`.

        Raises `UsageError` if no options do.
        """
        return {cls.width_option: width} if cls.width_option else {}

    @abstractmethod
    def expand(self, frontier: Leaves, width: int) -> Expansion:
        """Decide what to open and what to give up.

        `frontier` holds all complete nodes that were not dropped, in order of completion, the root
        first.  `width` is how many children may be opened now.
        """

    def answers(self, frontier: Leaves) -> tuple[int, ...]:
        """Candidate answers, best first, when the search is over."""
        return best_answer(frontier)


def ask(search: Search, frontier: Mapping[int, Leaf], width: int) -> Expansion:
    """The next wish of `search`, if a driver whose leaves are `frontier` can do it.

    Raises `PlanError` for a wish that none can fulfil.
    """
    wish = search.expand(list(frontier.values()), width)
    dropped, opened = set(wish.dropped), sum(wish.children.values())
    wrong = f"opens {opened} thoughts, {width} may be" if opened > width else ""
    for node, count in wish.children.items():
        if node not in frontier or node in dropped:
            wrong = f"opens children of node {node}, which is not complete or was given up"
        elif not frontier[node].expandable:
            wrong = f"opens children of node {node}, which cannot be continued"
        elif count < 1:
            wrong = f"opens {count} children of node {node}"
    for node in dropped:
        if node not in frontier or node == ROOT:
            wrong = f"gives up node {node}, which is the root, not complete or already given up"
    if len(dropped) < len(wish.dropped):
        wrong = "gives up a node twice"
    if wrong:
        raise PlanError(f"search {search.name} {wrong}")
    return wish


def handed_in(search: Search, frontier: Mapping[int, Leaf], nodes: int) -> tuple[int, ...]:
    """The answers of a search that is over, of a tree of `nodes`, or `PlanError` if it has none."""
    found = search.answers(list(frontier.values()))
    if not found or not all(0 <= node < nodes for node in found):
        raise PlanError(f"search {search.name} answers with nodes {found}, of {nodes}")
    return found


class Wide(Search):
    """Runs as many thoughts at once as its option `width` says."""

    width: int

    @property
    def slots(self) -> int:
        return self.width


def value(leaf: Leaf) -> float:
    """The leaf's score, with "unknown" below every known one."""
    return -math.inf if math.isnan(leaf.score) else leaf.score


def reward(leaf: Leaf) -> float:
    """The leaf's score as a term of a sum: an unknown one adds nothing."""
    return 0.0 if math.isnan(leaf.score) else leaf.score


def newest(frontier: Leaves, known: Container[int]) -> list[Leaf]:
    """Leaves that are not `known` yet, in order of completion: the last ones of the frontier."""
    return list(takewhile(lambda leaf: leaf.node not in known, reversed(frontier)))[::-1]


def best_first(leaves: Iterable[Leaf]) -> list[Leaf]:
    """By descending score, the older node first among equals."""
    return sorted(leaves, key=lambda leaf: (-value(leaf), leaf.node))


def deepest_first(leaves: Iterable[Leaf]) -> tuple[int, ...]:
    """Their nodes in the order in which nodes are given up: children before their parents."""
    return tuple(leaf.node for leaf in sorted(leaves, key=lambda x: (-x.depth, x.node)))


def best_answer(frontier: Leaves) -> tuple[int, ...]:
    """The finished leaf with the best score, or without one the best leaf there is."""
    for leaves in ([x for x in frontier if x.finished], [x for x in frontier if x.node != ROOT]):
        if leaves:
            return (best_first(leaves)[0].node,)
    return (ROOT,)


def hopeless(frontier: Leaves, kept: Iterable[int]) -> tuple[int, ...]:
    """All nodes but `kept`, their ancestors and the root, deepest first."""
    parent = {leaf.node: leaf.parent for leaf in frontier}
    alive = {ROOT}
    for node in kept:
        while node in parent and node not in alive:
            alive.add(node)
            node = parent[node]
    return deepest_first(leaf for leaf in frontier if leaf.node not in alive)
