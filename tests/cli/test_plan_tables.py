"""What a terminal shows with a plan's figures, for made-up plans."""

from __future__ import annotations

import io
import re
from dataclasses import replace

from rich.console import Console

from arborsim.machine.report import PrefixTokens
from arborsim.products.plan.costs import middle_solved, ranked
from arborsim.products.plan.page import PlanReport, report_of
from arborsim.products.plan.printed import MOST_ROWS, legend
from arborsim.products.plan.recommend import Demanded, recommend
from arborsim.products.plan.results import PlanResult
from arborsim.products.plan.words import shared_prefixes
from arborsim.report.text import print_report
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
    print_report(report_of(PlanReport(result)), console, notes=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_clients_are_whole_and_costs_are_of_served_searches() -> None:
    result = closed(small_plan())
    text = printed(result)
    row = next(line for line in text.splitlines() if line.lstrip().startswith("*"))
    assert " 12 " in row.split("%")[0]
    assert "  per served search" in text
    assert "per offered search" not in text
    assert "largest load, as none is stated" in text
    (rent, *_) = recommend(result, Demanded()).answer
    assert "at 12 clients, the largest load it carries (none is stated); " in rent


def test_every_line_of_the_legend_is_short_and_of_what_is_there() -> None:
    base = plan()
    lines = legend(base)
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith(("  =", "  +")) for line in lines)
    short = replace(
        base, candidates=tuple(replace(c, limited_by="run length") for c in base.candidates)
    )
    marks = [line for line in legend(short) if line.startswith("  ") and "runs are too" in line]
    assert marks == ["  +  runs are too short to tell: longer ones can show more or less"]
    assert not any("no mark" in line for line in legend(short))
    unpriced = legend(plan(prices=False))
    assert not any("USD" in line for line in unpriced)


def test_rows_are_the_recommended_one_and_then_the_cheapest() -> None:
    base = plan()
    (first, *others) = ranked(base)
    assert first.number == base.recommendation.candidate == 9
    costs = [middle_solved(row) for row in others]
    assert costs == sorted(costs)
    text = printed(base)
    shown = [line.split()[0] for line in text.splitlines() if re.match(r" ?[* ]\d+ ", line)]
    rows = [f"{'*' if row.number == 9 else ''}{row.number}" for row in ranked(base)]
    assert shown[:MOST_ROWS] == rows[:MOST_ROWS]
    # A policy whose answers nobody counted comes after those with a known share.
    assert base.candidates[5].fleet is not None
    unknown = replace(base.candidates[5].fleet, cost_per_solved=None)
    lossy = replace(base.candidates[5], fleet=unknown)
    mixed = replace(base, candidates=(*base.candidates[:5], lossy, *base.candidates[6:]))
    assert ranked(mixed)[-1].number == 5


def test_an_answer_says_which_answers_were_not_counted() -> None:
    base = plan()
    (rent, *_) = recommend(base, Demanded(attention_kept=0.85)).answer
    assert rent.startswith(
        "Rent 2 H100, arborkv at a budget of 0.25 (correct answers not measured): "
    )
    assert rent.endswith(" USD an hour.")
    none = replace(base, recommendation=replace(base.recommendation, candidate=None))
    assert shared_prefixes(none) == ""


def test_where_shared_prompts_were_found() -> None:
    who = "arborkv at 0.25 (stage) on H100"
    assert shared_prefixes(found_in(PrefixTokens(900, 0, 100))) == (
        f"Tokens of shared prompts, at the largest load of {who}: 90% found in HBM, 0% copied back "
        "from DDR, 10% computed."
    )
    text = shared_prefixes(found_in(PrefixTokens(99_990, 5, 5)))
    assert ">99% found in HBM, <1% copied back from DDR, <1% computed" in text
    assert shared_prefixes(found_in(PrefixTokens())) == ""
