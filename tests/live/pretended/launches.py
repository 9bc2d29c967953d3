"""Stand-ins for the launches of `arborsim_torch.kernels.scattered_kernels`.

Triton's interpreter has to be chosen before Triton is imported, and takes seconds for a call
(`tests.live.scattered_cases` runs it).  Here a launch is computed in plain operations from the same
arguments: addresses by the strides that were passed, splits of the same size, parts in the same
buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .device import again, inner, keep, on_device, touch, where_to

_SPLIT_STRIDES = (
    "q_sequence", "q_head", "q_dim", "k_head", "k_slot", "k_dim", "v_head", "v_slot", "v_dim",
    "k_scale_head", "k_scale_slot", "v_scale_head", "v_scale_slot", "index_head", "index_spot",
    "mask_sequence", "mask_head", "mask_spot",
)  # fmt: skip


class Launcher:
    """``kernel[grid](...)``.

    Parameters
    ----------
    name : str
    work : callable
        Gets the grid and the arguments, tensors without pretence.
    writes : tuple of int
        Positions of the arguments that are written; the other tensors are read.
    """

    def __init__(self, name: str, work: Callable[..., None], writes: tuple[int, ...]) -> None:
        self._name, self._work, self._writes = name, work, writes

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = [x for x in args if isinstance(x, Tensor)]
            if not all(on_device(x) for x in given):
                raise ValueError(
                    "Pointer argument cannot be accessed from Triton (cpu tensor?)"
                )  # Triton's own words
            by = where_to(True, self._name)
            for at, x in enumerate(args):
                touch(by, x, at in self._writes, self._name)
                if at in self._writes:
                    keep(x)
            there = inner(args)
            self._work(grid, *there, **kwargs)
            again(lambda: self._work(grid, *there, **kwargs))

        return launch


def _at(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """What a kernel finds behind a pointer by strides; outside of the tensor is an error."""
    return x.as_strided(shape, strides, x.storage_offset())


def _split(
    grid: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor,
    index: Tensor, mask: Tensor, part_out: Tensor, part_lse: Tensor, logits: Tensor,
    scale: float, n: int, rows: int, per_split: int, *strides: int, GROUP: int, DIM: int,
    SCALED: bool, FP8: bool, MASKED: bool, LOGITS: bool, BLOCK_ROWS: int, **_: Any,
) -> None:  # fmt: skip
    step = dict(zip(_SPLIT_STRIDES, strides, strict=True))
    splits, heads, row_blocks = grid
    assert row_blocks * BLOCK_ROWS >= rows > (row_blocks - 1) * BLOCK_ROWS
    assert splits * per_split >= n > (splits - 1) * per_split
    seqs = rows // GROUP
    slots = _at(index, (heads, n), (step["index_head"], step["index_spot"])).long()
    held = slots >= 0
    slots = slots.clamp(min=0)
    most = int(slots.max()) + 1
    queries = _at(
        q, (seqs, heads, GROUP, DIM),
        (step["q_sequence"], GROUP * step["q_head"], step["q_head"], step["q_dim"]),
    ).transpose(0, 1).reshape(heads, rows, DIM).float()  # fmt: skip

    def rows_of(pool: Tensor, factors: Tensor, which: str) -> Tensor:
        shape, by = (heads, most, DIM), tuple(step[f"{which}_{x}"] for x in ("head", "slot", "dim"))
        part = _at(pool, shape, by)
        part = part.view(torch.float8_e4m3fn).float() if FP8 else part.float()
        if SCALED:
            at = step[f"{which}_scale_head"], step[f"{which}_scale_slot"]
            part = part * _at(factors, (heads, most), at)[..., None]
        found = torch.stack([own[one] for own, one in zip(part, slots, strict=True)])
        return found.masked_fill(~held[..., None], 0.0)

    keys, values = rows_of(k, k_scale, "k"), rows_of(v, v_scale, "v")
    products = torch.bmm(queries, keys.transpose(1, 2)) * scale  # [heads, rows, n]
    readable = held[:, None].expand(heads, rows, n)
    if MASKED:
        by = tuple(step[f"mask_{x}"] for x in ("sequence", "head", "spot"))
        own = _at(mask, (seqs, heads, n), by) != 0
        readable = readable & own.transpose(0, 1).repeat_interleave(GROUP, 1)
    products = products.masked_fill(~readable, float("-inf"))
    if LOGITS:
        assert logits.shape == products.shape
        logits.copy_(products)
    for split in range(splits):
        part = slice(split * per_split, min((split + 1) * per_split, n))
        lse = products[:, :, part].logsumexp(-1)
        weights = (products[:, :, part] - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
        part_out[split] = torch.bmm(weights, values[:, part])
        part_lse[split] = lse


def _merge(
    grid: tuple[int, int], part_out: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor,
    splits: int, rows: int, *, GROUP: int, DIM: int, BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    heads = grid[1]
    assert grid[0] == rows
    assert BLOCK >= splits == len(part_out) == len(part_lse)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    total = part_lse.logsumexp(0)  # [heads, rows]
    weights = (part_lse - total.masked_fill(total.isneginf(), 0.0)).exp()
    merged = (part_out * weights[..., None]).sum(0)
    seqs = rows // GROUP
    out.copy_(merged.view(heads, seqs, GROUP, DIM).transpose(0, 1).reshape(out.shape))
    lse.copy_(total.view(heads, seqs, GROUP).transpose(0, 1).reshape(lse.shape))


def _mass(
    grid: tuple[int, int, int], logits: Tensor, lse: Tensor, mass: Tensor, n: int, rows: int,
    *, GROUP: int, BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    blocks, heads, seqs = grid
    assert blocks * BLOCK >= n > (blocks - 1) * BLOCK
    assert rows == seqs * GROUP
    base = lse.view(seqs, heads, GROUP).masked_fill(lse.isneginf().view(seqs, heads, GROUP), 0.0)
    spread = logits.view(heads, seqs, GROUP, n).transpose(0, 1)
    mass.copy_((spread - base[..., None]).exp().mean(2))


LAUNCHERS = {
    "attend_split": Launcher("attend_split", _split, (7, 8, 9)),
    "merge_splits": Launcher("merge_splits", _merge, (2, 3)),
    "mean_mass": Launcher("mean_mass", _mass, (2,)),
}
