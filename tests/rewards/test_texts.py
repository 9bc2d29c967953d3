"""Where the steps of a path end in the tokens of a reward model, on subword tokenisers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.rewards.base import Thought
from arborsim_torch.rewards.texts import Reencoded, SharedIds, single_token
from tests.rewards.tiny_rewards import ALPHABET, BYTES, METASPACE, subword


def thought(prompt: str, steps: list[str]) -> Thought:
    """A path whose searched model has one token per character."""
    ids = [ord(character) for character in "".join(steps)]
    ends = [sum(map(len, steps[: i + 1])) for i in range(len(steps))]
    problem = Problem("any", "test", 0, tuple(map(ord, prompt)), None)
    return Thought(problem, ids, tuple(ends))


def characters(ids: Any) -> str:
    return "".join(map(chr, ids))


WORDS = st.text(ALPHABET, min_size=1, max_size=12).filter(lambda text: text.strip())


@pytest.mark.parametrize("tokenizer", [BYTES, METASPACE], ids=["bytes", "metaspace"])
@given(prompt=WORDS, steps=st.lists(WORDS, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_step_is_scored_where_its_token_is(tokenizer: Any, prompt: str, steps: list[str]) -> None:
    found = Reencoded(tokenizer, characters, "ки").by_step(thought(prompt, steps))
    text = prompt.rstrip() + " " + "\n".join(f"{step.strip()} ки" for step in steps)
    assert found.ids == tokenizer(text)["input_ids"]
    marker = tokenizer(" ки", add_special_tokens=False)["input_ids"]
    assert [found.ids[at] for at in found.steps] == [marker[-1]] * len(steps)
    assert found.steps == [i for i, token in enumerate(found.ids) if token == marker[-1]]


@pytest.mark.parametrize("tokenizer", [BYTES, METASPACE], ids=["bytes", "metaspace"])
@given(prompt=WORDS, steps=st.lists(WORDS, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_without_a_token_a_step_is_scored_at_its_last(
    tokenizer: Any, prompt: str, steps: list[str]
) -> None:
    found = Reencoded(tokenizer, characters).by_step(thought(prompt, steps))
    text = prompt.rstrip() + " " + "\n".join(step.strip() for step in steps)
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert len(spans) == len(found.ids)
    end = len(prompt.rstrip())
    for step, at in zip(steps, found.steps, strict=True):
        end += 1 + len(step.strip())
        assert spans[at][0] < end
        assert all(first >= end for first, _ in spans[at + 1 :])


def test_a_step_that_ends_with_the_token_gets_no_other() -> None:
    found = Reencoded(BYTES, characters, "ки").by_step(thought("a", ["b ки\n", "c"]))
    assert found.ids == BYTES("a b ки\nc ки")["input_ids"]


def test_a_tokeniser_that_joins_the_token_with_what_follows_is_refused() -> None:
    joining = subword("metaspace", ["1 ки\n1 ки\n", "a ки\nb ки\n"])
    with pytest.raises(UsageError, match=r"--reward-token ки: .* joins it"):
        Reencoded(joining, characters, "ки").by_step(thought("1", ["1", "1"]))


def test_shared_ids() -> None:
    path = Thought(Problem("any", "test", 0, (1, 2), None), [3, 4, 9, 5, 6], (3, 5))
    plain = SharedIds().whole(path)
    assert (plain.ids, plain.steps) == ([1, 2, 3, 4, 9, 5, 6], [6])
    marked = SharedIds(9).by_step(path)
    assert (marked.ids, marked.steps) == ([1, 2, 3, 4, 9, 5, 6, 9], [4, 7])
    bare = SharedIds().by_step(path)
    assert (bare.ids, bare.steps) == ([1, 2, 3, 4, 9, 5, 6], [4, 6])


def test_a_token_has_to_be_one() -> None:
    def ids(text: str) -> list[int]:
        return list(BYTES(text, add_special_tokens=False)["input_ids"])

    assert single_token(ids, "+", "--reward-label") == ids("+")[0]
    with pytest.raises(UsageError, match="--reward-token zq: it is 2 tokens of the vocabulary"):
        single_token(ids, "zq", "--reward-token")
    with pytest.raises(UsageError, match="is no token"):
        single_token(ids, "", "--reward-token")
