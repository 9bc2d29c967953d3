"""The answer of a replay in words: sentences made from the rows of a trace, best news first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arborsim.core.units import quantity
from arborsim.run.aggregate import Row
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
