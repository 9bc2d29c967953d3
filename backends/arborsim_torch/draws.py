"""The next token of every leaf: drawn from logits, then waiting until the leaf is fed with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from arborsim_torch.recording import LiveNode
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sampling import Choice, Sampler
from arborsim_torch.sources import Source


class Draws:
    """Draws the tokens of one search.

    Parameters
    ----------
    sampler : Sampler
    source : Source
    problem : Problem
    nodes : list of LiveNode
        All nodes of the search, which go on growing.
    """

    def __init__(
        self, sampler: Sampler, source: Source, problem: Problem, nodes: list[LiveNode]
    ) -> None:
        self._sampler, self._source, self._problem, self._nodes = sampler, source, problem, nodes
        self._waiting: dict[int, tuple[int, float]] = {}  # leaf -> its token, log-probability

    def branch(self, leaves: Sequence[int], parents: Sequence[int]) -> None:
        """Draw the first token of each new leaf from what its parent's last token led to."""
        logits = []
        for parent in parents:
            last = self._nodes[parent].logits
            assert last is not None, f"node {parent} was expanded before it was complete"
            logits.append(last)
        self.draw(leaves, torch.stack(logits))

    def draw(self, leaves: Sequence[int], logits: Tensor) -> Choice:
        """Draw each leaf's next token, and note the value that the model states instead of it.

        Parameters
        ----------
        leaves : sequence of int
        logits : Tensor ``[leaves, vocabulary]``
        """
        choice = self._sampler.choose(logits)
        for row, n in enumerate(leaves):
            node = self._nodes[n]
            value = self._source.value_from_logits(self._problem, node.generated, logits[row])
            if value is not None:
                node.value = value
            self._waiting[n] = (choice.token[row], choice.logprob[row])
        return choice

    def feed(self, leaves: Sequence[int]) -> list[tuple[int, float]]:
        """Append to each leaf the token that was drawn for it; tokens and log-probabilities."""
        fed = [self._waiting.pop(n) for n in leaves]
        for n, (token, logprob) in zip(leaves, fed, strict=True):
            node = self._nodes[n]
            node.generated.append(token)
            node.tokens += 1
            node.logprob += logprob
        return fed

    def discard(self, n: int) -> None:
        """A leaf has ended: what was drawn for it is drawn anew for each of its children."""
        del self._waiting[n]
