"""Where prompts, thought boundaries and rewards come from: a reference task, or plain prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from arborsim.core.errors import UsageError
from arborsim_torch.reference.tasks import Problem, Readers, Task
from arborsim_torch.rewards.base import Reward, Thought
from arborsim_torch.rewards.exact import OwnValue, Verifier


class Source(Protocol):
    """What a recorder asks about the text it generates; `generated` is all after the prompt."""

    name: str
    max_tokens: int

    def count(self, first: int) -> int | None:
        """Problems from number `first` on; None for no end."""

    def problem(self, index: int) -> Problem: ...

    def is_thought_end(
        self, problem: Problem, generated: Sequence[int], block_tokens: int
    ) -> bool: ...

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool: ...

    def value_from_logits(
        self, problem: Problem, generated: Sequence[int], logits: Any
    ) -> float | None:
        """The model's own value, if its next token would state it."""

    def reward(
        self,
        problem: Problem,
        generated: Sequence[int],
        value: float | None,
        rng: np.random.Generator,
    ) -> float:
        """Search value in [0, 1] at a boundary; NaN if there is none."""

    def correct(self, problem: Problem, generated: Sequence[int]) -> bool | None:
        """Verdict on an answer; None if it cannot be judged."""

    def text(self, ids: Sequence[int]) -> str: ...

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int] | None:
        """How many needed steps are right, and how many there are; None if unknown."""

    def readers(
        self, problem: Problem, generated: Sequence[int], start: int
    ) -> list[Readers] | None:
        """Who reads each token of prompt and generated from number `start` on; None if unknown."""


class TaskSource:
    """Problems of a reference task, rewarded by its verifier (with noise) or by the model itself.

    Parameters
    ----------
    task : Task
    split : str
    noise, dead_penalty, floor : float
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

    def value_from_logits(
        self, problem: Problem, generated: Sequence[int], logits: Any
    ) -> float | None:
        if not self.task.is_value_next(problem, generated):
            return None
        return float(self.task.value_from_model(logits))

    def reward(
        self,
        problem: Problem,
        generated: Sequence[int],
        value: float | None,
        rng: np.random.Generator,
    ) -> float:
        thought = Thought(problem, generated, (len(generated),), value)
        return self._reward.score([thought], rng)[0]

    def correct(self, problem: Problem, generated: Sequence[int]) -> bool | None:
        return self.task.judge(problem, generated).correct

    def answer(self, generated: Sequence[int]) -> str | None:
        """What a finished reasoning answers."""
        return self.task.answer_text(generated)

    def text(self, ids: Sequence[int]) -> str:
        return self.task.text(ids)

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int] | None:
        return self.task.steps(problem, generated)

    def readers(
        self, problem: Problem, generated: Sequence[int], start: int
    ) -> list[Readers] | None:
        return self.task.readers(problem, generated, start)


class _Unjudged:
    """Text without values or verdicts."""

    def value_from_logits(
        self, problem: Problem, generated: Sequence[int], logits: Any
    ) -> float | None:
        return None

    def correct(self, problem: Problem, generated: Sequence[int]) -> bool | None:
        return None

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int] | None:
        return None

    def readers(
        self, problem: Problem, generated: Sequence[int], start: int
    ) -> list[Readers] | None:
        return None


def prompt_ids(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    """A prompt's token ids, in the tokeniser's chat template if `chat`: what a user says.

    Raises
    ------
    UsageError
        The tokeniser has no chat template.
    """
    if not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this model"
        raise UsageError(f"--chat: the tokeniser of {name} has no chat template: leave out --chat")
    said = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    return list(ids)


class PromptSource(_Unjudged):
    """Plain prompts, whose thoughts have no reward.

    A thought ends with the token that completes a stop string, or after `thought_tokens`.

    Parameters
    ----------
    prompts : sequence of str
    tokenizer
        Of transformers.
    eos_ids : sequence of int
    max_tokens, thought_tokens : int
    stop : sequence of str
    chat : bool
        Put prompts into the tokeniser's chat template.
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

    def reward(
        self,
        problem: Problem,
        generated: Sequence[int],
        value: float | None,
        rng: np.random.Generator,
    ) -> float:
        return float("nan")

    def answer(self, generated: Sequence[int]) -> str | None:
        """The last line that is not empty."""
        lines = self._tokenizer.decode(list(generated), skip_special_tokens=True).split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


class RandomSource(_Unjudged):
    """Random prompts for a model with random weights: only memory and time mean anything.

    Parameters
    ----------
    vocabulary : int
    prompt_tokens, max_tokens : int
    thought_tokens : int
        Length of a thought.
    """

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

    def reward(
        self,
        problem: Problem,
        generated: Sequence[int],
        value: float | None,
        rng: np.random.Generator,
    ) -> float:
        return float(rng.random())

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
