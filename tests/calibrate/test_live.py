"""What the model is asked, against plain transformers: no cache and no batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from arborsim.core.errors import UsageError  # noqa: E402
from arborsim.products.calibrate.backend import (  # noqa: E402
    Masking,
    MaskingRequest,
    ModelChoice,
    OcclusionRequest,
    get_calibrating_backend,
)
from arborsim.products.calibrate.bands import sliding_windows  # noqa: E402
from arborsim_torch import reference  # noqa: E402
from arborsim_torch.calibration import Reasoning, hidden_change  # noqa: E402

LINES = 4
CHOICE = ModelChoice(task_options={"lines": LINES}, batch=5)
REQUEST = OcclusionRequest(CHOICE, traces=1, window=6, stride=4, answer_tokens=6)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def world() -> Any:
    """The model under transformers' own attention, and its task."""
    return reference.load("chain", lines=LINES)


def nothing(what: str, done: int, total: int) -> None:
    pass


@torch.no_grad()
def slow_greedy(
    world: Any,
    fed: Sequence[int],
    prompt: int,
    cap: int,
    draft: Sequence[int],
    hidden: tuple[int, int] = (0, 0),
) -> list[int]:
    """Continue `fed` greedily, feeding everything anew whenever the draft was wrong.

    Tokens after position ``hidden[1]`` cannot read positions ``hidden[0] .. hidden[1] - 1``.  The
    result is that of one token at a time: the draft only says which tokens are tried at once.
    """
    model, task = world
    ids, draft = list(fed), list(draft)
    start, stop = hidden
    while True:
        tried = ids + draft
        n = len(tried)
        mask = torch.full((n, n), float("-inf")).triu(1)
        mask[stop:, start:stop] = float("-inf")
        logits = model(torch.tensor([tried]), attention_mask=mask[None, None]).logits[0]
        for best in logits[len(ids) - 1 :].argmax(-1).tolist():
            ids.append(best)
            if len(ids) - prompt >= cap or task.is_finished(None, ids[prompt:]):
                return ids[prompt:]
            if draft[:1] != [best]:
                draft = draft[1:]
                break
            draft = draft[1:]


def slow_answer(task: Any, generated: list[int]) -> list[int] | None:
    """The answer line, found by searching for its first word."""
    if task.vocab["?"] not in generated:
        return None
    line = generated[generated.index(task.vocab["?"]) :]
    return line if len(line) == 3 else None


@pytest.mark.parametrize("regenerate", ["answer", "rest"])
def test_labels_are_those_of_a_literal_occlusion(world: Any, regenerate: str) -> None:
    _, task = world
    request = replace(REQUEST, regenerate=regenerate)
    found = get_calibrating_backend().occlude(request, nothing)
    assert found.padding == "<pad>"
    outcomes = []
    for trace in found.traces:
        problem = task.problem("train", trace.problem)
        prompt = list(problem.prompt)
        whole = slow_greedy(world, prompt, len(prompt), task.max_tokens, task.solution(problem))
        assert task.judge(problem, whole).correct
        length = len(whole) - 3
        expected = []
        for first in range(0, max(1, length - 6 + 4), 4):
            stop = min(first + 6, length)
            fed = whole[:first] + [task.pad_id] * (stop - first) + whole[stop:length]
            fed = fed if regenerate == "answer" else fed[:stop]
            draft = whole[len(fed) :]
            again = slow_greedy(world, prompt + fed, len(prompt), length + 6, draft)
            expected.append(slow_answer(task, again) != whole[-3:])
        assert trace.flipped.tolist() == expected
        assert (trace.windows == sliding_windows(length, 6, 4)).all()
        outcomes += expected
    assert any(outcomes)
    assert not all(outcomes)


def test_hidden_change_is_that_of_plain_transformers(world: Any) -> None:
    plain, task = world
    problem = task.problem("train", 0)
    tokens = tuple(task.solution(problem))
    model, _ = reference.load("chain", lines=LINES)  # recording replaces a model's attention
    found = hidden_change(model, Reasoning(problem, tokens, len(tokens) - 3))
    outputs: list[Any] = []
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out))
        for layer in plain.model.layers
    ]
    with torch.no_grad():
        plain(torch.tensor([[*problem.prompt, *tokens]]))
    for hook in hooks:
        hook.remove()
    hidden = np.stack([(o[0] if isinstance(o, tuple) else o)[0].numpy() for o in outputs])
    change = np.linalg.norm(np.diff(hidden, axis=1), axis=-1).T
    expected = change[len(problem.prompt) - 1 : -3]
    assert found.shape == expected.shape
    assert found == pytest.approx(expected, rel=2e-3)


def test_masking_is_that_of_a_literal_mask(world: Any) -> None:
    _, task = world
    items, expected = [], []
    for number in range(2):
        problem = task.problem("train", number)
        prompt = list(problem.prompt)
        whole = task.reasoning(problem.data, range(LINES))  # needed lines, and others
        truth = whole[-3:]
        for lines in range(1, (len(whole) - 3) // 9):
            path = whole[: 9 * lines]
            end = len(prompt) + len(path)
            items.append(Masking(number, tuple(prompt), tuple(path), 9))
            expected.append([
                slow_answer(
                    task,
                    slow_greedy(
                        world, prompt + path, len(prompt), task.max_tokens, whole[len(path) :],
                        hidden,
                    ),
                ) == truth
                for hidden in ((0, 0), (end - 9, end))
            ])  # fmt: skip
    request = MaskingRequest(CHOICE, "train", "arborsim-chain", items)
    found = get_calibrating_backend().mask(request, nothing)
    assert np.stack([found.whole, found.masked], axis=1).tolist() == expected
    assert len({tuple(pair) for pair in expected}) > 1


def test_what_cannot_be_calibrated_is_refused() -> None:
    backend = get_calibrating_backend()
    with pytest.raises(UsageError, match="game24"):
        backend.occlude(replace(REQUEST, choice=ModelChoice("game24")), nothing)
    with pytest.raises(UsageError, match="no split"):
        backend.occlude(replace(REQUEST, split="tset"), nothing)
    with pytest.raises(UsageError, match="recorded on other, --model chain is arborsim-chain"):
        backend.mask(MaskingRequest(CHOICE, "train", "other", []), nothing)
    item = Masking(0, (1, 2, 3), (4,), 1)
    with pytest.raises(UsageError, match="problem 0 of the train split is not the one"):
        backend.mask(MaskingRequest(CHOICE, "train", "arborsim-chain", [item]), nothing)
