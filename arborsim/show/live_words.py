"""The answer of a live run in words, and what its reader must know."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arborsim.core.units import quantity
from arborsim.run.results import ANY, BASELINE, MARK
from arborsim.show.live_rows import SIGNIFICANT, LiveReport, LiveRow, least_visible
from arborsim.show.words import counted, score


def summarise(rows: Sequence[LiveRow]) -> list[str]:
    """Sentences about the rows; the first is the answer.

    What full retention solves, which settings answer measurably worse and what so few problems
    cannot show, and what the smallest of the others needs and solves.
    """
    full = next((row for row in rows if row.row.policy == BASELINE), None)
    others = [row for row in rows if row.row.policy != BASELINE]
    if not rows:
        return ["Nothing could be run."]
    if not others:
        return [_alone(rows[0])]
    if not any(row.judged for row in others):
        return [*_smallest(others, full), *_slowest(others)]
    if full is None or not full.judged:
        best = max(others, key=lambda row: (row.accuracy, -row.row.peak_hbm_kv_bytes))
        return [f"{_name(best)} solves most: {_score(best)}.", *_smallest(others, None)]
    worse = [row for row in others if row.p < SIGNIFICANT and row.difference < 0]
    rest = [row for row in others if row not in worse and row.judged]
    sentences = [f"Full retention solves {_score(full)}. {_verdict(full, rest, worse)}"]
    if worse:
        names = "; ".join(f"{_name(row)}: {_score(row)}" for row in worse)
        sentences.append(f"Worse than full retention (Fisher's p below {SIGNIFICANT}): {names}.")
    if rest:
        small = min(rest, key=lambda row: row.row.peak_hbm_kv_bytes)
        sentences.append(
            f"Of {'the others' if worse else 'all settings'}, {_name(small)} needs the least HBM: "
            f"{_memory(small)}; it solves {_score(small)}."
        )
    return [*sentences, *_slowest(others)]


def _verdict(full: LiveRow, rest: Sequence[LiveRow], worse: Sequence[LiveRow]) -> str:
    """Which settings lose answers, and what this number of problems can show."""
    if not rest:
        return "Every setting tried answers measurably worse."
    least = least_visible(full.correct, full.judged)
    problems = counted(full.judged, "problem")
    if least is None:
        are = "is" if full.judged == 1 else "are"
        return f"{problems} {are} too few to tell any setting from it: raise --episodes."
    shows = f"with {problems}, a loss shows only from {least}/{full.judged} down"
    count = len(rest) + len(worse)
    found = f"{len(worse)} of {count} settings are" if worse else "No setting is"
    return f"{found} measurably worse; {shows} (p < {SIGNIFICANT})."


def _smallest(others: Sequence[LiveRow], full: LiveRow | None) -> list[str]:
    if not others:
        return []
    small = min(others, key=lambda row: row.row.peak_hbm_kv_bytes)
    base = "" if full is None else f"; full retention {_memory(full)}"
    return [f"{_name(small)} needs the least HBM: {_memory(small)}{base}."]


def _slowest(others: Sequence[LiveRow]) -> list[str]:
    known = [row for row in others if not math.isnan(row.speed_vs_full)]
    if not known:
        return []
    fast = max(known, key=lambda row: row.speed_vs_full)
    slow = min(known, key=lambda row: row.speed_vs_full)
    if fast is slow:
        return [f"{_name(fast)} generates at {fast.speed_vs_full:.2f} times full's speed."]
    return [
        f"Speed relative to full retention: from {slow.speed_vs_full:.2f} ({_name(slow)}) to "
        f"{fast.speed_vs_full:.2f} ({_name(fast)})."
    ]


def _alone(row: LiveRow) -> str:
    solved = f" solves {_score(row)} and" if row.judged else ""
    return f"{_name(row)}{solved} needs {_memory(row)} of KV cache."


def _name(row: LiveRow) -> str:
    if row.row.policy == BASELINE:
        return "Full retention"
    return row.label if row.row.budget == ANY else f"{row.label} at budget {row.budget_label}"


def _score(row: LiveRow) -> str:
    return score(row.correct, row.judged, row.low, row.high)


def _memory(row: LiveRow) -> str:
    share = row.hbm_vs_full
    of_full = "" if math.isnan(share) or row.row.policy == BASELINE else f" ({share:.0%} of full)"
    return f"{quantity('bytes', row.row.peak_hbm_kv_bytes)}{of_full}"


def left_out(report: LiveReport) -> dict[tuple[str, str], list[str]]:
    """Why budgets were infeasible, by policy and budget; problem by problem."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        if result.infeasible:
            found.setdefault((result.policy, result.budget), []).append(result.infeasible)
    return found


def cautions(report: LiveReport, rows: Sequence[LiveRow]) -> list[str]:
    """What a reader must know in order not to misread the numbers."""
    found = []
    if report.facts.random_weights:
        found.append(
            "Random weights: text and answers mean nothing; memory and time are those of the "
            "geometry."
        )
    elif not any(row.judged for row in rows):
        found.append("The answers were not judged: there is no accuracy.")
    if report.shadow:
        gpu = report.request.get("gpu", {}).get("name", "?")
        found.append(
            f"Shadow run: policies decided, nothing was removed. Bytes and seconds are simulated "
            f"on {gpu}; the answers are those of full retention."
        )
    together = report.request.get("batch", 1)
    if together > 1 and not report.shadow:
        found.append(
            f"{together} searches ran at a time: the seconds of one are those of all that ran with "
            "it, so speeds are those of a single search among others."
        )
    if any(row.row.label != row.row.policy for row in rows):
        found.append(f"{MARK} does not keep to the budget: see HBM peak.")
    for (policy, budget), why in left_out(report).items():
        at = "" if budget == ANY else f" at budget {budget}"
        first = why[0].removeprefix(f"budget infeasible for {policy}: ")
        times = counted(len(why), "search")
        found.append(f"{policy}{at} could not hold {times}, e.g. {first}.")
    return found
