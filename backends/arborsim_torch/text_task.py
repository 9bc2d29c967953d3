"""Problems in words as a task: prompts in tokens, ends of thoughts, and a judge of answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.play.judges import judge_named
from arborsim.play.problem_sets import ProblemSet
from arborsim_torch.reference.tasks import Problem, Readers, Task, Verdict


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


@dataclass(frozen=True)
class Asked:
    """The prompt of a problem in words, and its answer, which is empty without a judge."""

    prompt: str
    answer: str


class TextTask(Task):
    """Prompts, in the tokeniser's chat template if `chat` or if their recipe wants it.

    A thought ends with the token that completes a stop string, or after `thought_tokens`.  A
    reasoning ends with one of `eos_ids`, after a text that ends it, or after `max_tokens`.
    """

    def __init__(
        self,
        problems: ProblemSet,
        tokenizer: Any,
        eos_ids: Sequence[int],
        max_tokens: int,
        thought_tokens: int,
        stop: Sequence[str] = ("\n",),
        chat: bool = False,
    ) -> None:
        recipe = problems.recipe
        chat = chat or (recipe.chat and bool(getattr(tokenizer, "chat_template", None)))
        self.name, self.problems, self.tokenizer = problems.name, problems, tokenizer
        self._ids = [tuple(prompt_ids(tokenizer, prompt, chat)) for prompt in problems.prompts]
        for number, ids in enumerate(self._ids, 1):
            if not ids:
                raise UsageError(f"prompt {number} has no tokens")
        self._eos = frozenset(eos_ids)
        self._max_tokens, self.step_tokens = max_tokens, thought_tokens
        self._stop, self._ends = tuple(stop), recipe.ends
        # A stop string may be spread over several tokens, each of which has at least a byte of it.
        self._stop_tokens = max(len(text.encode()) for text in (*stop, *recipe.ends))
        self._stops: dict[tuple[int, ...], bool] = {}

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def problem(self, split: str, index: int) -> Problem:
        if not 0 <= index < len(self._ids):
            raise ValueError(f"there is no problem {index}: it has {len(self._ids)}")
        answers = self.problems.answers
        asked = Asked(self.problems.prompts[index], answers[index] if answers else "")
        return Problem(self.name, "prompts", index, self._ids[index], asked)

    def num_problems(self, split: str) -> int:
        return len(self._ids)

    def is_thought_end(
        self, problem: Problem, generated: Sequence[int], block_tokens: int = 0
    ) -> bool:
        own = block_tokens or len(generated)
        return (
            self._stopped(tuple(generated[-min(own, self._stop_tokens) :]))
            or own >= self.step_tokens
            or self.is_finished(problem, generated)
        )

    def _stopped(self, last: tuple[int, ...]) -> bool:
        """Whether a stop string is in the thought's last tokens, and so ends with the very last."""
        if last not in self._stops:
            text = self.tokenizer.decode(list(last))
            self._stops[last] = any(stop in text for stop in self._stop)
        return self._stops[last]

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        if generated[-1] in self._eos or len(generated) >= self.max_tokens:
            return True
        tail = self.text(generated[-self._stop_tokens :]) if self._ends else ""
        return any(end in tail for end in self._ends) and bool(self.answer_text(generated))

    def answer_text(self, generated: Sequence[int]) -> str | None:
        """The answer as the judge reads it; without a judge the last line that is not empty."""
        found = self.reading(generated)
        return None if found is None else found[0]

    def reading(self, generated: Sequence[int], truth: str = "") -> tuple[str, int] | None:
        """An answer, and the number of the token that it begins in; None if there is none."""
        judge = self.problems.judge or judge_named("exact")
        text = self._said(generated)
        found = judge.read(text, truth)
        if found is None:
            return None
        low, high = 0, len(generated)  # the fewest tokens whose text reaches beyond its beginning
        while low < high:
            middle = (low + high) // 2
            if len(self._said(generated[:middle])) > found.start:
                high = middle
            else:
                low = middle + 1
        return found.text, max(0, low - 1)

    def judge(self, problem: Problem, generated: Sequence[int]) -> Verdict:
        """The judge's opinion of the text so far; no path is ever known to be dead."""
        try:
            right = self.problems.right(problem.index, self._said(generated))
        except UsageError as error:
            raise UsageError(f"{error}, of problem {problem.index}") from error
        finished = bool(generated) and self.is_finished(problem, generated)
        left = 0 if finished else self.max_tokens - len(generated)
        return Verdict(bool(right), finished, False, float(bool(right)), left)

    def solution(self, problem: Problem) -> list[int]:
        """The right answer alone."""
        return list(self.tokenizer(problem.data.answer, add_special_tokens=False)["input_ids"])

    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int]:
        """No step is known but the answer."""
        return int(self.judge(problem, generated).correct), 1

    def readers(self, problem: Problem, generated: Sequence[int], start: int = 0) -> list[Readers]:
        """Raises `UsageError`: who reads words is unknown."""
        raise UsageError(f"{self.name}: which tokens later ones need is known of no text")

    def text(self, ids: Iterable[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def _said(self, generated: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(generated), skip_special_tokens=True))
