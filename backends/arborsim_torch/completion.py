"""The completion of a thought: its reward, how it ended, what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arborsim.trace.schema import End
from arborsim_torch.capture import Capture
from arborsim_torch.recording import LiveNode, path_ends
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.rewards.base import Embedder, Reward, Thought
from arborsim_torch.sources import Source


@dataclass
class Completion:
    """Completes the thoughts of one search."""

    source: Source
    problem: Problem
    nodes: list[LiveNode]  #: all nodes of the search, which go on growing
    reward: Reward
    noise: np.random.Generator  #: for the reward
    embedder: Embedder | None
    capture: Capture | None
    max_tokens: int  #: generated tokens per path
    _said: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict, init=False)
    _alive: dict[int, int] = field(default_factory=dict, init=False)
    _verdicts: dict[tuple[int, ...], bool | None] = field(default_factory=dict, init=False)

    def judge(self, ended: Sequence[int]) -> None:
        """Reward and embed the thoughts that have just ended, all at once."""
        nodes = [self.nodes[n] for n in ended]
        thoughts = [
            Thought(self.problem, node.generated, path_ends(self.nodes, n), node.value)
            for n, node in zip(ended, nodes, strict=True)
        ]
        for node, score in zip(nodes, self.reward.score(thoughts, self.noise), strict=True):
            node.reward = float(np.float32(score))  # a bank hands out no more digits than that
        if self.embedder is not None:
            texts = [self.text(node) for node in nodes]
            for node, vector in zip(nodes, self.embedder.embed(texts), strict=True):
                node.embedding = vector
        elif self.capture is not None and self.capture.embeddings:
            for n, node in zip(ended, nodes, strict=True):
                node.embedding = self.capture.embedding(n)

    def text(self, node: LiveNode) -> str:
        """The thought's own text."""
        return self.source.text(node.generated[-node.tokens :])

    def finish(self, n: int) -> End:
        """Score a thought, say how it ended, and read its answer."""
        node = self.nodes[n]
        # Without a reward, the geometric mean of the token probabilities ranks thoughts.
        chance = float(np.exp(node.mean_logprob))
        node.score = chance if math.isnan(node.reward) else node.reward
        node.finished = self.source.is_finished(self.problem, node.generated)
        node.dead = not node.finished and len(node.generated) >= self.max_tokens
        if not node.finished:
            return End.DEAD if node.dead else End.NONE
        node.answer = self.source.answer(node.generated)
        node.correct = self.verdict(n)
        return End.FINISHED

    def repeats(self, n: int) -> bool:
        """Is there a complete sibling with the same tokens that was not given up?"""
        node = self.nodes[n]
        own = tuple(node.generated[-node.tokens :])
        node.twin = self._said.setdefault((node.parent, own), n)
        self._alive[node.twin] = self._alive.get(node.twin, 0) + 1
        return self._alive[node.twin] > 1

    def give_up(self, n: int) -> None:
        """A complete thought was given up: another that says the same does not repeat it."""
        self._alive[self.nodes[n].twin] -= 1

    def choose(self, candidates: Sequence[int]) -> tuple[int, bool | None]:
        """The first right answer among the candidates, or else the first, and its verdict."""
        verdicts = {n: self.verdict(n) for n in candidates}
        chosen = next((n for n in candidates if verdicts[n]), candidates[0])
        return chosen, verdicts[chosen]

    def verdict(self, n: int) -> bool | None:
        """Whether the reasoning up to `n` is right; equal ones are judged once."""
        generated = self.nodes[n].generated
        key = tuple(generated)
        if key not in self._verdicts:
            self._verdicts[key] = self.source.correct(self.problem, generated)
        return self._verdicts[key]
