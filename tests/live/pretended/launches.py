"""Stand-ins for the launches of `arborsim_torch.kernels`.

Triton's interpreter has to be chosen before Triton is imported, and takes seconds for a call
(`tests.live.pieces_cases` runs it).  Here a launch is computed in plain operations from the same
arguments: addresses by the strides that were passed, splits of the same size, parts in the same
buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arborsim.core.formats import Format
from arborsim_torch.tiers.codec import Packed

from .device import again, gpu, inner, keep, on_device, touch, where_to

_SPLIT_STRIDES = (
    "q_sequence", "q_head", "q_dim", "k_head", "k_slot", "k_dim", "v_head", "v_slot", "v_dim",
    "k_scale_head", "k_scale_slot", "v_scale_head", "v_scale_slot", "index_head", "index_spot",
    "mask_sequence", "mask_head", "mask_spot", "member_head", "member_slot",
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

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Triton compiles and loads a kernel when it is launched first, which no capture allows."""
        here = gpu[-1]
        kind = self._name, *map(_kind, args), *sorted((k, str(v)) for k, v in kwargs.items())
        if here.capture is not None and kind not in here.compiled:
            here.fault(f"{self._name} is compiled inside of a capture")
        here.compiled.add(kind)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            given = [x for x in args if isinstance(x, Tensor)]
            if not all(on_device(x) for x in given):
                raise ValueError(
                    "Pointer argument cannot be accessed from Triton (cpu tensor?)"
                )  # Triton's own words
            by = where_to(True, self._name)
            self._compile(args, kwargs)
            for at, x in enumerate(args):
                touch(by, x, at in self._writes, self._name)
                if at in self._writes:
                    keep(x)
            there = inner(args)
            self._work(grid, *there, **kwargs)
            again(lambda: self._work(grid, *there, **kwargs))

        return launch


def _kind(x: Any) -> Any:
    """What Triton compiles a kernel anew for: types, alignment, and numbers that are 1."""
    if isinstance(x, Tensor):
        return x.dtype, inner(x).data_ptr() % 16 == 0
    if isinstance(x, int) and not isinstance(x, bool):
        return int, x == 1 or x % 16 == 0, x == 1, x.bit_length() > 31
    return type(x)


def _at(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """What a kernel finds behind a pointer by strides; outside of the tensor is an error."""
    return x.as_strided(shape, strides, x.storage_offset())


def _split(
    grid: tuple[int, int, int], q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor, v_scale: Tensor,
    index: Tensor, mask: Tensor, member: Tensor, part_out: Tensor, part_lse: Tensor,
    logits: Tensor, scale: float, room: int, rows: int, per_split: int, first_split: int,
    first_entry: int, entries: int, *strides: int, HEADS: int, DIM: int, KIND: str, INDEXED: bool,
    MASKED: bool, LOGITS: bool, BLOCK_ROWS: int, **form: Any,
) -> None:  # fmt: skip
    step = dict(zip(_SPLIT_STRIDES, strides, strict=True))
    splits, heads, row_blocks = grid
    assert row_blocks * BLOCK_ROWS >= rows > (row_blocks - 1) * BLOCK_ROWS
    assert splits * per_split >= room > (splits - 1) * per_split
    seqs = rows // HEADS
    slots = torch.arange(room).expand(heads, room)
    if INDEXED:
        slots = _at(index, (heads, room), (step["index_head"], step["index_spot"])).long()
    held = slots >= 0
    slots = slots.clamp(min=0)
    most = int(slots.max()) + 1
    queries = _at(
        q, (seqs, heads, HEADS, DIM),
        (step["q_sequence"], HEADS * step["q_head"], step["q_head"], step["q_dim"]),
    ).transpose(0, 1).reshape(heads, rows, DIM).float()  # fmt: skip

    def rows_of(pool: Tensor, which: str, width: int) -> Tensor:
        by = tuple(step[f"{which}_{x}"] for x in ("head", "slot", "dim"))
        part = _at(pool, (heads, most, width), by)
        return torch.stack([own[one] for own, one in zip(part, slots, strict=True)])

    def scaled(pool: Tensor, factors: Tensor, which: str) -> Tensor:
        found = rows_of(pool, which, DIM)
        if KIND == "plain":
            return found.float()
        found = (found.view(torch.float8_e4m3fn) if KIND == "fp8" else found).float()
        by = _at(factors, (heads, most), (step[f"{which}_scale_head"], step[f"{which}_scale_slot"]))
        return found * by.gather(1, slots)[..., None]

    if KIND in ("packed", "grouped"):
        codec = _packed(DIM, form, form["GROUP"], "token", form["OUTLIERS"] / DIM)
        values = codec.vectors(rows_of(v, "v", codec.value_bytes))
        if KIND == "packed":
            keys = codec.vectors(rows_of(k, "k", codec.key_bytes))
        else:
            together = form["TOGETHER"]
            codec = _packed(DIM, form, together, "channel", form["KEY_OUTLIERS"] / together)
            place = _at(member, (heads, most), (step["member_head"], step["member_slot"]))
            place = place.gather(1, slots)
            group = place // together
            spans = _at(
                k_scale.view(torch.int16), (heads, int(group.max()) + 1, codec.span_bytes // 2),
                (step["k_scale_head"], step["k_scale_slot"], 1),
            ).contiguous().view(torch.uint8)  # fmt: skip
            spans = torch.stack([own[one] for own, one in zip(spans, group, strict=True)])
            keys = rows_of(k, "k", codec.key_bytes)
            keys = codec.grouped_keys(keys, spans, (place % together)[..., None])
        keys, values = keys.to(q.dtype).float(), values.to(q.dtype).float()
    else:
        keys, values = scaled(k, k_scale, "k"), scaled(v, v_scale, "v")
    keys, values = (part.masked_fill(~held[..., None], 0.0) for part in (keys, values))
    products = torch.bmm(queries, keys.transpose(1, 2)) * scale  # [heads, rows, room]
    readable = held[:, None].expand(heads, rows, room)
    if MASKED:
        by = tuple(step[f"mask_{x}"] for x in ("sequence", "head", "spot"))
        own = _at(mask, (seqs, heads, room), by) != 0
        readable = readable & own.transpose(0, 1).repeat_interleave(HEADS, 1)
    products = products.masked_fill(~readable, float("-inf"))
    if LOGITS:
        assert logits.shape == (heads, rows, entries)  # of the pieces
        logits[:, :, first_entry : first_entry + room] = products
    for split in range(splits):
        part = slice(split * per_split, min((split + 1) * per_split, room))
        lse = products[:, :, part].logsumexp(-1)
        weights = (products[:, :, part] - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
        part_out[first_split + split] = torch.bmm(weights, values[:, part])
        part_lse[first_split + split] = lse


def _packed(dim: int, form: dict[str, Any], group: int, axis: str, outliers: float) -> Packed:
    """The format that a launch was told of, part by part."""
    each = Format(
        form["BITS"], group, axis, form["SCALE_BYTES"], form["ZERO_BYTES"], outliers
    )  # fmt: skip
    assert each.steps == form["STEPS"]
    return Packed(each, dim)


def _merge(
    grid: tuple[int, int], part_out: Tensor, part_lse: Tensor, far: Tensor, out: Tensor,
    lse: Tensor, splits: int, rows: int, far_row: int, *, HEADS: int, DIM: int, FAR: bool, **_: Any,
) -> None:  # fmt: skip
    heads = grid[1]
    assert grid[0] == rows
    assert splits == len(part_out) == len(part_lse)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    if FAR:
        assert far.is_contiguous()
        assert far.shape == (heads, rows, far_row)
        part_out = torch.cat([part_out, far[None, ..., :DIM]])
        part_lse = torch.cat([part_lse, far[None, ..., DIM]])
    total = part_lse.logsumexp(0)  # [heads, rows]
    weights = (part_lse - total.masked_fill(total.isneginf(), 0.0)).exp()
    merged = (part_out * weights[..., None]).sum(0)
    seqs = rows // HEADS
    out.copy_(merged.view(heads, seqs, HEADS, DIM).transpose(0, 1).reshape(out.shape))
    lse.copy_(total.view(heads, seqs, HEADS).transpose(0, 1).reshape(lse.shape))


def _mass(
    grid: tuple[int, int, int], logits: Tensor, far: Tensor, lse: Tensor, mass: Tensor, own: int,
    entries: int, rows: int, far_row: int, *, HEADS: int, DIM: int, BLOCK: int, FAR: bool, **_: Any,
) -> None:  # fmt: skip
    blocks, heads, seqs = grid
    assert blocks * BLOCK >= entries > (blocks - 1) * BLOCK
    assert rows == seqs * HEADS
    base = lse.view(seqs, heads, HEADS).masked_fill(lse.isneginf().view(seqs, heads, HEADS), 0.0)
    if FAR:
        logits = torch.cat([logits, far[..., DIM + 1 :]], dim=-1)
    assert logits.shape == (heads, rows, entries)
    assert FAR or own == entries
    spread = logits.view(heads, seqs, HEADS, entries).transpose(0, 1)
    mass.copy_((spread - base[..., None]).exp().mean(2))


def _add_mass(
    grid: tuple[int, int], logits: Tensor, far: Tensor, lse: Tensor, position: Tensor,
    further: Tensor, total: Tensor, numbers: Tensor, own: int, entries: int, rows: int,
    far_row: int, first: int, positions: int, heads: int, *, FURTHER: bool, BLOCK: int, **form: Any,
) -> None:  # fmt: skip
    blocks, seqs = grid
    mass = torch.empty(seqs, heads, entries)
    whole = (blocks, heads, seqs)
    _mass(whole, logits, far, lse, mass, own, entries, rows, far_row, BLOCK=BLOCK, **form)
    at = torch.cat([position, further]) if FURTHER else position
    assert len(position) == first
    assert at.shape == (entries,)
    assert total.shape == (seqs, positions)
    row, good = mass.mean(1), ~mass.isnan().flatten(1).any(1)
    for own_row, spot, number, target in zip(row, at.expand(seqs, -1), good, total, strict=True):
        with_weight = own_row > 0
        assert len(spot[with_weight].unique()) == with_weight.sum()
        if number:
            target[spot[with_weight].long()] += own_row[with_weight]
    numbers += good


def _weights(
    q: Tensor, k: Tensor, lse: Tensor, queries: int, before: int, scale: float, strides: Any,
    members: int, dim: int,
) -> Tensor:  # fmt: skip
    """Of a block of a prompt, ``[heads, queries, keys]``."""
    heads, n = len(lse), before + queries
    vectors = _at(q, (heads, queries, dim), strides[:3]).float()
    keys = _at(k, (heads // members, n, dim), strides[3:]).float().repeat_interleave(members, 0)
    logits = torch.bmm(vectors, keys.transpose(1, 2)) * scale
    assert lse.is_contiguous()
    return (logits - lse[..., None]).exp().tril(before)


def _mean_rows(
    grid: tuple[int, int, int], q: Tensor, k: Tensor, lse: Tensor, good: Tensor, mean: Tensor,
    first: int, queries: int, before: int, scale: float, *strides: int, HEADS: int, MEMBERS: int,
    DIM: int, BLOCK_QUERIES: int, BLOCK_KEYS: int, **_: Any,
) -> None:  # fmt: skip
    assert grid[0] * BLOCK_KEYS >= before + queries > (grid[0] - 1) * BLOCK_KEYS
    assert grid[1] * BLOCK_QUERIES >= queries - first > (grid[1] - 1) * BLOCK_QUERIES
    assert mean.is_contiguous()
    assert (HEADS, grid[2]) == (len(lse), 1)
    found = _weights(q, k, lse, queries, before, scale, strides, MEMBERS, DIM).mean(0)
    mean += torch.where(good[:, None] != 0, found, 0.0)[first:]


def _group_rows(
    grid: tuple[int, int], q: Tensor, k: Tensor, lse: Tensor, good: Tensor, sums: Tensor,
    newest: Tensor, first: int, recent: int, queries: int, before: int, scale: float,
    *strides: int, HEADS: int, MEMBERS: int, DIM: int, BLOCK_KEYS: int, **_: Any,
) -> None:  # fmt: skip
    assert grid[0] * BLOCK_KEYS >= before + queries > (grid[0] - 1) * BLOCK_KEYS
    assert grid[1] * HEADS == len(lse)
    found = _weights(q, k, lse, queries, before, scale, strides, MEMBERS, DIM)
    found = found.unflatten(0, (grid[1], HEADS)).mean(1)
    counts = good[..., None] != 0
    counted = torch.where(counts, found, 0.0).tril(before - recent)[:, first:]
    sums.copy_(counted.sum(1, dtype=torch.float64))
    newest.copy_(torch.where(counts, found, torch.nan)[:, -1])


def _rank_pages(
    grid: tuple[int, int], q: Tensor, low: Tensor, high: Tensor, filled: Tensor, readable: Tensor,
    rank: Tensor, rows: int, pages: int, begin: int, total: int, q_seq: int, q_head: int,
    q_dim: int, bound_head: int, filled_head: int, readable_head: int, *, HEADS: int, DIM: int,
    BLOCK: int, **_: Any,
) -> None:  # fmt: skip
    blocks, heads = grid
    assert blocks * BLOCK >= pages > (blocks - 1) * BLOCK
    assert rank.shape == (heads, total)
    vectors = _at(
        q, (heads, rows // HEADS, HEADS, DIM), (HEADS * q_head, q_seq, q_head, q_dim)
    ).flatten(1, 2).float()  # fmt: skip
    least, largest = (
        _at(x, (heads, pages, DIM), (bound_head, DIM, 1)).float() for x in (low, high)
    )
    bound = vectors.clamp(min=0) @ largest.mT + vectors.clamp(max=0) @ least.mT
    good = _at(filled, (heads, pages), (filled_head, 1)) != 0
    good = good & (_at(readable, (heads, begin + pages), (readable_head, 1))[:, begin:] != 0)
    most = bound.amax(1).masked_fill(~good, float("-inf")) + 0.0
    bits = most.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _LAST, bits).long()
    page = torch.arange(begin, begin + pages)
    rank[:, begin : begin + pages] = ordered << 32 | (_LAST - page) << 1 | good


_LAST = 0x7FFFFFFF


def _take_pages(
    grid: tuple[int], rank: Tensor, chosen: Tensor, total: int, *, TOP: int, BLOCK: int, **_: Any
) -> None:  # fmt: skip
    assert total <= BLOCK
    assert rank.shape == (*grid, total)
    best = rank.sort(-1, descending=True).values[:, :TOP]
    chosen.copy_(torch.where(best % 2 == 1, _LAST - ((best & 0xFFFFFFFF) >> 1), -1))


def _add_norm(
    grid: tuple[int], x: Tensor, residual: Tensor, weight: Tensor, total: Tensor, normed: Tensor,
    eps: float, *, SIZE: int, BLOCK: int, ADD: bool, **_: Any,
) -> None:  # fmt: skip
    assert BLOCK >= SIZE == len(weight)
    assert x.numel() == grid[0] * SIZE
    assert all(part.is_contiguous() for part in (x, residual, total, normed))
    own = x + residual if ADD else x
    if ADD:
        total.copy_(own)
    wide = own.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed.copy_(weight * wide.to(x.dtype))


def _rotate(
    grid: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor,
    slots: Tensor, keys: Tensor, values: Tensor, out: Tensor, first: int, slot_head: int,
    key_head: int, key_slot: int, value_head: int, value_slot: int, *, MEMBERS: int, HALF: int,
    **_: Any,
) -> None:  # fmt: skip
    seqs, heads = grid
    dim, rows = 2 * HALF, slice(first, first + seqs)
    assert out.shape == (len(q), heads * MEMBERS, dim)
    assert cos.shape == sin.shape == (len(q), dim)
    assert all(part.is_contiguous() for part in (q, k, v, cos, sin, out))

    def turned(x: Tensor) -> Tensor:
        x = x[rows].view(seqs, -1, dim)
        low, high = x.chunk(2, -1)
        return x * cos[rows, None] + torch.cat((-high, low), -1) * sin[rows, None]

    out[rows] = turned(q)
    where = _at(slots, (heads, seqs), (slot_head, 1))
    for head, own in enumerate(where):
        for pool, by, step, new in (
            (keys, key_head, key_slot, turned(k)), (values, value_head, value_slot, v[rows]),
        ):  # fmt: skip
            slab = pool.as_strided(
                (int(own.max()) + 1, dim), (step, 1), pool.storage_offset() + head * by
            )
            slab[own] = new.view(seqs, heads, dim)[:, head]


def _silu(
    grid: tuple[int], gate: Tensor, up: Tensor, out: Tensor, count: int, *, BLOCK: int, **_: Any
) -> None:  # fmt: skip
    assert grid[0] * BLOCK >= count == gate.numel() == up.numel()
    out.copy_(torch.nn.functional.silu(gate) * up)


#: By module of `arborsim_torch.kernels`.
LAUNCHERS = {
    "pieces_kernels": {
        "attend_split": Launcher("attend_split", _split, (8, 9, 10)),
        "merge_splits": Launcher("merge_splits", _merge, (3, 4)),
        "mean_mass": Launcher("mean_mass", _mass, (3,)),
        "add_mean_mass": Launcher("add_mean_mass", _add_mass, (5, 6)),
    },
    "rows_triton": {
        "add_mean_rows": Launcher("add_mean_rows", _mean_rows, (4,)),
        "sum_group_rows": Launcher("sum_group_rows", _group_rows, (4, 5)),
    },
    "layers_triton": {
        "add_norm_rows": Launcher("add_norm_rows", _add_norm, (3, 4)),
        "rotate_rows": Launcher("rotate_rows", _rotate, (6, 7, 8)),
        "silu_product": Launcher("silu_product", _silu, (2,)),
    },
    "ondemand_triton": {
        "rank_pages": Launcher("rank_pages", _rank_pages, (5,)),
        "take_pages": Launcher("take_pages", _take_pages, (1,)),
    },
}
