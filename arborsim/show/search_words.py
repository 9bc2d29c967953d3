"""The answer of a search on a bank in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from arborsim.bank.arms import REFERENCE
from arborsim.bank.results import FIGURES, MARGIN, Paired, SearchResult, paired
from arborsim.bank.results import SearchRow as Row
from arborsim.core.units import quantity, scale_for
from arborsim.run.results import at_budget
from arborsim.search import make_search
from arborsim.search.chains import IndependentSamples, Linear
from arborsim.search.levels import LevelSearch
from arborsim.search.tot import TotBfs
from arborsim.show.search import reference
from arborsim.show.words import counted, score

#: Searches whose selections show all that they hold: by levels, or of chains.  The others come back
#: to older states, which the KV size does not count again (`arborsim.bank.walk`).
_BY_LEVELS = (LevelSearch, TotBfs, IndependentSamples, Linear)
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
    (leader, lead, _), *others = found
    shorts = [short for _, _, short in others[: _MOST_WIDTHS - 1]]
    return [lead, *_policies(results, leader), *shorts, _best(own)]


def _policies(results: Sequence[SearchResult], leader: Row) -> list[str]:
    """What other policies make of the search that the answer is about, on the same problems."""
    cells: dict[tuple[str, str], dict[int, SearchResult]] = {}
    for r in results:
        if (r.label, r.width) == (leader.label, leader.width):
            cells.setdefault((r.policy, r.budget), {})[r.episode] = r
    base = cells.pop((leader.policy, leader.budget))
    shared = [(cell, base.keys() & own.keys(), own) for cell, own in cells.items()]
    return [
        _under(leader, cell, [(own[n], base[n]) for n in sorted(both)])
        for cell, both, own in shared[:_MOST_NAMED]
        if both
    ]


def _under(
    leader: Row, cell: tuple[str, str], pairs: Sequence[tuple[SearchResult, SearchResult]]
) -> str:
    mine, base = (_means([pair[side] for pair in pairs]) for side in (0, 1))
    peak, before = mine["peak_hbm_kv_bytes"], base["peak_hbm_kv_bytes"]
    kept = mine["attention_kept"]
    attention = "" if math.isnan(kept) else f", and keeps {_percent(kept)} of the attention"
    some = (
        f" On {len(pairs)} of {leader.searches} problems." if len(pairs) < leader.searches else ""
    )
    return (
        f"Under {at_budget(*cell)}, {leader.label} at width {leader.width} peaks at "
        f"{_ratio(peak, before)} times the HBM that it needs under "
        f"{at_budget(leader.policy, leader.budget)} ({quantity('bytes', peak)} against "
        f"{quantity('bytes', before)}), in {_ratio(mine['total_s'], base['total_s'])} times the "
        f"time{attention}.{some}"
    )


def _means(results: Sequence[SearchResult]) -> dict[str, float]:
    return {name: fmean(map(of, results)) for name, of in FIGURES.items()}


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}" if base else "unknown"


def _percent(value: float) -> str:
    return f"{scale_for('percent', [value]).show(value)} %"


def _at_width(
    results: Sequence[SearchResult], rows: Sequence[Row], width: int
) -> tuple[Row, str, str] | None:
    """The comparison with REBASE at one width, in full and in short; None if there is none."""
    theirs = [r for r in results if (r.label, r.width) == (REFERENCE, width)]
    base = next(row for row in rows if (row.label, row.width) == (REFERENCE, width))
    found: list[tuple[Row, Paired]] = []
    for row in rows:
        own = [r for r in results if (r.label, r.width) == (row.label, width)]
        rival = row.width == width and row.label != REFERENCE
        # A search that was denied thoughts is a smaller one than its width says.
        rival = rival and (row.missed <= _MOST_MISSED or base.missed > _MOST_MISSED)
        pair = paired(own, theirs) if rival else None
        if pair and by_levels(row.label):
            found.append((row, pair))
    if not found:
        return None
    able = [each for each in found if each[1].difference >= -MARGIN - 1e-12]
    if able:
        row, pair = min(able, key=lambda each: each[0].figures["kv_tokens"])
        lead = _reached(row)
    else:
        row, pair = max(found, key=lambda each: (each[1].difference, -each[0].times("kv_tokens")))
        lead = f"no search reaches REBASE's accuracy; {row.label} comes closest, {_size(row)}"
    said = f"At width {width}, {lead}:"
    return (
        row,
        f"{said} it solves {_score(row)}, REBASE {_score(base)}. {_told_apart(row, base, pair)}"
        f"{_lacking(row, base)}",
        f"{said} {row.right}/{row.judged} against {base.right}/{base.judged}, "
        f"{_difference(pair)}.{_lacking(row, base)}",
    )


def _lacking(row: Row, base: Row) -> str:
    """A reminder with each comparison that rests on too few thoughts."""
    most = max(row.missed, base.missed)
    return (
        f" Up to {_share(most)} of the thoughts that one of the two asked for were not recorded."
        if most
        else ""
    )


def by_levels(label: str) -> bool:
    """Whether a search's KV size can be compared with REBASE's."""
    return isinstance(make_search(label.split(" ")[0]), _BY_LEVELS)


def _reached(row: Row) -> str:
    if row.times("kv_tokens") < 1.005:
        return f"{row.label} reaches REBASE's accuracy {_size(row)}"
    return (
        f"no search reaches REBASE's accuracy with less KV; of those that reach it, {row.label} "
        f"needs least, {_size(row).removeprefix('with ')}"
    )


def _size(row: Row) -> str:
    share = row.times("kv_tokens")
    if math.isnan(share):
        return ""
    return "with its KV size" if abs(share - 1) < 0.005 else f"with {share:.2f} times its KV size"


def _told_apart(row: Row, base: Row, pair: Paired) -> str:
    """What this number of problems can tell."""
    low, high = pair.interval()
    overlap = row.low <= base.high and base.low <= row.high
    intervals = "The intervals overlap" if overlap else "The intervals do not overlap"
    problems = counted(pair.judged, "problem")
    if pair.gained or pair.lost:
        same = (
            f"of the same {problems}, only {row.label} solves {pair.gained} and only REBASE "
            f"{pair.lost}"
        )
    else:
        same = f"of the same {problems}, both solve the same ones"
    alone = "does not" if pair.judged == 1 else "do not"
    told = f"{problems} {alone} tell the two apart" if low <= 0 <= high else "more than chance"
    return f"{intervals}; {same}, {_difference(pair)}: {told}."


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
    compared = best.label != REFERENCE and by_levels(best.label)
    size = _size(best).replace("its", "REBASE's") if compared else ""
    at = f", {size}" if size else ""
    equals = sum(row.accuracy == best.accuracy for row in judged) - 1
    most = f"as many as any ({equals} more do)" if equals else "most"
    return f"{best.label} at width {best.width} solves {most}: {_score(best)}{at}."


def _unjudged(rows: Sequence[Row]) -> str:
    small = min(rows, key=lambda row: row.figures["kv_tokens"])
    size = _size(small).replace("its", "REBASE's")
    return (
        "The bank does not judge answers, so it is not known which searches were right. "
        f"{small.label} at width {small.width} needs the least KV{', ' if size else ''}{size}."
    )


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
    named = "; ".join(
        f"{label} at width {width}: {_share(missed)}"
        for missed, label, width in short[:_MOST_NAMED]
    )
    more = len(short) - _MOST_NAMED
    rest = f"; and {more} more, see the table" if more > 0 else ""
    return (
        f"Share of what was asked for and not recorded: {named}{rest}. Such a search was smaller "
        "than its width says, and so are its accuracy, its KV size and its time; record a "
        "wider bank to serve it."
    )


def _share(value: float) -> str:
    return "<0.1 %" if value < 0.001 else f"{100 * value:.1f} %"


def cautions(results: Sequence[SearchResult], rows: Sequence[Row]) -> list[str]:
    """What a reader needs in order not to misread the numbers."""
    found = ["Bytes and seconds are simulated, each search alone on the GPU."]
    if any(not math.isnan(row.figures["attention_kept"]) for row in rows):
        found.append("Attention kept is not accuracy: a search takes the recorded thoughts, "
                     "whatever a policy evicts.")  # fmt: skip
    elif any(row.policy != "full" for row in rows):
        found.append("Accuracy is that of the recorded thoughts: what a policy evicts changes "
                     "memory and time here, never an answer.")  # fmt: skip
    others = [label for label in dict.fromkeys(r.label for r in rows) if not by_levels(label)]
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
