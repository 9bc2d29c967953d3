"""`arborsim compare`: what differs between two runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from arborsim.core.errors import UsageError
from arborsim.products.declare import Option
from arborsim.products.options import Json


def compare(
    first: Annotated[Path, Option(complete="results")],
    second: Annotated[Path, Option(complete="results")],
    *,
    fail_over: Annotated[str, Option(shown="never")] = "",
    json: Json = False,
) -> int:
    """Compare two runs of replay, search, plan or live.

    Searches that both hold are matched one by one.  Shows what made the runs differ, the second
    run's figures with their difference from the first, and what only one of them holds.

    Parameters
    ----------
    first
        Results: the file of --out, or a live log.
    second
        The same of another run.
    fail_over
        Exit with code 1 if a figure differs by more than this: 5%.
    json
        Print JSON instead of tables.
    """
    from arborsim.products.compare.match import compare as matched
    from arborsim.products.compare.report import report_of, to_json
    from arborsim.products.kinds import load_results
    from arborsim.report.text import print_report

    limit = _limit(fail_over)
    a, b = load_results(first), load_results(second)
    if a.kind != b.kind:
        raise UsageError(f"{first} holds {a.kind} results, {second} {b.kind} results")
    found = matched(a.kind, a.raw, b.raw, a.metadata, b.metadata)
    names = str(first), str(second)
    commands = a.metadata.get("command", ""), b.metadata.get("command", "")
    if json:
        print(to_json(found, names, commands))
    else:
        print_report(report_of(found, names, commands))
    return int(found.largest() > limit)


def _limit(text: str) -> float:
    """``"5%"`` as a share; "" is none."""
    if not text:
        return math.inf
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not 0 <= percent < math.inf:
        raise UsageError(f"--fail-over {text}: expected a percentage such as 5%")
    return percent / 100
