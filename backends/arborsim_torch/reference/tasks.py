"""The interface of the reference tasks: problems, verdicts, vocabularies.

A task is a family of problems whose reasoning is written line by line in a
small word-level language and can be checked exactly, token by token.  A search
needs no more than this module's `Task` to expand, score and stop.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

#: Seed words that keep the problem streams of the splits apart.
SPLIT_SEEDS = {"train": 0x7261696E, "test": 0x74657374}


@dataclass(frozen=True)
class Problem:
    """One problem: its prompt and the description its verifier needs."""

    #: the call that produced it; together with the task's options they determine everything else
    task: str
    split: str
    index: int
    prompt: tuple[int, ...]  #: token ids to feed before generation
    data: Any  #: frozen, task-specific description


@dataclass(frozen=True)
class Verdict:
    """An exact verifier's opinion of a (partial) reasoning."""

    correct: bool  #: finished with the right answer, every step valid
    finished: bool  #: an answer line or the end marker was produced
    dead: bool  #: provably can no longer succeed
    #: share of the needed steps that are done; on a dead path, before it died
    progress: float
    #: tokens of the shortest completion (the end marker not counted).  0 when finished or dead.
    remaining_tokens: int


@dataclass(frozen=True)
class ValueReadout:
    """The two tokens by which a model states its own value of a state."""

    yes_id: int
    no_id: int

    def probability(self, next_token_logits: Any) -> Any:
        """Return p(yes) given that one of the two tokens comes next.

        Logits are an array or tensor (..., vocab_size), just before the value token.
        """
        margin = next_token_logits[..., self.yes_id] - next_token_logits[..., self.no_id]
        if isinstance(margin, (np.ndarray, np.floating, float)):
            return 1.0 / (1.0 + np.exp(-np.asarray(margin, dtype=np.float64)))
        return margin.double().sigmoid()


#: Of one token: the step that the reasoning is at after it, then the steps that read it, ascending.
Readers = tuple[int, ...]


class Vocabulary:
    """A word-level tokeniser: one id per word, words separated by blanks."""

    def __init__(self, words: Sequence[str]) -> None:
        if len(set(words)) != len(words):
            raise ValueError("a vocabulary must not repeat a word")
        for special in (PAD, BOS, EOS):
            if special not in words:
                raise ValueError(f"the vocabulary lacks {special}")
        self.vocab = list(words)
        self._id = {word: index for index, word in enumerate(self.vocab)}
        self.pad_id, self.bos_id, self.eos_id = (self._id[w] for w in (PAD, BOS, EOS))

    def __len__(self) -> int:
        return len(self.vocab)

    def __getitem__(self, word: str) -> int:
        return self._id[word]

    def encode(self, words: Iterable[str]) -> list[int]:
        """Return the ids of `words`; raises KeyError on an unknown word."""
        return [self._id[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words of `ids`, separated by single blanks."""
        return " ".join(self.vocab[int(index)] for index in ids)

    def save(self, path: Path) -> None:
        """Write the vocabulary as plain JSON."""
        specials = {"pad_id": self.pad_id, "bos_id": self.bos_id, "eos_id": self.eos_id}
        path.write_text(json.dumps({**specials, "vocab": self.vocab}, indent=0) + "\n")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what `save` wrote."""
        return cls(json.loads(path.read_text())["vocab"])


class Task(ABC):
    """A family of problems over a word-level vocabulary, and all that a search asks of it.

    `generated` is always the list of token ids after the prompt.  A thought has at most
    `step_tokens` tokens.  `value_readout` says how the model states its own value, if it does.
    """

    name: str
    step_tokens: int
    value_readout: ValueReadout | None = None

    def __init__(self, vocab: Vocabulary) -> None:
        self.vocab = vocab
        self.vocab_size = len(vocab)
        self.eos_id = vocab.eos_id
        self.pad_id = vocab.pad_id

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """Default cap on generated tokens."""

    @abstractmethod
    def problem(self, split: str, index: int) -> Problem:
        """Return problem `index` of `split`: the same for the same arguments."""

    @abstractmethod
    def num_problems(self, split: str) -> int | None:
        """Return the number of problems of a split; None if unlimited."""

    @abstractmethod
    def is_thought_end(
        self, problem: Problem, generated: Sequence[int], block_tokens: int = 0
    ) -> bool:
        """Tell whether the last token closes a thought, which has had `block_tokens` if known."""

    @abstractmethod
    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        """Tell whether an answer was given or the end marker produced."""

    @abstractmethod
    def answer_text(self, generated: Sequence[int]) -> str | None:
        """Return what a finished reasoning answers, None if nothing: equal texts are one vote."""

    @abstractmethod
    def judge(self, problem: Problem, generated: Sequence[int]) -> Verdict:
        """Verify a (partial) reasoning exactly."""

    @abstractmethod
    def solution(self, problem: Problem) -> list[int]:
        """Return the ids of one shortest correct reasoning, end marker excluded."""

    @abstractmethod
    def steps(self, problem: Problem, generated: Sequence[int]) -> tuple[int, int]:
        """Return how many needed steps are written down right, wherever, and how many there are."""

    @abstractmethod
    def readers(self, problem: Problem, generated: Sequence[int], start: int = 0) -> list[Readers]:
        """Return who reads each token of prompt and generated, from number `start` on.

        A token is read at some steps of the reasoning; it is needed until the last of them.
        """

    def needed(self, problem: Problem, generated: Sequence[int]) -> np.ndarray:
        """Return which tokens later ones read; bool over prompt and generated."""
        rows = self.readers(problem, generated)
        now = rows[-1][0]
        return np.array([any(step >= now for step in steps) for _, *steps in rows])

    def is_value_next(self, problem: Problem, generated: Sequence[int]) -> bool:
        """Tell whether the model's own value token comes next."""
        return False

    def value_from_model(self, next_token_logits: Any) -> Any:
        """Return p(yes) from logits just before the value token, (..., vocab) to (...)."""
        if self.value_readout is None:
            raise ValueError(f"{self.name} models state no value; score states with noisy_value")
        return self.value_readout.probability(next_token_logits)

    def text(self, ids: Iterable[int]) -> str:
        """Return ids as words."""
        return self.vocab.decode(ids)


def noisy_value(
    verdict: Verdict, rng: np.random.Generator, noise: float, *, dead_penalty: float = 1.0
) -> float:
    """Return a reward of stated quality, in [0, 1]: the truth plus Gaussian noise.

    `noise` is its standard deviation, in units of progress: one needed line of a `chain` problem is
    1 / (number of needed lines), about 0.05-0.1.  One normal number is drawn per call.
    `dead_penalty` is the share of the progress that a dead path loses: 1 lets the reward see death,
    0 makes it blind to it.
    """
    if noise < 0 or not 0 <= dead_penalty <= 1:
        raise ValueError("noise must be >= 0 and dead_penalty in [0, 1]")
    truth = verdict.progress * (1.0 - dead_penalty) if verdict.dead else verdict.progress
    return float(min(1.0, max(0.0, truth + noise * rng.standard_normal())))
