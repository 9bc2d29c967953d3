"""Where prompts, thought boundaries and rewards come from: a reference task, or plain prompts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim_torch.reference.tasks import Problem, Readers, Task
from arborsim_torch.rewards.base import Reward, Thought
from arborsim_torch.rewards.exact import OwnValue, Verifier

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
        return self.task.is_thought_end(problem, generated)

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


def prompt_ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """A prompt's token ids, in the tokeniser's chat template if `chat`: what a user says.

    Raises `UsageError`: the tokeniser has no chat template.
    """
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this model"
        raise UsageError(f"--chat: the tokeniser of {name} has no chat template: leave out --chat")
    said = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    return list(ids)


class PromptSource(Source):
    """Plain prompts, in the tokeniser's chat template if `chat`, whose thoughts have no reward.

    A thought ends with the token that completes a stop string, or after `thought_tokens`.
    """

    name = "prompts"

    def __init__(
        self,
        prompts: Sequence[str],
        tokenizer: Any,
        eos_ids: Sequence[int],
        max_tokens: int,
        thought_tokens: int,
        stop: Sequence[str] = ("\n",),
        chat: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = [tuple(prompt_ids(tokenizer, prompt, chat)) for prompt in prompts]
        for number, ids in enumerate(self._ids, 1):
            if not ids:
                raise UsageError(f"prompt {number} has no tokens")
        self._eos = frozenset(eos_ids)
        self.max_tokens = max_tokens
        self._thought_tokens = thought_tokens
        self._stop = tuple(stop)
        # A stop string may be spread over several tokens, each of which has at least a byte of it.
        self._stop_tokens = max(len(text.encode()) for text in stop)
        self._stops: dict[tuple[int, ...], bool] = {}

    def count(self, first: int) -> int | None:
        return max(0, len(self._ids) - first)

    def problem(self, index: int) -> Problem:
        return Problem(self.name, "prompts", index, self._ids[index], None)

    def is_thought_end(self, problem: Problem, generated: Sequence[int], block_tokens: int) -> bool:
        return (
            self._stopped(tuple(generated[-min(block_tokens, self._stop_tokens) :]))
            or block_tokens >= self._thought_tokens
            or self.is_finished(problem, generated)
        )

    def _stopped(self, last: tuple[int, ...]) -> bool:
        """Whether a stop string is in the thought's last tokens, and so ends with the very last."""
        if last not in self._stops:
            text = self._tokenizer.decode(list(last))
            self._stops[last] = any(stop in text for stop in self._stop)
        return self._stops[last]

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        return generated[-1] in self._eos or len(generated) >= self.max_tokens

    def answer(self, generated: Sequence[int]) -> str | None:
        """The last line that is not empty."""
        lines = self._tokenizer.decode(list(generated), skip_special_tokens=True).split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


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
