"""What runs out first: space once searches wait for it, else what is busy most of the time."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import pytest

from arborsim.machine.report import Utilisation
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.runs import Bench, Run, mean_shares, runs_out, used_shares
from arborsim.products.plan.words import first_out
from tests.plan.make import small_plan, small_workload


@cache
def real_run() -> Run:
    """At a load that the machine carries with ease."""
    workload = small_workload()
    bench = Bench(workload, workload.hardware[0], Planner(workload).demands_of(0))
    found = bench.run(0.2, 0)
    assert found is not None
    return found


def run(
    first_s: dict[str, float] | None = None, queue: float = 0.0, preemptions: int = 0, **used: float
) -> Run:
    """The real run with other figures: 10 searches in the machine on average, 32 measured."""
    base = real_run()
    none = Utilisation(*(0.0 for _ in fields(Utilisation)))
    busy = replace(base.report.busy, prefill_s=0.0, recompute_s=0.0)
    used_ = replace(none, **used)
    report = replace(base.report, first_s=first_s or {}, used=used_, busy=busy, joined_s=0.0)
    return replace(base, report=report, queue=queue, concurrency=10.0, preemptions=preemptions)


def test_a_real_run_with_little_to_do_is_bound_by_memory_bandwidth() -> None:
    assert not real_run().report.first_s
    assert runs_out([real_run()]) == "memory"


@pytest.mark.parametrize(
    ("queue", "preemptions", "expected"),
    [(0.0, 0, "memory"), (0.1, 0, "memory"), (0.102, 0, "hbm"), (0.0, 1, "hbm")],
)
def test_space_runs_out_once_searches_wait_for_it(
    queue: float, preemptions: int, expected: str
) -> None:
    """0.1 waiting next to 10 is just below 1% of their time; 1 of 32 lost its place."""
    assert len(real_run().measured) == 32
    found = run({"hbm": 3.0}, queue, preemptions, memory=0.9, hbm=0.6)
    assert runs_out([found]) == expected


def test_of_several_kinds_of_space_the_first_one_counts() -> None:
    assert runs_out([run({"hbm": 3.0, "host": 2.0}, 1.0, memory=0.9)]) == "host"
    assert runs_out([run({"searches": 1.0, "hbm": 3.0}, 1.0, memory=0.9)]) == "searches"


def test_waiting_for_iterations_is_no_lack_of_space() -> None:
    assert runs_out([run({}, 1.0, memory=0.3, compute=0.4)]) == "compute"


@pytest.mark.parametrize("name", ["compute", "memory", "pcie_down", "pcie_up"])
def test_else_it_is_what_is_busy_most_of_the_time(name: str) -> None:
    shares = {"compute": 0.3, "memory": 0.3, "pcie_down": 0.3, "pcie_up": 0.3, "hbm": 0.9}
    assert runs_out([run(**(shares | {name: 0.4}))]) == name


def test_prompts_count_as_computing() -> None:
    base = run(compute=0.2, memory=0.5)
    report = base.report
    busy = replace(report.busy, prefill_s=0.3 * report.total_s, recompute_s=0.1 * report.total_s)
    found = replace(base, report=replace(report, busy=busy))
    assert used_shares(found.report).compute == pytest.approx(0.6)
    assert used_shares(found.report).memory == 0.5
    assert runs_out([found]) == "compute"
    joined = replace(found.report, joined_s=0.3 * report.total_s)
    assert used_shares(joined).compute == pytest.approx(0.3), "parts in iterations count once"


def test_runs_that_disagree_are_decided_together() -> None:
    """Two runs can each name another one: what counts is their sum, in either order."""
    compute, memory = run(compute=0.6, memory=0.5), run(compute=0.2, memory=0.5)
    assert [runs_out([each]) for each in (compute, memory)] == ["compute", "memory"]
    assert runs_out([compute, memory]) == runs_out([memory, compute]) == "memory"
    assert mean_shares([compute, memory]).compute == pytest.approx(0.4)


@pytest.mark.parametrize(("queue", "expected"), [(0.2, "memory"), (0.21, "hbm")])
def test_waiting_is_summed_over_runs(queue: float, expected: str) -> None:
    """0.2 waiting in one run next to 10 in each of two is just below 1% of all their time."""
    waits, not_ = run({"hbm": 3.0}, queue, memory=0.9), run(memory=0.9)
    assert runs_out([waits]) == "hbm"
    assert runs_out([waits, not_]) == runs_out([not_, waits]) == expected


def test_preemptions_are_summed_over_runs() -> None:
    """1 of 64 searches is more than 1%, 1 of 128 is not."""
    lost, other = run({"hbm": 3.0}, preemptions=1, memory=0.9), run(memory=0.9)
    assert runs_out([lost, other]) == "hbm"
    assert runs_out([lost, other, other, other]) == "memory"


def test_space_that_ran_out_earlier_over_all_runs_counts() -> None:
    """Where it did not run out, it did at the end at the earliest."""
    end = real_run().report.total_s
    assert end > 20
    early, late = run({"hbm": 3.0}, 1.0, memory=0.9), run({"host": 5.0}, 1.0, memory=0.9)
    assert runs_out([early, late]) == runs_out([late, early]) == "hbm"
    both = run({"hbm": 9.0, "host": 5.0}, 1.0, memory=0.9)
    assert runs_out([early, both]) == "hbm"
    assert runs_out([late, both]) == "host"


def test_time_is_not_said_to_run_out_where_runs_are_too_short() -> None:
    base = small_plan().candidates[0]
    point = base.at_largest
    assert point is not None
    busy = replace(point, saturated="compute", used=replace(point.used, compute=0.43))

    def said(limit: str, saturated: str = "compute") -> str:
        point = replace(busy, saturated=saturated)
        return first_out(replace(base, at_largest=point, limited_by=limit))

    unseen = "not seen in runs of this length; busiest is compute (43% of the time)"
    assert said("run length") == unseen
    assert said("target") == said("throughput") == "compute (busy 43% of the time)"
    assert said("run length", "hbm").startswith("HBM space (on average"), "searches waited"
