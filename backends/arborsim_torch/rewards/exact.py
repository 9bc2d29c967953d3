"""Rewards without a model of their own: an exact verifier, and the searched model's own value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arborsim_torch.reference.tasks import Task, Verdict, noisy_value
from arborsim_torch.rewards.base import Thought


class Verifier:
    """The task's exact verifier, made worse by as much noise as is asked for.

    A task whose model states whether the goal can still be reached (`game24`) is verified on just
    that: 1 if it can, else 0.  Otherwise (`chain`) the truth is the progress made, rescaled from
    [0, 1] to [floor, 1], so that a state that is alive without progress is not taken for a dead
    one.  See `arborsim_torch.reference.noisy_value`.
    """

    def __init__(
        self, task: Task, noise: float = 0.0, dead_penalty: float = 1.0, floor: float = 0.0
    ) -> None:
        self._task = task
        self._noise, self._dead_penalty, self._floor = noise, dead_penalty, floor

    def score(self, thoughts: Sequence[Thought], rng: np.random.Generator) -> list[float]:
        scores = []
        for thought in thoughts:
            verdict = self._task.judge(thought.problem, thought.generated)
            known = replace(verdict, progress=self._known(verdict))
            scores.append(noisy_value(known, rng, self._noise, dead_penalty=self._dead_penalty))
        return scores

    def _known(self, verdict: Verdict) -> float:
        if self._task.value_readout is not None:
            return 1.0  # alive is all there is to know; `noisy_value` sees to the dead
        return self._floor + (1.0 - self._floor) * verdict.progress

    def usage(self) -> None:
        return None


class OwnValue:
    """The searched model's own value of its state, by the two tokens it may write next."""

    def score(self, thoughts: Sequence[Thought], rng: np.random.Generator) -> list[float]:
        # A line without its value token is broken: the model did not get to state one.
        return [0.0 if thought.value is None else thought.value for thought in thoughts]

    def usage(self) -> None:
        return None


class SourceReward:
    """The reward that the source of the problems gives by itself."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def score(self, thoughts: Sequence[Thought], rng: np.random.Generator) -> list[float]:
        return [float(self._source.reward(thought, rng)) for thought in thoughts]

    def usage(self) -> None:
        return None
