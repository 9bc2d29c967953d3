"""Triton kernels that choose pages by the bounds of their keys, and what launches them.

The plain form is `arborsim_torch.kernels.ondemand.PageBounds.select`, a dozen launches a layer.
Here a launch for each set of pages makes one whole number of a page: its largest bound, in order,
then the page, lower ones first, then whether it may be read.  A second kernel takes the largest
of these numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

_BLOCK_PAGES = 16
Bounds = tuple[Tensor, Tensor, Tensor]  #: lowest and highest keys of pages, and which have keys


# Pages come and go: a kernel per kind of number would be compiled again and again.
@triton.jit(
    do_not_specialize=["rows", "pages", "begin", "total", "filled_head", "readable_head"],
    do_not_specialize_on_alignment=["filled", "readable"],
)
def rank_pages(
    q, low, high, filled, readable, rank, rows, pages, begin, total,
    q_seq, q_head, q_dim, bound_head, filled_head, readable_head,
    HEADS: constexpr, DIM: constexpr, BLOCK_DIM: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """The rank of some pages of a set, whose first one is page `begin` of all `total` pages."""
    head = tl.program_id(1).to(tl.int64)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, BLOCK_DIM)
    at = head * bound_head + page.to(tl.int64)[:, None] * DIM + dim[None, :]
    there = (page < pages)[:, None] & (dim < DIM)[None, :]
    lows = tl.load(low + at, mask=there, other=0.0).to(tl.float32)
    highs = tl.load(high + at, mask=there, other=0.0).to(tl.float32)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for row in range(rows):
        own = q + (row // HEADS) * q_seq + (head * HEADS + row % HEADS) * q_head + dim * q_dim
        vector = tl.load(own, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
        bound = tl.maximum(vector, 0.0) * highs + tl.minimum(vector, 0.0) * lows
        most = tl.maximum(most, tl.sum(bound, 1))
    good = tl.load(filled + head * filled_head + page, mask=page < pages, other=0) != 0
    allowed = readable + head * readable_head + begin + page
    good = good & (tl.load(allowed, mask=page < pages, other=0) != 0)
    most = tl.where(good, most, float("-inf"))
    most = tl.where(most == 0.0, 0.0, most)  # minus 0 is no lower
    bits = most.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    lower = (0x7FFFFFFF - begin - page).to(tl.int64)
    own_rank = (ordered << 32) | (lower << 1) | good.to(tl.int64)
    tl.store(rank + head * total + begin + page, own_rank, mask=page < pages)


@triton.jit(do_not_specialize=["total"])
def take_pages(rank, chosen, total, TOP: constexpr, BLOCK: constexpr):
    """The `TOP` pages of the highest rank of a KV head; -1 for those that may not be read."""
    head = tl.program_id(0).to(tl.int64)
    page = tl.arange(0, BLOCK)
    own = tl.load(rank + head * total + page, mask=page < total, other=-0x7FFFFFFFFFFFFFFF)
    for spot in range(TOP):
        best = tl.max(own, 0)
        found = 0x7FFFFFFF - ((best & 0xFFFFFFFF) >> 1)
        tl.store(chosen + head * TOP + spot, tl.where((best & 1) != 0, found, -1))
        own = tl.where(own == best, -0x7FFFFFFFFFFFFFFF, own)


def choose(bounds: Sequence[Bounds], q: Tensor, pages_top: int, readable: Tensor) -> Tensor:
    """`arborsim_torch.kernels.ondemand.choose_pages` in Triton."""
    seqs, heads, dim = q.shape
    kv_heads = len(bounds[0][0])
    total, begin, members = sum(filled.shape[1] for *_, filled in bounds), 0, heads // kv_heads
    rank = torch.empty((kv_heads, total), dtype=torch.int64, device=q.device)
    chosen = torch.empty((kv_heads, pages_top), dtype=torch.int64, device=q.device)
    allowed = readable.view(torch.uint8)
    readable_head = allowed.stride(0) if len(allowed) > 1 else 0
    shape = {"HEADS": members, "DIM": dim, "BLOCK_DIM": triton.next_power_of_2(dim)}
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        for low, high, filled in bounds:
            count = filled.shape[1]
            tensors = (q, low, high, filled.view(torch.uint8), allowed, rank)
            numbers = (seqs * members, count, begin, total)
            strides = (*q.stride(), low.stride(0), filled.stride(0), readable_head)
            grid = (triton.cdiv(count, _BLOCK_PAGES), kv_heads)
            rank_pages[grid](*tensors, *numbers, *strides, **shape, BLOCK=_BLOCK_PAGES, num_warps=4)
            begin += count
        block, warps = triton.next_power_of_2(total), 8 if total > 2048 else 4
        take_pages[(kv_heads,)](rank, chosen, total, TOP=pages_top, BLOCK=block, num_warps=warps)
    return chosen
