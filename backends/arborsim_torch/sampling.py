"""Choose tokens from logits, with probability and entropy, and the next token of every leaf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.recording import LiveNode
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sources import Source
from arborsim_torch.tiers.copies import to_device


@dataclass(frozen=True)
class Choice:
    """One entry per row of logits."""

    token: list[int]
    logprob: list[float]  #: of the token under the model itself (temperature 1), nats
    entropy: list[float]  #: of the model's distribution (temperature 1), nats


def entropies(logits: Tensor) -> Tensor:
    """Entropy of each row's distribution, nats; float32.

    Of a long vocabulary some rows at a time: in float32 those of a block take gigabytes.
    """
    together = max(1, _TOGETHER // max(1, logits.shape[-1]))
    if len(logits) > together:
        return torch.cat([entropies(part) for part in logits.split(together)])
    mass = torch.softmax(logits.float(), -1)
    entropy: Tensor = torch.special.entr(mass)
    return entropy.sum(-1).clamp_(min=0.0)


_TOGETHER = 1 << 24  # numbers


def scored(logits: Tensor, rows: np.ndarray, token: np.ndarray) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens after rows, both int ``[n]``, and each row's entropy, in nats.

    Float32 ``[n]`` and ``[rows of logits]``.
    """
    scores = torch.log_softmax(logits.float(), -1)
    mass = scores.exp()
    entropy = torch.linalg.vecdot(mass, scores).neg_().clamp_(min=0.0)
    if bool(entropy.isnan().any()):  # tokens that cannot come: 0 times minus infinity
        entropy = torch.special.entr(mass).sum(-1).clamp_(min=0.0)
    return scores[to_device(rows, logits.device), to_device(token, logits.device)], entropy


def nucleus(mass: Tensor, top_p: float) -> Tensor:
    """Probabilities ``[rows, vocabulary]``, 0 but for the most probable tokens that make `top_p`.

    Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", arXiv:1904.09751.  Of
    equally probable tokens the one with the lower id stays.
    """
    ranked, order = mass.sort(dim=-1, descending=True, stable=True)
    left_out = torch.zeros_like(order, dtype=torch.bool)  # the most probable one always stays
    left_out[..., 1:] = ranked.cumsum(-1)[..., :-1] >= top_p
    kept = ranked.masked_fill(left_out, 0.0)
    return torch.zeros_like(mass).scatter_(-1, order, kept)


class Sampler:
    """Seeded sampling; draws come from a generator on the host, so devices agree on them.

    Temperature 0 takes the most probable token.  With `top_p`, tokens are drawn from the most
    probable ones that make this much together (`nucleus`).
    """

    def __init__(self, temperature: float, seed: tuple[int, ...], top_p: float = 1.0) -> None:
        self.temperature, self.top_p = temperature, top_p
        state = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
        self._generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))

    @torch.inference_mode()
    def choose(self, logits: Tensor) -> Choice:
        """Choose one token per row of logits ``[rows, vocabulary]``."""
        scores = torch.log_softmax(logits.float(), -1)
        mass = scores.exp()
        entropy = torch.special.entr(mass).sum(-1).clamp_(min=0.0)
        if self.temperature == 0:
            token = scores.argmax(-1)
        else:
            if self.temperature != 1:
                mass = torch.softmax(scores.double() / self.temperature, -1)
            if self.top_p < 1:
                mass = nucleus(mass.double(), self.top_p)
            total = mass.double().cumsum(-1)
            draw = torch.rand(len(total), 1, generator=self._generator, dtype=torch.float64)
            draw = draw.to(total.device, non_blocking=True)
            token = torch.searchsorted(total, draw * total[:, -1:], right=True)
            token = token[:, 0].clamp_(max=total.shape[1] - 1)
        logprob = scores.gather(1, token[:, None])[:, 0]
        # One transfer for all three.
        packed = torch.stack([token.double(), logprob.double(), entropy.double()]).tolist()
        return Choice([int(t) for t in packed[0]], packed[1], packed[2])


class Draws:
    """Draws the tokens of one search, whose `nodes` go on growing."""

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
        """Draw each leaf's next token, and note the value that the model states instead of it."""
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
