"""From the path to a thought to the token ids that a reward model reads, and where it scores them.

A reward model with a tokeniser of its own reads the path's text, decoded and encoded again.  One
without reads the searched model's own token ids.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.errors import UsageError
from arborsim_torch.models import LoadedModel
from arborsim_torch.reference.tasks import BOS, EOS, PAD
from arborsim_torch.rewards.base import Thought

#: Text of token ids, without the tokens that only mark beginnings and ends.
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Encoded:
    """Token ids of a path, and the positions of those at which its steps end."""

    ids: list[int]
    steps: list[int]


def decoder_of(loaded: LoadedModel) -> Decode | None:
    """How the searched model's ids become text; None for random weights without words."""
    if loaded.task is not None:
        task = loaded.task
        marks = {task.vocab[mark] for mark in (PAD, BOS, EOS)}
        return lambda ids: task.text(i for i in ids if i not in marks)
    if loaded.tokenizer is None:
        return None
    return lambda ids: str(loaded.tokenizer.decode(list(ids), skip_special_tokens=True))


class SharedIds:
    """The searched model's own ids, for a reward model of the same vocabulary.

    The token `step_id`, if there is one, goes behind every step that does not end with it.
    """

    def __init__(self, step_id: int | None = None) -> None:
        self._step_id = step_id

    def whole(self, thought: Thought) -> Encoded:
        ids = [*thought.problem.prompt, *thought.generated]
        return Encoded(ids, [len(ids) - 1])

    def by_step(self, thought: Thought) -> Encoded:
        ids, steps, begin = list(thought.problem.prompt), [], 0
        for end in thought.ends:
            ids += thought.generated[begin:end]
            if self._step_id is not None and ids[-1] != self._step_id:
                ids.append(self._step_id)
            steps.append(len(ids) - 1)
            begin = end
        return Encoded(ids, steps)


class Reencoded:
    """The path's text, decoded, in the tokens of the reward model's own fast tokeniser.

    By step, the text is ``PROMPT STEP TOKEN\\nSTEP TOKEN``, as of Math-Shepherd (Wang et al. 2024):
    the step token, if there is one, goes behind every step that does not end with it.  As a whole
    it is a conversation if the tokeniser has a template for one: the prompt is what the user says,
    the reasoning what the assistant answers.
    """

    def __init__(self, tokenizer: Any, decode: Decode, step_token: str = "") -> None:
        self._tokenizer, self._decode, self._step_token = tokenizer, decode, step_token

    def whole(self, thought: Thought) -> Encoded:
        prompt, *steps = self._texts(thought)
        if getattr(self._tokenizer, "chat_template", None):
            talk = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": "".join(steps).strip()},
            ]
            text = self._tokenizer.apply_chat_template(talk, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(prompt + "".join(steps))["input_ids"]
        return Encoded(list(ids), [len(ids) - 1])

    def by_step(self, thought: Thought) -> Encoded:
        prompt, *steps = self._texts(thought)
        text, ends = prompt.rstrip(), []
        for number, step in enumerate(steps):
            step = step.strip()
            if self._step_token and not step.endswith(self._step_token):
                step = f"{step} {self._step_token}".strip()
            text += ("\n" if number else " ") + step
            ends.append(len(text))
        found = self._tokenizer(text, return_offsets_mapping=True)
        spans = found["offset_mapping"]
        places = _last_before(spans, ends)
        if self._step_token and any(
            spans[at][1] > end for at, end in zip(places, ends, strict=True)
        ):
            raise UsageError(
                f"--reward-token {self._step_token}: the reward model's tokeniser joins it with "
                "the line's end that follows, so that it is no token of its own"
            )
        return Encoded(list(found["input_ids"]), places)

    def _texts(self, thought: Thought) -> list[str]:
        """The prompt's text, then that of each step: together they are the path's."""
        prompt = thought.problem.prompt
        texts, before = [], ""
        for end in (0, *thought.ends):
            text = self._decode([*prompt, *thought.generated[:end]])
            texts.append(text[len(before) :])
            before = text
        return texts


def _last_before(spans: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """For each of the ascending `ends` the last token that begins before it.

    `spans` are the first character and the end of every token, empty for those not of the text.
    """
    tokens = [(first, at) for at, (first, end) in enumerate(spans) if first < end]
    begins = [first for first, _ in tokens]
    return [tokens[bisect_left(begins, end) - 1][1] for end in ends]


def single_token(encode: Callable[[str], Sequence[int]], text: str, option: str) -> int:
    """The one token that `text` is; `UsageError`: it is none, or several."""
    ids = list(encode(text))
    if len(ids) != 1:
        said = f"is {len(ids)} tokens" if ids else "is no token"
        raise UsageError(f"{option} {text}: it {said} of the vocabulary, but has to be one")
    return ids[0]


#: What a reward model reads of a thought: the path as one text (`whole`), or step by step.
Encoder = SharedIds | Reencoded
