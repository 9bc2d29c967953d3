"""What a terminal shows with a plan's figures, for made-up plans."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from arborsim.machine.report import PrefixTokens
from arborsim.plan.results import PlanResult
from arborsim.show.plan import legend, print_plan
from arborsim.show.plan_words import headline, shared_prefixes
from tests.plan.make import small_plan
from tests.show.plan_synthetic import plan


def closed(base: PlanResult) -> PlanResult:
    """The same figures as of a closed loop: loads are clients."""
    rows = tuple(
        replace(row, limited_by="target", largest=12.0, largest_by_seed=(12.0, 13.0), fleet=None,
                at_largest=replace(row.at_largest, load=12.0))
        if row.at_largest is not None else row
        for row in base.candidates
    )  # fmt: skip
    return replace(base, unit="clients", stated_load=None, candidates=rows)


def found_in(prefixes: PrefixTokens) -> PlanResult:
    """The recommended candidate found shared prompts there."""
    base = plan()
    rows = tuple(
        replace(row, at_largest=replace(row.at_largest, prefixes=prefixes))
        if row.number == base.recommendation.candidate and row.at_largest is not None else row
        for row in base.candidates
    )  # fmt: skip
    return replace(base, candidates=rows)


def printed(result: PlanResult) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    print_plan(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_clients_are_whole_and_costs_are_of_served_searches() -> None:
    result = closed(small_plan())
    text = printed(result)
    row = next(line for line in text.splitlines() if line.lstrip().startswith("*"))
    assert " 12 " in row.split("%")[0]
    assert "USD/1000: per served search" in text
    assert "per offered search" not in text
    assert ", full retention: up to 12 clients for " in headline(result)


def test_every_line_of_the_legend_is_short_and_of_what_is_there() -> None:
    base = plan()
    lines = legend(base)
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith(("  =", "  +")) for line in lines)
    short = replace(
        base, candidates=tuple(replace(c, limited_by="run length") for c in base.candidates)
    )
    marks = [line for line in legend(short) if line.startswith("  ") and "runs are too" in line]
    assert marks == ["  +  runs are too short to tell: it may serve more, for less"]
    assert not any("no mark" in line for line in legend(short))
    unpriced = legend(plan(prices=False))
    assert not any("USD" in line for line in unpriced)


def test_the_headline_says_what_how_much_and_for_what_price() -> None:
    base = plan()
    chosen = base.candidates[9]
    assert chosen.fleet is not None
    machines = chosen.fleet.machines
    assert headline(base) == (
        f"{machines} x h100, arborkv at a budget of 0.25: 5.9 searches/s for "
        f"{2 * machines:.2f} to {3.5 * machines:.2f} USD an hour (correct answers not measured)"
    )
    assert "USD" not in headline(plan(prices=False))
    none = replace(base, recommendation=replace(base.recommendation, candidate=None))
    assert headline(none) == shared_prefixes(none) == ""


def test_where_shared_prompts_were_found() -> None:
    who = "arborkv at 0.25 (stage) on h100"
    assert shared_prefixes(found_in(PrefixTokens(900, 0, 100))) == (
        f"Tokens of shared prompts, at the largest load of {who}: 90% found in HBM, 0% copied back "
        "from DDR, 10% computed."
    )
    text = shared_prefixes(found_in(PrefixTokens(99_990, 5, 5)))
    assert ">99% found in HBM, <1% copied back from DDR, <1% computed" in text
    assert shared_prefixes(found_in(PrefixTokens())) == ""
