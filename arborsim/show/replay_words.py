"""A replay in words: the answer, what its reader must know, and what was left out and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arborsim.core.units import quantity
from arborsim.run.results import ANY, MARK, ORACLE, LeftOut, ReplayResult, Row
from arborsim.show.words import counted, listed

#: Shares of attention kept that settings are grouped by, strictest first.
LEVELS = (0.99, 0.95, 0.9, 0.8)
_MODEL = "model computation"


def summarise(rows: Sequence[Row]) -> list[str]:
    """Sentences about the rows of one trace; the first one is the answer.

    Which setting needs the least HBM at which share of attention kept, what that costs in time,
    what loses nothing, what is smallest, and what the slowest one spends its time on.
    """
    full, others, able = _choices(rows)
    if not others:
        return [] if full is None else [
            f"Only full retention was replayed: its KV cache peaks at "
            f"{quantity('bytes', full.peak_hbm_kv_bytes)} and it generates "
            f"{quantity('rate', full.tokens_per_s)}."
        ]  # fmt: skip
    if not able:
        fits = ", fits the machine" if any(not row.fits for row in others) else ""
        none = f"No setting keeps to its budget{fits} and needs less HBM than full retention."
        return [none, *_slowest(others, full, None)]
    known = [row for row in able if not math.isnan(row.attention_kept)]
    if not known:
        best = min(able, key=_rank)
        claim = f"{_name(best)} needs the least HBM: {_costs(best, full)}."
        return [f"{claim} How much attention it keeps was not measured.",
                *_slowest(others, full, best)]  # fmt: skip
    best, claim = _best(known, full)
    said = [best]
    sentences = [claim, *_against_oracle(best)]
    lossless = [row for row in known if row.attention_kept >= 1]
    if lossless and best not in lossless:
        said.append(min(lossless, key=_rank))
        sentences.append(
            f"Without losing any attention, the least is {_name(said[-1])}: "
            f"{_costs(said[-1], full)}."
        )
    least = min(row.peak_hbm_kv_bytes for row in known)
    if all(row.peak_hbm_kv_bytes > 1.05 * least for row in said):
        near = [row for row in known if row.peak_hbm_kv_bytes <= 1.01 * least]
        small = max(near, key=lambda row: row.attention_kept)
        but = f", but only {_kept(small)} of the attention is kept"
        sentences.append(f"Smallest of all is {_name(small)}: {_costs(small, full, but)}.")
    return [*sentences, *_slowest(others, full, best)]


def headline(rows: Sequence[Row]) -> Row | None:
    """The row that the first sentence is about, else the smallest; None if there is only full."""
    full, others, able = _choices(rows)
    known = [row for row in able if not math.isnan(row.attention_kept)]
    if known:
        return _best(known, full)[0]
    return min(able or others, key=_rank, default=None)


def _choices(rows: Sequence[Row]) -> tuple[Row | None, list[Row], list[Row]]:
    """Full retention; what one could choose; what of it could be recommended.

    Full retention is there to compare with, the oracle to bound.  Recommended are settings that
    hold what they were given, save memory at all and fit, if anything does.
    """
    full = next((row for row in rows if row.is_baseline), None)
    others = [row for row in rows if not (row.is_baseline or row.is_oracle)]
    anything = any(row.fits for row in others)
    able = [
        row
        for row in others
        if row.bounded
        and (row.fits or not anything)
        and (full is None or row.peak_hbm_kv_bytes < full.peak_hbm_kv_bytes)
    ]
    return full, others, able


def _best(known: Sequence[Row], full: Row | None) -> tuple[Row, str]:
    """Of the settings whose attention is known, the recommended one, and why."""
    for level in LEVELS:
        pool = [row for row in known if row.attention_kept >= level]
        if pool:
            best = min(pool, key=_rank)
            costs = _costs(best, full, f", with {_kept(best)} of the attention kept")
            return best, (
                f"Of the settings that keep at least {level:.0%} of the attention, {_name(best)} "
                f"needs the least HBM: {costs}."
            )
    most = max(row.attention_kept for row in known)
    equal = [row for row in known if most - row.attention_kept < 1e-12]
    best = min(equal, key=_rank)
    alike = f", like {len(equal) - 1} more," if len(equal) > 1 else ""
    return best, (
        f"No setting keeps {LEVELS[-1]:.0%} of the attention. {_name(best)}{alike} comes "
        f"nearest with {best.attention_kept:.1%}: {_costs(best, full)}."
    )


def _against_oracle(row: Row) -> list[str]:
    gap = row.oracle_gap
    if math.isnan(gap):
        return []
    more = "more" if gap > 0 else "less"
    against = (
        f"as much as {row.policy}"
        if abs(gap) < 5e-5
        else f"{abs(100 * gap):.2f} percentage points {more} than {row.policy}"
    )
    kept = gap + row.attention_kept
    share = "more than 99.99%" if 0.99995 <= kept < 1 else f"{kept:.2%}"  # almost all is not all
    oracle = f"{ORACLE}-{row.per}" if row.per in ("layer", "head") else f"the {ORACLE}"
    return [
        f"At budget {row.budget_label}, {oracle}, which knows the future and only evicts, "
        f"keeps {share}: {against}."
    ]


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


def _rank(row: Row) -> tuple[float, float, float]:
    """Least memory; among equals (to a per cent) the fastest, then the one that keeps most."""
    size = round(math.log(max(row.peak_hbm_kv_bytes, 1)) * 100)
    kept = 0.0 if math.isnan(row.attention_kept) else row.attention_kept
    return size, round(row.time.total_s, 6), -kept


def _kept(row: Row) -> str:
    """Almost all is not all."""
    if row.attention_kept >= 1:
        return "all"
    return "more than 99.9%" if row.attention_kept >= 0.9995 else f"{row.attention_kept:.1%}"


def _name(row: Row) -> str:
    return f"{row.policy} at budget {row.budget_label}"


def _costs(row: Row, full: Row | None, remark: str = "") -> str:
    """Memory, a remark, and time; against full retention if it is known."""
    memory = f"{quantity('bytes', row.peak_hbm_kv_bytes)} of KV cache at the peak"
    saved = 1 - row.relative.peak_hbm
    if full is not None and not math.isnan(saved):
        change = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
        memory += f" instead of {quantity('bytes', full.peak_hbm_kv_bytes)} ({change})"
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


def _parts(row: Row) -> dict[str, float]:
    return {
        _MODEL: row.model_s,
        "rehydration": row.time.rehydration_s,
        "waiting for transfers": row.time.exposed_transfer_s,
        "policy and scoring": row.time.policy_s,
    }


def notes(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """The notes below the tables of a terminal."""
    found = [
        "attn. kept is n/a: not measured, or the trace holds no attention."
        if all(math.isnan(row.attention_kept) for row in rows)
        else "attn. kept: recorded attention that fell on readable tokens; not accuracy."
    ]
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


def left_out(found: Iterable[LeftOut]) -> list[str]:
    """A line per way to come by what is missing, and one for budgets that are too small.

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
    if small := _too_small(items):
        lines.append(f"Left out where the budget is below what is needed: {'; '.join(small)}.")
    lines += dict.fromkeys(f"Left out: {each.detail}." for each in items if each.unsuited)
    return lines


def _instead(policies: Sequence[str], items: Iterable[LeftOut]) -> str:
    """Which of the policies run without a new recording under another setting."""
    ways: dict[str, dict[str, None]] = {}
    for each in items:
        if each.instead and each.policy in policies:
            ways.setdefault(each.instead, {})[each.policy] = None
    return "".join(f" Without that, --set {way} runs {listed(own)}." for way, own in ways.items())


def _too_small(items: Iterable[LeftOut]) -> list[str]:
    """``"on x.parquet: at least 0.15 for h2o, epikv and more than any for arborkv"``."""
    needs: dict[str, dict[str, float]] = {}  # trace -> policy -> least budget
    texts = {math.inf: "more than any"}
    for each in items:
        if not each.remedy and not each.unsuited:
            least = float(each.least or "inf")
            texts.setdefault(least, f"at least {each.least}")
            policies = needs.setdefault(each.trace, {})
            policies[each.policy] = max(policies.get(each.policy, 0.0), least)
    return [
        f"on {trace}: "
        + listed(
            f"{texts[least]} for {', '.join(p for p, one in policies.items() if one == least)}"
            for least in sorted(set(policies.values()))
        )
        for trace, policies in needs.items()
    ]
