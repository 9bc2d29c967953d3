"""A small workload that is planned in seconds; its machines are full with 24 searches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from arborsim.products.plan.plan import Planner
from arborsim.products.plan.results import PlanResult
from arborsim.products.plan.workload import Workload
from arborsim.products.plan.workload_file import parse_workload

SMALL = """
name = "small"
searches = 40
warm_up = 8
runs = 2

[model]
name = "llama-3.1-8b"

[[mix]]
name = "trees"
shared_prompt_tokens = 50

[mix.generated]
prompt_tokens = "uniform:low=100,high=900"
thought_tokens = "uniform:low=20,high=80"
depth = 3
first = 4
branching = 2
pruned = 0.5
solved = 0.5
searches = 4

[arrivals]
kind = "poisson"
rate_per_s = 20.0

[candidates]
gpus = ["rtx4090", "h100"]
policies = ["full", "streaming-llm"]
budgets = [0.5]

[serving]
max_searches = 24

[target]
percentile = 90
search = "20 s"
token = "60 ms"

[prices]
currency = "USD"

[prices.per_hour]
h100 = [2.0, 3.5]
"""


def small_workload(*changes: tuple[str, str]) -> Workload:
    """`SMALL`, with texts replaced by others."""
    text = SMALL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return parse_workload(text, Path())


@cache
def small_plan() -> PlanResult:
    """A real plan of the small workload."""
    return Planner(small_workload()).run()


def knowing(plan: PlanResult) -> Callable[..., PlanResult]:
    """`Planner.run` that evaluates no candidate anew: those of this plan are finished."""
    real = Planner.run

    def run(self: Planner, *called: Any) -> PlanResult:
        self.finished.update({each.number: each for each in plan.candidates})
        return real(self, *called)

    return run
