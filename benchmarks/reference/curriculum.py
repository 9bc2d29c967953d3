"""Training examples and the order in which they come.

An example is a sequence of ids and, for each, its kind: whether it is trained
on, and in which column of the training curve its accuracy is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from arborsim_torch.reference import game24
from arborsim_torch.reference.chain import LINE_TOKENS, ChainTask
from arborsim_torch.reference.game24 import Game24Task
from arborsim_torch.reference.programs import MAX_LINES, NAMES, random_program, woven_program
from arborsim_torch.reference.tail import CHAINS, TailTask
from arborsim_torch.reference.tasks import Task

CONTEXT, DETERMINED, CHOICE, RECALL, FILLER = range(5)
KINDS = ("context", "determined", "choice", "recall", "filler")
POOL_BATCHES = 16  #: batches that are sorted by length together
USUAL_CHAIN = 0.7  #: `tail`: probability that a line's filler is the one that its label tells


class Example(NamedTuple):
    """A training sequence: ids and the kind of each, both of length T."""

    ids: list[int]
    kinds: list[int]


class TrainingBatch(NamedTuple):
    """Examples of similar length, padded at the right: arrays (batch, T)."""

    ids: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True)
class Stage:
    """One stage of a curriculum."""

    name: str  #: label in the training curve
    steps: int  #: most optimiser steps of the stage
    tokens: int  #: tokens per step, prompts and padding included
    #: rates at the start and the end of the stage; linear in between
    muon_lr: tuple[float, float]
    adam_lr: tuple[float, float]
    recall: float = 0.0  #: share of auxiliary look-up examples
    #: the stage ends early when the running accuracy on them exceeds this
    until_recall: float | None = None
    #: `chain`: fewest and most program lines, log-uniform in between
    lines: tuple[int, int] = (0, 0)
    #: `chain`: probabilities, one per trace, to evaluate a line although it is not needed
    keep: tuple[float, ...] = (0.0, 0.3, 0.6, 1.0)
    filler: float = 1.0  #: `tail`: probability that a line is followed by its filler


@dataclass(frozen=True)
class Recipe:
    """How one of the shipped models is made."""

    name: str  #: of the model
    task: str  #: what it learns
    stages: tuple[Stage, ...]  #: the curriculum
    #: heads that are planted to look back; see `benchmarks.reference.model`.  A chain line's
    #: operator can only be found by the label two tokens before it.
    look_back: int = 2
    #: shipped weights to begin from (`benchmarks.reference.model.grow`), None for new ones
    start: str | None = None
    config: dict[str, Any] = field(default_factory=dict)  #: overrides of the model's configuration


_MOSTLY_ALL = (0.3, 0.6, 1.0, 1.0)

_CHAIN = (
    Stage("recall", 600, 3000, (0.02, 0.02), (8e-3, 8e-3), 0.6, 0.9, (6, 14), _MOSTLY_ALL),
    Stage("6-14", 250, 3000, (0.02, 0.02), (8e-3, 8e-3), 0.1, None, (6, 14), _MOSTLY_ALL),
    Stage("14-32", 150, 3000, (0.02, 0.02), (8e-3, 8e-3), 0.05, None, (14, 32), _MOSTLY_ALL),
    Stage("32-64", 200, 3000, (0.02, 0.02), (8e-3, 8e-3), 0.0, None, (32, 64), _MOSTLY_ALL),
    Stage("64-112", 120, 3500, (0.02, 0.012), (8e-3, 4e-3), 0.0, None, (64, 112), _MOSTLY_ALL),
    Stage("24-125", 700, 4500, (0.012, 0.0), (4e-3, 0.0), 0.0, None, (24, MAX_LINES)),
)
_GAME24 = (
    Stage("warm", 600, 4000, (0.02, 0.02), (8e-3, 8e-3)),
    Stage("decay", 750, 5000, (0.02, 0.0), (8e-3, 0.0)),
)
_TAIL = (
    Stage("4-8", 64, 3000, (0.01, 0.01), (3e-3, 3e-3), lines=(4, 8)),
    Stage("4-16", 96, 3000, (0.01, 0.01), (3e-3, 3e-3), lines=(4, 16)),
    Stage("4-26", 144, 3600, (0.01, 0.01), (3e-3, 3e-3), lines=(4, 26)),
    Stage("decay", 720, 3600, (0.01, 0.0), (3e-3, 0.0), lines=(4, 26)),
)
_TAIL_DEEP = (
    Stage("4-12", 60, 3000, (0.01, 0.01), (3e-3, 3e-3), lines=(4, 12)),
    Stage("decay", 340, 3000, (0.01, 0.0), (3e-3, 0.0), lines=(4, 16)),
)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("chain", "chain", _CHAIN),
        Recipe("game24", "game24", _GAME24, look_back=1),
        Recipe("tail", "tail", _TAIL, start="chain"),
        Recipe("tail-deep", "tail", _TAIL_DEEP, start="tail", config={"num_hidden_layers": 24}),
    )
}


def chain_example(task: ChainTask, rng: np.random.Generator, stage: Stage) -> Example:
    """Draw a program and a trace of it: all that is needed and some more."""
    low, high = stage.lines
    lines = min(high, int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))
    program = random_program(rng, lines)
    keep = rng.choice(stage.keep)
    extra = rng.random(lines) < keep
    needed = set(program.needed)
    chosen: set[int] = set()
    for k in range(program.query + 1):
        ready = all(j < 0 or j in chosen for j in program.operands[k])
        if k in needed or (extra[k] and ready):
            chosen.add(k)
    prompt = task.prompt(program)
    reasoning = task.reasoning(program, sorted(chosen))
    kinds = [DETERMINED] * (len(reasoning) + 1)
    kinds[0 : LINE_TOKENS * len(chosen) : LINE_TOKENS] = [CHOICE] * len(chosen)
    return Example([*prompt, *reasoning, task.eos_id], [CONTEXT] * len(prompt) + kinds)


def tail_example(task: TailTask, rng: np.random.Generator, stage: Stage) -> Example:
    """Draw a program and its evaluation with filler; 30% of lines take a chain at random."""
    low, high = stage.lines
    program = woven_program(rng, int(rng.integers(low, high + 1)))
    prompt, reasoning, kinds = task.prompt(program), [], []
    for k in range(program.lines):
        line = task.line(program, k)
        reasoning += line
        kinds += [DETERMINED] * len(line)
        if rng.random() < stage.filler:
            usual = rng.random() < USUAL_CHAIN
            chain = task.chain_of(program, k) if usual else int(rng.integers(CHAINS))
            blocks = task.filler(program, k, chain)
            reasoning += blocks
            kinds += [CHOICE, *[FILLER] * (len(blocks) - 1)]
    ending = [*task.ending(program), task.eos_id]
    kinds += [DETERMINED] * len(ending)
    return Example([*prompt, *reasoning, *ending], [CONTEXT] * len(prompt) + kinds)


def recall_example(task: ChainTask, rng: np.random.Generator, stage: Stage) -> Example:
    """Draw a look-up exercise: repetition, pairs, or look-up two tokens back."""
    kind = rng.random()
    if kind < 0.2:
        half = rng.integers(3, task.vocab_size, rng.integers(10, 60)).tolist()
        kinds = [CONTEXT] * (len(half) + 2) + [RECALL] * (len(half) - 1)
        return Example([task.vocab.bos_id, *half, *half], kinds)
    return _recall_pairs(task, rng) if kind < 0.6 else _recall_two_back(task, rng)


def _recall_pairs(task: ChainTask, rng: np.random.Generator) -> Example:
    """Draw key-value pairs, then the keys again, each followed by its value.

    As in the task, operands that are shown as U are restated as v.
    """
    pairs = int(rng.integers(4, 40))
    key = "LMv"[rng.integers(3)]
    keys = rng.permutation(NAMES)[:pairs]
    values = rng.integers(0, 10 if key == "v" else NAMES, pairs)
    shown, asked = ("", "") if key == "v" else ("U", "v")
    words = [w for n, x in zip(keys, values, strict=True) for w in (f"{key}{n}", f"{shown}{x}")]
    order = rng.integers(0, pairs, pairs)
    words += [w for i in order for w in (f"{key}{keys[i]}", f"{asked}{values[i]}")]
    kinds = [CONTEXT] * (1 + 2 * pairs) + [CONTEXT, RECALL] * pairs
    return Example([task.vocab.bos_id, *task.vocab.encode(words)], kinds)


def _recall_two_back(task: ChainTask, rng: np.random.Generator) -> Example:
    """Draw exercises of the kind that a line's operator is: found by the label two before.

    Shown as ``L U value``, restated as ``L v digit value``: what stands between
    label and value is drawn anew, so that it is of no help.
    """
    count = int(rng.integers(4, 30))
    keys = rng.permutation(NAMES)[:count]
    operators = rng.random() < 0.5
    values = ["+-"[x % 2] if operators else f"M{x}" for x in rng.integers(0, NAMES, count)]
    words = []
    for n, value, between in zip(keys, values, rng.integers(0, NAMES, count), strict=True):
        words += [f"L{n}", f"U{between}", value]
    for i in rng.integers(0, count, count):
        words += [f"L{keys[i]}", f"v{rng.integers(NAMES)}", str(rng.integers(10)), values[i]]
    kinds = [CONTEXT] * (1 + 3 * count) + [CONTEXT, CONTEXT, CONTEXT, RECALL] * count
    return Example([task.vocab.bos_id, *task.vocab.encode(words)], kinds)


def game24_example(task: Game24Task, rng: np.random.Generator, stage: Stage) -> Example:
    """Draw a puzzle and a solution (60%), or random moves with choices not trained on."""
    solve = rng.random() < 0.6
    hand = _draw_hand(rng, solve)
    ids = task.prompt(hand)
    kinds = [CONTEXT] * len(ids)
    numbers = hand
    while len(numbers) > 1:
        options = _winning_moves(numbers) if solve else tuple(game24.moves(numbers))
        move = options[rng.integers(len(options))]
        line = task.line(numbers, move)
        choice = CHOICE if solve else CONTEXT
        ids += line
        kinds += [choice] * 3 + [DETERMINED] * (len(line) - 3)
        numbers = game24.remainder(numbers, move)
    return Example([*ids, task.eos_id], [*kinds, DETERMINED])


@functools.cache
def _winning_moves(numbers: tuple[int, ...]) -> tuple[game24.Move, ...]:
    moves = game24.moves(numbers)
    return tuple(move for move in moves if game24.solvable(game24.remainder(numbers, move)))


def _draw_hand(rng: np.random.Generator, solve: bool) -> tuple[int, ...]:
    """Draw four numbers ascending, that are no test puzzle; 30% are wide."""
    while True:
        if rng.random() < 0.3:
            hand = tuple(int(n) for n in np.sort(rng.integers(1, 21, 4)))
            if hand[-1] <= game24.HIGHEST_CARD or (solve and not game24.solvable(hand)):
                continue
        elif solve:
            train = game24.splits()["train"]
            hand = train[rng.integers(len(train))]
        else:
            hand = tuple(int(n) for n in np.sort(rng.integers(1, 14, 4)))
            if hand in game24.splits()["test"]:
                continue
        return hand


_MAKERS: dict[str, Callable[..., Example]] = {
    "chain": chain_example,
    "game24": game24_example,
    "tail": tail_example,
    "recall": recall_example,
}


def make_pool(task: Task, stage: Stage, seed: tuple[int, ...]) -> list[TrainingBatch]:
    """Return about 16 batches of stage.tokens tokens each, always the same for `seed`.

    Examples are sorted by length before they are cut into batches, which leaves
    next to no padding; the order of the batches is then shuffled.
    """
    rng = np.random.default_rng(seed)
    examples: list[Example] = []
    total = 0
    while total < POOL_BATCHES * stage.tokens:
        kind = "recall" if rng.random() < stage.recall else task.name
        examples.append(_MAKERS[kind](task, rng, stage))
        total += len(examples[-1].ids)
    examples.sort(key=lambda example: -len(example.ids))
    batches = list(_cut(examples, stage.tokens, task.pad_id))
    return [batches[i] for i in rng.permutation(len(batches))]


def _cut(examples: list[Example], tokens: int, pad_id: int) -> Iterator[TrainingBatch]:
    """Cut examples, longest first, into batches of at most `tokens` tokens (or one example)."""
    start = 0
    while start < len(examples):
        length = len(examples[start].ids)
        rows = examples[start : start + max(1, tokens // length)]
        ids = np.full((len(rows), length), pad_id, dtype=np.int64)
        kinds = np.full((len(rows), length), CONTEXT, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row.ids)] = row.ids
            kinds[i, : len(row.kinds)] = row.kinds
        yield TrainingBatch(ids, kinds)
        start += len(rows)
