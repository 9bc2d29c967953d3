"""A shadow run decides exactly as a replay of the trace recorded in that same run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.play.backends import LiveFacts, LiveRequest, LiveResult, get_backend
from arborsim.play.episode import Cell
from arborsim.play.move_log import MoveLog
from arborsim.policies.registry import available, build
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import decide_all

NAMES = sorted(set(available()) - {"oracle"})


#: Settings of policies that would have nothing to do on searches this short.
SMALL = {"kivi": {"residual": "16", "group": "16"}}


class Collect:
    """A watch that keeps all results."""

    def __init__(self) -> None:
        self.results: list[LiveResult] = []
        self.facts: LiveFacts | None = None

    def began(self, facts: LiveFacts, episodes: int) -> None:
        self.facts = facts

    def wants(self, episode: int, cell: Cell) -> bool:
        return True

    def full_tokens(self, episode: int) -> int:
        return 0

    def running(self, episode: int, what: str, tokens: int) -> None:
        pass

    def finished(self, result: LiveResult) -> None:
        self.results.append(result)


@pytest.mark.parametrize(
    ("model", "search", "options", "lines", "episodes", "budget", "pinned"),
    [
        ("chain", "linear", {}, 24, 1, "260", True),
        ("game24", "tot-bfs", {"keep": 3, "children": 4}, 0, 2, "130", True),
        ("chain", "linear", {}, 16, 1, "70", False),  # less than the prompt
    ],
)
def test_plans_equal_those_of_the_replay(
    tmp_path: Path, model: str, search: str, options: dict[str, Any], lines: int, episodes: int,
    budget: str, pinned: bool,
) -> None:  # fmt: skip
    """Invariant 5: with the prompt pinned where that is the default, and with none pinned."""
    logs: dict[tuple[int, str], MoveLog] = defaultdict(MoveLog)
    loose = {} if pinned else {name: {"pin_prompt": "false"} for name in NAMES if name != "full"}
    policies = [build(name, {**SMALL.get(name, {}), **loose.get(name, {})}) for name in NAMES]
    cells = tuple(Cell(policy, Budget.parse(budget)) for policy in policies)
    request = LiveRequest(
        model=model, search=search, search_options=options, cells=cells, episodes=episodes,
        temperature=0.7, shadow=True, machine=Machine(load_profile("h100")),
        trace=tmp_path / "shadow.parquet", task_options={"lines": lines} if lines else {},
    )  # fmt: skip
    watch = Collect()
    backend: Any = get_backend("torch")
    backend.live(request, watch, meters=lambda episode, cell: (logs[episode, cell.policy.name],))
    decided = {(r.episode, r.policy): r for r in watch.results}
    moved = 0
    needs = frozenset().union(*(cell.policy.reads() for cell in cells))
    for number, episode in enumerate(TraceReader(request.trace).episodes(tuple(needs))):
        for cell in cells:
            name, live = cell.policy.name, decided[number, cell.policy.name]
            if live.infeasible:
                continue
            _, expected = decide_all(cell.policy, episode, live.budget_tokens)
            np.testing.assert_array_equal(logs[number, name].rows, expected, err_msg=name)
            moved += len(expected) > 0
    assert moved > episodes * len(cells) / 2  # most policies had to decide, in every search
