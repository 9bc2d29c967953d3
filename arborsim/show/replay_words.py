"""A replay in words: the answer, what its reader must know, and what was left out and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from arborsim.core.units import quantity
from arborsim.run.results import ANY, MARK, LeftOut, ReplayResult, Row
from arborsim.show.words import listed

#: Shares of attention kept that settings are grouped by, strictest first.
LEVELS = (0.99, 0.95, 0.9, 0.8)
MODEL = "model computation"


def summarise(rows: Sequence[Row]) -> list[str]:
    """Sentences about the rows of one trace; the first one is the answer.

    Which setting needs the least HBM at which share of attention kept, what that costs in time,
    what loses nothing, what is smallest, and what the slowest one spends its time on.
    """
    full = _baseline(rows)
    others = _real(rows)
    if not others:
        return [] if full is None else [_alone(full)]
    able = _recommendable(others, full)
    if not able:
        fits = ", fits the machine" if any(not row.fits for row in others) else ""
        none = f"No setting keeps to its budget{fits} and needs less HBM than full retention."
        return [none, *_slowest(others, full, None)]
    found: list[tuple[Row, str]] = []
    known = [row for row in able if not math.isnan(row.attention_kept)]
    if known:
        found.append(_best(known, full))
        found += _lossless(known, full, found[0][0])
        found += _smallest(known, full, [row for row, _ in found])
    else:
        best = min(able, key=_rank)
        claim = f"{_name(best)} needs the least HBM: {_memory(best, full)}; {_time(best, full)}."
        found.append((best, f"{claim} How much attention it keeps was not measured."))
    best, first = found[0]
    rest = [sentence for _, sentence in found[1:]]
    return [first, *_against_oracle(best), *rest, *_slowest(others, full, best)]


def headline(rows: Sequence[Row]) -> Row | None:
    """The row that the first sentence is about, else the smallest; None if there is only full."""
    others, full = _real(rows), _baseline(rows)
    able = _recommendable(others, full)
    known = [row for row in able if not math.isnan(row.attention_kept)]
    if known:
        return _best(known, full)[0]
    return min(able or others, key=_rank, default=None)


def _baseline(rows: Sequence[Row]) -> Row | None:
    return next((row for row in rows if row.is_baseline), None)


def _recommendable(others: Sequence[Row], full: Row | None) -> list[Row]:
    """Settings that hold what they were given, save memory at all and fit, if anything does."""
    anything = any(row.fits for row in others)
    return [
        row
        for row in others
        if row.bounded
        and (row.fits or not anything)
        and (full is None or row.peak_hbm_kv_bytes < full.peak_hbm_kv_bytes)
    ]


def _real(rows: Sequence[Row]) -> list[Row]:
    """What one could choose: full retention is there to compare with, the oracle to bound."""
    return [row for row in rows if not (row.is_baseline or row.is_oracle)]


def _against_oracle(row: Row) -> list[str]:
    gap = row.oracle_gap
    if math.isnan(gap):
        return []
    kept = f"{gap + row.attention_kept:.2%}"
    bound = (
        f"At budget {row.budget_label}, the oracle, which knows the future and only evicts, "
        f"keeps {kept}"
    )
    if abs(gap) < 5e-5:
        return [f"{bound}: as much as {row.policy}."]
    more = "more" if gap > 0 else "less"
    return [f"{bound}: {abs(100 * gap):.2f} percentage points {more} than {row.policy}."]


def _alone(full: Row) -> str:
    return (
        f"Only full retention was replayed: its KV cache peaks at "
        f"{quantity('bytes', full.peak_hbm_kv_bytes)} and it generates "
        f"{quantity('rate', full.tokens_per_s)}."
    )


def _best(known: Sequence[Row], full: Row | None) -> tuple[Row, str]:
    for level in LEVELS:
        pool = [row for row in known if row.attention_kept >= level]
        if pool:
            best = min(pool, key=_rank)
            claim = (
                f"Of the settings that keep at least {level:.0%} of the attention, {_name(best)} "
                f"needs the least HBM: {_memory(best, full)}, "
                f"with {_kept(best)} of the attention kept; {_time(best, full)}."
            )
            return best, claim
    most = max(row.attention_kept for row in known)
    equal = [row for row in known if most - row.attention_kept < 1e-12]
    best = min(equal, key=_rank)
    alike = f", like {len(equal) - 1} more," if len(equal) > 1 else ""
    claim = (
        f"No setting keeps {LEVELS[-1]:.0%} of the attention. {_name(best)}{alike} comes "
        f"nearest with {best.attention_kept:.1%}: {_memory(best, full)}; {_time(best, full)}."
    )
    return best, claim


def _lossless(known: Sequence[Row], full: Row | None, said: Row) -> list[tuple[Row, str]]:
    pool = [row for row in known if row.attention_kept >= 1]
    if not pool or said in pool:
        return []
    best = min(pool, key=_rank)
    claim = (
        f"Without losing any attention, the least is {_name(best)}: "
        f"{_memory(best, full)}; {_time(best, full)}."
    )
    return [(best, claim)]


def _smallest(known: Sequence[Row], full: Row | None, said: Sequence[Row]) -> list[tuple[Row, str]]:
    least = min(row.peak_hbm_kv_bytes for row in known)
    if any(row.peak_hbm_kv_bytes <= 1.05 * least for row in said):
        return []
    near = [row for row in known if row.peak_hbm_kv_bytes <= 1.01 * least]
    best = max(near, key=lambda row: row.attention_kept)
    claim = (
        f"Smallest of all is {_name(best)}: {_memory(best, full)}, but only "
        f"{_kept(best)} of the attention is kept; {_time(best, full)}."
    )
    return [(best, claim)]


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
        more = f"{MODEL} ({slowest.model_s / full.model_s:.2f} times that of full retention)"
        shares = [share.replace(MODEL, more) for share in shares]
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


def _memory(row: Row, full: Row | None) -> str:
    peak = quantity("bytes", row.peak_hbm_kv_bytes)
    if full is None or math.isnan(row.relative.peak_hbm):
        return f"{peak} of KV cache at the peak"
    saved = 1 - row.relative.peak_hbm
    change = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
    base = quantity("bytes", full.peak_hbm_kv_bytes)
    return f"{peak} of KV cache at the peak instead of {base} ({change})"


def _parts(row: Row) -> dict[str, float]:
    return {
        MODEL: row.model_s,
        "rehydration": row.time.rehydration_s,
        "waiting for transfers": row.time.exposed_transfer_s,
        "policy and scoring": row.time.policy_s,
    }


def _time(row: Row, full: Row | None) -> str:
    ratio = row.relative.time
    if full is None or math.isnan(ratio):
        return f"it takes {quantity('seconds', row.time.total_s)}"
    if abs(ratio - 1) < 0.005:
        return "it takes as long as full retention"
    if ratio < 1:
        return f"it takes {1 - ratio:.1%} less time than full retention"
    base = _parts(full)
    extra = {what: seconds - base[what] for what, seconds in _parts(row).items()}
    cause = max(extra, key=lambda what: extra[what])
    return f"it takes {ratio - 1:.1%} more time than full retention, mostly for {cause}"


_MORE_THAN_ANY = "more than any"


def notes(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """The notes below the tables of a terminal."""
    found = []
    if any(not math.isnan(row.attention_kept) for row in rows):
        found.append("attn. kept: recorded attention that fell on readable tokens; not accuracy.")
    else:
        found.append("attn. kept is n/a: not measured, or the trace holds no attention.")
    if any(not math.isnan(row.oracle_gap) for row in rows):
        found.append(
            "gap: what the oracle keeps at the same budget, less the policy's, in percentage "
            "points. It knows the future, and bounds what evicting the same tokens in all heads "
            "can keep; DDR, 8 bits, recomputing, a choice per head, or holding more than the "
            "budget can beat it (below zero)."
        )
    found.append(
        "Peaks are the largest of any search, taken before decisions and with the prefill: they "
        "can exceed the budget; tokens moved and times are sums."
    )
    return [*found, *cautions(result, rows), *assumed(result, "see --report")]


def cautions(result: ReplayResult, rows: Sequence[Row]) -> list[str]:
    """What does not hold for every row: broken budgets, ties, and notes on single policies."""
    found = []
    if any(row.label != row.policy for row in rows):
        found.append(f"{MARK} does not keep to the budget: see HBM peak.")
    return [*found, *_ties(rows), *result.notes]


def assumed(result: ReplayResult, where: str) -> list[str]:
    """How many numbers of the hardware are not measured; `where` tells where they are listed."""
    count = len(result.assumed)
    if not count:
        return []
    return [
        f"{count} number{'s' if count > 1 else ''} of the hardware profile "
        f"{'are' if count > 1 else 'is'} assumed, not measured ({where})."
    ]


def _ties(rows: Sequence[Row]) -> list[str]:
    """A note for every trace on which policies lose exactly as much, so that none is better.

    What is protected can fill a budget alone, and policies that take whole blocks can take the
    same ones; the order of such rows says nothing about their scores.
    """
    found = []
    traces = list(dict.fromkeys(row.trace for row in rows))
    for trace in traces:
        on = f" on {trace}" if len(traces) > 1 else ""
        groups = [
            f"{len(policies)} policies{on} ({', '.join(policies)}; budget {', '.join(budgets)})"
            for policies, budgets in _alike([row for row in rows if row.trace == trace]).items()
        ]
        if groups:
            found.append(f"Same attention kept, so in no order: {'; '.join(groups)}.")
    return found


def _alike(rows: Sequence[Row]) -> dict[tuple[str, ...], list[str]]:
    """Policies that keep the same, less than everything, with the budgets at which they do."""
    cells: dict[tuple[str, float], list[str]] = {}
    for row in rows:
        if row.attention_kept < 1 and row.budget != ANY and not row.is_oracle:
            cells.setdefault((row.budget, round(row.attention_kept, 12)), []).append(row.label)
    found: dict[tuple[str, ...], list[str]] = {}
    for (budget, _), policies in cells.items():
        if len(policies) > 1:
            found.setdefault(tuple(policies), []).append(budget)
    return found


def left_out(found: Iterable[LeftOut]) -> list[str]:
    """A line per way to come by what is missing, and one for budgets that are too small.

    The same on several traces is said once.
    """
    items = list(found)
    lines = [
        f"Left out: {', '.join(policies)}. {listed(traces)} "
        f"{'do' if len(traces) > 1 else 'does'} not hold what they read; {remedy}."
        f"{_instead(policies, items)}"
        for (traces, remedy), policies in _lacking(items).items()
    ]
    small = _too_small(items)
    if small:
        lines.append(f"Left out where the budget is below what is needed: {'; '.join(small)}.")
    lines += dict.fromkeys(f"Left out: {each.detail}." for each in items if each.unsuited)
    return lines


def _instead(policies: Iterable[str], items: Iterable[LeftOut]) -> str:
    """Which of the policies run without a new recording under another setting."""
    ways: dict[str, dict[str, None]] = {}
    for each in items:
        if each.instead and each.policy in policies:
            ways.setdefault(each.instead, {})[each.policy] = None
    return "".join(f" Without that, --set {way} runs {listed(own)}." for way, own in ways.items())


def _lacking(items: Iterable[LeftOut]) -> dict[tuple[tuple[str, ...], str], list[str]]:
    """Policies by the traces that do not serve them and by how to come by what they read."""
    traces: dict[tuple[str, str], list[str]] = {}
    for each in items:
        if each.remedy:
            remedy = each.unrecorded or f"record with {each.remedy}"
            traces.setdefault((each.policy, remedy), []).append(each.trace)
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (policy, remedy), where in traces.items():
        found.setdefault((tuple(where), remedy), []).append(policy)
    return found


def _too_small(items: Iterable[LeftOut]) -> list[str]:
    """``"on x.parquet: at least 0.15 for h2o, epikv and at least 0.26 for arborkv"``."""
    needs: dict[str, dict[str, str]] = {}  # trace -> policy -> least
    for each in items:
        if not each.remedy and not each.unsuited:
            policies = needs.setdefault(each.trace, {})
            known = policies.get(each.policy, "0")
            policies[each.policy] = max(known, each.least or _MORE_THAN_ANY, key=_size)
    return [
        f"on {trace}: "
        + listed(
            f"{least if least == _MORE_THAN_ANY else f'at least {least}'} for "
            f"{', '.join(policy for policy, one in policies.items() if one == least)}"
            for least in sorted(set(policies.values()), key=_size)
        )
        for trace, policies in needs.items()
    ]


def _size(least: str) -> float:
    return math.inf if least == _MORE_THAN_ANY else float(least)
