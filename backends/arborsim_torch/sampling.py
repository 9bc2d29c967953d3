"""Choose tokens from logits, and say how likely and how certain the choice was."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """One entry per row of logits.

    Attributes
    ----------
    token : list of int
    logprob : list of float
        Of the token under the model itself (temperature 1), nats.
    entropy : list of float
        Of the model's distribution (temperature 1), nats.
    """

    token: list[int]
    logprob: list[float]
    entropy: list[float]


def entropies(logits: Tensor) -> Tensor:
    """Entropy of each row's distribution, nats; float32."""
    mass = torch.softmax(logits.float(), -1)
    entropy: Tensor = torch.special.entr(mass)
    return entropy.sum(-1).clamp_(min=0.0)


class Sampler:
    """Seeded sampling; draws come from a generator on the host, so devices agree on them.

    Parameters
    ----------
    temperature : float
        0 takes the most probable token.
    seed : sequence of int
    """

    def __init__(self, temperature: float, seed: tuple[int, ...]) -> None:
        self.temperature = temperature
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
            total = mass.double().cumsum(-1)
            draw = torch.rand(len(total), 1, generator=self._generator, dtype=torch.float64)
            draw = draw.to(total.device, non_blocking=True)
            token = torch.searchsorted(total, draw * total[:, -1:], right=True)
            token = token[:, 0].clamp_(max=total.shape[1] - 1)
        logprob = scores.gather(1, token[:, None])[:, 0]
        # One transfer for all three.
        packed = torch.stack([token.double(), logprob.double(), entropy.double()]).tolist()
        return Choice([int(t) for t in packed[0]], packed[1], packed[2])
