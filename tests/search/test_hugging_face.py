"""Refilled beams find the sequences that transformers' beam search finds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from arborsim.searches import make_search
from tests.search.bank import Bank, Run, drive

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY, END, PROMPT = 13, 5, [1, 7, 3]


def model_of(seed: int) -> Any:
    """A random model that ends now and then."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.35, bos_token_id=None, eos_token_id=END,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    model.lm_head.bias = torch.nn.Parameter(1.5 * torch.eye(VOCABULARY)[END])
    return model


@dataclass
class Tokens(Bank):
    """Thoughts of one token: every child of every path, rewarded by the model."""

    model: Any = None
    chances: bool = False  # rewards are probabilities, not their logarithms
    _after: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    def child(self, path: tuple[int, ...]) -> tuple[float, bool, bool]:
        *before, token = path
        above = tuple(before)
        if above not in self._after:
            with torch.inference_mode():
                logits = self.model(torch.tensor([PROMPT + before])).logits[0, -1]
            self._after[above] = torch.log_softmax(logits.double(), -1).tolist()
        reward = self._after[above][token]
        return (
            math.exp(reward) if self.chances else reward,
            token == END or (len(path) == self.depth),
            False,
        )

    def has(self, path: tuple[int, ...]) -> bool:
        return path[-1] < VOCABULARY


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("beams", "penalty"), [(1, 1.0), (2, 0.0), (3, 1.0), (4, 0.0), (5, 1.0)])
def test_the_same_sequences(seed: int, beams: int, penalty: float) -> None:
    """A length penalty of 1 is the mean log-probability, one of 0 the product of probabilities."""
    longest = 7
    prompt = torch.tensor([PROMPT])
    theirs = model_of(seed).generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, do_sample=False,
        max_new_tokens=longest, early_stopping=True, length_penalty=penalty,
        num_return_sequences=beams,
    )  # fmt: skip
    score = "mean" if penalty else "prod"
    run = beam(seed, beams, longest, refill=True, score=score)
    ended = {run.path[n] for n in run.seen if run.leaves[n].finished}
    sequences = [_trimmed(row[len(PROMPT) :].tolist()) for row in theirs]
    assert ended == set(sequences)
    assert run.path[run.answer[0]] == sequences[0]


def _trimmed(tokens: list[int]) -> tuple[int, ...]:
    """Without what stands behind the end."""
    return tuple(tokens[: tokens.index(END) + 1] if END in tokens else tokens)


def beam(seed: int, beams: int, longest: int, refill: bool, score: str) -> Run:
    bank = Tokens(seed, depth=longest, model=model_of(seed), chances=score == "prod")
    search: Any = make_search(
        "beam-4", width=beams * VOCABULARY, keep=beams, depth=longest, refill=refill, score=score,
        answer="best",
    )  # fmt: skip
    return drive(search, bank)


def test_refilling_matters() -> None:
    """Sequences end at different lengths, and without it beams find others."""
    lengths, differ = set(), 0
    for seed in range(6):
        refilled, plain = (
            {run.path[n] for n in run.seen if run.leaves[n].finished}
            for run in (beam(seed, 3, 7, refill, "mean") for refill in (True, False))
        )
        lengths |= {len(path) for path in refilled}
        differ += refilled != plain
    assert len(lengths) > 3
    assert differ > 3
