"""Experiments on judged answers: occlude a reasoning, or hide blocks of its cache.

The two experiments behind `arborsim calibrate`.  Both generate greedily, so results repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from transformers import LlamaForCausalLM

from arborsim.core.errors import UsageError
from arborsim.play.problem_sets import ProblemChoice, read_problems
from arborsim.products.calibrate import backend
from arborsim.products.calibrate.bands import sliding_windows
from arborsim_torch.capture import Capture
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.models import LoadedModel, eos_ids, load_model
from arborsim_torch.reference.chain import ANSWER_TOKENS, ChainTask
from arborsim_torch.reference.decoder import generate
from arborsim_torch.reference.tasks import PAD, Problem
from arborsim_torch.text_task import TextTask

_MOST_TRIES = 8  # problems tried per correct answer that is asked for
_MOST_TOKENS = 512  # of a reasoning in words, unless its recipe says otherwise

Judged = ChainTask | TextTask  #: answers of these can be judged, and told from the reasoning


@dataclass(frozen=True)
class Reasoning:
    """A correct greedy solution, and the number of tokens before its answer."""

    problem: Problem
    tokens: tuple[int, ...]
    length: int


def occlude(
    request: backend.OcclusionRequest, on_progress: backend.OnProgress
) -> backend.Occlusions:
    """Occlude every window of correct greedy reasonings (see `OcclusionRequest`).

    Occluded tokens become the vocabulary's padding token, at the same positions.
    """
    loaded, task = _load(request.choice)
    solved, tried = _solve(loaded, task, request, on_progress)
    windows = [
        sliding_windows(reasoning.length, request.window, request.stride) for reasoning in solved
    ]
    jobs = [
        (i, w, _occluded(solved[i], start, stop, task.pad_id, request.regenerate))
        for i in range(len(solved))
        for w, (start, stop) in enumerate(windows[i].tolist())
    ]
    # One batch holds contexts of one length; in order of length, such jobs are neighbours.
    jobs.sort(key=lambda job: (len(solved[job[0]].problem.prompt), len(job[2]), job[:2]))
    flipped = [np.zeros(len(own), dtype=bool) for own in windows]
    done = 0
    for _, same in groupby(jobs, key=lambda job: (len(solved[job[0]].problem.prompt), len(job[2]))):
        group = list(same)
        for at in range(0, len(group), request.choice.batch):
            part = group[at : at + request.choice.batch]
            made = generate(
                loaded.model,
                task,
                [solved[i].problem for i, _, _ in part],
                prefixes=[context for _, _, context in part],
                max_tokens=max(solved[i].length for i, _, _ in part) + request.answer_tokens,
                batch=request.choice.batch,
            )
            for (i, w, _), generation in zip(part, made, strict=True):
                cap = solved[i].length + request.answer_tokens
                answer = answer_of(task, solved[i].problem, generation.tokens[:cap])
                flipped[i][w] = answer != answer_of(task, solved[i].problem, solved[i].tokens)
            done += len(part)
            on_progress("occluding windows", done, len(jobs))
    traces = tuple(
        backend.OccludedTrace(r.problem.index, hidden_change(loaded.model, r), own, changed)
        for r, own, changed in zip(solved, windows, flipped, strict=True)
    )
    stands_in = PAD if isinstance(task, ChainTask) else task.text([task.pad_id])
    return backend.Occlusions(loaded.name, stands_in, tried, traces)


def mask(request: backend.MaskingRequest, on_progress: backend.OnProgress) -> backend.Maskings:
    """Continue after the end of each block, with and without its keys and values.

    Raises `UsageError`: the blocks were recorded on another model, or on other problems.
    """
    loaded, task = _load(request.choice)
    if loaded.name != request.recorded:
        raise UsageError(
            f"the trace was recorded on {request.recorded}, --model {request.choice.model} is "
            f"{loaded.name}"
        )
    problems = [_problem(task, request.split, item) for item in request.items]
    found = {lost: np.zeros(len(problems), dtype=bool) for lost in (False, True)}

    def key(i: int) -> tuple[int, int, int]:
        item = request.items[i]
        return len(problems[i].prompt), len(item.path), item.block_tokens

    order = sorted(range(len(problems)), key=key)
    done = 0
    for _, same in groupby(order, key=key):
        group = list(same)
        for at in range(0, len(group), request.choice.batch):
            part = group[at : at + request.choice.batch]
            for lost, right in found.items():
                made = generate(
                    loaded.model,
                    task,
                    [problems[i] for i in part],
                    prefixes=[request.items[i].path for i in part],
                    forget=[request.items[i].block_tokens if lost else 0 for i in part],
                    batch=request.choice.batch,
                )
                for i, generation in zip(part, made, strict=True):
                    right[i] = _right(task, problems[i], generation.tokens)
            done += len(part)
            on_progress("masking blocks", done, len(problems))
    return backend.Maskings(found[False], found[True])


def answer_of(task: Judged, problem: Problem, generated: Sequence[int]) -> object:
    """An answer, to compare with another one; None if there is none."""
    if isinstance(task, ChainTask):
        return answer_line(task, generated)
    found = task.reading(generated, problem.data.answer)
    return None if found is None else found[0]


def _right(task: Judged, problem: Problem, generated: Sequence[int]) -> bool:
    if isinstance(task, ChainTask):
        return answer_line(task, generated) == tuple(task.answer(problem.data))
    return task.judge(problem, generated).correct


def _length(task: Judged, problem: Problem, generated: Sequence[int]) -> int:
    """Tokens before the answer of a reasoning that has one."""
    if isinstance(task, ChainTask):
        return len(generated) - ANSWER_TOKENS
    found = task.reading(generated, problem.data.answer)
    return 0 if found is None else found[1]


def answer_line(task: ChainTask, generated: Sequence[int]) -> tuple[int, ...] | None:
    """The answer line that ends `generated`; None if it holds no complete one."""
    line = tuple(generated[-ANSWER_TOKENS:])
    return line if len(line) == ANSWER_TOKENS and line[0] == task.vocab["?"] else None


def hidden_change(model: Any, reasoning: Reasoning) -> np.ndarray:
    """``||h_l(t) - h_l(t-1)||`` of the tokens before the answer, as a recording stores it.

    Returns float16 ``[tokens, layers]``.
    """
    prompt = reasoning.problem.prompt
    body = reasoning.tokens[: reasoning.length]
    capture = Capture(top=1)
    decoder = TreeDecoder(model, capture)
    decoder.prefill([*prompt, *body])
    capture.drain(decoder)
    change: np.ndarray = capture.columns()["hidden_change"]
    return change[len(prompt) :]


def _load(choice: backend.ModelChoice) -> tuple[LoadedModel, Judged]:
    if choice.problems is not None:
        return _load_text(choice, choice.problems)
    options = choice.task_options
    loaded = load_model(choice.model, choice.task, choice.device, task_options=options)
    if not isinstance(loaded.task, ChainTask):
        raise UsageError(
            f"--model {choice.model}: calibration needs a task whose answers can be judged and "
            "told from the reasoning: chain (or --task chain for a folder with own weights), or a "
            "language model with judged --prompts"
        )
    return loaded, loaded.task


def _load_text(choice: backend.ModelChoice, named: ProblemChoice) -> tuple[LoadedModel, TextTask]:
    """A language model and its problems, whose occluded tokens are the tokeniser's unknown one."""
    problems = read_problems(named)
    if problems.judge is None:
        raise UsageError(f"--prompts {named.source}: calibration needs a --judge of answers")
    loaded = load_model(choice.model, "", choice.device)
    if loaded.tokenizer is None or not isinstance(loaded.model, LlamaForCausalLM):
        raise UsageError(
            f"--model {choice.model}: calibration with --prompts computes models of Llama's kind "
            "with a tokeniser, e.g. smollm2"
        )
    tokenizer = loaded.tokenizer
    tokens = problems.recipe.max_tokens or _MOST_TOKENS
    task = TextTask(problems, tokenizer, eos_ids(loaded), tokens, tokens)
    known = (tokenizer.unk_token_id, tokenizer.pad_token_id, *eos_ids(loaded))
    task.pad_id = next(each for each in known if each is not None)
    return loaded, task


def _solve(
    loaded: LoadedModel,
    task: Judged,
    request: backend.OcclusionRequest,
    on_progress: backend.OnProgress,
) -> tuple[list[Reasoning], int]:
    """The first correct greedy reasonings, and how many problems were tried."""
    solved: list[Reasoning] = []
    tried = 0
    while len(solved) < request.traces:
        if tried >= _MOST_TRIES * request.traces:
            raise UsageError(
                f"only {len(solved)} of {tried} problems were answered correctly, which is too few "
                f"for --traces {request.traces}: try shorter problems"
            )
        known = _num_problems(task, request.split)
        left = request.traces if known is None else known - request.first - tried
        count = min(request.traces - len(solved), left)
        if count < 1:
            raise UsageError(
                f"only {len(solved)} of the {tried} problems there are were answered correctly, "
                f"with enough before the answer: --traces {request.traces} needs more"
            )
        problems = [
            _any_problem(task, request.split, request.first + tried + k) for k in range(count)
        ]
        made = generate(loaded.model, task, problems, batch=request.choice.batch)
        tried += count
        solved += [
            Reasoning(problem, generation.tokens, length)
            for problem, generation in zip(problems, made, strict=True)
            if task.judge(problem, generation.tokens).correct
            and (length := _length(task, problem, generation.tokens)) > 0
        ]
        on_progress("solving problems", len(solved), request.traces)
    return solved, tried


def _occluded(
    reasoning: Reasoning, start: int, stop: int, pad: int, regenerate: str
) -> tuple[int, ...]:
    """The tokens that are fed: up to the answer, or up to the end of the window."""
    end = reasoning.length if regenerate == "answer" else stop
    return (*reasoning.tokens[:start], *[pad] * (stop - start), *reasoning.tokens[stop:end])


def _any_problem(task: Judged, split: str, index: int) -> Problem:
    try:
        return task.problem(split, index)
    except ValueError as error:
        raise UsageError(f"task {task.name}: {error}") from error
    except KeyError:
        raise _no_split(task, split) from None


def _num_problems(task: Judged, split: str) -> int | None:
    try:
        return task.num_problems(split)
    except KeyError:
        raise _no_split(task, split) from None


def _no_split(task: Judged, split: str) -> UsageError:
    return UsageError(f"task {task.name} has no split {split!r}: use train or test")


def _problem(task: Judged, split: str, item: backend.Masking) -> Problem:
    problem = _any_problem(task, split, item.problem)
    if problem.prompt != item.prompt:
        raise UsageError(
            f"problem {item.problem} of the {split} split is not the one that was recorded: the "
            "trace was made with other task options or other weights"
        )
    return problem
