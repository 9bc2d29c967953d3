"""A replay in words: the answer, what its reader must know, and what was left out and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arborsim.core.statistics import least_visible
from arborsim.core.units import quantity
from arborsim.play.results import ANY, MARK, LeftOut, ReplayResult, Row
from arborsim.play.served import MEANING
from arborsim.products.replay import answers_words
from arborsim.report.words import counted, listed

_MODEL = "model computation"
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
        return [] if full is None else [
            f"Only full retention was replayed: its KV cache peaks at "
            f"{quantity('bytes', full.peak_hbm_kv_bytes)} and it generates "
            f"{quantity('rate', full.tokens_per_s)}."
        ]  # fmt: skip
    wanted = [decides] if decides else []
    if not able:
        fits = ", fits the machine" if any(not row.fits for row in others) else ""
        none = f"No setting keeps to its budget{fits} and needs less HBM than full retention."
        return [none, *_losses(others), *_slowest(others, full, None), *wanted]
    if _counted(others):
        best, sentences = _by_answers(able, others, full)
    else:
        best, sentences = _trade_off(able, full)
    return [*sentences, *wanted, *_slowest(others, full, best)]


def headline(rows: Sequence[Row]) -> Row | None:
    """The row that the first sentence is about, else the smallest; None if there is only full."""
    _, others, able = _choices(rows)
    if not able:
        return min(others, key=_rank, default=None)
    lossless = _lossless(able)
    return min(lossless or able, key=_rank)


def _counted(rows: Sequence[Row]) -> list[Row]:
    """Rows with answers counted under their own budget, on the trace's own kind of problems."""
    return [row for row in rows if row.answers is not None and row.answers.exact]


def _lossless(rows: Sequence[Row]) -> list[Row]:
    """Rows that lose no answers visibly, and whose budget could hold every search."""
    return [
        row
        for row in _counted(rows)
        if row.answers is not None
        and row.answers.full_right is not None
        and not row.answers.infeasible
        and not row.answers.loses
    ]


def _by_answers(
    able: Sequence[Row], others: Sequence[Row], full: Row | None
) -> tuple[Row | None, list[str]]:
    """What the counted answers say; the row that the first sentence is about."""
    known, lossless = _counted(able), _lossless(able)
    losses = _losses(others)
    if not lossless:
        few = "No setting whose answers were counted live"
        first = f"{few} keeps to its budget, saves memory and loses no answers visibly."
        return None, [first, *losses]
    best = min(lossless, key=_rank)
    found = best.answers
    assert found is not None
    which = (
        f"Of the {len(known)} settings whose answers were counted live, {_name(best)} needs the "
        "least HBM without a visible loss"
        if len(known) > 1
        else f"{_name(best)} loses no answers visibly, counted live"
    )
    which += _alike(best, lossless)
    sentences = [
        f"{which}: {answers_words.score(found)}, {answers_words.against_full(found)}; "
        f"{_costs(best, full)}."
    ]
    full_right = found.full_right
    assert full_right is not None
    least = least_visible(full_right, found.n)
    shows = (
        f"{counted(found.n, 'problem')} are too few to show any loss"
        if least is None
        else f"With {counted(found.n, 'problem')}, a loss shows only from {least} right down"
    )
    return best, [*sentences, f"{shows}.", *losses]


def _losses(rows: Sequence[Row]) -> list[str]:
    """Settings that are visibly less right than full retention, those that save least first."""
    lost = sorted(
        (row for row in _counted(rows) if row.answers and row.answers.loses),
        key=lambda row: -row.peak_hbm_kv_bytes,
    )
    if not lost:
        return []
    named = [
        f"{_name(row)} {row.answers.right} of {row.answers.n}, where it is {row.answers.full_right}"
        for row in lost[:_MOST_NAMED]
        if row.answers
    ]
    more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    return [f"Visibly fewer are right than under full retention with {'; '.join(named)}{more}."]


def _trade_off(able: Sequence[Row], full: Row | None) -> tuple[Row, list[str]]:
    """What the settings cost, where no answers say which of them will do."""
    small = min(able, key=_rank)
    first = "Which of these settings keeps answers right was not counted."
    sentences = [f"{first} {_smallest(small, able, full)}"]
    known = [row for row in able if not math.isnan(row.attention_kept)]
    if not known:
        return small, [f"{sentences[0]} How much attention is kept was not measured."]
    most = max(row.attention_kept for row in known)
    keeping = [row for row in known if row.attention_kept >= most - 1e-12]
    near = min(keeping, key=_rank)
    if near is not small:
        share = "All attention is" if most >= 1 else f"The most attention, {_kept(near)}, is"
        alike = _alike(near, keeping)
        sentences.append(f"{share} kept by {_name(near)}{alike}: {_costs(near, full)}.")
    said = answers_words.not_ranking()
    sentences += [f"Attention kept is not accuracy. {said}"] if said else []
    return small, [*sentences, *_near(able)]


def _smallest(small: Row, able: Sequence[Row], full: Row | None) -> str:
    """What needs the least HBM, one setting or several, and the range of what that costs."""
    same = [row for row in able if _rank(row)[0] == _rank(small)[0]]
    kept = [row for row in same if not math.isnan(row.attention_kept)]
    if len(same) == 1:
        but = f", with {_kept(small)} of the attention kept" if kept else ""
        return f"{_name(small)} needs the least HBM: {_costs(small, full, but)}."
    policies = list(dict.fromkeys(row.policy for row in same))
    budgets = listed(dict.fromkeys(row.budget_label for row in same))
    whose = listed(policies) if len(policies) <= _MOST_NAMED else f"{len(policies)} policies"
    sentence = f"The least HBM is what {whose} need at budget {budgets}: {_memory(small, full)}"
    if kept:
        ends = [choose(kept, key=lambda row: row.attention_kept) for choose in (min, max)]
        sentence += f"; they keep {' to '.join(dict.fromkeys(map(_kept, ends)))} of the attention"
    times = sorted(row.relative.time for row in same)
    if full is None or math.isnan(times[0]):
        return f"{sentence}."
    spent = dict.fromkeys(f"{ratio:.2f}" for ratio in (times[0], times[-1]))
    return f"{sentence}, and take {' to '.join(spent)} times as long as full retention."


def _near(rows: Sequence[Row]) -> list[str]:
    """Answers that were counted at a near budget, or on other problems of the task."""
    near = [(row, row.answers) for row in rows if row.answers and not row.answers.exact]
    named = [
        f"{_name(row)} {found.right} of {found.n} ({', '.join(found.differs)})"
        + ("" if found.full_right is None else f", full retention {found.full_right}")
        for row, found in near[:_MOST_NAMED]
    ]
    more = f"; and {len(near) - _MOST_NAMED} more" if len(near) > _MOST_NAMED else ""
    return [f"Right answers counted near these settings: {'; '.join(named)}{more}."] if near else []


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
    able = [
        row
        for row in others
        if row.bounded
        and (row.fits or not anything)
        and (full is None or row.peak_hbm_kv_bytes < full.peak_hbm_kv_bytes)
    ]
    return full, others, able


def _slowest(others: Sequence[Row], full: Row | None, said: Row | None) -> list[str]:
    slowest = max(others, key=lambda row: row.time.total_s / max(row.generated_tokens, 1))
    total = slowest.time.total_s
    if not total or (full is not None and slowest.relative.time < 1.005):
        return [] if full is None else ["No setting is noticeably slower than full retention."]
    if slowest == said and full is not None:
        return []  # the first sentence has said what its time goes to
    parts = sorted(_parts(slowest).items(), key=lambda part: -part[1])
    shares = [f"{seconds / total:.0%} {what}" for what, seconds in parts if seconds >= 0.01 * total]
    if full is not None and slowest.model_s > 1.01 * full.model_s:
        more = f"{_MODEL} ({slowest.model_s / full.model_s:.2f} times that of full retention)"
        shares = [share.replace(_MODEL, more) for share in shares]
    against = "" if full is None else f" ({slowest.relative.time:.2f} times full retention)"
    return [
        f"Slowest is {_name(slowest)}: {quantity('seconds', total)}{against}, "
        f"of which {listed(shares)}."
    ]


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


def _costs(row: Row, full: Row | None, remark: str = "") -> str:
    """Memory, a remark, and time; against full retention if it is known."""
    memory = _memory(row, full)
    ratio = row.relative.time
    if full is None or math.isnan(ratio):
        time = quantity("seconds", row.time.total_s)
    elif abs(ratio - 1) < 0.005:
        time = "as long as full retention"
    elif ratio < 1:
        time = f"{1 - ratio:.1%} less time than full retention"
    else:
        base = _parts(full)
        extra = {what: seconds - base[what] for what, seconds in _parts(row).items()}
        cause = max(extra, key=extra.__getitem__)
        time = f"{ratio - 1:.1%} more time than full retention, mostly for {cause}"
    return f"{memory}{remark}; it takes {time}"


def _memory(row: Row, full: Row | None) -> str:
    memory = f"{quantity('bytes', row.peak_hbm_kv_bytes)} of KV cache at the peak"
    saved = 1 - row.relative.peak_hbm
    if full is None or math.isnan(saved):
        return memory
    change = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
    return f"{memory} instead of {quantity('bytes', full.peak_hbm_kv_bytes)} ({change})"


def _parts(row: Row) -> dict[str, float]:
    return {
        _MODEL: row.model_s,
        "rehydration": row.time.rehydration_s,
        "waiting for transfers": row.time.exposed_transfer_s,
        "policy and scoring": row.time.policy_s,
    }


def notes(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """The notes below the tables of a terminal."""
    found = [*_settings(result, rows), *answers_words.footnotes(rows)]
    if all(math.isnan(row.attention_kept) for row in rows):
        found.append("attn. kept is n/a: not measured, or the trace holds no attention.")
    else:
        kept = "attn. kept: recorded attention that fell on readable tokens; not accuracy."
        found.append(f"{kept} {answers_words.not_ranking()}".rstrip())
    if any(not math.isnan(row.oracle_gap) for row in rows):
        found.append(
            "gap: what the oracle keeps at the same budget, less the policy's. It knows the future "
            "and only evicts, the same tokens in all heads; DDR, fewer bits, recomputing, a choice "
            "per head, or holding more than the budget can beat it (below zero)."
        )
    found += _by_group(rows)
    found.append(
        "Peaks are the largest of any search, before decisions and with the prefill: they can "
        "exceed the budget. Times and moves are sums."
    )
    return [*found, *cautions(result, rows, "see --report")]


def _settings(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """Which policies are not what their names alone stand for."""
    policies = dict.fromkeys(row.policy for row in rows if not row.is_oracle)
    given = [" ".join([each, *own]) for each in policies
             if (own := answers_words.changed(each, result))]  # fmt: skip
    return [f"Settings that are not the defaults: {', '.join(given)}."] if given else []


def _by_group(rows: Sequence[Row]) -> list[str]:
    """What other rows and oracles policies that choose per layer or head are measured with."""
    per = [each for each in ("layer", "head") if any(row.per == each for row in rows)]
    if not per or all(math.isnan(row.attention_kept) for row in rows if row.per in per):
        return []
    kind = " or ".join(per)
    said = f"Where a policy chooses per {kind}, attn. kept is each {kind}'s own, in captured layers"
    bounds = list(dict.fromkeys(row.policy for row in rows if row.is_oracle and row.per in per))
    if bounds:
        said += (
            f", and the gap is to {' or '.join(bounds)}, which shares the budget out as is best "
            "(in long searches equally: uneven shares can beat that)"
        )
    return [f"{said}."]


def budget_of_reading(policies: Iterable[str]) -> list[str]:
    """What the budget of policies is that read less than they hold; nothing if there is none."""
    whose = ", ".join(dict.fromkeys(policies))
    said = f"The budget of {whose} is how many tokens a step reads of each KV head."
    return [said] if whose else []


def cautions(result: ReplayResult, rows: Sequence[Row], where: str) -> list[str]:
    """What does not hold for every row, and how many numbers of the hardware are not measured.

    Broken budgets, ties, and notes on single policies; `where` tells where the numbers are listed.
    """
    found = []
    if any(row.label != row.policy for row in rows):
        found.append(f"{MARK} does not keep to the budget: see HBM peak.")
    choosing = [row.policy for row in rows if row.bounds_read_bytes and not row.bounded]
    found += budget_of_reading(choosing)
    found += [*_ties(rows), *result.notes]
    if count := len(result.assumed):
        numbers = f"{counted(count, 'number')} of the hardware profile"
        found.append(f"{numbers} {'are' if count > 1 else 'is'} assumed, not measured ({where}).")
    return found


def _ties(rows: Sequence[Row]) -> list[str]:
    """A note for every trace on which policies lose exactly as much, so that none is better.

    What is protected can fill a budget alone, and policies that take whole blocks can take the
    same ones; the order of such rows says nothing about their scores.
    """
    cells: dict[tuple[str, str, float], list[str]] = {}
    for row in rows:
        if row.attention_kept < 1 and row.budget != ANY and not row.is_oracle:
            kept = round(row.attention_kept, 12)
            cells.setdefault((row.trace, row.budget, kept), []).append(row.label)
    alike: dict[str, dict[tuple[str, ...], list[str]]] = {}  # trace -> policies -> budgets
    for (trace, budget, _), policies in cells.items():
        if len(policies) > 1:
            alike.setdefault(trace, {}).setdefault(tuple(policies), []).append(budget)
    several = len({row.trace for row in rows}) > 1
    found = []
    for trace, groups in alike.items():
        on = f" on {trace}" if several else ""
        same = [
            f"{len(policies)} policies{on} ({', '.join(policies)}; budget {', '.join(budgets)})"
            for policies, budgets in groups.items()
        ]
        found.append(f"Same attention kept, so in no order: {'; '.join(same)}.")
    return found


def too_small(found: Iterable[LeftOut]) -> list[LeftOut]:
    """Of what was left out, the cells whose budget was too small."""
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
