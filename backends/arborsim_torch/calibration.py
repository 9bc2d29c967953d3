"""Experiments on a reference model: occlude its reasoning, or hide blocks of its cache.

The two experiments behind `arborsim calibrate`.  Both generate greedily, so results repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.products.calibrate import backend
from arborsim.products.calibrate.bands import sliding_windows
from arborsim_torch.capture import Capture
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.models import LoadedModel, load_model
from arborsim_torch.reference.chain import ANSWER_TOKENS, ChainTask
from arborsim_torch.reference.decoder import generate
from arborsim_torch.reference.tasks import PAD, Problem

_MOST_TRIES = 8  # problems tried per correct answer that is asked for


@dataclass(frozen=True)
class Reasoning:
    """A correct greedy solution; `tokens` ends with the answer line."""

    problem: Problem
    tokens: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens before the answer line."""
        return len(self.tokens) - ANSWER_TOKENS


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
                own = solved[i].tokens
                cap = solved[i].length + request.answer_tokens
                flipped[i][w] = answer_line(task, generation.tokens[:cap]) != own[-ANSWER_TOKENS:]
            done += len(part)
            on_progress("occluding windows", done, len(jobs))
    traces = tuple(
        backend.OccludedTrace(r.problem.index, hidden_change(loaded.model, r), own, changed)
        for r, own, changed in zip(solved, windows, flipped, strict=True)
    )
    return backend.Occlusions(loaded.name, PAD, tried, traces)


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
                    truth = tuple(task.answer(problems[i].data))
                    right[i] = answer_line(task, generation.tokens) == truth
            done += len(part)
            on_progress("masking blocks", done, len(problems))
    return backend.Maskings(found[False], found[True])


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


def _load(choice: backend.ModelChoice) -> tuple[LoadedModel, ChainTask]:
    options = choice.task_options
    loaded = load_model(choice.model, choice.task, choice.device, task_options=options)
    if not isinstance(loaded.task, ChainTask):
        raise UsageError(
            f"--model {choice.model}: calibration needs a task whose answers can be judged and "
            "told from the reasoning: chain (or --task chain for a folder with own weights)"
        )
    return loaded, loaded.task


def _solve(
    loaded: LoadedModel,
    task: ChainTask,
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
        count = request.traces - len(solved)
        problems = [
            _any_problem(task, request.split, request.first + tried + k) for k in range(count)
        ]
        made = generate(loaded.model, task, problems, batch=request.choice.batch)
        tried += count
        solved += [
            Reasoning(problem, generation.tokens)
            for problem, generation in zip(problems, made, strict=True)
            if task.judge(problem, generation.tokens).correct
        ]
        on_progress("solving problems", len(solved), request.traces)
    return solved, tried


def _occluded(
    reasoning: Reasoning, start: int, stop: int, pad: int, regenerate: str
) -> tuple[int, ...]:
    """The tokens that are fed: up to the answer, or up to the end of the window."""
    end = reasoning.length if regenerate == "answer" else stop
    return (*reasoning.tokens[:start], *[pad] * (stop - start), *reasoning.tokens[stop:end])


def _any_problem(task: ChainTask, split: str, index: int) -> Problem:
    try:
        return task.problem(split, index)
    except ValueError as error:
        raise UsageError(f"task {task.name}: {error}") from error
    except KeyError:
        raise UsageError(f"task {task.name} has no split {split!r}: use train or test") from None


def _problem(task: ChainTask, split: str, item: backend.Masking) -> Problem:
    problem = _any_problem(task, split, item.problem)
    if problem.prompt != item.prompt:
        raise UsageError(
            f"problem {item.problem} of the {split} split is not the one that was recorded: the "
            "trace was made with other task options or other weights"
        )
    return problem
