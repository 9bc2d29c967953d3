"""How many answers policies get right, from live runs: of the user, or those that are known."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from arborsim.core.errors import UsageError
from arborsim.core.records import read_text
from arborsim.play.results import ANY
from arborsim.policies.registry import resolved
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.workload import Workload
from arborsim.products.replay.answers import Searched, shipped
from arborsim.products.replay.counting import counted_in, read_log


def counted(workload: Workload) -> dict[tuple[str, str], Estimate | None]:
    """Share of right answers by policy and budget, as a candidate has them; None if unknown.

    Only what was counted under the very same settings and budget is taken.  Searches that a budget
    could not hold count as wrong.
    """
    if workload.answers is None:
        return {}
    about, known = workload.answers, shipped()
    rows = known.of(Searched(about.task, about.search, about.model, about.options, {}, 0.0))
    searched = [row.searched for row in rows if dict(row.searched.options) == dict(about.options)]
    found: dict[tuple[str, str], Estimate | None] = {}
    for each in workload.candidates():
        policy, budget = each.policy.policy, each.budget_text
        match = searched and known.for_(
            searched[0], policy.name, resolved(policy), ANY if budget == "-" else budget
        )
        key = each.policy.name, budget
        found[key] = None
        if match and match.exact:
            right, n = match.counted.right, match.counted.n + match.counted.infeasible
            found[key] = Estimate.share(right, n)
    return found


def problems_of(paths: Iterable[Path]) -> str:
    """Tasks and models of logs, names of tables: ``"game24 by arborsim-game24"``; "" if unknown."""
    given = list(paths)
    tables = [path for path in given if path.suffix.lower() == ".csv"]
    logs = [path for path in given if path not in tables]
    searched = (each.searched for path in logs for each in counted_in(path))
    names = dict.fromkeys(f"{s.task} by {s.model}" for s in searched if s.task and s.model)
    names |= dict.fromkeys(path.name for path in tables)
    return " and ".join(names)


class Answered(NamedTuple):
    """Answers of a policy at a budget."""

    right: Estimate  #: share of right answers
    growth: float = 1.0  #: tokens that it generates over those of full retention
    #: Share of answers that were cut off, or never begun as the budget could not hold the search;
    #: none of them is right.  None where they were not counted.
    unfinished: Estimate | None = None


Key = tuple[str, str]  # policy, and budget as a candidate has it: "-" for none


def read_answers(paths: Iterable[Path]) -> dict[Key, Answered]:
    """Right answers and lengths by policy and budget, of logs and tables.

    A log is what ``arborsim live --out`` wrote.  A table is a CSV file of answers that someone else
    counted, with the columns of `_TABLE`: one row per policy and budget, one of them for ``full``.
    A column ``unfinished_percent`` says how many were cut off, if they were counted.
    Shares have Clopper and Pearson's 95% interval.  Searches that a budget could not hold count as
    wrong.
    """
    found: dict[Key, Answered] = {}
    counts: dict[Key, list[tuple[int, int, int]]] = defaultdict(list)
    for path in paths:
        if path.suffix.lower() == ".csv":
            found |= _read_table(path)
            continue
        _, results = read_log(path)
        for result in results:
            if result.correct is not None or result.infeasible:
                budget = "-" if result.budget == ANY else result.budget
                tokens = 0 if result.infeasible else result.tokens
                full = result.full_tokens if tokens else 0
                key = result.policy, budget
                counts[key].append((bool(result.correct), tokens, full))
    for key, rows in counts.items():
        right, tokens, full = map(sum, zip(*rows, strict=True))
        growth = tokens / full if tokens and full else 1.0
        unfinished = Estimate.share(sum(not each[1] for each in rows), len(rows))
        found[key] = Answered(Estimate.share(right, len(rows)), growth, unfinished)
    return found


_TABLE = ("policy", "budget_tokens", "n", "right_percent", "mean_output_tokens")


def _read_table(path: Path) -> dict[Key, Answered]:
    """Answers that others counted; a `UsageError` names the row that is wrong."""
    rows = list(csv.DictReader(read_text(path).splitlines()))
    if missing := [name for name in _TABLE if not rows or name not in rows[0]]:
        raise UsageError(f"--answers {path}: column {missing[0]} is missing")
    tasks = dict.fromkeys((row.get("model") or "", row.get("dataset") or "") for row in rows)
    if len(tasks) > 1:
        named = "; ".join(" on ".join(filter(None, each)) for each in list(tasks)[:3])
        raise UsageError(
            f"--answers {path}: holds answers of {len(tasks)} models and data sets ({named}, ...): "
            "keep the rows of one"
        )
    found: dict[Key, tuple[Estimate, float, Estimate | None]] = {}
    for number, row in enumerate(rows, 1):
        try:
            n, percent, tokens = (float(row[name]) for name in _TABLE[2:])
            cut_off = float(row.get("unfinished_percent") or "nan")
            if not (n >= 1 and 0 <= percent <= 100 - max(0.0, cut_off) and tokens > 0):
                raise ValueError
            budget = f"{float(row['budget_tokens']):g}" if row["budget_tokens"] else "-"
        except (TypeError, ValueError):
            raise UsageError(
                f"--answers {path}, row {number}: expected a count of answers, the percentage that "
                "is right, and their mean length in tokens; what is unfinished is not right"
            ) from None
        key = row["policy"], budget
        if key in found:
            raise UsageError(f"--answers {path}, row {number}: {' at '.join(key)} is there twice")
        right = Estimate.share(round(n * percent / 100), round(n))
        unfinished = None
        if not math.isnan(cut_off):
            unfinished = Estimate.share(round(n * cut_off / 100), round(n))
        found[key] = right, tokens, unfinished
    if ("full", "-") not in found:
        raise UsageError(
            f"--answers {path}: no row of policy full, which lengths are compared with"
        )
    full = found["full", "-"][1]
    return {
        key: Answered(right, tokens / full, unfinished)
        for key, (right, tokens, unfinished) in found.items()
    }
