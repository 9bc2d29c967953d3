"""Greedy searches under scores that are fixed when a token is born, as those of EpiKV are, masked.

A search keeps its prompt, its newest tokens and of the others those that score highest; above the
budget the lowest goes, at every step, and is masked from then on.  That decides as the policies do
(`tests/calibrate/test_epikv_claims.py` compares with live runs) in a fraction of their time.
Cumulative attention, which is not fixed, and chance are here to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from arborsim.core.tiers import Budget
from arborsim.signals.rolling import EPSILON
from arborsim_torch import reference
from arborsim_torch.reference import Problem, Task
from arborsim_torch.reference.decoder import generate
from benchmarks.claims import Row, Store
from benchmarks.claims.masked import Batch
from benchmarks.greedy import greedy

RECENT = 16  #: protected newest tokens
WINDOW = 64  #: of rolling statistics


@dataclass(frozen=True)
class Score:
    """What tokens rank by: a signal, or the difference of two.

    Attributes
    ----------
    plus, minus
        "key" and "value" (variances), "g0", "g1" ... (hidden-state change at a layer), "attention"
        (cumulative) or "random"; `minus` may be empty.
    smoothing
        "raw", "rolling-64" or "z-64", over generated tokens.
    """

    plus: str
    minus: str = ""
    smoothing: str = "raw"


@dataclass(frozen=True)
class Found:
    """One search: whether it was right, and needed steps that are written down right, and all.

    `tokens` were generated before it ended, or (without `whole`) could no longer succeed.
    """

    correct: bool
    steps_right: int
    steps: int
    tokens: int


class Signals:
    """Signals of generated tokens, float64 ``[rows, tokens]`` each."""

    def __init__(self, model: Any) -> None:
        self._outputs: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self.values: dict[str, list[torch.Tensor]] = {}
        inner = model.model
        # What a layer puts out is what the next one's norm, or the last norm, gets.
        norms = [*(layer.input_layernorm for layer in inner.layers[1:]), inner.norm]
        self._hooks = [norm.register_forward_pre_hook(self._take) for norm in norms]

    def _take(self, _norm: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        hidden = inputs[0]
        self._outputs.append(hidden[:, -1] if hidden.dim() == 3 else hidden)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def prompt(self) -> None:
        """The prompt was run: its last token is what the first generated one changes from."""
        self._before, self._outputs = self._outputs, []

    def token(self, batch: Batch) -> None:
        """A token was appended to every row."""
        outputs, self._outputs = self._outputs, []
        for layer, (now, before) in enumerate(zip(outputs, self._before, strict=True)):
            change = torch.linalg.vector_norm(now - before, dim=-1).double()
            self.values.setdefault(f"g{layer}", []).append(change)
        self._before = outputs
        at = batch.length - 1
        for name, cache in (("key", batch.keys), ("value", batch.values)):
            variance = [each[:, :, at].var(-1, unbiased=False).mean(1) for each in cache]
            self.values.setdefault(name, []).append(torch.stack(variance).double().mean(0))

    def keep(self, rows: list[int]) -> None:
        self._before = [each[rows] for each in self._before]
        self.values = {name: [v[rows] for v in own] for name, own in self.values.items()}

    def newest(self, name: str, smoothing: str) -> torch.Tensor:
        """The newest token's value, float64 ``[rows]``; 0 without a name."""
        if not name:
            return torch.zeros((), dtype=torch.float64)
        own = self.values[name]
        if smoothing == "raw":
            return own[-1]
        window = torch.stack(own[-WINDOW:])
        if smoothing == "rolling-64":
            return window.mean(0)
        if len(window) < 2:
            return torch.zeros_like(own[-1])
        return (own[-1] - window.mean(0)) / (window.std(0, unbiased=False) + EPSILON)


def search(
    model: Any, task: Task, problems: Sequence[Problem], score: Score, budget: str,
    full_tokens: Sequence[int], whole: bool = False,
) -> list[Found]:  # fmt: skip
    """Search greedily; prompts must be of one length.

    The budget is a share of `full_tokens`, what a search takes with everything kept, prompt
    included.  `whole` searches go on when they can no longer succeed.
    """
    signals = Signals(model)
    try:
        tokens = _search(
            model, signals, task, problems, score,
            [Budget.parse(budget).in_tokens(each) for each in full_tokens], whole,
        )  # fmt: skip
    finally:
        signals.close()
    found = []
    for problem, own in zip(problems, tokens, strict=True):
        verdict = task.judge(problem, own)
        right, steps = task.steps(problem, own)
        found.append(Found(verdict.finished and verdict.correct, right, steps, len(own)))
    return found


def _search(
    model: Any, signals: Signals, task: Task, problems: Sequence[Problem], score: Score,
    room: list[int], whole: bool,
) -> list[list[int]]:  # fmt: skip
    """The tokens of each search; `room` are the tokens that each may hold."""
    prompts = torch.tensor([each.prompt for each in problems])
    prompt = prompts.shape[1]
    batch = Batch(model, prompts, prompt + task.max_tokens, gradient=False)
    signals.prompt()
    draws = np.random.default_rng(problems[0].index)
    tokens: list[list[int]] = [[] for _ in problems]
    limit = np.array(room)
    ranks = np.zeros((len(problems), 0))  # of generated tokens
    for _, still, rows in greedy(batch, task, problems, tokens, give_up=not whole):
        if len(still) < len(limit):
            signals.keep(still)
            limit, ranks = limit[still], ranks[still]
        signals.token(batch)
        if score.plus == "attention":
            ranks = batch.attended[:, prompt : batch.length].numpy().copy()
        else:
            ranks = np.concatenate([ranks, _newest(signals, score, len(rows), draws)], axis=1)
        _evict(batch, ranks, limit)
    return tokens


def _newest(
    signals: Signals, score: Score, rows: int, draws: np.random.Generator
) -> np.ndarray:  # fmt: skip
    """What the newest tokens rank by, float64 ``[rows, 1]``."""
    if score.plus == "random":
        return draws.random((rows, 1))
    plus, minus = (signals.newest(name, score.smoothing) for name in (score.plus, score.minus))
    rank: np.ndarray = (plus - minus).numpy()[:, None]
    return rank


def _evict(batch: Batch, ranks: np.ndarray, limit: np.ndarray) -> None:
    """Mask the lowest of each search that holds more than it may; of equals the older."""
    prompt, end = batch.prompt, batch.length
    dead = batch.dead[:, :end].numpy()
    full = np.flatnonzero(end - dead.sum(axis=1) > limit)
    free = ~dead[full, prompt : end - RECENT]
    if not len(full) or not free.shape[1]:
        return
    values = np.where(free, ranks[full, : free.shape[1]], np.inf)
    lowest = values.argmin(axis=1)
    some = free.any(axis=1)
    batch.dead[torch.from_numpy(full[some]), torch.from_numpy(prompt + lowest[some])] = True


#: EpiKV inverted, z_B - z_A of layers 2 and 4: the paper's protocol refuses it on `chain`.
INVERTED = Score("g4", "g2", "z-64")
KEY = Score("key")
#: Model, program lines, score, budget and problems; what decides most first.
ANSWERS: tuple[tuple[str, int, Score, str, int], ...] = (
    ("chain", 32, KEY, "0.87", 200),
    ("chain", 32, INVERTED, "0.87", 200),
    ("chain", 32, Score("g4", "g2", "rolling-64"), "0.87", 50),
    ("chain", 32, INVERTED, "0.69", 50),
    ("chain", 32, KEY, "0.69", 50),
    ("chain", 32, INVERTED, "0.56", 50),
    ("tail", 16, Score("g2", smoothing="z-64"), "0.5", 50),
)
CHUNK = 50  # problems that are searched side by side


def answers(store: Store) -> None:
    """Right answers: a cell per score, budget and fifty problems (and one with all kept)."""
    torch.set_num_threads(1)
    loaded: dict[tuple[str, int], tuple[Any, Any]] = {}
    for name, lines, score, budget, episodes in ANSWERS:
        if (name, lines) not in loaded:
            model, task = reference.load(name, lines=lines)
            loaded[name, lines] = model.requires_grad_(False), task
        model, task = loaded[name, lines]
        for first in range(0, episodes, CHUNK):
            problems = [task.problem("test", first + i) for i in range(CHUNK)]
            at = {"model": name, "lines": lines, "first": first}
            store.cell("full", at, partial(_full, model, task, problems))
            kept = [row for row in store.rows if at.items() <= row.items()]
            tokens = {row["episode"]: row["tokens"] for row in kept if row["experiment"] == "full"}
            store.cell(
                "answers", {**at, **asdict(score), "budget": budget},
                partial(_masked, model, task, problems, score, budget, tokens, name != "chain"),
            )  # fmt: skip


def _full(model: Any, task: Any, problems: list[Problem]) -> Iterator[Row]:
    made = generate(model, task, problems, batch=CHUNK)
    for problem, own in zip(problems, made, strict=True):
        right, steps = task.steps(problem, own.tokens)
        yield {
            "episode": problem.index, "correct": task.judge(problem, own.tokens).correct,
            "steps_right": right / steps, "tokens": len(problem.prompt) + len(own.tokens),
        }  # fmt: skip


def _masked(
    model: Any, task: Any, problems: list[Problem], score: Score, budget: str,
    tokens: dict[int, int], whole: bool,
) -> Iterator[Row]:  # fmt: skip
    full = [tokens[problem.index] for problem in problems]
    found = search(model, task, problems, score, budget, full, whole)
    for problem, own in zip(problems, found, strict=True):
        yield {"episode": problem.index, "correct": own.correct,
               "steps_right": own.steps_right / own.steps, "generated": own.tokens}  # fmt: skip
