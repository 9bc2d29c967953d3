"""A recorder's notes of a search while it runs, the events it reports, and its trace rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from arborsim.searches import Leaf
from arborsim.trace.schema import Kind
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.reference.tasks import Readers

_Result = TypeVar("_Result")
Iterations = Generator[list[int], Tensor, _Result]  # tokens of the leaves, their logits


class Listener(Protocol):
    """Hears of everything that happens in a search, as it happens."""

    def began(self, decoder: TreeDecoder) -> None:
        """A search begins on this decoder."""

    @property
    def wants_readers(self) -> bool:
        """Whether it is to be told who reads the tokens."""

    def prompt(self, tokens: Sequence[int], readers: Sequence[Readers] | None) -> None:
        """The prompt has been computed."""

    def iteration(
        self, leaves: Sequence[int], tokens: Sequence[int], readers: Sequence[Readers] | None
    ) -> None:
        """Each leaf, in batch order, has computed one token."""

    def turned(self, leaves: tuple[int, ...], parents: tuple[int, ...]) -> None:
        """The search goes on with these leaves, in order of number."""

    def closed(self, node: int, reward: float, entropy: float) -> None:
        """A thought is complete."""

    def pruned(self, node: int) -> None:
        """The search will not come back to a node."""

    def answered(self, correct: bool | None) -> None:
        """The search is over."""


@dataclass
class LiveNode:
    """A node while its search runs."""

    parent: int
    generated: list[int]  #: all tokens after the prompt, this node's included
    tokens: int = 0  #: the node's own
    logprob: float = 0.0  #: sum of the log-probabilities of its own tokens, nats
    visits: int = 0
    score: float = math.nan
    finished: bool = False
    dead: bool = False
    value: float | None = None  #: what the model itself said of the state
    #: what it was rewarded with once complete.  NaN if nothing rewards it.
    reward: float = math.nan
    logits: Tensor | None = None  #: after its last token, to draw its children's first tokens from
    embedding: np.ndarray | None = None
    text: str | None = None  #: its own, once complete
    #: nats of the next token's distribution after its last, as stored; NaN: not complete
    entropy: float = math.nan
    answer: str | None = None  #: what it answers, if it is finished and its source can read that
    twin: int = -1  #: the first complete sibling that says the same, or the node itself
    correct: bool | None = None  #: verdict on the answer of a finished thought
    held: bool = True  #: whether its keys and values are there

    @property
    def mean_logprob(self) -> float:
        """Mean over its own tokens, nats; NaN for the prompt."""
        return self.logprob / self.tokens if self.tokens else math.nan


def path_ends(nodes: Sequence[LiveNode], n: int) -> tuple[int, ...]:
    """Generated tokens on the path of node `n` after each of its thoughts, the first one first."""
    ends = []
    while nodes[n].parent >= 0:
        ends.append(len(nodes[n].generated))
        n = nodes[n].parent
    return tuple(reversed(ends))


@dataclass
class EpisodeResult:
    """The result of `EpisodeRecorder.run`; times in seconds.

    `steps` are needed steps of the reasoning handed in: those that are right, and how many there
    are (None where the source does not count them).

    `decode_s` is all that came after the prompt, `forward_s` the part of it that decode iterations
    took in the model and in drawing tokens.
    """

    columns: dict[str, Any]
    correct: bool | None
    tokens: int
    thoughts: int
    prompt_tokens: int
    iterations: int
    prefill_s: float
    decode_s: float
    forward_s: float
    steps: tuple[int, int] | None = None


_SAME = (  # of a node and the leaf that a search sees
    *("parent", "score", "finished", "dead", "visits"),
    *("embedding", "answer", "text", "entropy", "twin"),
)


class Frontier:
    """Complete thoughts that have not been given up, in order of completion.

    `nodes` are all of the search, which go on growing, and `depth` gives that of a node.  The
    search chooses from the `leaves`, by node.
    """

    def __init__(self, nodes: list[LiveNode], depth: Callable[[int], int]) -> None:
        self._nodes, self._depth = nodes, depth
        self.leaves: dict[int, Leaf] = {}

    def enter(self, n: int) -> None:
        """A thought is complete, and all that is known of it will not change any more."""
        node = self._nodes[n]
        same: dict[str, Any] = {name: getattr(node, name) for name in _SAME}
        tokens, logprob = len(node.generated), node.mean_logprob
        self.leaves[n] = Leaf(n, depth=self._depth(n), tokens=tokens, logprob=logprob, **same)

    def leave(self, n: int) -> None:
        """A thought was given up."""
        del self.leaves[n]

    def visited(self, n: int) -> None:
        """A thought has got children."""
        self.leaves[n] = replace(self.leaves[n], visits=self._nodes[n].visits)


#: Columns that only some rows have, and the others' values.
_EMPTY: dict[str, Any] = {"position": -1, "token": -1}
_EMPTY |= {"logprob": math.nan, "entropy": math.nan, "reward": math.nan}
_EMPTY |= {"text": None, "correct": -1, "embedding": None, "end": 0, "answer": None}
_NAMES = ("time_s", "kind", "iteration", "node", "parent", "depth", *_EMPTY)
_INTEGERS = ("iteration", "node", "parent", "depth", "position", "token", "correct", "end")


class EventRows:
    """Appends rows in time order; `columns` turns them into what `TraceWriter` takes.

    `time_s` and `iteration` are those of the rows to come.
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self.iteration = 0
        self._tree: list[tuple[int, int]] = []  # parent, depth
        self._rows: list[tuple[Any, ...]] = []

    def open(self, parent: int) -> int:
        """Number a new node."""
        depth = self._tree[parent][1] + 1 if parent >= 0 else 0
        self._tree.append((parent, depth))
        return len(self._tree) - 1

    def depth(self, node: int) -> int:
        return self._tree[node][1]

    def add(self, kind: Kind, node: int, **known: Any) -> None:
        """Append a row; `known` are those of its columns that only some rows have."""
        own = (self.time_s, int(kind), self.iteration, node, *self._tree[node])
        self._rows.append((*own, *(_EMPTY | known).values()))

    def columns(self, with_embeddings: bool) -> dict[str, Any]:
        """Columns by name, one entry per row."""
        by_name: dict[str, Any] = dict(zip(_NAMES, zip(*self._rows, strict=True), strict=True))
        for name in _INTEGERS:
            by_name[name] = np.asarray(by_name[name], dtype=np.int32)
        for name in ("logprob", "entropy", "reward"):
            by_name[name] = np.asarray(by_name[name], dtype=np.float32)
        by_name["time_s"] = np.asarray(by_name["time_s"], dtype=np.float64)
        if not with_embeddings:
            del by_name["embedding"]
        return by_name


def verdict_number(correct: bool | None) -> int:
    """How a trace notes a verdict: -1 if there is none."""
    return -1 if correct is None else int(correct)
