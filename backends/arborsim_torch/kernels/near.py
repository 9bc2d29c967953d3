"""Attention where the keys are: the CPU attends over keys and values that stay in host memory.

The queries of a step are small and go to the host; the output and its log-sum-exp are as small and
come back, to be merged with the GPU's part (`arborsim_torch.kernels.merge`).  On CUDA the copies
run on streams of their own and the CPU's work in a thread, so that both parts run at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import attend_weights, pack, unpack
from arborsim_torch.kernels.merge import merge
from arborsim_torch.kernels.pieces_torch import rows_at
from arborsim_torch.tiers.codec import E4M3_UNIT, e4m3_as_half

_TILE_TOKENS = 1024  # float32 copies of a tile stay in the cache of a CPU


def attend_host(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor | None,
    scale: float,
    mask: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention in float32 over chosen slots of a host pool, copied a tile at a time.

    Parameters
    ----------
    q : Tensor ``[seqs, heads, queries, head_dim]``
    k, v : Tensor ``[kv_heads, capacity, head_dim]``
        Of any type; 8-bit ones with their scales.
    index : int Tensor ``[n]`` or ``[kv_heads, n]``, or None
        Slots to read, -1 = padding; None for all in order.
    scale : float
        Factor of the inner products.
    mask : bool Tensor ``[seqs or 1, kv_heads or 1, queries or 1, n]`` or None
        True = readable, by entry of `index`.
    k_scale, v_scale : float32 Tensor ``[kv_heads, capacity]`` or None
    logits : float32 Tensor ``[kv_heads, seqs, group, queries, n]``, optional
        Where to write the logits, -inf where nothing is read.

    Returns
    -------
    out : Tensor ``[seqs, heads, queries, head_dim]``
        In the type of `q`; 0 for a query that reads nothing.
    lse : float32 Tensor ``[seqs, heads, queries]``
        Natural log-sum-exp, -inf for a query that reads nothing.
    """
    wide = q.float()
    n = k.shape[1] if index is None or k.shape[1] == 0 else index.shape[-1]
    outs, lses = [], []
    for first in range(0, max(n, 1), _TILE_TOKENS):
        last = min(first + _TILE_TOKENS, n)
        tile = slice(first, last)
        keys, values = _rows(k, k_scale, index, tile), _rows(v, v_scale, index, tile)
        readable = _readable(index, mask, tile)
        out, lse, weights = attend_weights(wide, keys, values, scale, readable)
        if logits is not None:
            base = lse.view(*weights.shape[:-1], 1)
            logits[..., tile] = weights.log_().add_(base).transpose(0, 1)
        outs.append(out)
        lses.append(lse)
    out, lse = merge(outs, lses)
    return out.to(q.dtype), lse


def attend_packed(q: Tensor, pieces: Sequence[HostPiece], scale: float, *, logits: bool) -> Tensor:
    """`attend_host` over all pieces, as `Pending.packed` returns it."""
    (seqs, heads, queries, dim), kv_heads = q.shape, len(pieces[0].k)
    entries = [piece.entries if logits else 0 for piece in pieces]
    rows = seqs * (heads // kv_heads) * queries
    packed = torch.full((kv_heads, rows, dim + 1 + sum(entries)), float("-inf"))
    of_logits = packed[..., dim + 1 :].unflatten(1, (seqs, -1, queries)).split(entries, dim=-1)
    parts = [
        attend_host(
            q.float(), piece.k, piece.v, piece.index, scale, piece.mask, k_scale=piece.k_scale,
            v_scale=piece.v_scale, logits=own if logits else None,
        )
        for piece, own in zip(pieces, of_logits, strict=True)
    ]  # fmt: skip
    out, lse = parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))
    packed[..., :dim] = pack(out, kv_heads)
    packed[..., dim] = pack(lse[..., None], kv_heads)[..., 0]
    return packed


def _rows(pool: Tensor, scales: Tensor | None, index: Tensor | None, tile: slice) -> Tensor:
    if index is None:
        rows, by = pool[:, tile], None if scales is None else scales[:, tile]
    else:
        slot = index[..., tile].clamp(min=0)
        rows, by = rows_at(pool, slot), None if scales is None else rows_at(scales, slot)
    if rows.dtype == torch.float8_e4m3fn and by is not None:
        rows, by = e4m3_as_half(rows), by * E4M3_UNIT
    wide = rows.float()
    return wide if by is None else wide.mul_(by[..., None])


def _readable(index: Tensor | None, mask: Tensor | None, tile: slice) -> Tensor | None:
    own = None if mask is None else mask[..., tile]
    if index is None:
        return own
    held = index[..., tile] >= 0
    held = (held if held.ndim == 2 else held[None])[None, :, None]
    if own is None:
        return None if bool(held.all()) else held
    return held & own


@dataclass(frozen=True)
class HostPiece:
    """Slots of one host pool, as arguments of `attend_host`."""

    k: Tensor
    v: Tensor
    index: Tensor | None = None
    mask: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def entries(self) -> int:
        return self.k.shape[1] if self.index is None else self.index.shape[-1]


class Pending:
    """Attention that is under way.

    Parameters
    ----------
    running : Future
        Gives `packed`, and the event after which the GPU may read it, or None.
    q : Tensor ``[seqs, heads, queries, head_dim]``
    """

    def __init__(self, running: Future[tuple[Tensor, Any]], q: Tensor) -> None:
        self._running, self._dtype = running, q.dtype
        self._seqs, _, self._queries, self._dim = q.shape

    def packed(self) -> Tensor:
        """What crossed, float32 ``[kv_heads, rows, head_dim + 1 + entries]``: one copy.

        Of each row of `arborsim_torch.kernels.dense.pack`, on the queries' device: output,
        log-sum-exp, and where they were asked for, the logits of all pieces' entries.

        The host waits for the CPU's work; the GPU's current stream waits for the copy.
        Raises what the work raised.
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

    Parameters
    ----------
    device : torch.device
        Of the queries.
    background : bool or None
        Whether the CPU works in a thread; None for: exactly if the queries are on CUDA, since on
        the CPU there is nothing to overlap with.
    """

    def __init__(self, device: torch.device, *, background: bool | None = None) -> None:
        self.device = torch.device(device)
        self._cuda = self.device.type == "cuda"
        self._worker: ThreadPoolExecutor | None = None
        if self._cuda if background is None else background:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="near-attention")
        if self._cuda:
            # Two, so that results of one layer do not queue behind the queries of the next.
            self._down, self._up = _streams(self.device)

    def start(
        self, q: Tensor, pieces: Sequence[HostPiece], scale: float, *, logits: bool = False
    ) -> Pending:
        """Begin `attend_host` over all pieces together.

        Parameters
        ----------
        q : Tensor ``[seqs, heads, queries, head_dim]``
            On the device; may still be under computation on its current stream.
        pieces : sequence of HostPiece
            At least one, on the host; must not change until the result is there, and copies into
            them must have ended.
        scale : float
        logits : bool
            Whether logits are wanted, too.
        """
        there, ready = self._fetch(q) if self._cuda else (q, None)

        @torch.no_grad()
        def work() -> tuple[Tensor, Any]:
            if ready is not None:
                ready.synchronize()
            packed = attend_packed(there, pieces, scale, logits=logits)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _fetch(self, q: Tensor) -> tuple[Tensor, Any]:
        """Start copying queries to pinned memory; the event says when they are there.

        PyTorch's caching allocators keep pinned and device memory until the copies that use it
        have ended.
        """
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            there = torch.empty(q.shape, dtype=q.dtype, pin_memory=True)
            there.copy_(q, non_blocking=True)
            q.record_stream(self._down)
            return there, self._down.record_event()

    def _send(self, packed: Tensor) -> tuple[Tensor, Any]:
        with torch.cuda.stream(self._up):
            there = packed.pin_memory().to(self.device, non_blocking=True)
            return there, self._up.record_event()


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(2)]
