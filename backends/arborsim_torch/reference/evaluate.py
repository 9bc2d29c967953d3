"""Measure how well a reference model reasons, with its whole cache.

::

    python -m arborsim_torch.reference.evaluate chain --lines 40,64,96,112 --n 200
    python -m arborsim_torch.reference.evaluate game24 --n 269
    python -m arborsim_torch.reference.evaluate tail --lines 8,16,20 --n 200

prints a table and writes it as `accuracy.json` and `accuracy.md` next to the
weights.  Intervals are Clopper-Pearson, 95%.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from arborsim.core.statistics import clopper_pearson

from . import MODELS, get_task, load, weights_path
from .chain import ChainTask
from .decoder import Generation, generate
from .tail import TailTask
from .tasks import Problem, Task, Verdict

BEST_OF = 16
BEAM, CHILDREN = 5, 8
SAMPLED_PROBLEMS = 40  #: `chain`: problems on which sampling is measured


@dataclass(frozen=True)
class AccuracyRow:
    """One line of the accuracy table.

    Attributes
    ----------
    method, setting
        What was run on which problems.
    n, correct
        Number of problems, and of those solved.
    low, high
        95% interval of the accuracy.
    tokens
        Mean number of generated tokens of a reasoning (`chain`).
    seconds
        Wall time.
    """

    method: str
    setting: str
    n: int
    correct: float
    low: float
    high: float
    tokens: float
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of problems solved."""
        return self.correct / self.n


def make_row(
    method: str, setting: str, solved: Sequence[bool], tokens: float, began: float
) -> AccuracyRow:
    """Return the table's line for one outcome per problem."""
    correct = sum(map(bool, solved))
    seconds = time.perf_counter() - began
    interval = clopper_pearson(correct, len(solved))
    return AccuracyRow(method, setting, len(solved), correct, *interval, tokens, seconds)


def judge_all(
    task: Task, problems: Sequence[Problem], generations: Sequence[Generation]
) -> list[Verdict]:
    """Return the verdict on each problem's generation."""
    return [task.judge(p, g.tokens) for p, g in zip(problems, generations, strict=True)]


def sampled(
    model: Any, task: Task, problems: Sequence[Problem], seed: int, **options: Any
) -> tuple[list[list[bool]], float]:
    """Sample 16 reasonings per problem at temperature 1.

    Returns correctness per problem and sample, and the mean number of tokens.
    """
    many = [p for p in problems for _ in range(BEST_OF)]
    seeds = [(seed, p.index, k) for p in problems for k in range(BEST_OF)]
    made = generate(model, task, many, temperature=1.0, seeds=seeds, **options)
    right = [v.correct for v in judge_all(task, many, made)]
    groups = [right[i : i + BEST_OF] for i in range(0, len(right), BEST_OF)]
    return groups, float(np.mean([len(g.tokens) for g in made]))


def evaluate_chain(
    model: Any, task: ChainTask, lines: Sequence[int], n: int, seed: int, batch: int
) -> list[AccuracyRow]:
    """Greedy accuracy per program length; then, of `chain`, sampling on the first of them."""
    rows = []
    for count in lines:
        began = time.perf_counter()
        cap = get_task(task.name, lines=count).max_tokens
        problems = [task.problem("test", i, lines=count) for i in range(n)]
        made = generate(model, task, problems, max_tokens=cap, batch=batch)
        length = float(np.mean([len(g.tokens) for g in made]))
        right = [v.correct for v in judge_all(task, problems, made)]
        rows.append(make_row("greedy", f"{count} lines", right, length, began))
        print_row(rows[-1])
    if isinstance(task, TailTask):
        return rows
    count = lines[0]
    began = time.perf_counter()
    problems = [task.problem("test", i, lines=count) for i in range(min(n, SAMPLED_PROBLEMS))]
    groups, length = sampled(model, task, problems, seed, max_tokens=9 * count + 4, batch=batch)
    return rows + sampling_rows(f"{count} lines", groups, length, began)


def sampling_rows(
    setting: str, groups: list[list[bool]], tokens: float, began: float
) -> list[AccuracyRow]:
    """Return the lines "first sample" and "best of 16 by verifier"."""
    rows = [
        make_row("one sample, T=1", setting, [g[0] for g in groups], tokens, began),
        make_row(
            f"best of {BEST_OF} by verifier", setting, [any(g) for g in groups], tokens, began
        ),
    ]
    for row in rows:
        print_row(row)
    return rows


def evaluate_game24(model: Any, task: Task, n: int, seed: int, batch: int) -> list[AccuracyRow]:
    """Greedy, sampling, and trees of thoughts under two scores."""
    problems = [task.problem("test", i) for i in range(n)]
    setting = "held-out puzzles"
    began = time.perf_counter()
    greedy = generate(model, task, problems, batch=batch)
    tokens = float(np.mean([len(g.tokens) for g in greedy]))
    right = [v.correct for v in judge_all(task, problems, greedy)]
    rows = [make_row("greedy", setting, right, tokens, began)]
    print_row(rows[-1])
    began = time.perf_counter()
    groups, tokens = sampled(model, task, problems, seed, batch=batch)
    rows += sampling_rows(setting, groups, tokens, began)
    scores: dict[str, Callable[[Generation, float], float]] = {
        "log-probability": lambda thought, before: before + thought.logprob,
        "own Y/N value": lambda thought, before: thought.value or 0.0,
    }
    for name, score in scores.items():
        began = time.perf_counter()
        beams = tree_of_thoughts(model, task, problems, seed, score, batch)
        for what, width in (("best leaf", 1), (f"any of {BEAM} leaves", BEAM)):
            right = [
                any(task.judge(p, tokens).correct for tokens, _ in beam[:width])
                for p, beam in zip(problems, beams, strict=True)
            ]
            method = f"ToT b={BEAM} k={CHILDREN} by {name}, {what}"
            rows.append(make_row(method, setting, right, float(task.max_tokens - 1), began))
            print_row(rows[-1])
    return rows


def tree_of_thoughts(
    model: Any,
    task: Task,
    problems: Sequence[Problem],
    seed: int,
    score: Callable[[Generation, float], float],
    batch: int,
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Breadth-first search: sample 8 thoughts per state, keep the 5 best states.

    Parameters
    ----------
    score
        Of a new thought and its parent's score.

    Returns
    -------
    Per problem the final states, (tokens, score), best first.
    """
    beams: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)] for _ in problems]
    for level in range(3):
        work = [
            (row, tokens, before, (seed, level, problems[row].index, place, child))
            for row, beam in enumerate(beams)
            for place, (tokens, before) in enumerate(beam)
            if not task.is_finished(problems[row], tokens)
            for child in range(CHILDREN)
        ]
        thoughts = generate(
            model,
            task,
            [problems[row] for row, *_ in work],
            prefixes=[tokens for _, tokens, _, _ in work],
            temperature=1.0,
            seeds=[key for *_, key in work],
            stop=task.is_thought_end,
            batch=batch,
        )
        found: list[dict[tuple[int, ...], float]] = [{} for _ in problems]
        for (row, _, before, _), thought in zip(work, thoughts, strict=True):
            found[row][thought.tokens] = score(thought, before)
        beams = [sorted(states.items(), key=lambda s: (-s[1], s[0]))[:BEAM] for states in found]
    return beams


def print_row(row: AccuracyRow) -> None:
    """Print a line of the table."""
    print(
        f"{row.method:44s} {row.setting:18s} n={row.n:4d}  {100 * row.accuracy:5.1f}% "
        f"[{100 * row.low:.1f}, {100 * row.high:.1f}]  {row.tokens:6.1f} tokens"
        f"  {row.seconds:6.1f} s",
        flush=True,
    )


def markdown(rows: Sequence[AccuracyRow], record: dict[str, Any]) -> str:
    """Return the table as Markdown, with the command that makes it."""
    head = f"`{record['command']}`, {record['date']}, torch {record['versions']['torch']}, "
    lines = [
        head + f"seed {record['seed']}, {record['dtype']}, full cache, held-out problems.",
        "",
        "| method | problems | n | accuracy, % | 95% interval | reasoning tokens, mean |",
        "|---|---|---:|---:|---|---:|",
    ]
    lines += [
        f"| {r.method} | {r.setting} | {r.n} | {100 * r.accuracy:.1f} "
        f"| [{100 * r.low:.1f}, {100 * r.high:.1f}] | {r.tokens:.0f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="arborsim_torch.reference.evaluate", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--lines", help="program lengths; default 40,64,96,112 (tail: 8,16,20)")
    parser.add_argument("--n", type=int, help="problems; default 200, of game24 269")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batch", type=int, default=0, help="sequences at a time")
    parser.add_argument("--weights", type=Path, help="default: the shipped ones")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model, task = load(options.model, options.device, dtype, folder=options.weights)
    if isinstance(task, ChainTask):
        n = options.n or 200
        lengths = options.lines or ("8,16,20" if isinstance(task, TailTask) else "40,64,96,112")
        lines = [int(count) for count in lengths.split(",")]
        rows = evaluate_chain(model, task, lines, n, options.seed, options.batch or 50)
        what = f"{options.model} --lines {lengths} --n {n}"
    else:
        n = options.n or 269
        rows = evaluate_game24(model, task, n, options.seed, options.batch or 512)
        what = f"game24 --n {n}"
    record = {
        "command": f"python -m arborsim_torch.reference.evaluate {what} --seed {options.seed}",
        "date": datetime.date.today().isoformat(),
        "seed": options.seed,
        "dtype": options.dtype,
        "device": options.device,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    folder = options.weights or weights_path(options.model)
    table = [{**asdict(row), "accuracy": row.accuracy} for row in rows]
    (folder / "accuracy.json").write_text(json.dumps({**record, "rows": table}, indent=1) + "\n")
    (folder / "accuracy.md").write_text(markdown(rows, record))


if __name__ == "__main__":
    main()
