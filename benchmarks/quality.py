"""What evicting costs in answers: live runs of the reference models under policies.

    python benchmarks/quality.py cliff family grid arkv game24 --episodes 200 --out reports/quality

Tokens really are removed; every cell is a policy with settings and a budget, and all cells of an
experiment search the same held-out problems.  With ``--masked`` they are masked instead, which
answers the same and takes a part of the time (`arborsim_torch.masked`).  Finished searches
are kept (in JSON lines, or in the ``results.parquet`` that the page is made with), so a run goes on
where the last one stopped.  `benchmarks/quality_page.py` makes the tables.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult, get_backend
from arborsim.play.episode import Cell
from arborsim_torch.masked.drafts import search as search_masked
from arborsim_torch.reference import MODELS, Problem, Task

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.greedy import said_with_all
from benchmarks.quality_arms import EXPERIMENTS, Arm


class Collector:
    """Stores a line per search, and knows what an earlier run has stored."""

    def __init__(self, path: Path, arms: tuple[Arm, ...], masked: bool) -> None:
        self.path, self.arms, self.masked = path, arms, masked
        self.done: set[tuple[int, int]] = set()
        self.lengths: dict[int, int] = {}
        self._index = {id(cell): i for i, cell in enumerate(self.cells(arms))}
        self._begun = time.time()
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                row = json.loads(line)
                self.done.add((row["episode"], row["arm"]))
                self.lengths[row["episode"]] = row["full_tokens"]
        self._file = path.open("a")

    def cells(self, arms: tuple[Arm, ...]) -> tuple[Cell, ...]:
        self._cells = tuple(arm.cell() for arm in arms)
        return self._cells

    @property
    def request_cells(self) -> tuple[Cell, ...]:
        return self._cells

    def began(self, facts: LiveFacts, episodes: int) -> None:
        if not self.done and self._file.tell() == 0:
            head = {"facts": asdict(facts), "date": time.strftime("%Y-%m-%d"),
                    "arms": [asdict(arm) for arm in self.arms]}  # fmt: skip
            self._file.write(json.dumps(head) + "\n")

    def wants(self, episode: int, cell: Cell) -> bool:
        return (episode, self._index[id(cell)]) not in self.done

    def full_tokens(self, episode: int) -> int:
        return self.lengths.get(episode, 0)

    def take(self, cell: Cell, result: LiveResult) -> None:
        m = result.measured
        row = {
            "episode": result.episode, "arm": self._index[id(cell)], "correct": result.correct,
            "tokens": result.tokens, "full_tokens": result.full_tokens,
            "budget_tokens": result.budget_tokens, "infeasible": bool(result.infeasible),
            "peak_tokens": m.peak_hbm_kv_tokens, "evicted": m.evicted_tokens,
            "quantised": m.quantised_tokens, "offloaded": m.offloaded_tokens,
            "rehydrated": m.rehydrated_tokens, "peak_hbm_bytes": m.peak_hbm_kv_bytes,
            "peak_ddr_bytes": m.peak_ddr_bytes, "staging_bytes": m.peak_staging_bytes,
            "steps_right": result.steps_right, "steps": result.steps, "masked": self.masked,
        }  # fmt: skip
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def restore(name: str, arms: tuple[Arm, ...], out: Path) -> None:
    """Write the lines of an experiment that only ``results.parquet`` holds, so that a run goes on.

    Rows of arms that are no longer in the experiment are left out.
    """
    path, made = out / f"{name}.jsonl", out / "results.parquet"
    if path.exists() or not made.exists():
        return
    import pyarrow.parquet as pq

    table = pq.read_table(made)
    known = json.loads(table.schema.metadata[b"arborsim"]).get(name)
    if known is None:
        return
    numbers = {(arm.label, arm.budget, json.dumps(arm.settings)): i for i, arm in enumerate(arms)}
    lines = [json.dumps(known | {"arms": [asdict(arm) for arm in arms]})]
    for row in table.to_pylist():
        arm = numbers.get((row.pop("label"), row.pop("budget"), row.pop("settings")))
        if row.pop("experiment") == name and arm is not None:
            row.pop("policy")
            lines.append(json.dumps(row | {"arm": arm}))
    path.write_text("\n".join(lines) + "\n")


def run(
    name: str, episodes: int, batch: int, out: Path, only: list[str] | None = None,
    weights: str = "", masked: bool = False, give_up: bool = False,
) -> None:  # fmt: skip
    """One experiment, cell by cell: what is finished is on the disk.

    `only` names arms that are run, as ``"h2o@0.5"``, in their order; None for all.  `weights` is a
    folder with other weights of the experiment's task; `give_up` is of masked searches.
    """
    experiment = EXPERIMENTS[name]()
    search = experiment.search
    if weights:
        search = search | {"model": weights, "task": MODELS[search["model"]]}
    restore(name, experiment.arms, out)
    collector = Collector(out / f"{name}.jsonl", experiment.arms, masked)
    backend = _Masked(give_up, out) if masked else get_backend("torch")
    cells = {
        f"{arm.label}@{arm.budget}": (arm, cell)
        for arm, cell in zip(experiment.arms, collector.request_cells, strict=True)
    }
    if unknown := set(only or ()) - set(cells):
        raise UsageError(f"no arm {', '.join(sorted(unknown))}; there are {', '.join(cells)}")
    for arm, cell in (cells[each] for each in only or cells):
        watch = _Watch(collector, cell)
        begun = time.time()
        backend.live(LiveRequest(cells=(cell,), episodes=episodes, batch=batch, **search), watch)
        print(
            f"{name:10} {arm.label:24} {arm.budget:5} {watch.right}/{watch.judged} right, "
            f"{watch.infeasible} infeasible, {time.time() - begun:.0f} s",
            flush=True,
        )


class _Watch:
    """Hands the results of one cell on."""

    def __init__(self, collector: Collector, cell: Cell) -> None:
        self._collector, self._cell = collector, cell
        self.right = self.judged = self.infeasible = 0

    def began(self, facts: LiveFacts, episodes: int) -> None:
        self._collector.began(facts, episodes)

    def wants(self, episode: int, cell: Cell) -> bool:
        return self._collector.wants(episode, self._cell)

    def full_tokens(self, episode: int) -> int:
        return self._collector.full_tokens(episode)

    def running(self, episode: int, what: str, tokens: int) -> None:
        pass

    def finished(self, result: LiveResult) -> None:
        self._collector.lengths.setdefault(result.episode, result.full_tokens)
        self._collector.take(self._cell, result)
        self.infeasible += bool(result.infeasible)
        self.judged += result.correct is not None
        self.right += bool(result.correct)


class _Masked:
    """In place of the live backend: greedy searches under a mask, drafted by full retention.

    What that says is kept in `folder`.
    """

    def __init__(self, give_up: bool, folder: Path) -> None:
        self._give_up, self._folder = give_up, folder

    def live(self, request: LiveRequest, watch: _Watch) -> None:
        """Every missing problem; those of a batch must have prompts of one length.

        Raises
        ------
        UsageError
            A search that is not greedy.
        """
        from arborsim_torch.live.run import facts
        from arborsim_torch.models import load_model
        from arborsim_torch.sources import TaskSource

        if request.search != "linear" or request.temperature:
            raise UsageError("masked searches are greedy: run this experiment live")
        loaded = load_model(request.model, request.task, task_options=request.task_options)
        watch.began(facts(loaded, request), request.episodes)
        model, task = loaded.model.requires_grad_(False), loaded.task
        assert task is not None
        (cell,) = request.cells
        source = TaskSource(task, request.split)
        missing = [i for i in range(request.episodes) if watch.wants(i, cell)]
        for i, said in self._drafts(request, model, task, missing):
            problem = task.problem(request.split, i)
            hopeless = partial(_hopeless, task, problem) if self._give_up else None
            draft = () if cell.policy.name == "full" else said
            found = search_masked(model, source, problem, cell, task.max_tokens, draft, hopeless)
            watch.finished(found.result)

    def _drafts(
        self, request: LiveRequest, model: Any, task: Task, wanted: Sequence[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """Problems, and what full retention says of each."""
        of = json.dumps([request.model, request.task, request.split, dict(request.task_options)])
        path = self._folder / "drafts.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        own = known.setdefault(of, {})
        left = iter(wanted)
        while together := list(islice(left, request.batch)):
            if new := [i for i in together if str(i) not in own]:
                problems = [task.problem(request.split, i) for i in new]
                said = said_with_all(model, task, problems)
                own.update(zip(map(str, new), said, strict=True))
                path.write_text(json.dumps(known))
            yield from ((i, own[str(i)]) for i in together)


def _hopeless(task: Task, problem: Problem, said: Sequence[int]) -> bool:
    return task.judge(problem, said).dead


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("reports/quality"))
    parser.add_argument("--arm", action="append", help="only this arm, LABEL@BUDGET; repeatable")
    parser.add_argument("--masked", action="store_true", help="mask tokens instead of removing")
    parser.add_argument(
        "--give-up", action="store_true",
        help="masked searches end when they can no longer succeed; no steps are counted",
    )  # fmt: skip
    parser.add_argument("--weights", default="", help="a folder with other weights of the task")
    options = parser.parse_args()
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.experiments:
        try:
            run(
                name,
                options.episodes,
                options.batch,
                options.out,
                options.arm,
                options.weights,
                options.masked,
                options.give_up,
            )
        except UsageError as error:
            raise SystemExit(f"{name}: {error}") from error


if __name__ == "__main__":
    main()
