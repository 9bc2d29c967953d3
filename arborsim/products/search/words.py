"""The answer of a search on a bank in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arborsim.core.units import quantity, scale_for
from arborsim.play.results import at_budget
from arborsim.products.search.results import MARGIN, Paired, SearchResult, paired, rows_of
from arborsim.products.search.results import SearchRow as Row
from arborsim.products.search.tables import reference
from arborsim.report.words import counted, score
from arborsim.searches.arms import REFERENCE

_MOST_WIDTHS = 4
#: With a larger share of thoughts not recorded, a width says little: others come first.
_MOST_MISSED = 0.05
_MOST_NAMED = 3


def summarise(results: Sequence[SearchResult], rows: Sequence[Row]) -> list[str]:
    """Sentences; the first is the answer.

    The search with the least KV among those that reach REBASE's accuracy, at the largest width
    at which REBASE got the thoughts that it asked for; then the same at other widths, and the
    highest accuracy of all.  KV sizes are compared where they count the same.
    """
    if not rows:
        return ["No search was completed."]
    policy, budget = rows[0].policy, rows[0].budget
    own = [row for row in rows if (row.policy, row.budget) == (policy, budget)]
    mine = [r for r in results if (r.policy, r.budget) == (policy, budget)]
    if not any(row.judged for row in own):
        return [_unjudged(own)]
    base = reference(own)
    if base is None or not base.judged:
        return [f"{_best(own)} REBASE was not run, so nothing is compared with it."]
    if all(row.label == REFERENCE for row in own):
        return [f"{_best(own)} Nothing else was run that could be compared with it."]
    short = {row.width for row in own if row.label == REFERENCE and row.missed > _MOST_MISSED}
    widths = sorted({row.width for row in own if row.reference}, key=lambda w: (w in short, -w))
    found = [each for width in widths if (each := _at_width(mine, own, width))]
    if not found:
        return [_best(own)]
    (leader, lead, evidence), *others = found
    shorts = [short for _, short, _ in others[: _MOST_WIDTHS - 1]]
    return [lead, *_policies(results, leader), *shorts, _best(own), evidence]


def _policies(results: Sequence[SearchResult], leader: Row) -> list[str]:
    """Compare other policies on the search that the answer is about, on the same problems."""
    cells: dict[tuple[str, str], dict[int, SearchResult]] = {}
    for r in _of(results, leader):
        cells.setdefault((r.policy, r.budget), {})[r.episode] = r
    base = cells.pop((leader.policy, leader.budget))
    return [
        _under(leader, [own[n] for n in shared], [base[n] for n in shared])
        for own in list(cells.values())[:_MOST_NAMED]
        if (shared := sorted(base.keys() & own.keys()))
    ]


def _of(results: Sequence[SearchResult], row: Row) -> list[SearchResult]:
    """The results of a row's search, under any policy."""
    return [r for r in results if (r.label, r.width) == (row.label, row.width)]


def _under(leader: Row, results: Sequence[SearchResult], reference: Sequence[SearchResult]) -> str:
    """Results under another policy, and under the leader's on the same problems."""
    (mine,), (base,) = rows_of(results), rows_of(reference)

    def times(figure: str) -> str:
        value, other = mine.figures[figure], base.figures[figure]
        return f"{value / other:.2f}" if other else "unknown"

    peak, other = (quantity("bytes", row.figures["peak_hbm_kv_bytes"]) for row in (mine, base))
    kept = mine.figures["attention_kept"]
    attention = "" if math.isnan(kept) else f", and keeps {_percent(kept)} of the attention"
    fewer = len(results) < leader.searches
    some = f" On {len(results)} of {leader.searches} problems." if fewer else ""
    return (
        f"Under {at_budget(mine.policy, mine.budget)}, {leader.label} at width {leader.width} "
        f"peaks at {times('peak_hbm_kv_bytes')} times the HBM that it needs under "
        f"{at_budget(leader.policy, leader.budget)} ({peak} against {other}), "
        f"in {times('total_s')} times the time{attention}.{some}"
    )


def _percent(value: float) -> str:
    return f"{scale_for('percent', [value]).show(value)}%"


def _at_width(
    results: Sequence[SearchResult], rows: Sequence[Row], width: int
) -> tuple[Row, str, str] | None:
    """The comparison with REBASE at one width, and its evidence; None if there is none."""
    base = next(row for row in rows if (row.label, row.width) == (REFERENCE, width))
    found = [
        (row, pair)
        for row in rows
        if row.width == width and row.label != REFERENCE and row.by_levels
        # A search that was denied thoughts is a smaller one than its width says.
        if not row.missed > _MOST_MISSED >= base.missed
        if (pair := paired(_of(results, row), _of(results, base)))
    ]
    if not found:
        return None
    able = [each for each in found if each[1].difference >= -MARGIN - 1e-12]
    if able:
        row, pair = min(able, key=lambda each: each[0].figures["kv_tokens"])
        lead = f"{row.label} reaches REBASE's accuracy {_size(row)}"
        if row.times("kv_tokens") >= 1.005:
            lead = (
                f"no search reaches REBASE's accuracy with less KV; {row.label} does {_size(row)}"
            )
    else:
        row, pair = max(found, key=lambda each: (each[1].difference, -each[0].times("kv_tokens")))
        lead = f"no search reaches REBASE's accuracy; {row.label} comes closest, {_size(row)}"
    lead = f"At width {width}, {lead}:"
    evidence = f"It solves {_score(row)}, REBASE {_score(base)}. {_evidence(row, base, pair)}"
    short = f"{row.right}/{row.judged} against {base.right}/{base.judged}, {_difference(pair)}."
    most = max(row.missed, base.missed)
    lacking = f" Up to {_percent(most)} of the thoughts that one of the two asked for were not"
    lacking = f"{lacking} recorded." if most else ""
    return row, f"{lead} {short}{lacking}", evidence


def _size(row: Row) -> str:
    share = row.times("kv_tokens")
    if math.isnan(share):
        return ""
    return "with its KV size" if abs(share - 1) < 0.005 else f"with {share:.2f} times its KV size"


def _evidence(row: Row, base: Row, pair: Paired) -> str:
    """Say what this number of problems shows."""
    low, high = pair.interval()
    overlap = "overlap" if row.low <= base.high and base.low <= row.high else "do not overlap"
    problems = counted(pair.judged, "problem")
    few = f"{problems} {'is' if pair.judged == 1 else 'are'} too few to show a difference"
    return (
        f"The intervals {overlap}; of the same {problems}, only {row.label} solves {pair.gained} "
        f"and only REBASE {pair.lost}, {_difference(pair)}: "
        f"{few if low <= 0 <= high else 'more than chance'}."
    )


def _difference(pair: Paired) -> str:
    low, high = pair.interval()
    return (
        f"a difference of {_points(pair.difference)} points (95% interval {_points(low)} to "
        f"{_points(high)})"
    )


def _points(share: float) -> str:
    return f"{100 * share + 0.0:+.1f}".replace("-", "\N{MINUS SIGN}") if share else "0"


def _best(rows: Sequence[Row]) -> str:
    """The highest accuracy; of equal ones the least KV."""
    judged = [row for row in rows if row.judged]
    best = min(judged, key=lambda row: (-row.accuracy, row.figures["kv_tokens"]))
    size = _than_rebase(best) if best.label != REFERENCE and best.by_levels else ""
    equals = sum(row.accuracy == best.accuracy for row in judged) - 1
    others = "1 more does" if equals == 1 else f"{equals} more do"
    most = f"as many as any ({others})" if equals else "most"
    return f"{best.label} at width {best.width} solves {most}: {_score(best)}{size}."


def _unjudged(rows: Sequence[Row]) -> str:
    small = min(rows, key=lambda row: row.figures["kv_tokens"])
    return (
        "The bank does not judge answers, so it is not known which searches were right. "
        f"{small.label} at width {small.width} needs the least KV{_than_rebase(small)}."
    )


def _than_rebase(row: Row) -> str:
    size = _size(row).replace("its", "REBASE's")
    return f", {size}" if size else ""


def _score(row: Row) -> str:
    return score(row.right, row.judged, row.low, row.high)


def missing(rows: Sequence[Row]) -> str:
    """A warning about thoughts that the bank lacks; empty if it served every search."""
    most: dict[tuple[str, int], float] = {}
    for row in rows:  # a policy changes no search, but can leave problems out
        key = row.label, row.width
        most[key] = max(most.get(key, 0.0), row.missed)
    short = sorted(((missed, *key) for key, missed in most.items() if missed), reverse=True)
    if not short:
        return ""
    named = [f"{each[1]} at width {each[2]}: {_percent(each[0])}" for each in short[:_MOST_NAMED]]
    if len(short) > _MOST_NAMED:
        named.append(f"and {len(short) - _MOST_NAMED} more, see the table")
    return (
        f"Share of what was asked for and not recorded: {'; '.join(named)}. Such a search was "
        "smaller than its width says, and so are its accuracy, its KV size and its time; record a "
        "wider bank to serve it."
    )


def cautions(results: Sequence[SearchResult], rows: Sequence[Row]) -> list[str]:
    """Notes without which the numbers can be misread."""
    found = ["Bytes and seconds are simulated, each search alone on the GPU."]
    if any(not math.isnan(row.figures["attention_kept"]) for row in rows):
        found.append(
            "Attention kept is not accuracy: a search takes the recorded thoughts, whatever a "
            "policy evicts."
        )
    elif any(row.policy != "full" for row in rows):
        found.append(
            "Accuracy is that of the recorded thoughts: what a policy evicts changes memory and "
            "time here, never an answer."
        )
    others = list(dict.fromkeys(row.label for row in rows if not row.by_levels))
    if others:
        found.append(
            f"{' and '.join(others)} {'come' if len(others) > 1 else 'comes'} back to older "
            "states, which the KV size does not count again: compare byte-seconds or peaks there."
        )
    if len({row.searches for row in rows}) > 1:
        found.append("Rows rest on different problems where a budget was too small for a search.")
    problems = {r.episode for r in results}
    unknown = {r.episode for r in results if r.correct is None}
    if unknown and len(unknown) < len(problems):
        found.append(
            f"On {len(unknown)} of {len(problems)} problems some search gave an answer that the "
            "bank does not judge; it is left out of that search's accuracy."
        )
    return found
