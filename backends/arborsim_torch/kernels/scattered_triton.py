"""Attention over scattered slots in Triton: how a call is cut into programs, and its launches.

At decode there is little to compute and much to read, so each program serves all query heads of a
KV head and, where they fit, all sequences: a slot is read once for all of them.  Tokens are split
over as many programs as fill the GPU (flash-decoding; Dao et al. 2023), and the parts are merged.
What the programs do is in `arborsim_torch.kernels.scattered_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from arborsim_torch.kernels.scattered_kernels import attend_split, mean_mass, merge_splits

_MOST_ROWS = 64  # query heads x sequences in one program; tensor cores take at least 16
_MOST_SPLITS = 128  # their outputs are merged in registers
_PROGRAMS_PER_SM = 2


class LaunchShape(NamedTuple):
    """How a call is cut into programs.

    Attributes
    ----------
    block : int
        Tokens that a program reads at a time.
    block_rows : int
        Rows of a program; `row_blocks` of them serve all sequences.
    row_blocks : int
    per_split : int
        Tokens of a split, a multiple of `block`.
    splits : int
    warps : int
    """

    block: int
    block_rows: int
    row_blocks: int
    per_split: int
    splits: int
    warps: int


def launch_shape(
    n: int, rows: int, kv_heads: int, dim: int, itemsize: int, processors: int
) -> LaunchShape:
    """Cut `n` > 0 tokens so that `processors` streaming multiprocessors all have work.

    Blocks are as large as the registers of compute capability 9.0 hold (64 rows spill 24 bytes).

    Parameters
    ----------
    n : int
    rows : int
        Sequences times query heads per KV head.
    kv_heads : int
    dim : int
        Elements of a key.
    itemsize : int
        Bytes of an element of the queries; float32 has no tensor cores to keep it exact.
    processors : int
    """
    block = 64 if dim * itemsize <= 256 else 32
    most_rows = _MOST_ROWS if itemsize == 2 else 16
    block_rows = min(most_rows, max(16, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_rows)
    wanted = triton.cdiv(_PROGRAMS_PER_SM * processors, kv_heads * row_blocks)
    blocks = triton.cdiv(n, block)
    per_split = block * triton.cdiv(blocks, min(wanted, blocks, _MOST_SPLITS))
    warps = 4 if itemsize == 2 and block_rows == 16 else 8
    return LaunchShape(block, block_rows, row_blocks, per_split, triton.cdiv(n, per_split), warps)


def attend_scattered_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    want_mass: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`arborsim_torch.kernels.scattered.attend_scattered` in Triton; unchecked arguments.

    Runs on CUDA, or on CPU tensors in Triton's interpreter (``TRITON_INTERPRET=1``).  Never makes
    the host wait.
    """
    seqs, heads, dim = q.shape
    kv_heads, n = len(k), index.shape[-1]
    rows = seqs * (heads // kv_heads)
    out = torch.empty((seqs, heads, dim), dtype=q.dtype, device=q.device)
    lse = _wide(q, seqs, heads)
    mass = _wide(q, seqs, kv_heads, n) if want_mass else None
    if n == 0 or seqs == 0:
        return out.zero_(), lse.fill_(float("-inf")), mass
    cut = launch_shape(n, rows, kv_heads, dim, q.element_size(), _processors(q.device))
    part_out = _wide(q, cut.splits, kv_heads, rows, dim)
    part_lse = _wide(q, cut.splits, kv_heads, rows)
    logits = _wide(q, kv_heads, rows, n) if want_mass else part_lse
    fp8 = k.dtype == torch.float8_e4m3fn
    if fp8:  # as bytes: loads have a type for what is masked off
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    shape: dict[str, Any] = {
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "BLOCK_DIM": max(16, triton.next_power_of_2(dim)),
    }
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        attend_split[(cut.splits, kv_heads, cut.row_blocks)](
            q, k, v, _or(k_scale, q), _or(v_scale, q), index, _or(mask, q),
            part_out, part_lse, logits, scale, n, rows, cut.per_split,
            *q.stride(), *k.stride(), *v.stride(),
            *_strides(k_scale, 2), *_strides(v_scale, 2), *_strides(index, 2), *_strides(mask, 3),
            **shape, BLOCK_ROWS=cut.block_rows, BLOCK=cut.block,
            SCALED=k_scale is not None, FP8=fp8, MASKED=mask is not None, LOGITS=want_mass,
            FACTOR=_factor_type(q),
            num_warps=cut.warps, num_stages=3,
        )  # fmt: skip
        merge_splits[(rows, kv_heads)](
            part_out, part_lse, out, lse, cut.splits, rows,
            **shape, BLOCK=triton.next_power_of_2(cut.splits), num_warps=4,
        )  # fmt: skip
        if mass is not None:
            mean_mass[(triton.cdiv(n, 1024), kv_heads, seqs)](
                logits, lse, mass, n, rows, GROUP=shape["GROUP"], BLOCK=1024, num_warps=4
            )
    return out, lse, mass


def _wide(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer has to be passed even where none is read."""
    if tensor is None:
        return other
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _strides(tensor: Tensor | None, axes: int) -> tuple[int, ...]:
    """Strides by KV head and so on; 0 for the head that a flat index or mask does not have."""
    if tensor is None:
        return (0,) * axes
    stride = tensor.stride()
    return stride if len(stride) == axes else (*stride[:-1], 0, stride[-1])


def _factor_type(q: Tensor) -> Any:
    """What the kernel multiplies in: the queries' type, but the interpreter cannot in bfloat16."""
    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not q.is_cuda):
        return tl.float32
    return tl.float16 if q.dtype == torch.float16 else tl.bfloat16


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter runs one program after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
