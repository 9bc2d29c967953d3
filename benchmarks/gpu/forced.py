"""The same search on two devices: one draws tokens and rewards, the other is told them.

Sampling and rewards depend on logits, whose last bits differ between devices, and one other token
makes another search.  What is left to compare is what the policies see, and what they decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arborsim_torch.live.setup import SearchSetup
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Choice, Sampler


@dataclass
class Tape:
    """Everything that was drawn in one search, in order.

    Attributes
    ----------
    tokens : list of list of int
        Per call of the sampler.
    rewards : list of float
    """

    tokens: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class TapedSampler:
    """Draws as another sampler does and writes it down."""

    def __init__(self, inner: Sampler, tape: Tape) -> None:
        self._inner, self._tape = inner, tape

    def choose(self, logits: Tensor) -> Choice:
        choice = self._inner.choose(logits)
        self._tape.tokens.append(choice.token)
        return choice


class ForcedSampler:
    """Takes the tokens of a tape; how likely they are is up to the logits at hand."""

    def __init__(self, tape: Tape) -> None:
        self._tokens: Iterator[list[int]] = iter(tape.tokens)

    @torch.inference_mode()
    def choose(self, logits: Tensor) -> Choice:
        token = next(self._tokens)
        chosen = torch.tensor(token, device=logits.device)[:, None]
        scores = torch.log_softmax(logits.float(), -1)
        entropy = torch.special.entr(scores.exp()).sum(-1).clamp_(min=0.0)
        return Choice(token, scores.gather(1, chosen)[:, 0].tolist(), entropy.tolist())


class TapedSource:
    """A source whose rewards are written down, or taken from the tape."""

    def __init__(self, inner: Any, tape: Tape, forced: bool) -> None:
        self._inner, self._tape = inner, tape
        self._rewards: Iterator[float] | None = iter(tape.rewards) if forced else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reward(self, *arguments: Any) -> float:
        if self._rewards is not None:
            return next(self._rewards)
        reward = float(self._inner.reward(*arguments))
        self._tape.rewards.append(reward)
        return reward


@dataclass(frozen=True)
class TapedSetup(SearchSetup):
    """A search that is written down (`forced` false), or that goes as an earlier one did."""

    tape: Tape = field(default_factory=Tape)
    forced: bool = False

    def recorder(self, *arguments: Any, **options: Any) -> EpisodeRecorder:
        made = super().recorder(*arguments, **options)
        taped = ForcedSampler(self.tape) if self.forced else TapedSampler(made.sampler, self.tape)
        made.sampler = taped  # type: ignore[assignment]
        made.source = TapedSource(made.source, self.tape, self.forced)
        return made
