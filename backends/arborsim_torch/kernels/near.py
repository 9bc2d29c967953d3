"""Attention where the keys are: the CPU attends over keys and values that stay in host memory.

The queries of a step are small and go to the host; the output and its log-sum-exp are as small and
come back, to be merged with the GPU's part (`arborsim_torch.kernels.merge`).  On CUDA the copies
run on streams of their own and the CPU's work in a thread, so that both parts run at a time.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import attend
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
        out, lse = attend(wide, keys, values, scale, _readable(index, mask, tile))
        outs.append(out)
        lses.append(lse)
    out, lse = merge(outs, lses)
    return out.to(q.dtype), lse


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


class Pending:
    """Attention that is under way.

    Parameters
    ----------
    running : Future
        Gives output, log-sum-exp, and the event after which the GPU may read them, or None.
    """

    def __init__(self, running: Future[tuple[Tensor, Tensor, Any]]) -> None:
        self._running = running

    def result(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp as of `attend_host`, on the queries' device.

        The host waits for the CPU's work; the GPU's current stream waits for the copies.
        Raises what the work raised.
        """
        out, lse, sent = self._running.result()
        if sent is not None:
            current = torch.cuda.current_stream(out.device)
            current.wait_event(sent)
            out.record_stream(current)
            lse.record_stream(current)
        return out, lse


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
        self,
        q: Tensor,
        k_host: Tensor,
        v_host: Tensor,
        index: Tensor | None,
        scale: float,
        mask: Tensor | None = None,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Pending:
        """Begin `attend_host`.

        Parameters
        ----------
        q : Tensor ``[seqs, heads, queries, head_dim]``
            On the device; may still be under computation on its current stream.
        k_host, v_host, index, scale, mask, k_scale, v_scale
            As for `attend_host`, on the host; must not change until the result is there, and
            copies into them must have ended.
        """
        there, ready = self._fetch(q) if self._cuda else (q, None)

        @torch.no_grad()
        def work() -> tuple[Tensor, Tensor, Any]:
            if ready is not None:
                ready.synchronize()
            out, lse = attend_host(
                there, k_host, v_host, index, scale, mask, k_scale=k_scale, v_scale=v_scale
            )
            return self._send(out, lse) if self._cuda else (out, lse, None)

        if self._worker is not None:
            return Pending(self._worker.submit(work))
        done: Future[tuple[Tensor, Tensor, Any]] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # told where a thread would tell it
            done.set_exception(error)
        return Pending(done)

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

    def _send(self, *parts: Tensor) -> tuple[Tensor, Tensor, Any]:
        with torch.cuda.stream(self._up):
            out, lse = (part.pin_memory().to(self.device, non_blocking=True) for part in parts)
            return out, lse, self._up.record_event()


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(2)]
