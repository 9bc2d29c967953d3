"""Attention where the keys are: the CPU attends over keys and values that stay in host memory.

The queries of a step are small and go to the host; the output and its log-sum-exp are as small and
come back, to be merged with the GPU's part (`arborsim_torch.kernels.dense`).  On CUDA the copies
run on streams of their own and the CPU's work in a thread, so that both parts run at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import attend_weights, finite, merge, pack, unpack
from arborsim_torch.kernels.fused import attend_cpu
from arborsim_torch.kernels.pieces_torch import attend_fused, rows_at
from arborsim_torch.tiers.codec import E4M3_UNIT, e4m3_as_half

_TILE_TOKENS = 512  # per four threads: float32 copies of a tile stay in the caches of a CPU
_LEAST_PART = 128  # tokens that are worth a thread of their own
_MOST_THREADS = 16  # more do not read memory faster
_SPARE_CORES = 2  # one launches the GPU's work, one serves its driver
_scratch = threading.local()


@dataclass(frozen=True)
class HostPiece:
    """Slots of one host pool, of which `attend_host` reads tiles."""

    #: ``[kv_heads, capacity, head_dim]``; 8-bit ones have scales, float32 ``[kv_heads, capacity]``
    k: Tensor
    v: Tensor
    #: int ``[n]`` or ``[kv_heads, n]``: slots to read, -1 = padding.  None for all in order.
    index: Tensor | None = None
    #: bool ``[seqs or 1, kv_heads or 1, queries or 1, n]``: by entry of `index`
    mask: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def entries(self) -> int:
        return self.k.shape[1] if self.index is None else self.index.shape[-1]

    @cached_property
    def padded(self) -> bool:
        """Whether the index has entries of -1."""
        return self.index is not None and bool((self.index < 0).any())

    def rows(self, tile: slice) -> tuple[Tensor, Tensor]:
        """Keys and values in float32, ``[kv_heads, entries, head_dim]``, until the next call."""
        slot = None if self.index is None else self.index[..., tile]
        if slot is not None and self.padded:
            slot = slot.clamp(min=0)
        numbers = len(self.k) * (tile.stop - tile.start) * self.k.shape[2]
        room = _scratch_of(2 * numbers)
        return (
            _wide(self.k, self.k_scale, slot, tile, room[:numbers]),
            _wide(self.v, self.v_scale, slot, tile, room[numbers:]),
        )

    def readable(self, tile: slice) -> Tensor | None:
        """Bool ``[seqs or 1, kv_heads or 1, queries or 1, entries]``; None if all are."""
        own = None if self.mask is None else self.mask[..., tile]
        if self.index is None or not self.padded:
            return own
        held = self.index[..., tile] >= 0
        held = (held if held.ndim == 2 else held[None])[None, :, None]
        return held if own is None else held & own


def attend_host(
    q: Tensor, piece: HostPiece, scale: float, logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention in float32 over chosen slots of a host pool, copied a tile at a time.

    A tile goes to PyTorch's fused attention, unless logits are wanted or several queries of a
    sequence have masks.  Returns outputs and log-sum-exps ``[seqs, heads, queries]``.  Logits are
    written to float32 ``[kv_heads, seqs, group, queries, n]``, -inf where nothing is read.
    """
    n, mask = piece.entries if piece.k.shape[1] else 0, piece.mask
    step = _TILE_TOKENS * max(1, torch.get_num_threads() // 4)
    tiles = [slice(first, min(first + step, n)) for first in range(0, max(n, 1), step)]
    if n and logits is None and (mask is None or mask.shape[2] == 1 == q.shape[2]):
        out, lse = _attend_fused(q, piece, tiles, scale)
        return out.to(q.dtype), lse
    wide, parts = q.float(), []
    for tile in tiles:
        out, lse, weights = attend_weights(wide, *piece.rows(tile), scale, piece.readable(tile))
        if logits is not None:
            base = lse.view(*weights.shape[:-1], 1)
            logits[..., tile] = weights.log_().add_(base).transpose(0, 1)
        parts.append((out, lse))
    out, lse = merge(*zip(*parts, strict=True))
    return out.to(q.dtype), lse


def _attend_fused(
    q: Tensor, piece: HostPiece, tiles: Sequence[slice], scale: float
) -> tuple[Tensor, Tensor]:
    """`attend_host` without logits; all parts are merged at once."""
    seqs, _, queries, _ = q.shape
    rows = pack(q, len(piece.k)).float()
    outs, lses = [], []
    for tile in tiles:
        keys, values = piece.rows(tile)
        readable = piece.readable(tile)
        if readable is None:
            parts = _attend_parts(rows, keys, values, scale)
        else:
            one = attend_fused(rows, keys, values, readable[:, :, 0], scale, seqs)
            parts = iter([(one[0][None], one[1][None])])
        for out, lse in parts:
            outs.append(out)
            lses.append(lse)
    out, lse = (each[0] if len(each) == 1 else torch.cat(each) for each in (outs, lses))
    if len(out) > 1:
        whole = torch.logsumexp(lse, 0)
        out = torch.exp(lse - finite(whole))[..., None].mul(out).sum(0)
        lse = whole
    else:
        out, lse = out[0], lse[0]
    return unpack(out.contiguous(), seqs, queries), unpack(lse.contiguous(), seqs, queries)


def _attend_parts(
    rows: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Output ``[parts, kv_heads, rows, head_dim]`` and log-sum-exp of parts of the keys.

    The operator gives a thread a head; there are parts so that every thread has work.
    """
    kv_heads, n, _ = keys.shape
    step = min(n, max(_LEAST_PART, n // -(-torch.get_num_threads() // kv_heads)))
    whole = n // step * step
    for first, last, size in ((0, whole, step), (whole, n, n - whole)):
        if size:
            k, v = (
                each[:, first:last].unflatten(1, (-1, size)).transpose(0, 1)
                for each in (keys, values)
            )
            yield attend_cpu(rows.expand(len(k), -1, -1, -1), k, v, scale)


def attend_packed(
    q: Tensor, pieces: Sequence[HostPiece], scale: float, *, logits: bool, pinned: bool = False
) -> Tensor:
    """`attend_host` over all pieces, as `Pending.packed` returns it; in page-locked memory."""
    (seqs, heads, queries, dim), kv_heads = q.shape, len(pieces[0].k)
    entries = [piece.entries if logits else 0 for piece in pieces]
    rows = seqs * (heads // kv_heads) * queries
    packed = torch.empty((kv_heads, rows, dim + 1 + sum(entries)), pin_memory=pinned)
    if logits:
        packed.fill_(float("-inf"))
    of_logits = packed[..., dim + 1 :].unflatten(1, (seqs, -1, queries)).split(entries, dim=-1)
    parts = [
        attend_host(q.float(), piece, scale, own if logits else None)
        for piece, own in zip(pieces, of_logits, strict=True)
    ]
    out, lse = parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))
    packed[..., :dim] = pack(out, kv_heads)
    packed[..., dim] = pack(lse[..., None], kv_heads)[..., 0]
    return packed


def _scratch_of(numbers: int) -> Tensor:
    """This thread's memory for a tile: fresh memory costs more than what is written to it."""
    held: Tensor | None = getattr(_scratch, "numbers", None)
    if held is None or len(held) < numbers:
        with torch.inference_mode(False):  # lest it be of no use outside that mode
            held = _scratch.numbers = torch.empty(numbers)
    return held[:numbers]


def _wide(
    pool: Tensor, scales: Tensor | None, slot: Tensor | None, tile: slice, room: Tensor
) -> Tensor:
    """Rows in float32: copied to `room`, unless that is how they lie in the pool."""
    if slot is None:
        rows, by = pool[:, tile], None if scales is None else scales[:, tile]
    else:
        rows, by = _looked_up(pool, slot), None if scales is None else rows_at(scales, slot)
    if rows.dtype == torch.float8_e4m3fn and by is not None:
        rows, by = e4m3_as_half(rows), by * E4M3_UNIT
    if rows.dtype == torch.float32 and by is None and rows.stride(-1) == 1:
        return rows
    heads, n, dim = rows.shape
    if rows.stride(0) < rows.stride(1):  # token by token, as rows of all heads lie
        wide = room.view(n, heads, dim).transpose(0, 1)
    else:
        wide = room.view(heads, n, dim)
    wide.copy_(rows)
    return wide if by is None else wide.mul_(by[..., None])


def _looked_up(pool: Tensor, slot: Tensor) -> Tensor:
    """`rows_at`; where all heads of a token lie together, they are copied together."""
    if slot.ndim == 2 or not 0 < pool.stride(0) < pool.stride(1):
        return rows_at(pool, slot)
    if pool.dtype == torch.float8_e4m3fn:  # which cannot be indexed everywhere
        return _looked_up(pool.view(torch.int8), slot).view(pool.dtype)
    return pool.transpose(0, 1).index_select(0, slot).transpose(0, 1)


class Pending:
    """Attention that is under way, for queries `q`.

    `running` gives `packed`, and the event after which the GPU may read it, or None.
    """

    def __init__(self, running: Future[tuple[Tensor, Any]], q: Tensor) -> None:
        self._running, self._dtype = running, q.dtype
        self._seqs, _, self._queries, self._dim = q.shape

    def packed(self) -> Tensor:
        """The results in one copy, float32 ``[kv_heads, rows, head_dim + 1 + entries]``.

        Of each row of `arborsim_torch.kernels.dense.pack`, on the queries' device: output,
        log-sum-exp, and where they were asked for, the logits of all pieces' entries.  The host
        waits for the CPU's work, and raises what that raised; the GPU waits for the copy.
        """
        packed, sent = self._running.result()
        if sent is not None:
            current = torch.cuda.current_stream(packed.device)
            current.wait_event(sent)
            packed.record_stream(current)
        return packed

    def result(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp as of `attend_host`, on the queries' device; see `packed`."""
        whole = unpack(self.packed(), self._seqs, self._queries)
        return whole[..., : self._dim].to(self._dtype), whole[..., self._dim]


class NearAttention:
    """Attends over host pools for queries of one device.

    In the `background` the CPU works in a thread: by default exactly if the queries are on CUDA,
    since on the CPU there is nothing to overlap with.
    """

    def __init__(self, device: torch.device, *, background: bool | None = None) -> None:
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        self._worker: ThreadPoolExecutor | None = None
        if self._cuda if background is None else background:
            begin = _leave_cores if self._cuda else None
            self._worker = ThreadPoolExecutor(1, "near-attention", initializer=begin)
        if self._cuda:
            # Two, so that results of one layer do not queue behind the queries of the next.
            self._down, self._up = (torch.cuda.Stream(self.device) for _ in range(2))

    def start(
        self, q: Tensor, pieces: Sequence[HostPiece], scale: float, *, logits: bool = False
    ) -> Pending:
        """Begin `attend_host` over all pieces together, which must not change meanwhile.

        The queries may still be under computation on the device's current stream; copies into the
        pieces, of which there is at least one, must have ended.  `logits` asks for these, too.
        """
        there, ready = self._fetch(q) if self._cuda else (q, None)

        @torch.no_grad()
        def work() -> tuple[Tensor, Any]:
            if ready is not None:
                ready.synchronize()
            packed = attend_packed(there, pieces, scale, logits=logits, pinned=self._cuda)
            return self._send(packed) if self._cuda else (packed, None)

        if self._worker is not None:
            return Pending(self._worker.submit(work), q)
        done: Future[tuple[Tensor, Any]] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # told where a thread would tell it
            done.set_exception(error)
        return Pending(done, q)

    def close(self) -> None:
        """Wait for what is under way and end the thread."""
        if self._worker is not None:
            self._worker.shutdown()

    def __enter__(self) -> NearAttention:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _fetch(self, q: Tensor) -> tuple[Tensor, Any]:
        """Start copying queries to pinned memory; the event says when they are there.

        PyTorch's caching allocators keep pinned and device memory until its copies have ended.
        """
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            there = torch.empty(q.shape, dtype=q.dtype, pin_memory=True)
            there.copy_(q, non_blocking=True)
            q.record_stream(self._down)
            return there, self._down.record_event()

    def _send(self, packed: Tensor) -> tuple[Tensor, Any]:
        with torch.cuda.stream(self._up):
            there = packed.to(self.device, non_blocking=True)
            return there, self._up.record_event()


def _leave_cores() -> None:
    """Let this thread's operations use fewer threads than there are cores.

    One that waits for its core holds up all, at the end of every operation.
    """
    torch.set_num_threads(max(1, min(torch.get_num_threads() - _SPARE_CORES, _MOST_THREADS)))
