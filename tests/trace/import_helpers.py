"""Small recordings in other formats, made up here, and what a trace says they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arborsim.machine.lookup import load_geometry
from arborsim.trace.episode import Episode
from arborsim.trace.importers.sources import Contents, Description, trace_info, write_trace
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind

#: Recordings by others, which are no part of this project: tests on them run where they lie.
RECORDINGS = Path(__file__).parents[3] / "shared" / "data"


def recording(name: str) -> Path:
    path = RECORDINGS / name
    if not path.is_file():
        pytest.skip(f"the recording {name} is not here")
    return path


def imported(
    path: Path, contents: Contents, out: Path, format: str = "test", **extra: Any
) -> TraceReader:
    """The trace of what was read."""
    about = Description(format, "task", "search", "lengths", {}, extra)
    info = trace_info(path, about, contents, load_geometry("llama-3.1-8b"))
    write_trace(contents, info, out)
    return TraceReader(out)


def rows(episode: Episode, kind: Kind) -> list[int]:
    return [row for row in range(episode.num_rows) if episode.kind[row] == kind]


def parents(episode: Episode) -> dict[int, int]:
    return dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))


def tokens_of(episode: Episode) -> dict[int, int]:
    """Own tokens per node, those without any included."""
    found = dict.fromkeys(parents(episode), 0)
    for row in episode.token_rows.tolist():
        found[int(episode.node[row])] += 1
    return found


def tot_problem(seed: int, steps: int = 3, keep: int = 2) -> dict[str, Any]:
    """A problem as the tree-of-thoughts program would log it, with equal proposals among others."""
    rng = random.Random(seed)
    ys, logged = [""], []
    for step in range(steps):
        new = [
            state + f"{step} then {rng.randrange(3)}" + rng.choice(["", " (left: é)"]) + "\n"
            for state in ys
            for _ in range(rng.randrange(1, 4))
        ]
        values = [rng.choice([0, 0.001, 1.002, 20.002, 60.0]) for _ in new]
        best = sorted(range(len(new)), key=lambda i: -values[i])[:keep]
        chosen = [new[i] for i in best]
        logged.append({"step": step, "x": f"{seed} 2 3", "ys": ys, "new_ys": new,
                       "values": values, "select_new_ys": chosen})  # fmt: skip
        ys = chosen
    return {"steps": logged, "idx": seed, "ys": ys, "infos": [{"r": rng.randrange(2)} for _ in ys]}


def tot_visits(seed: int, children: int = 3, deepest: int = 5) -> list[dict[str, Any]]:
    """A problem as the tree-of-thoughts program would log it, depth first, with equal actions."""
    rng = random.Random(seed)
    visits: list[dict[str, Any]] = []

    def visit(actions: list[str]) -> None:
        for _ in range(rng.randrange(children + 1)):
            if len(visits) == 30:
                return
            path = [*actions, rng.choice(["h1. taste", "v2. motor", "h3. aé"])]
            count = {name: rng.randrange(3) for name in ("sure", "maybe", "impossible")}
            info = {"r_letter": rng.random(), "r_word": rng.choice([0.0, 0.4, 1.0])}
            visits.append({"total_step": len(visits), "env_step": len(path), "actions": path,
                           "info": info, "count": count})  # fmt: skip
            if len(path) < deepest and (rng.random() < 0.3 or not count["impossible"]):
                visit(path)

    while not visits:
        visit([])
    return visits


def tot_samples(seed: int, samples: int = 4) -> dict[str, Any]:
    """A problem that the tree-of-thoughts program only sampled answers to."""
    rng = random.Random(seed)
    ys = [f"so\nAnswer: {rng.randrange(9)}" for _ in range(samples)]
    return {"idx": seed, "ys": ys, "infos": [{"r": rng.randrange(2)} for _ in ys]}


def nested_tree(seed: int, deepest: int = 4) -> dict[str, Any]:
    """A tree as `NestedTree(root="a.tree", value="v", tokens="n")` reads it."""
    rng = random.Random(seed)

    def node(depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {"text": f"node {rng.randrange(99)}", "n": rng.randrange(1, 9)}
        if rng.random() < 0.7:
            made["v"] = rng.choice([None, 0, 0.25, 1])
        if depth < deepest or rng.random() < 0.5:
            below = rng.randrange(4) if depth < deepest else 0
            made["children"] = [node(depth + 1) for _ in range(below)]
        return made

    return {"a": {"tree": node(0)}, "number": seed}


def deft_tree(seed: int, nodes: int = 12) -> dict[str, Any]:
    """A tree with ids in no particular order but for the root's."""
    rng = random.Random(seed)
    ids = [0, *rng.sample(range(1, 100), nodes - 1)]
    data: dict[str, Any] = {}
    for i, number in enumerate(ids):
        tokens = rng.randrange(1, 9)
        end = 0 if i == 0 else tokens
        if i:
            up = data[str(rng.choice(ids[:i]))]
            up["children"].append(number)
            end += up["end"]
        data[str(number)] = {"id": number, "value": tokens, "start": end - tokens + 1,
                             "end": end, "children": []}  # fmt: skip
    return {"incompleted": False, "prompt": f"sort {seed}", "data": data}


Change = Callable[[Any], None]
