"""Small traces and grids, and a policy that fails when it is told to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from arborsim.policies.methods.baselines import StreamingLLM
from tests.helpers.traces import make_trace

#: Its traces have no vectors, which the authors' form reads.
H2O = '{ use = "h2o", set = { per = "shared" } }'
GRID = f"""
traces = ["a.parquet", "b.parquet"]
policies = [{H2O}, "oracle", {{ use = "streaming-llm", set = {{ sinks = [2, 4] }} }}]
budgets = [0.5, 0.01]
gpus = ["h100", "l40s"]

[[cells]]
policies = ["random"]
recalls = ["stage", "near"]
"""


def small(folder: Path, grid: str = GRID) -> Path:
    """A grid and its traces."""
    for seed, name in enumerate(("a", "b")):
        make_trace(folder / f"{name}.parquet", seed=seed, episodes=1)
    path = folder / "grid.toml"
    path.write_text(grid)
    return path


def files(folder: Path) -> dict[str, bytes]:
    """All that a folder holds, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True)
class Fails(StreamingLLM):
    """A policy with a mistake in it."""

    name: ClassVar[str] = "fails"

    def decide(self, view: Any, event: Any) -> Any:
        if os.environ.get("FAILS") == "1":
            raise ValueError("a mistake\nin two lines")
        return super().decide(view, event)

    def decide_run(self, *given: Any) -> Any:
        if os.environ.get("FAILS") == "1":
            raise ValueError("a mistake\nin two lines")
        return super().decide_run(*given)


@dataclass(frozen=True)
class Dies(StreamingLLM):
    """A policy that takes its process with it."""

    name: ClassVar[str] = "dies"

    def decide(self, view: Any, event: Any) -> Any:
        os._exit(3)

    def decide_run(self, *given: Any) -> Any:
        os._exit(3)
