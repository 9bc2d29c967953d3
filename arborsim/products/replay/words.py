"""A replay in words: the answer, what its reader must know, and what was left out and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arborsim.core.statistics import least_visible
from arborsim.core.units import quantity
from arborsim.play.results import ANY, MARK, Answered, LeftOut, ReplayResult, Row, at_budget
from arborsim.play.served import MEANING
from arborsim.products.replay import answers_words
from arborsim.products.replay.run import FILLED
from arborsim.report.words import counted, listed

_MOST_NAMED = 4  # settings that a sentence names
_SLOWER = 1.05  # times full retention's, from which a search is noticeably longer


def summarise(rows: Sequence[Row]) -> list[str]:
    """Up to three sentences about the rows of one trace; the first one is the answer.

    Where answers were counted live they lead: which setting needs the least HBM without losing
    answers visibly, and which lose some.  Where they were not, no setting is called best: the
    sentences say what the smallest and the fastest one buy.
    """
    full, others, able = _choices(rows)
    if any(row.idle for row in rows) and not others:
        return ["Nothing was evicted: every search fits its budget."]
    if not others:
        return [f"Only full retention was replayed: {_buys(full)}."] if full else []
    fits = ", fits the machine" if any(not row.fits for row in others) else ""
    if lossless := _lossless(able):
        first = _without_loss(min(lossless, key=_rank), lossless)
    elif not able:
        first = [f"No setting keeps to its budget{fits} and needs less HBM than full retention."]
    elif _counted(others):
        few = "No setting whose answers were counted live"
        first = [f"{few} keeps to its budget, saves memory and loses no answers visibly."]
    else:
        first = _trade_off(able)
    return [*first, *_losses(others)]


def headline(rows: Sequence[Row]) -> Row | None:
    """The row that the first sentence is about, else the smallest; None if there is only full."""
    _, others, able = _choices(rows)
    return min(_lossless(able) or able or others, key=_rank, default=None)


def _exact(row: Row) -> bool:
    return row.answers is not None and row.answers.exact


def _counted(rows: Sequence[Row]) -> list[tuple[Row, Answered]]:
    """Rows with answers counted under their own budget, on the trace's own kind of problems."""
    return [(row, row.answers) for row in rows if row.answers is not None and row.answers.exact]


def _lossless(rows: Sequence[Row]) -> list[Row]:
    """Rows that lose no answers visibly, and whose budget could hold every search."""
    return [
        row
        for row, own in _counted(rows)
        if own.full_right is not None and not own.infeasible and not own.loses
    ]


def _without_loss(best: Row, rows: Sequence[Row]) -> list[str]:
    """Say what the row that loses no answers buys."""
    found = best.answers
    assert found is not None
    return [
        f"{_name(best)} loses no answers visibly{_alike(best, rows)}: {found.right} of {found.n}, "
        f"full retention {found.full_right}.",
        f"It buys {_buys(best)}.",
    ]


def _power(able: Sequence[Row]) -> list[str]:
    """Which loss the problems of the setting that leads could show."""
    if not (lossless := _lossless(able)):
        return []
    found = min(lossless, key=_rank).answers
    assert found is not None
    assert found.full_right is not None
    least, problems = least_visible(found.full_right, found.n), counted(found.n, "problem")
    if least is None:
        return [f"{problems} are too few to show any loss."]
    return [f"With {problems}, a loss shows only from {least} right down."]


def _losses(rows: Sequence[Row]) -> list[str]:
    """Settings that are visibly less right than full retention, those that save least first."""
    lost = [each for each in _counted(rows) if each[1].loses]
    named = [
        f"{_name(row)}: {own.right} of {own.n} (full retention {own.full_right})"
        for row, own in sorted(lost, key=lambda each: -each[0].peak_hbm_kv_bytes)
    ]
    return [f"Visibly fewer answers are right under {_first(named)}."] if named else []


def _trade_off(able: Sequence[Row]) -> list[str]:
    """Say what the smallest and the fastest setting buy, where no answers were counted."""
    small = min(able, key=_rank)
    found = [f"{_name(small)} needs the least HBM{_alike(small, able)}: {_buys(small)}."]
    rates = [row for row in able if not math.isnan(row.full_tokens_per_s)]
    fast = max(rates, key=lambda row: row.full_tokens_per_s, default=small)
    if fast.full_tokens_per_s > 1.01 * small.full_tokens_per_s:
        found.append(f"The most tokens per second come with {_name(fast)}: {_buys(fast)}.")
        return found
    if any(row.fidelity for row in able):  # which says more than attention kept
        return found
    known = [row for row in able if not math.isnan(row.attention_kept)]
    most = max(known, key=lambda row: (row.attention_kept, -_rank(row)[0]), default=small)
    if known and most.attention_kept > small.attention_kept + 1e-12:
        found.append(f"The most attention is kept by {_name(most)}: {_buys(most)}.")
    return found


def near(rows: Sequence[Row]) -> list[str]:
    """Answers that were counted at a near budget, or on other problems of the task."""
    named = [
        f"{_name(row)} {own.right} of {own.n} ({', '.join(own.differs)})"
        + ("" if own.full_right is None else f", full retention {own.full_right}")
        for row in rows
        if (own := row.answers) and not own.exact and not row.is_baseline
    ]
    return [f"Right answers counted near these settings: {_first(named)}."] if named else []


def _first(texts: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return "; ".join(texts[:_MOST_NAMED]) + more


def _alike(best: Row, rows: Sequence[Row]) -> str:
    """Policies that need as much HBM as `best`, to a per cent."""
    size = _rank(best)[0]
    same = [row.name for row in rows if row.policy != best.policy and _rank(row)[0] == size]
    alike = list(dict.fromkeys(same))
    if len(alike) > _MOST_NAMED:
        return f", like {len(alike)} other policies"
    return f", like {listed(alike)}" if alike else ""


def _choices(rows: Sequence[Row]) -> tuple[Row | None, list[Row], list[Row]]:
    """Full retention; what one could choose; what of it could be recommended.

    Full retention is there to compare with, the oracle to bound.  Recommended are settings that
    hold what they were given, save memory at all and fit, if anything does.
    """
    full = next((row for row in rows if row.is_baseline), None)
    others = [row for row in rows if not (row.is_baseline or row.is_bound or row.idle)]
    anything = any(row.fits for row in others)
    most = math.inf if full is None else full.peak_hbm_kv_bytes
    able = [
        row
        for row in others
        if row.bounded and (row.fits or not anything) and row.peak_hbm_kv_bytes < most
    ]
    return full, others, able


def _slower(rows: Sequence[Row]) -> list[str]:
    """Settings that make a search noticeably longer, the slowest first."""
    slow = [row for row in rows if row.relative.time >= _SLOWER]
    slow.sort(key=lambda row: -row.relative.time)
    first = {row.policy: row for row in reversed(slow)}.values()
    named = [f"{_name(row)}: {row.relative.time:.2f}x ({_longest(row)})" for row in first]
    return [f"A search by itself takes longer under {_first(named[::-1])}."] if named else []


def _longest(row: Row) -> str:
    """The part of its time that is not the model's, or most of it."""
    parts = {
        "rehydration": row.time.rehydration_s,
        "waiting for transfers": row.time.exposed_transfer_s,
        "policy and scoring": row.time.policy_s,
    }
    name, seconds = max(parts.items(), key=lambda part: part[1])
    return f"{name} {seconds / row.total_s:.0%}" if seconds >= 0.01 * row.total_s else "computing"


def _rank(row: Row) -> tuple[float, float, str, str]:
    """Least memory; among equals (to a per cent) the fastest, then the first by name."""
    size = round(math.log(max(row.peak_hbm_kv_bytes, 1)) * 100)
    return size, round(row.time.total_s, 6), row.policy, row.budget


def _kept(row: Row) -> str:
    """Almost all is not all."""
    if row.attention_kept >= 1:
        return "all attention kept"
    kept = "over 99.9%" if row.attention_kept >= 0.9995 else f"{row.attention_kept:.1%}"
    return f"{kept} of the attention kept"


def _name(row: Row) -> str:
    return at_budget(row.name, row.budget).replace("budget ", "")


def _buys(row: Row) -> str:
    """Searches at once and tokens per second of a full GPU, else memory and time; what is kept."""
    said = []
    if not math.isnan(row.at_once):
        at_once, rate = row.relative.at_once, row.relative.full_tokens_per_s
        said.append(f"{row.at_once:.0f} searches at once{_against(row, at_once)}")
        said.append(f"{row.full_tokens_per_s:,.0f} tokens/s{_against(row, rate, short=True)}")
    else:
        peak = row.relative.peak_hbm
        share = "" if row.is_baseline or math.isnan(peak) else f" ({peak:.1%} of full's)"
        said.append(f"{quantity('bytes', row.peak_hbm_kv_bytes)} of KV cache at the peak{share}")
        said.append(f"{quantity('seconds', row.total_s)}{_against(row, row.relative.time)}")
    if row.fidelity is not None and not row.is_baseline:
        said.append(answers_words.near_full(row.fidelity))
    elif not (row.is_baseline or math.isnan(row.attention_kept) or _exact(row)):
        said.append(_kept(row))
    return ", ".join(said)


def _against(row: Row, ratio: float, short: bool = False) -> str:
    whose = "" if short else " full retention's"
    return "" if row.is_baseline or math.isnan(ratio) else f" ({ratio:.2f}x{whose})"


def telling(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """Notes that can change what is chosen, those that can most first."""
    missing = [each for each in result.left_out if not result.asked or each.policy in result.asked]
    lacking = left_out(missing)
    meant = result.notes[:1] if result.equal else ()  # what equal is, in which rows are read
    found = [
        *meant,
        *result.does_not_fit,
        *(line for line in lacking if line.startswith("Left out")),
    ]
    if any(row.label != row.name for row in rows):
        found.append(f"{MARK} does not keep to the budget: see HBM peak.")
    found += answers_words.footnotes([row for row in rows if result.was_asked(row)])
    found += answers_words.fidelity_notes(rows)
    chosen = _choices(rows)[1]
    if uncounted := list(dict.fromkeys(row.policy for row in chosen if not _exact(row))):
        some = " at every budget" if any(map(_exact, chosen)) else ""
        who = listed(uncounted) if len(uncounted) <= _MOST_NAMED else f"{len(uncounted)} policies"
        found.append(f"Whether answers stay right under {who} was not counted{some}.")
    if not any(map(_exact, chosen)) and any(not math.isnan(row.attention_kept) for row in chosen):
        found.append(f"Attention kept is no accuracy. {answers_words.not_ranking()}".rstrip())
    found += _power(_choices(rows)[2])
    found += _slower(chosen)
    return list(dict.fromkeys([*found, *result.notes, *lacking]))


def notes(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """The other notes, without which the figures can be misread."""
    found = ["Bytes and seconds are simulated."]
    found += dict.fromkeys(each for one in _by_trace(rows) for each in _decided(one, result))
    if all(math.isnan(row.attention_kept) for row in rows):
        found.append("attn. kept is n/a: not measured, or the trace holds no attention.")
    else:
        found.append("attn. kept: recorded attention that fell on readable tokens; not accuracy.")
    choosing = [row.policy for row in rows if row.bounds_read_bytes and not row.bounded]
    found += [*_by_group(rows), *budget_of_reading(choosing), *_ties(rows)]
    if count := len(result.assumed):
        numbers = f"{counted(count, 'number')} of the hardware profile"
        are = "are" if count > 1 else "is"
        found.append(f"{numbers} {are} assumed, not measured (see --report).")
    return found


def _by_trace(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.trace, []).append(row)
    return list(found.values())


def _decided(rows: Sequence[Row], result: ReplayResult) -> list[str]:
    """Answers counted near a trace's settings, and the command that counts the rest."""
    asked = [row for row in rows if result.was_asked(row)]
    return [*near(asked), *filter(None, [answers_words.would_decide(asked, result)])]


def legend(rows: Sequence[Row]) -> list[str]:
    """Meanings of a terminal's columns, which a page says column by column."""
    found = []
    if any(not math.isnan(row.at_once) for row in rows):
        found.append(
            "at once: searches that fit the GPU, each at its mean peak; tokens/s: of all of them, "
            f"with a new search for each that ends (the first {FILLED} of a trace, in turn)."
        )
    if any(not math.isnan(row.oracle_gap) for row in rows):
        found.append(
            "gap: what the oracle keeps at the same budget, less the policy's. It knows the future "
            "and only evicts; DDR, fewer bits, recomputing or a choice per head can beat it."
        )
    return [
        *found,
        "Peaks are the largest of any search, before decisions and with the prefill: they can "
        "exceed the budget. Times and moves are sums.",
    ]


def _by_group(rows: Sequence[Row]) -> list[str]:
    """The measure of policies that choose per layer or head, and their oracles."""
    per = [each for each in ("layer", "head") if any(row.per == each for row in rows)]
    if not per or all(math.isnan(row.attention_kept) for row in rows if row.per in per):
        return []
    kind = " or ".join(per)
    said = f"Where a policy chooses per {kind}, attn. kept is each {kind}'s own, in captured layers"
    bounds = dict.fromkeys(row.policy for row in rows if row.is_oracle and row.per in per)
    if bounds:
        said += (
            f", and the gap is to {' or '.join(bounds)}, which shares the budget out as is best "
            "(in long searches equally: uneven shares can beat that)"
        )
    return [f"{said}."]


def budget_of_reading(policies: Iterable[str]) -> list[str]:
    """Say what the budget of policies means that read less than they hold; nothing for none."""
    whose = ", ".join(dict.fromkeys(policies))
    said = f"The budget of {whose} is how many tokens a step reads of each KV head."
    return [said] if whose else []


def _ties(rows: Sequence[Row]) -> list[str]:
    """Policies that lose exactly as much under a budget, so that none is better.

    What is protected can fill a budget alone, and policies that take whole blocks can take the
    same ones; the order of such rows says nothing about their scores.
    """
    cells: dict[tuple[str, str, float], list[str]] = {}
    for row in rows:
        if row.attention_kept < 1 and row.budget != ANY and not row.is_oracle:
            kept = round(row.attention_kept, 12)
            cells.setdefault((row.trace, row.budget, kept), []).append(row.label)
    same = [
        f"{listed(policies)} at {budget} on {trace}"
        for (trace, budget, _), policies in cells.items()
        if len(policies) > 1
    ]
    return [f"Same attention kept, so in no order: {_first(same)}."] if same else []


def too_small(found: Iterable[LeftOut]) -> list[LeftOut]:
    """The cells that were left out because their budget was too small."""
    return [each for each in found if each.budget]


def left_out(found: Iterable[LeftOut]) -> list[str]:
    """A line per way to come by what is missing, and one on what makes budgets large enough.

    The same on several traces is said once.
    """
    items = list(found)
    traces: dict[tuple[str, str], list[str]] = {}  # policy and remedy -> traces
    for each in items:
        if each.remedy:
            remedy = each.unrecorded or f"record with {each.remedy}"
            traces.setdefault((each.policy, remedy), []).append(each.trace)
    lacking: dict[tuple[tuple[str, ...], str], list[str]] = {}  # traces and remedy -> policies
    for (policy, remedy), where in traces.items():
        lacking.setdefault((tuple(where), remedy), []).append(policy)
    lines = [
        f"Left out: {', '.join(policies)}. {listed(where)} {'do' if len(where) > 1 else 'does'} "
        f"not hold what they read; {remedy}.{_instead(policies, items)}"
        for (where, remedy), policies in lacking.items()
    ]
    small = {each.policy: each.instead for each in too_small(items)}
    for way in dict.fromkeys(filter(None, small.values())):
        whose = [policy for policy, one in small.items() if one == way]
        lines.append(f"--set {way} lets the prompt compete under {listed(whose)}: less is needed.")
    lines += dict.fromkeys(f"Left out: {each.detail}." for each in items if each.unsuited)
    return lines


def _instead(policies: Sequence[str], items: Iterable[LeftOut]) -> str:
    """Which of the policies run without a new recording under another setting."""
    ways: dict[str, dict[str, None]] = {}
    for each in items:
        if each.instead and each.policy in policies:
            ways.setdefault(each.instead, {})[each.policy] = None
    return "".join(
        f" Without that, --set {way} runs {listed(own)}: {MEANING}." for way, own in ways.items()
    )
