"""Rules of policies by hand: what deciding takes in NumPy, with nothing around it.

Each rule loops over the rows of an episode with the fewest calls that it needs, on plain arrays: no
tree, no account of bytes, transfers or seconds, no result, and evictions are not written down.
Numbers that are not attention are drawn at random.  With the time to decode the rows, and to
simulate what the policy moves, this is about the least that a replay can take.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from generate import PROMPT

_INTERVAL, _DOOMED, _IN_HBM, _REACH = 64, 0.03, 0.5, 8  # of the hierarchy and its ablations
_STAIR = 32
_SEGMENT, _RECENT, _KEEPS = 128, 128, np.array([64, 32, 8])

#: Values of a step's row, and the positions that they are of: None if all.
Row = tuple[np.ndarray, np.ndarray | None]
#: What a rule works on: the rows, the budget in tokens, a number and 16 of them by token.
Rule = Callable[[list[Row], int, np.ndarray, np.ndarray], None]


def hand_s(path: Path, attention: str, name: str, budget: int) -> float:
    """Seconds of the processor that a rule takes for all episodes, decoding left out."""
    taken, rng = 0.0, np.random.default_rng(0)
    for rows in _rows(path, attention):
        number, numbers = rng.random(len(rows)), rng.normal(size=(len(rows), 16))
        start = time.process_time()
        RULES[name](rows, budget, number, numbers)
        taken += time.process_time() - start
    return taken


def _rows(path: Path, attention: str) -> Iterator[list[Row]]:
    """The rows of each episode, as they lie in the file; empty ones where there is no attention."""
    if attention == "none":
        nothing = np.empty(0), None
        for group in range((file := pq.ParquetFile(path)).num_row_groups):
            yield [nothing] * (file.metadata.row_group(group).num_rows - 3)  # see `generate`
        return
    names = ["attention"] if attention == "dense" else ["attention_value", "attention_index"]
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, columns=names, use_threads=False)
        lists = [table[name].combine_chunks() for name in names]
        values, *positions = (each.flatten().to_numpy(zero_copy_only=False) for each in lists)
        # In the types that NumPy computes with fastest.
        values, positions = values.astype(np.float64), [each.astype(np.int64) for each in positions]
        found: list[Row] = []
        for first, last in pairwise(lists[0].offsets.to_numpy()):
            if last > first:
                found.append((values[first:last], positions[0][first:last] if positions else None))
        yield found


def _h2o(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    """A sparse row changes few sums: a heap finds the lowest, looking again at those that rose."""
    score, held = np.empty(len(rows)), np.arange(budget + 1)
    heap: list[tuple[float, int]] = []
    for step, row in enumerate(rows):
        _grown(score, row, step)
        if row[1] is None:
            if step >= budget:
                held[-1] = step
                held[score.take(held).argmin()] = step  # the next one takes its place
            continue
        heapq.heappush(heap, (score.item(step), step))
        while step >= budget:
            known, at = heap[0]
            if (now := score.item(at)) == known:
                heapq.heappop(heap)
                break
            heapq.heapreplace(heap, (now, at))


def _vatp(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    score, held = np.empty(len(rows)), np.arange(budget + 1)
    for step, row in enumerate(rows):
        _grown(score, row, step)
        if step >= budget:
            held[-1] = step
            held[(score[held] * number[held]).argmin()] = step


def _attn_hs(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    score, held = np.empty(len(rows)), np.arange(budget + 1)
    for step, row in enumerate(rows):
        _grown(score, row, step)
        if step >= budget:
            held[-1] = step
            rank = _unit(score[held])
            rank += _unit(number[held])
            held[rank.argmin()] = step  # the next one takes its place


def _unit(values: np.ndarray) -> np.ndarray:
    values -= values.min()
    values /= values.max()
    return values


def _grown(score: np.ndarray, row: Row, step: int) -> None:
    """Add a row to the sums of the tokens so far."""
    values, at = row
    score[step] = 0.0
    if at is None:
        seen = score[: step + 1]
        seen += values
    else:
        score[at] += values


def _tova(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    paid, held = np.zeros(len(rows)), np.arange(budget + 1)
    for step, (values, at) in enumerate(rows):
        if step < budget:
            continue
        held[-1] = step
        if at is None:
            held[values.take(held).argmin()] = step
        else:
            paid[at] = values
            held[paid.take(held).argmin()] = step
            paid[at] = 0.0


def _raas(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    last, held = np.empty(len(rows)), np.arange(budget + 1)
    for step, (values, at) in enumerate(rows):
        if at is not None:
            # The median is an even share of the rest, and no less is listed: all are used alike,
            # and the oldest goes.
            if (values < 0.0).any():
                break
            continue
        last[step] = step
        middle = (len(values) - 1) // 2
        np.putmask(last[: step + 1], values >= np.partition(values, middle)[middle], step)
        if step >= budget:
            held[-1] = step
            held[last.take(held).argmin()] = step


def _staircase(rows: list[Row], budget: int, rank: np.ndarray, _: np.ndarray) -> None:
    """Every 32 steps the lowest of HBM go to DDR of the budget's size, its lowest out.

    Half of what HBM keeps is in 8 bits.
    """
    hbm, ddr = np.arange(0), np.arange(0)
    for step in range(0, len(rows), _STAIR):
        hbm = np.concatenate([hbm, np.arange(step, min(step + _STAIR, len(rows)))])
        if len(hbm) <= budget - _STAIR:
            continue
        ranks, over = rank.take(hbm), len(hbm) - budget + _STAIR
        order = ranks.argpartition([over, over + (budget - _STAIR) // 2])
        ddr, hbm = np.concatenate([ddr, hbm[order[:over]]]), hbm[order[over:]]
        if (out := len(ddr) - budget) > 0:
            ddr = ddr[rank.take(ddr).argpartition(out)[out:]]


def _segments(rows: list[Row], budget: int, rank: np.ndarray | None, prompt: int = 0) -> None:
    """Entropies in segments of what is held; inside, tokens by `rank` or by their attention.

    A `prompt` and the newest tokens stay, and come off the budget: how many of them decides how
    often the rest is over it.
    """
    recent = min(_RECENT, budget // 4)
    budget -= prompt + recent
    held, count = np.empty(budget + 1, dtype=np.int64), 0
    for step in range(prompt + recent, len(rows)):
        values, at = rows[step]
        held[count] = step - recent
        count += 1
        if count <= budget:
            continue
        if at is None:
            paid = values[held]
        else:
            row = np.zeros(step + 1)
            row[at] = values
            paid = row[held]
        of = held // _SEGMENT
        starts = np.flatnonzero(np.diff(of, prepend=-1))
        sizes = np.diff(starts, append=count)
        mass = np.add.reduceat(paid, starts)
        share = paid / np.repeat(np.where(mass > 0, mass, 1.0), sizes)
        share *= np.log(share, where=share > 0, out=np.zeros(count))
        entropy = np.where(mass > 0, -np.add.reduceat(share, starts), np.log(sizes))
        ordered, n = np.sort(entropy), len(entropy)
        keeps = _KEEPS[np.searchsorted(ordered[[n // 3, 2 * n // 3]], entropy)]
        most = np.minimum(keeps, sizes)
        keeps = np.clip(budget - np.cumsum(most) + most, 0, most)
        crowded = keeps < sizes
        inside = np.flatnonzero(np.repeat(crowded, sizes))
        score = paid[inside] if rank is None else rank[held[inside]]
        inside = inside[np.lexsort((-score, of[inside]))]
        most, sizes = keeps[crowded], sizes[crowded]
        place = np.arange(len(inside)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        stay = np.ones(count, dtype=bool)
        stay[inside[place >= np.repeat(most, sizes)]] = False
        left = held[:count][stay]
        count = len(left)
        held[:count] = left


def _thinkv(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    _segments(rows, budget, None)


def _segment_hs(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    _segments(rows, budget, number, PROMPT)


def _hierarchy(rows: list[Row], budget: int, number: np.ndarray, _: np.ndarray) -> None:
    _moved(rows, budget, lambda score, alive: score[alive])


def _redundancy(rows: list[Row], budget: int, norm: np.ndarray, keys: np.ndarray) -> None:
    def rank(score: np.ndarray, alive: np.ndarray) -> np.ndarray:
        columns, similar = keys[alive], np.zeros(len(alive))
        for lag in range(1, min(_REACH, len(alive) - 1) + 1):
            cosine = np.einsum("ij,ij->i", columns[lag:], columns[:-lag])
            similar[lag:] += cosine
            similar[:-lag] += cosine
        return np.asarray(score[alive] * norm[alive] - similar)

    _moved(rows, budget, rank)


def _moved(
    rows: list[Row], budget: int, rank: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> None:
    """Every `_INTERVAL` steps the lowest are destroyed, and the next lowest go to DDR."""
    score, tier = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int8)
    for step in range(0, len(rows), _INTERVAL):
        part = rows[step : step + _INTERVAL]
        stop = step + len(part)
        at = [np.arange(len(values)) if where is None else where for values, where in part]
        values = np.concatenate([values for values, _ in part])
        score[:stop] += np.bincount(np.concatenate(at), values, stop)
        alive = np.flatnonzero(tier[:stop] < 2)
        doomed = int(_DOOMED * len(alive))
        kept = max(1, min(int(_IN_HBM * (len(alive) - doomed)), budget - _INTERVAL))
        order = rank(score, alive).argpartition(sorted({doomed, len(alive) - kept}))
        tier[alive[order[-kept:]]] = 0
        tier[alive[order[doomed:-kept]]] = 1
        tier[alive[order[:doomed]]] = 2


RULES: dict[str, Rule] = {
    "h2o": _h2o, "attn-hs": _attn_hs, "vatp": _vatp, "tova": _tova, "raas": _raas,
    "thinkv": _thinkv, "segment-hs": _segment_hs, "hierarchy": _hierarchy,
    "staircase": _staircase, "redundancy": _redundancy, "attn-val-redundancy": _redundancy,
}  # fmt: skip
