"""Record tokens that any engine generated (teacher forcing): one pass over blocks, no decoding.

The recorder is the one that decodes (`EpisodeRecorder`); only its decoder and its draws differ.
`ForcedDecoder` computes a block of the given tokens at a time, so attention needs block x n, and
hands out one token's logits after the other.  `Given` draws the tokens that were given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.errors import UsageError
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import PREFILL_BLOCK, Observer, TreeDecoder
from arborsim_torch.prompts import CHAIN, read_lines
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sampling import Choice, Sampler, scored
from arborsim_torch.sources import Source

_MOST_VALUES = 1 << 28  # attention probabilities of a layer that a block may have
_LEAST_BLOCK = 16


@dataclass(frozen=True)
class Chain:
    """A prompt and what followed it.

    `ends` are the numbers of tokens after which its thoughts end, the last one all of them; empty
    if the file does not say.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    ends: tuple[int, ...] = ()
    correct: bool | None = None


def read_chains(
    path: Path, encode: Callable[[str, bool], list[int]], vocabulary: int
) -> list[Chain]:
    """The chains of a JSON-lines file; each line has "prompt" and "tokens", text or ids.

    `encode` gives the ids of a text, which is a prompt or not.  Raises `UsageError`, which names
    the file and the line that is wrong.
    """
    return [
        _Line(f"{path}, line {number}", entry, encode, vocabulary).chain()
        for number, entry in read_lines(path, CHAIN)
    ]


@dataclass(frozen=True)
class _Line:
    """One line of the file."""

    where: str
    entry: Any
    encode: Callable[[str, bool], list[int]]
    vocabulary: int

    def chain(self) -> Chain:
        tokens = self._ids("tokens")
        correct = self.entry.get("correct")
        if correct is not None and not isinstance(correct, bool):
            raise UsageError(f'{self.where}: "correct" is true, false or left out')
        return Chain(self._ids("prompt"), tokens, self._ends(len(tokens)), correct)

    def _ids(self, key: str) -> tuple[int, ...]:
        given = self.entry.get(key)
        if isinstance(given, str) and given:
            return tuple(self.encode(given, key == "prompt"))
        if not isinstance(given, list) or not given or not all(map(_is_whole, given)):
            raise UsageError(f'{self.where}: expected "{key}": text, or a list of token ids')
        wrong = [token for token in given if not 0 <= token < self.vocabulary]
        if wrong:
            raise UsageError(
                f'{self.where}: "{key}" has id {wrong[0]}, but the model knows 0 to '
                f"{self.vocabulary - 1}: was it made with another tokeniser?"
            )
        return tuple(given)

    def _ends(self, count: int) -> tuple[int, ...]:
        ends = self.entry.get("thoughts")
        if ends is None:
            return ()
        if isinstance(self.entry["tokens"], str):
            raise UsageError(f'{self.where}: "thoughts" counts tokens: give "tokens" as ids')
        whole = isinstance(ends, list) and all(map(_is_whole, ends)) and ends[-1:] == [count]
        if not whole or any(a >= b for a, b in pairwise([0, *ends])):
            raise UsageError(
                f'{self.where}: "thoughts" lists after how many tokens each thought ends, in '
                f"order, the last one {count}"
            )
        return tuple(ends)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class ForcedSource(Source):
    """Chains from a file, as problems whose answer is known.

    `base` decodes text, and says where thoughts end if the file does not.
    """

    def __init__(self, base: Source, chains: Sequence[Chain]) -> None:
        self._base, self.name = base, base.name
        self.chains = [chain if chain.ends else self._cut(chain) for chain in chains]
        self._ends = [frozenset(chain.ends) for chain in self.chains]
        self.max_tokens = max(len(chain.tokens) for chain in chains)

    def _cut(self, chain: Chain) -> Chain:
        problem = Problem(self.name, "forced", 0, chain.prompt, None)
        generated: list[int] = []
        ends = [0]
        for token in chain.tokens:
            generated.append(token)
            if self._base.is_thought_end(problem, generated, len(generated) - ends[-1]):
                ends.append(len(generated))
        if ends[-1] < len(generated):
            ends.append(len(generated))
        return replace(chain, ends=tuple(ends[1:]))

    def count(self, first: int) -> int | None:
        return max(0, len(self.chains) - first)

    def problem(self, index: int) -> Problem:
        return Problem(self.name, "forced", index, self.chains[index].prompt, None)

    def is_thought_end(self, problem: Problem, generated: Sequence[int], block_tokens: int) -> bool:
        return len(generated) in self._ends[problem.index]

    def is_finished(self, problem: Problem, generated: Sequence[int]) -> bool:
        return len(generated) == len(self.chains[problem.index].tokens)

    def correct(self, problem: Problem, generated: Sequence[int]) -> bool | None:
        return self.chains[problem.index].correct

    def answer(self, generated: Sequence[int]) -> str | None:
        return self._base.answer(generated)

    def text(self, ids: Sequence[int]) -> str:
        return self._base.text(ids)


class ForcedDecoder(TreeDecoder):
    """Does what `TreeDecoder` does for a chain whose tokens are known before.

    All thoughts are one node of the cache, so that blocks need not end where thoughts do.
    """

    def __init__(
        self, model: Any, observer: Observer | None, chain: Chain, cache: TieredCache | None = None
    ) -> None:
        heads, length = model.config.num_attention_heads, len(chain.prompt) + len(chain.tokens)
        block = max(_LEAST_BLOCK, min(PREFILL_BLOCK, _MOST_VALUES // (heads * length)))
        super().__init__(model, observer, block, cache)
        self._chain = chain
        self.fed = 0  #: tokens handed in
        self._first = 0  # the block's first row is what follows this number of tokens
        self._block = torch.empty(0)  # logits [rows, vocabulary]
        self._scores: list[tuple[float, float]] = []  # by row: log-probability of the next, entropy

    def prefill(
        self, token_ids: Sequence[int], on_block: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """See `TreeDecoder.prefill`."""
        logits = super().prefill(token_ids, on_block)
        self._keep(0, logits[None])
        return logits

    def open(self, node: int, parent: int) -> None:
        """A thought: the cache has one node for all of them."""

    def activate(self, leaves: Sequence[int]) -> None:
        """The chain is the only leaf."""

    def drop(self, node: int) -> None:
        """The chain needs all of its thoughts."""

    def thoughts(self, leaf: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """See `Observed`."""
        prompt = len(self._chain.prompt)
        borders = [0, *(prompt + end for end in (0, *self._chain.ends))]
        for node, (first, end) in enumerate(pairwise(borders)):
            if first < stop and start < end:
                yield node, max(first, start), min(end, stop)

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits after the next token, ``[1, vocabulary]``; a block is computed when it is due."""
        assert list(tokens) == [self._chain.tokens[self.fed]], "another token than the given one"
        if self.fed + 1 == self._first + len(self._block):
            if self.fed == 0:
                self.cache.open(1, 0)
                self.cache.activate([1])
            block = self._chain.tokens[self.fed : self.fed + self.prefill_block]
            self._keep(self.fed + 1, self._forward(np.array([block]), 0)[0])
        self.fed += 1
        return self._block[self.fed - self._first][None]

    def _keep(self, first: int, logits: Tensor) -> None:
        after = [*self._chain.tokens[first : first + len(logits)]]
        token = torch.tensor(after + [0] * (len(logits) - len(after)), device=logits.device)
        self._first, self._block = first, logits
        self._scores = list(zip(*(each.tolist() for each in scored(logits, token)), strict=True))

    def choice(self) -> Choice:
        """The next token of the chain; after the last one, any."""
        logprob, entropy = self._scores[self.fed - self._first]
        tokens = self._chain.tokens
        return Choice([tokens[self.fed] if self.fed < len(tokens) else 0], [logprob], [entropy])


class Given(Sampler):
    """Draws what a decoder was given."""

    def __init__(self, decoder: ForcedDecoder) -> None:
        super().__init__(0.0, (0,))
        self._decoder = decoder

    def choose(self, logits: Tensor) -> Choice:
        return self._decoder.choice()


@dataclass
class ForcedRecorder(EpisodeRecorder):
    """Records one chain of a `ForcedSource`; `search` is linear."""

    def _make_decoder(self) -> TreeDecoder:
        assert isinstance(self.source, ForcedSource)
        chain = self.source.chains[self.problem.index]
        decoder = ForcedDecoder(self.model, self.capture, chain, self.cache)
        self.sampler = Given(decoder)
        return decoder

    def run(self, problem: Problem) -> EpisodeResult:
        """Record the chain; its time is that of one long prompt."""
        done = super().run(problem)
        whole_s = done.prefill_s + done.decode_s
        tokens = done.prompt_tokens + done.tokens
        return replace(done, prompt_tokens=tokens, prefill_s=whole_s, decode_s=0.0, iterations=0)
