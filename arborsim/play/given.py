"""Searches that ran elsewhere: a tree of thoughts with its tokens, put together and checked.

`TreeBuilder` takes thoughts as they come and says at once what cannot be.  Thoughts run in *steps*:
those of a step side by side, a token of each per iteration, until all of them are complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arborsim.core.errors import UsageError

PROMPT = 0  #: the number of the prompt


@dataclass
class GivenThought:
    """A thought that was given, or the prompt."""

    parent: int  #: number of the thought above; `PROMPT` is the prompt, whose own is -1
    tokens: tuple[int, ...]
    name: str  #: in messages
    step: int = -1
    depth: int = 0
    reward: float = math.nan  #: in [0, 1]; NaN for none
    text: str | None = None
    answer: str | None = None
    correct: bool | None = None
    finished: bool = False  #: the reasoning ended here
    last: int = -1  #: the last step in which it or a child of it runs
    #: step after which it was given up; None if it was not
    pruned: int | None = None


@dataclass(frozen=True)
class GivenTree:
    """A search that ran elsewhere; thoughts are numbered in the order of opening."""

    nodes: Sequence[GivenThought]  #: the prompt first
    steps: Sequence[Sequence[int]]  #: numbers of the thoughts that run side by side
    #: numbers of what is given up after each step, in this order
    given_up: Sequence[Sequence[int]]
    chosen: int | None = None  #: what was handed in
    correct: bool | None = None  #: verdict on that

    @property
    def num_tokens(self) -> int:
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def straight(self) -> bool:
        """Whether each thought follows the one before it."""
        return all(node.parent == number for number, node in enumerate(self.nodes[1:]))

    @property
    def lengths(self) -> list[int]:
        """Tokens on the path of each node."""
        found: list[int] = []
        for node in self.nodes:
            found.append(len(node.tokens) + (found[node.parent] if node.parent >= 0 else 0))
        return found


@dataclass
class TreeBuilder:
    """A tree in the making.  Thoughts are named by the numbers that `add` returns.

    What cannot be is a `UsageError` that names the thought, and leaves the tree as it was.
    """

    vocabulary: int  #: token ids are below this
    longest: int  #: tokens that a path may have
    nodes: list[GivenThought] = field(default_factory=list)
    chosen: int | None = None
    correct: bool | None = None
    _gone: list[int] = field(default_factory=list)  # given up, in this order
    _closed: bool = False  # whether the next thought begins a step
    _length: list[int] = field(default_factory=list)  # tokens of each path

    def prompt(self, tokens: Sequence[int]) -> None:
        """Begin with the prompt."""
        self._enter(GivenThought(-1, self.ids(tokens, "the prompt"), "the prompt"))

    def add(
        self,
        parent: int,
        tokens: Sequence[int],
        *,
        name: str = "",
        step: int | None = None,
        reward: float | None = None,
        text: str | None = None,
        answer: str | None = None,
        correct: bool | None = None,
    ) -> int:
        """Add a complete thought, and return its number.

        Without a `step` it runs together with the thoughts that were added before it, unless it
        follows one of them, or something has been given up since.
        """
        name = name or f"node {len(self.nodes)}"
        above = self._known(parent, name)
        if above.pruned is not None:
            raise UsageError(f"{name} follows {above.name}, which was given up before")
        if above.finished:
            raise UsageError(f"{name} follows {above.name}, which answers: nothing comes after it")
        step = self._next_step(above) if step is None else step
        if step <= above.step:
            raise UsageError(
                f"{name} has order {step}, not above the {above.step} of {above.name}, which it "
                "follows"
            )
        if reward is not None and not 0 <= reward <= 1:
            raise UsageError(f"{name}: reward {reward} is not between 0 and 1: scale it")
        thought = GivenThought(parent, self.ids(tokens, name), name, step, above.depth + 1)
        thought.reward = math.nan if reward is None else float(reward)
        thought.text, thought.answer, thought.correct = text, answer, correct
        thought.finished = answer is not None or correct is not None
        self._enter(thought)
        above.last = max(above.last, step)
        self._closed = False
        return len(self.nodes) - 1

    def _next_step(self, above: GivenThought) -> int:
        newest = self.nodes[-1].step
        together = newest >= 0 and not self._closed and above.step < newest
        return newest if together else max(node.step for node in self.nodes) + 1

    def _enter(self, thought: GivenThought) -> None:
        before = self._length[thought.parent] if thought.parent >= 0 else 0
        length = before + len(thought.tokens)
        if length > self.longest:
            raise UsageError(
                f"the path to {thought.name} takes {length} positions, but the model has "
                f"{self.longest}"
            )
        thought.last = thought.step
        self._length.append(length)
        self.nodes.append(thought)

    def _known(self, number: int, what: str) -> GivenThought:
        if not self.nodes:
            raise UsageError("there is no search yet: begin with prompt()")
        if isinstance(number, bool) or not 0 <= number < len(self.nodes):
            raise UsageError(f"{what}: there is no node {number}")
        return self.nodes[number]

    def ids(self, tokens: Sequence[int], name: str) -> tuple[int, ...]:
        """The ids, if the model knows them; messages say `name`."""
        found = np.asarray(tokens)
        if found.size == 0:
            raise UsageError(f"{name} has no tokens")
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise UsageError(f"{name}: expected token ids, one after the other")
        wrong = found[(found < 0) | (found >= self.vocabulary)]
        if len(wrong):
            raise UsageError(
                f"{name} has id {wrong[0]}, but the model knows 0 to {self.vocabulary - 1}: was it "
                "made with another tokeniser?"
            )
        return tuple(found.tolist())

    def prune(self, number: int, after: int | None = None) -> None:
        """Give a thought up, once step `after` is complete; by default all so far."""
        node = self._known(number, "prune")
        if number == PROMPT or node.pruned is not None:
            why = "" if number == PROMPT else ": it was given up before"
            raise UsageError(f"{node.name} cannot be given up{why}")
        newest = max(each.step for each in self.nodes)
        node.pruned = newest if after is None else after
        if node.pruned < node.last:
            node.pruned, given = None, node.pruned
            raise UsageError(
                f"{node.name} is given up after order {given}, but runs on until {node.last}"
            )
        self._gone.append(number)
        self._closed = True

    def answer(self, number: int, correct: bool | None = None, text: str | None = None) -> None:
        """The search hands in a thought, which ends there if none follows it."""
        node = self._known(number, "answer")
        node.finished = number != PROMPT and all(each.parent != number for each in self.nodes)
        node.answer = text if text is not None else node.answer
        node.correct = correct if correct is not None else node.correct
        self.chosen, self.correct = number, node.correct

    def tree(self) -> GivenTree:
        """The whole tree."""
        self._known(PROMPT, "the search")
        order = sorted(range(len(self.nodes)), key=lambda n: self.nodes[n].step)
        place = {number: at for at, number in enumerate(order)}
        nodes = [self.nodes[number] for number in order]
        for node in nodes[1:]:
            node.parent = place[node.parent]
        known = sorted({node.step for node in nodes[1:]})
        steps = [[n for n, node in enumerate(nodes) if node.step == step] for step in known]
        given_up: list[list[int]] = [[] for _ in known]
        for number in self._gone:
            pruned = self.nodes[number].pruned
            assert pruned is not None
            given_up[int(np.searchsorted(known, pruned, side="right")) - 1].append(place[number])
        chosen = None if self.chosen is None else place[self.chosen]
        return GivenTree(nodes, steps, given_up, chosen, self.correct)
