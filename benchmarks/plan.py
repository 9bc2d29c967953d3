"""How fast a plan is: 4 GPUs x 6 policies x 3 budgets, 1,000 searches per run.

Run on two cores: ``python benchmarks/plan.py [--jobs 2] [--runs 1] [--out plan.json]``.

The mix is that of the shipped example: beam searches and single chains, drawn from distributions.
`full` ignores budgets, so there are 4 x (1 + 5 x 3) = 64 candidates; each is tried at about ten
loads.  The policies need no signals and keep any search to such budgets: StreamingLLM with several
numbers of sinks, which decides after every iteration.  Printed are seconds by the clock and of the
processors.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

from arborsim.products.plan.plan import Planner
from arborsim.products.plan.workload import Workload
from arborsim.products.plan.workload_file import example_workload, parse_workload

_CANDIDATES = """
[candidates]
gpus = ["rtx4090", "a100-80", "h100", "h200"]
policies = [
    "full",
    "streaming-llm",
    { use = "streaming-llm", name = "16 sinks", set = { sinks = 16 } },
    { use = "streaming-llm", name = "64 sinks", set = { sinks = 64 } },
    { use = "streaming-llm", name = "128 sinks", set = { sinks = 128 } },
    { use = "streaming-llm", name = "96 sinks", set = { sinks = 96 } },
]
budgets = [0.75, 0.5, 0.25]
"""


def workload(runs: int) -> Workload:
    """The example with other candidates, and only the largest load sought."""
    before, _, after = example_workload().partition("[candidates]")
    text = before + _CANDIDATES + "[serving]" + after.partition("[serving]")[2]
    found = parse_workload(text.replace("rate_per_s = 0.5", ""), Path())
    return replace(found.with_run_length(1000, 100, runs), name="benchmark")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    chosen = parser.parse_args(arguments)
    planner = Planner(workload(chosen.runs), jobs=chosen.jobs)
    before_s = time.perf_counter()
    plan = planner.run()
    wall_s = time.perf_counter() - before_s
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    figures = {
        "python": platform.python_version(),
        "jobs": chosen.jobs,
        "runs": chosen.runs,
        "searches": plan.searches,
        "candidates": len(plan.candidates),
        "status": dict(Counter(each.status for each in plan.candidates)),
        "wall_s": round(wall_s, 1),
        "processor_s": round(sum(each.ru_utime + each.ru_stime for each in used), 1),
        "peak_rss_mb": round(max(each.ru_maxrss for each in used) / 1024),
    }
    print(json.dumps(figures, indent=1))
    print(plan.recommendation.text)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
