"""A replay in words: the answer, what its reader must know, and what was left out and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arborsim.core.statistics import least_visible
from arborsim.core.units import quantity
from arborsim.play.results import ANY, MARK, Answered, LeftOut, ReplayResult, Row
from arborsim.play.served import MEANING
from arborsim.products.replay import answers_words
from arborsim.report.words import counted, listed

_MOST_NAMED = 4  # settings that a sentence names


def summarise(rows: Sequence[Row], decides: str = "") -> list[str]:
    """Sentences about the rows of one trace; the first one is the answer.

    Where answers were counted live they lead: which setting needs the least HBM without losing
    answers visibly, and which lose some.  Where they were not, no setting is called best: the
    sentences say what memory, time and attention each way costs.  `decides` says what would count
    the answers that are missing (`answers_words.would_decide`).
    """
    full, others, able = _choices(rows)
    if not others:
        return [f"Only full retention was replayed: {_costs(full)}."] if full else []
    wanted, slowest = filter(None, [decides]), _slowest(others, full)
    if able and not _counted(others):
        return [*_trade_off(able), *wanted, slowest]
    lossless = _lossless(able)
    fits = ", fits the machine" if any(not row.fits for row in others) else ""
    if lossless:
        first = _without_loss(min(lossless, key=_rank), able)
    elif able:
        few = "No setting whose answers were counted live"
        first = [f"{few} keeps to its budget, saves memory and loses no answers visibly."]
    else:
        first = [f"No setting keeps to its budget{fits} and needs less HBM than full retention."]
    return [*first, *_losses(others), *wanted, slowest]


def headline(rows: Sequence[Row]) -> Row | None:
    """The row that the first sentence is about, else the smallest; None if there is only full."""
    _, others, able = _choices(rows)
    return min(_lossless(able) or able or others, key=_rank, default=None)


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


def _without_loss(best: Row, able: Sequence[Row]) -> list[str]:
    """Say what the row that loses no answers needs, and which loss its problems could show."""
    found, known = best.answers, len(_counted(able))
    assert found is not None
    assert found.full_right is not None
    least, problems = least_visible(found.full_right, found.n), counted(found.n, "problem")
    return [
        f"Of {counted(known, 'setting')} whose answers were counted live, {_name(best)} needs the "
        f"least HBM without a visible loss{_alike(best, _lossless(able))}: "
        f"{answers_words.score(found)}, {answers_words.against_full(found)}; {_costs(best)}.",
        f"{problems} are too few to show any loss."
        if least is None
        else f"With {problems}, a loss shows only from {least} right down.",
    ]


def _losses(rows: Sequence[Row]) -> list[str]:
    """Settings that are visibly less right than full retention, those that save least first."""
    lost = [each for each in _counted(rows) if each[1].loses]
    named = [
        f"{_name(row)} {own.right} of {own.n}, where it is {own.full_right}"
        for row, own in sorted(lost, key=lambda each: -each[0].peak_hbm_kv_bytes)
    ]
    said = "Visibly fewer are right than under full retention with"
    return [f"{said} {_first(named)}."] if named else []


def _trade_off(able: Sequence[Row]) -> list[str]:
    """Say what the settings cost, where no answers say which of them will do."""
    small = min(able, key=_rank)
    known = [row for row in able if not math.isnan(row.attention_kept)]
    kept = f", with {_kept(small)} of the attention kept" if small in known else ""
    sentences = [
        "Which of these settings keeps answers right was not counted. "
        f"{_name(small)} needs the least HBM{_alike(small, able)}: {_costs(small, kept)}."
    ]
    if not known:
        return [f"{sentences[0]} How much attention is kept was not measured.", *_near(able)]
    most = max(row.attention_kept for row in known)
    keeping = [row for row in known if row.attention_kept >= most - 1e-12]
    near = min(keeping, key=_rank)
    if near is not small:
        share = "All attention is" if most >= 1 else f"The most attention, {_kept(near)}, is"
        sentences.append(f"{share} kept by {_name(near)}{_alike(near, keeping)}: {_costs(near)}.")
    return [*sentences, *_near(able)]


def _near(rows: Sequence[Row]) -> list[str]:
    """Answers that were counted at a near budget, or on other problems of the task."""
    named = [
        f"{_name(row)} {own.right} of {own.n} ({', '.join(own.differs)})"
        + ("" if own.full_right is None else f", full retention {own.full_right}")
        for row in rows
        if (own := row.answers) and not own.exact
    ]
    return [f"Right answers counted near these settings: {_first(named)}."] if named else []


def _first(texts: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f"; and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return "; ".join(texts[:_MOST_NAMED]) + more


def _alike(best: Row, rows: Sequence[Row]) -> str:
    """Policies that need as much HBM as `best`, to a per cent."""
    size = _rank(best)[0]
    same = [row.policy for row in rows if row.policy != best.policy and _rank(row)[0] == size]
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
    others = [row for row in rows if not (row.is_baseline or row.is_bound)]
    anything = any(row.fits for row in others)
    most = math.inf if full is None else full.peak_hbm_kv_bytes
    able = [
        row
        for row in others
        if row.bounded and (row.fits or not anything) and row.peak_hbm_kv_bytes < most
    ]
    return full, others, able


def _slowest(others: Sequence[Row], full: Row | None) -> str:
    slowest = max(others, key=lambda row: row.time.total_s / max(row.generated_tokens, 1))
    total = slowest.time.total_s
    if not total or (full is not None and slowest.relative.time < 1.005):
        return "No setting is noticeably slower than full retention."
    parts = sorted(_parts(slowest).items(), key=lambda part: -part[1])
    shares = [f"{seconds / total:.0%} {what}" for what, seconds in parts if seconds >= 0.01 * total]
    against = "" if full is None else f" ({slowest.relative.time:.2f} times full retention)"
    seconds = quantity("seconds", total)
    return f"Slowest is {_name(slowest)}: {seconds}{against}, of which {listed(shares)}."


def _rank(row: Row) -> tuple[float, float, str, str]:
    """Least memory; among equals (to a per cent) the fastest, then the first by name."""
    size = round(math.log(max(row.peak_hbm_kv_bytes, 1)) * 100)
    return size, round(row.time.total_s, 6), row.policy, row.budget


def _kept(row: Row) -> str:
    """Almost all is not all."""
    if row.attention_kept >= 1:
        return "all"
    return "more than 99.9%" if row.attention_kept >= 0.9995 else f"{row.attention_kept:.1%}"


def _name(row: Row) -> str:
    return f"{row.policy} at budget {row.budget_label}"


def _costs(row: Row, remark: str = "") -> str:
    """Memory, a remark, and time; against full retention if it is known."""
    memory, time = quantity("bytes", row.peak_hbm_kv_bytes), quantity("seconds", row.time.total_s)
    peak, ratio = row.relative.peak_hbm, row.relative.time
    if not (row.is_baseline or math.isnan(peak)):
        memory += f" ({peak:.1%} of full retention's)"
    if not (row.is_baseline or math.isnan(ratio)):
        time += f" ({ratio:.2f} times full retention's)"
    return f"{memory} of KV cache at the peak{remark}, in {time}"


def _parts(row: Row) -> dict[str, float]:
    return {
        "model computation": row.model_s,
        "rehydration": row.time.rehydration_s,
        "waiting for transfers": row.time.exposed_transfer_s,
        "policy and scoring": row.time.policy_s,
    }


def notes(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """Notes without which the figures can be misread."""
    found = ["Bytes and seconds are simulated.", *result.does_not_fit]
    found += [*_settings(result, rows), *answers_words.footnotes(rows)]
    if all(math.isnan(row.attention_kept) for row in rows):
        found.append("attn. kept is n/a: not measured, or the trace holds no attention.")
    else:
        kept = "attn. kept: recorded attention that fell on readable tokens; not accuracy."
        found.append(f"{kept} {answers_words.not_ranking()}".rstrip())
    return [*found, *_by_group(rows), *cautions(result, rows)]


def legend(rows: Sequence[Row]) -> list[str]:
    """Meanings of a terminal's columns, which a page says column by column."""
    found = []
    if any(not math.isnan(row.oracle_gap) for row in rows):
        found.append(
            "gap: what the oracle keeps at the same budget, less the policy's. It knows the future "
            "and only evicts, the same tokens in all heads; DDR, fewer bits, recomputing, a choice "
            "per head, or holding more than the budget can beat it (below zero)."
        )
    return [
        *found,
        "Peaks are the largest of any search, before decisions and with the prefill: they can "
        "exceed the budget. Times and moves are sums.",
    ]


def _settings(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """Say which policies are not what their names alone stand for."""
    policies = dict.fromkeys(row.policy for row in rows if not row.is_oracle)
    own = {each: answers_words.changed(each, result) for each in policies}
    given = [" ".join([each, *settings]) for each, settings in own.items() if settings]
    return [f"Settings that are not the defaults: {', '.join(given)}."] if given else []


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


def cautions(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """Notes on broken budgets, ties, single policies, and numbers that are not measured."""
    found = []
    if any(row.label != row.policy for row in rows):
        found.append(f"{MARK} does not keep to the budget: see HBM peak.")
    choosing = [row.policy for row in rows if row.bounds_read_bytes and not row.bounded]
    found += budget_of_reading(choosing)
    found += [*_ties(rows), *result.notes]
    if count := len(result.assumed):
        numbers = f"{counted(count, 'number')} of the hardware profile"
        are = "are" if count > 1 else "is"
        found.append(f"{numbers} {are} assumed, not measured (see --report).")
    return found


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
