"""Where prompts, thought boundaries and rewards come from: a reference task, or plain prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.play.problem_sets import ProblemSet
from arborsim_torch.reference.tasks import Problem, Readers, Task
from arborsim_torch.rewards.base import Reward, Thought
from arborsim_torch.rewards.exact import OwnValue, Verifier
from arborsim_torch.text_task import TextTask

Value = float | None
Reading = list[Readers] | None


class Source(ABC):
    """Answers a recorder's questions about the text it generates.

    `generated` is all after the prompt.  A source that knows no better has no values, rewards,
    verdicts or readers.
    """

    name: str
    max_tokens: int

    @abstractmethod
    def count(self, first: int) -> int | None:
        """Problems from number `first` on; None for no end."""

    @abstractmethod
    def problem(self, index: int) -> Problem: ...

    @abstractmethod
    def is_thought_end(
        self, problem: Problem, generated: Sequence[int], block_tokens: int
    ) -> bool: ...

    @abstractmethod
    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool: ...

    @abstractmethod
    def text(self, ids: Sequence[int]) -> str: ...

    def value_from_logits(self, problem: Problem, generated: Sequence[int], logits: Any) -> Value:
        """The model's own value, if its next token would state it."""
        return None

    def reward(self, thought: Thought, rng: np.random.Generator) -> float:
        """Search value in [0, 1] at a boundary; NaN if there is none."""
        return math.nan

    def correct(self, problem: Problem, generated: Sequence[int]) -> bool | None:
        """Verdict on an answer; None if it cannot be judged."""
        return None

    def answer(self, generated: Sequence[int]) -> str | None:
        """The answer of a finished reasoning; None if it cannot be read."""
        return None

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int] | None:
        """How many needed steps are right, and how many there are; None if unknown."""
        return None

    def readers(self, problem: Problem, generated: Sequence[int], start: int) -> Reading:
        """Who reads each token of prompt and generated from number `start` on; None if unknown."""
        return None


class TaskSource(Source):
    """Problems of a reference task, rewarded by its verifier (with noise) or by the model itself.

    See `arborsim_torch.rewards.exact.Verifier`.
    """

    judged = True  #: whether answers have a verdict

    def __init__(
        self,
        task: Task,
        split: str = "test",
        noise: float = 0.0,
        dead_penalty: float = 1.0,
        floor: float = 0.0,
    ) -> None:
        self.task, self.split = task, split
        self.name = task.name
        self.max_tokens = task.max_tokens
        self.verifier = Verifier(task, noise, dead_penalty, floor)
        self._reward: Reward = self.verifier if task.value_readout is None else OwnValue()
        try:
            task.num_problems(split)
        except KeyError:
            raise UsageError(
                f"task {task.name} has no split {split!r}: use train or test"
            ) from None

    def count(self, first: int) -> int | None:
        available = self.task.num_problems(self.split)
        return None if available is None else max(0, available - first)

    def problem(self, index: int) -> Problem:
        try:
            return self.task.problem(self.split, index)
        except ValueError as error:
            raise UsageError(f"task {self.task.name}: {error}") from error

    def is_thought_end(self, problem: Problem, generated: Sequence[int], block_tokens: int) -> bool:
        return self.task.is_thought_end(problem, generated, block_tokens)

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        return self.task.is_finished(problem, generated)

    def value_from_logits(self, problem: Problem, generated: Sequence[int], logits: Any) -> Value:
        if not self.task.is_value_next(problem, generated):
            return None
        return float(self.task.value_from_model(logits))

    def reward(self, thought: Thought, rng: np.random.Generator) -> float:
        return self._reward.score([thought], rng)[0]

    def correct(self, problem: Problem, generated: Sequence[int]) -> bool | None:
        return self.task.judge(problem, generated).correct

    def answer(self, generated: Sequence[int]) -> str | None:
        return self.task.answer_text(generated)

    def text(self, ids: Sequence[int]) -> str:
        return self.task.text(ids)

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int] | None:
        return self.task.steps(problem, generated)

    def readers(self, problem: Problem, generated: Sequence[int], start: int) -> Reading:
        return self.task.readers(problem, generated, start)


class PromptSource(TaskSource):
    """Prompts as problems: thoughts have no reward, and answers a verdict only from a judge."""

    def __init__(
        self,
        problems: ProblemSet | Sequence[str],
        tokenizer: Any,
        eos_ids: Sequence[int],
        max_tokens: int,
        thought_tokens: int,
        stop: Sequence[str] = ("\n",),
        chat: bool = False,
    ) -> None:
        if not isinstance(problems, ProblemSet):
            problems = ProblemSet("prompts", tuple(problems))
        super().__init__(
            TextTask(problems, tokenizer, eos_ids, max_tokens, thought_tokens, stop, chat)
        )
        self.judged = problems.judge is not None

    def reward(self, thought: Thought, rng: np.random.Generator) -> float:
        return math.nan

    def correct(self, problem: Problem, generated: Sequence[int]) -> bool | None:
        return super().correct(problem, generated) if self.judged else None

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int] | None:
        return None

    def readers(self, problem: Problem, generated: Sequence[int], start: int) -> Reading:
        return None


class RandomSource(Source):
    """Random prompts for a model with random weights: only memory and time mean anything."""

    name = "random"

    def __init__(
        self, vocabulary: int, prompt_tokens: int, max_tokens: int, thought_tokens: int
    ) -> None:
        self.max_tokens = max_tokens
        self._vocabulary, self._prompt_tokens = vocabulary, prompt_tokens
        self._thought_tokens = thought_tokens

    def count(self, first: int) -> int | None:
        return None

    def problem(self, index: int) -> Problem:
        rng = np.random.default_rng([index, self._prompt_tokens])
        ids = tuple(rng.integers(0, self._vocabulary, self._prompt_tokens).tolist())
        return Problem(self.name, "random", index, ids, None)

    def is_thought_end(self, problem: Problem, generated: Sequence[int], block_tokens: int) -> bool:
        return block_tokens >= self._thought_tokens or self.is_finished(problem, generated)

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        return len(generated) >= self.max_tokens

    def reward(self, thought: Thought, rng: np.random.Generator) -> float:
        return float(rng.random())

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
