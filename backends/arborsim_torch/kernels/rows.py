"""Causal attention of a block of a prompt that adds up its own rows.

Nothing as large as heads x queries x keys ever exists.  On the CPU weights are made for the output
anyway, a tile of queries at a time: those of one KV head are used for both while they are in the
cache, and overwritten by the next.  On CUDA fused attention gives the log-sum-exp, and kernels in
Triton make the weights again from that (`arborsim_torch.kernels.rows_triton`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arborsim.machine.live_memory import TILE_BYTES
from arborsim_torch.kernels.dense import accumulator, wide_product
from arborsim_torch.kernels.flash import attend_prefill
from arborsim_torch.kernels.piece import BlockRows, in_triton


def adds_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `attend_rows` runs there on queries of a type."""
    return device.type == "cpu" or in_triton(device, dtype)


def attend_rows(q: Tensor, k: Tensor, v: Tensor, scale: float, kept: BlockRows) -> Tensor:
    """Softmax attention of the last tokens of a sequence, whose rows are kept as `kept` says.

    Query i of ``[heads, queries, head_dim]`` reads all keys but the last ``queries - 1 - i``.
    `kept` is of no more queries than there are, and changed.
    """
    if q.device.type == "cpu":
        return _in_tiles(q, k, v, scale, kept)
    from arborsim_torch.kernels import rows_triton

    before = k.shape[1] - q.shape[1]
    history = (k[:, :before], v[:, :before])
    out, lse = attend_prefill(q[None], k[:, before:], v[:, before:], scale, history)
    rows_triton.add_rows(q, k, lse[0], scale, kept)
    return out[0]


def count_paid(q: Tensor, k: Tensor, scale: float, part: float) -> Tensor:
    """How many keys queries pay at least a `part` > 0 of the most that they pay any.

    Logits tell, a tile of queries at a time: weights are their exponentials.  Takes queries as
    `attend_rows` does.  Returns int64 ``[kv_heads, heads // kv_heads, queries]``: 0 for a query
    whose weights are not numbers; others pay their largest at least.
    """
    heads, queries, dim = q.shape
    kv_heads, n, _ = k.shape
    grouped, found = q.view(kv_heads, -1, queries, dim), list[Tensor]()
    size = max(1, min(queries, TILE_BYTES // (4 * heads * n)))
    for start in range(0, queries, size):
        some = grouped[:, :, start : start + size]
        rows, end = some.shape[2], n - queries + start + some.shape[2]
        packed = some.reshape(kv_heads, -1, dim)
        logits = wide_product(packed, k[:, :end].transpose(1, 2)).mul_(scale)
        logits = logits.view(kv_heads, -1, rows, end)
        logits[..., end - rows :] += _later(rows, logits.dtype, logits.device)
        most = logits.amax(-1, keepdim=True)
        # Infinity less itself is no number: neither is a softmax with such a logit.
        found.append((logits >= most + (most - most) + math.log(part)).sum(-1))
    return torch.cat(found, -1)


def _in_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float, kept: BlockRows) -> Tensor:
    """`attend_rows` on the CPU."""
    heads, queries, dim = q.shape
    kv_heads, n, _ = k.shape
    members, before, kind = heads // kv_heads, n - queries, accumulator(q.dtype)
    keys, values = k.to(kind).transpose(1, 2), v.to(kind)
    scaled = (q.to(kind) * scale).view(kv_heads, members, queries, dim)
    out = q.new_empty((kv_heads, members, queries, dim))
    size = max(1, min(queries, TILE_BYTES // (kind.itemsize * members * n)))
    room, later = q.new_empty(members * size * n, dtype=kind), _later(size, kind, q.device)
    taken = _Taken(kept, kv_heads, heads, queries, q.new_empty(size * n, dtype=kind))
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        rows, end = stop - start, before + stop
        weights = room[: members * rows * end].view(members * rows, end)
        by_member = weights.view(members, rows, end)
        taken.begin(start, stop, end)
        for head in range(kv_heads):
            some = scaled[head, :, start:stop].reshape(-1, dim)
            torch.mm(some, keys[head, :, :end], out=weights)
            by_member[:, :, before + start :] += later[:rows, :rows]
            torch.softmax(weights, -1, out=weights)
            found = torch.mm(weights, values[head, :end])
            out[head, :, start:stop] = found.view(members, rows, dim)
            taken.add(head, by_member)
        taken.finish()
    return out.view(heads, queries, dim)


def _later(size: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """-inf for what comes after a query, ``[size, size]``."""
    return torch.full((size, size), float("-inf"), dtype=kind, device=device).triu_(1)


class _Taken:
    """Takes in a tile's weights, KV head by KV head; `room` has space for a tile's rows."""

    def __init__(
        self, kept: BlockRows, kv_heads: int, heads: int, queries: int, room: Tensor
    ) -> None:
        self._kept, self._heads, self._queries, self._room = kept, heads, queries, room
        self._first_of_mean = queries - kept.of_mean
        self._first_of_groups = queries - kept.of_groups
        self._groups = kv_heads if kept.groups == "head" else 1
        self._newest: list[Tensor] = []

    def begin(self, start: int, stop: int, end: int) -> None:
        """A tile of the queries from `start` to `stop`, which reads `end` keys."""
        self._start, self._stop, self._end = start, stop, end
        self._total = self._room[: (stop - start) * end].view(stop - start, end)
        self._newest.clear()

    def add(self, head: int, weights: Tensor) -> None:
        """Those of a KV head, ``[members, rows, end]``."""
        if self._kept.groups == "head":
            own = weights[0] if len(weights) == 1 else weights.mean(0)
            self._add_group(head, own)
            if self._kept.mean is None:
                return
        for member, rows in enumerate(weights):
            if head == member == 0:
                self._total.copy_(rows)
            else:
                self._total.add_(rows)

    def finish(self) -> None:
        """The tile has been taken in."""
        kept, start = self._kept, self._start
        if kept.groups == "layer" or kept.mean is not None:
            self._total.div_(self._heads)
        if kept.groups == "layer":
            self._add_group(0, self._total)
        if self._newest and self._stop == self._queries:
            kept.newest = torch.stack(self._newest).float()
        if kept.mean is None or kept.numbers is None or self._stop <= self._first_of_mean:
            return
        first = max(start, self._first_of_mean)
        rows, good = _numbers(self._total[first - start :])
        at = slice(first - self._first_of_mean, self._stop - self._first_of_mean)
        kept.mean[at, : self._end] += rows
        kept.numbers[at] += good

    def _add_group(self, group: int, rows: Tensor) -> None:
        """Rows of one group."""
        kept = self._kept
        if self._stop <= self._first_of_groups:
            return
        self._newest.append(rows[-1].clone())
        if kept.of_groups == 1 and not kept.recent:
            return
        if kept.sums is None:
            shape = (self._groups, self._end + self._queries - self._stop)
            kept.sums = rows.new_zeros(shape, dtype=torch.float64)
        if kept.recent:
            rows = rows.tril(self._end - self._stop + self._start - kept.recent)
        counts, _ = _numbers(rows[max(0, self._first_of_groups - self._start) :])
        kept.sums[group, : self._end] += counts.sum(0, dtype=torch.float64)


def _numbers(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with 0 in those that are not numbers, and which are, ``[rows, 1]``.

    A softmax row with a NaN in it is NaN throughout, so its first entry tells.
    """
    broken = rows[:, :1].isnan()
    return rows.masked_fill(broken, 0.0) if bool(broken.any()) else rows, ~broken
