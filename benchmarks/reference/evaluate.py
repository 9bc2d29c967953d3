"""Measure how well a reference model reasons, with its whole cache.

::

    python -m benchmarks.reference.evaluate chain --lines 40,64,96,112 --n 200
    python -m benchmarks.reference.evaluate game24 --n 269
    python -m benchmarks.reference.evaluate tail --lines 8,16,20 --n 200

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from arborsim.core.statistics import clopper_pearson
from arborsim_torch.reference import MODELS, get_task, load, weights_path
from arborsim_torch.reference.chain import ChainTask
from arborsim_torch.reference.decoder import Generation, generate
from arborsim_torch.reference.tail import TailTask
from arborsim_torch.reference.tasks import Problem, Task, Verdict

BEST_OF = 16
BEAM, CHILDREN = 5, 8
SAMPLED_PROBLEMS = 40  #: `chain`: problems on which sampling is measured
_VERSIONS = {
    "python": platform.python_version(),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
}


@dataclass(frozen=True)
class AccuracyRow:
    """One line of the accuracy table: a method on some problems."""

    method: str
    setting: str
    n: int
    correct: int
    #: 95% interval of the accuracy
    low: float
    high: float
    tokens: float  #: mean number of generated tokens of a reasoning
    seconds: float  #: wall time
    accuracy: float

    def __str__(self) -> str:
        interval = f"[{100 * self.low:.1f}, {100 * self.high:.1f}]"
        return (
            f"{self.method:44s} {self.setting:18s} n={self.n:4d}  {100 * self.accuracy:5.1f}% "
            f"{interval}  {self.tokens:6.1f} tokens  {self.seconds:6.1f} s"
        )


@dataclass
class Evaluation:
    """Measures one model, and prints each row as it comes."""

    model: Any
    task: Task
    seed: int
    batch: int
    rows: list[AccuracyRow] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def add(self, method: str, setting: str, solved: Sequence[bool], tokens: float) -> None:
        """Add the row of one outcome per problem; its seconds are those since the row before."""
        correct, n = sum(map(bool, solved)), len(solved)
        seconds, self._began = time.perf_counter() - self._began, time.perf_counter()
        interval = clopper_pearson(correct, n)
        row = AccuracyRow(method, setting, n, correct, *interval, tokens, seconds, correct / n)
        self.rows.append(row)
        print(row, flush=True)

    def greedy(self, setting: str, problems: Sequence[Problem], max_tokens: int) -> None:
        made = generate(self.model, self.task, problems, max_tokens=max_tokens, batch=self.batch)
        right = [v.correct for v in judge_all(self.task, problems, made)]
        self.add("greedy", setting, right, _mean_tokens(made))

    def sampled(self, setting: str, problems: Sequence[Problem], max_tokens: int) -> None:
        """Sample 16 reasonings per problem at temperature 1."""
        many = [p for p in problems for _ in range(BEST_OF)]
        seeds = [(self.seed, p.index, k) for p in problems for k in range(BEST_OF)]
        options: dict[str, Any] = {"max_tokens": max_tokens, "batch": self.batch}
        made = generate(self.model, self.task, many, temperature=1.0, seeds=seeds, **options)
        right = [v.correct for v in judge_all(self.task, many, made)]
        groups = [right[i : i + BEST_OF] for i in range(0, len(right), BEST_OF)]
        self.add("one sample, T=1", setting, [group[0] for group in groups], _mean_tokens(made))
        best = f"best of {BEST_OF} by verifier"
        self.add(best, setting, [any(group) for group in groups], _mean_tokens(made))

    def searched(self, setting: str, problems: Sequence[Problem]) -> None:
        """Search trees of thoughts under two scores."""
        scores: dict[str, Callable[[Generation, float], float]] = {
            "log-probability": lambda thought, before: before + thought.logprob,
            "own Y/N value": lambda thought, before: thought.value or 0.0,
        }
        judge, tokens = self.task.judge, float(self.task.max_tokens - 1)
        for name, score in scores.items():
            beams = tree_of_thoughts(self.model, self.task, problems, self.seed, score, self.batch)
            found = [
                [judge(problem, tokens).correct for tokens, _ in beam]
                for problem, beam in zip(problems, beams, strict=True)
            ]
            by = f"ToT b={BEAM} k={CHILDREN} by {name}"
            self.add(f"{by}, best leaf", setting, [any(each[:1]) for each in found], tokens)
            self.add(f"{by}, any of {BEAM} leaves", setting, [any(each) for each in found], tokens)


def _mean_tokens(made: Sequence[Generation]) -> float:
    return float(np.mean([len(g.tokens) for g in made]))


def judge_all(
    task: Task, problems: Sequence[Problem], generations: Sequence[Generation]
) -> list[Verdict]:
    """Return the verdict on each problem's generation."""
    return [task.judge(p, g.tokens) for p, g in zip(problems, generations, strict=True)]


def tree_of_thoughts(
    model: Any,
    task: Task,
    problems: Sequence[Problem],
    seed: int,
    score: Callable[[Generation, float], float],
    batch: int,
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Breadth-first search: sample 8 thoughts per state, keep the 5 best states.

    `score` is of a new thought and its parent's score.  Returns per problem the final states,
    (tokens, score), best first.
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
    parser = argparse.ArgumentParser(prog="benchmarks.reference.evaluate", description=__doc__)
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
        n, tail = options.n or 200, isinstance(task, TailTask)
        lengths = options.lines or ("8,16,20" if tail else "40,64,96,112")
        what, evaluation = f" --lines {lengths}", Evaluation(model, task, options.seed, 50)
        evaluation.batch = options.batch or evaluation.batch
        for lines in map(int, lengths.split(",")):
            problems = [task.problem("test", i, lines=lines) for i in range(n)]
            most = get_task(task.name, lines=lines).max_tokens
            evaluation.greedy(f"{lines} lines", problems, most)
        if not tail:
            lines = int(lengths.split(",")[0])
            some = range(min(n, SAMPLED_PROBLEMS))
            problems = [task.problem("test", i, lines=lines) for i in some]
            evaluation.sampled(f"{lines} lines", problems, 9 * lines + 4)
    else:
        n, what = options.n or 269, ""
        evaluation = Evaluation(model, task, options.seed, options.batch or 512)
        setting, problems = "held-out puzzles", [task.problem("test", i) for i in range(n)]
        evaluation.greedy(setting, problems, task.max_tokens)
        evaluation.sampled(setting, problems, task.max_tokens)
        evaluation.searched(setting, problems)
    command = f"python -m benchmarks.reference.evaluate {options.model}{what} --n {n}"
    record = {
        "command": f"{command} --seed {options.seed}",
        "date": datetime.date.today().isoformat(),
        "seed": options.seed,
        "dtype": options.dtype,
        "device": options.device,
        "versions": _VERSIONS,
    }
    folder, rows = options.weights or weights_path(options.model), evaluation.rows
    table = {**record, "rows": [asdict(row) for row in rows]}
    (folder / "accuracy.json").write_text(json.dumps(table, indent=1) + "\n")
    (folder / "accuracy.md").write_text(markdown(rows, record))


if __name__ == "__main__":
    main()
