"""The arguments of the attention kernels: pieces of pools, and the rows that are kept.

A piece is read in place and in its own format.  `arborsim_torch.kernels.pieces` attends over
pieces, and `arborsim_torch.kernels.rows` over blocks of a prompt.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from arborsim_torch.tiers.codec import Codec, Packed, Plain


@dataclass(frozen=True)
class Prefix:
    """A piece of plain keys and values, as a contiguous cache and a rest."""

    length: Tensor  #: int32 ``[1]``: all sequences read slots 0 .. length - 1; at least one.
    rest: Piece | None  #: what else is read of the pool
    #: one of `arborsim_torch.kernels.packages.DECODERS`, whose kernel reads it
    package: str = "flash-attn"


@dataclass(frozen=True)
class Piece:
    """Slots of one pool that one decode step reads in place, in one format.

    Every slot of the pool must be finite, also those that are not read.
    """

    #: ``[kv_heads, capacity, width]``: as `codec` stores them: `head_dim` numbers, or of `Packed` a
    #: record of bytes.  With keys in groups of tokens `keys` are the codes, and `values` whole
    #: records.  Heads may overlap (stride 0) if each has an index of its own.
    keys: Tensor
    values: Tensor
    codec: Codec
    #: float32 ``[kv_heads, capacity]`` of 8-bit formats with a scale per vector; of keys in groups
    #: of tokens, `key_scale` is uint8 ``[kv_heads, groups, bytes]``: their spans
    key_scale: Tensor | None
    value_scale: Tensor | None
    #: int32 ``[room]`` or ``[kv_heads, room]``: slots to read, -1: padding.  None: 0 .. room - 1.
    index: Tensor | None
    room: int  #: entries that are looked at
    #: bool ``[seqs or 1, kv_heads or 1, room]``: may be read.  None if all but padding may.
    mask: Tensor | None = None
    #: int32 ``[capacity]`` or ``[kv_heads, capacity]``: of keys in groups of tokens: by slot, the
    #: number of its group in `key_scale` times the tokens of a group, plus the token's number in it
    member: Tensor | None = None
    #: The same entries as a contiguous start of the pool and a rest; None if it is not known
    prefix: Prefix | None = None
    #: Called before it is read: lets the device wait for what is on its way.  None: all is there
    ready: Callable[[], None] | None = None


@dataclass(frozen=True)
class MeanRows:
    """Rows of weights, averaged over heads, that layers add up; one with a NaN counts nowhere."""

    total: Tensor  #: float32 ``[seqs, positions]``: rows are added to it
    numbers: Tensor  #: int64 ``[seqs]``: raised by 1 for each row that is a number
    #: int ``[n]``: where the first entries stand on their path, and where those after them do
    #: (None: there are none).  Entries of one sequence that have weight stand apart.
    position: Tensor
    further: Tensor | None = None

    def add(self, mass: Tensor) -> None:
        """Take a layer's masses ``[seqs, kv_heads, entries]``."""
        rows, spots = mass.mean(1), self.position
        good = ~rows.isnan().any(1)
        if self.further is not None:
            spots = torch.cat([spots, self.further])
        self.total.index_add_(1, spots, rows.masked_fill(~good[:, None], 0.0).to(self.total.dtype))
        self.numbers.add_(good)


@dataclass(frozen=True)
class Elsewhere:
    """Attention over other keys, computed at the same time by the host."""

    #: called once the pieces are under way.  Float32 ``[kv_heads, rows, head_dim + 1 + room]`` on
    #: the queries' device, contiguous: output, log-sum-exp and logits of each row, in the order of
    #: `arborsim_torch.kernels.dense.pack`.
    packed: Callable[[], Tensor]
    room: int  #: of its keys that get masses; 0 if none are wanted


@dataclass
class BlockRows:
    """The rows of a block that are kept; one that is not a number counts nowhere."""

    #: float32 ``[queries, n]``: mean rows over heads of as many last queries are added to it
    mean: Tensor | None = None
    #: int64 ``[queries, 1]``: raised by 1 for each of these rows that is a number
    numbers: Tensor | None = None
    #: {"layer", "head"}: whose rows are wanted apart
    groups: Literal["layer", "head"] | None = None
    of_groups: int = 0  #: how many of the block's last queries count there
    recent: int = 0  #: of `sums`: a query pays nothing to its newest keys, this many with its own
    #: float64 ``[groups, n]``, found: sums of several rows, or where newest keys are left out
    sums: Tensor | None = None
    #: float32 ``[groups, n]``: found: the row of the last query, NaN if it is none
    newest: Tensor | None = None

    @property
    def of_mean(self) -> int:
        """How many of the block's last queries have a row in `mean`."""
        return 0 if self.mean is None else len(self.mean)


def in_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels run there on queries of a type."""
    return device.type == "cuda" and _kernels_for(device, dtype)


@functools.cache
def _kernels_for(device: torch.device, dtype: torch.dtype) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def check(q: Tensor, piece: Piece) -> None:
    """Refuse what a kernel would read wrongly; looks at shapes and types only, not at data.

    Whether indices lie in the pool is not checked: that would make the host wait.
    """
    (seqs, heads, dim), (kv_heads, capacity, _) = q.shape, piece.keys.shape
    room, codec = piece.room, piece.codec
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into {kv_heads} groups")
    widths = _widths(codec, dim)
    parts = (("keys", piece.keys, widths[0]), ("values", piece.values, widths[1]))
    for part, tensor, width in parts:
        if tuple(tensor.shape) != (kv_heads, capacity, width):
            raise ValueError(
                f"{part} {list(tensor.shape)} of queries of {dim} in format {codec.name}: "
                f"{[kv_heads, capacity, width]} is needed"
            )
        if tensor.dtype != codec.storage or (isinstance(codec, Plain) and q.dtype != tensor.dtype):
            raise ValueError(f"queries of {q.dtype}, {part} of {tensor.dtype} as {codec.name}")
    _check_scales(piece)
    if piece.index is None:
        if room > capacity:
            raise ValueError(f"no index, and room {room} for {capacity} slots")
    elif tuple(piece.index.shape) not in ((room,), (kv_heads, room)):
        raise ValueError(
            f"an index of shape {list(piece.index.shape)} for {kv_heads} KV heads and room {room}"
        )
    if piece.mask is not None:
        shape = tuple(piece.mask.shape)
        if not any(shape == (s, h, room) for s in (1, seqs) for h in (1, kv_heads)):
            raise ValueError(
                f"a mask of shape {list(shape)} for {seqs} sequences, {kv_heads} KV heads and "
                f"room {room}"
            )


def _widths(codec: Codec, dim: int) -> tuple[int, int]:
    """Elements of a key and of a value."""
    if isinstance(codec, Packed):
        return codec.key_bytes, codec.value_bytes
    return dim, dim


def _check_scales(piece: Piece) -> None:
    kv_heads, capacity, _ = piece.keys.shape
    codec, scales = piece.codec, (piece.key_scale, piece.value_scale)
    if isinstance(codec, Packed) and codec.scaled:
        spans, member = piece.key_scale, piece.member
        shape = None if spans is None else tuple(spans.shape[::2])
        if member is None or shape != (kv_heads, codec.span_bytes):
            raise ValueError(
                f"keys in groups of tokens need their spans, uint8 [{kv_heads}, groups, "
                f"{codec.span_bytes}], and where each token stands in them"
            )
        if tuple(member.shape) not in ((capacity,), (kv_heads, capacity)):
            raise ValueError(f"places in groups {list(member.shape)} for {capacity} slots")
        return
    needed = codec.scaled
    for scale in scales:
        if (scale is not None) != needed:
            raise ValueError(f"format {codec.name} needs scales exactly if it has one per vector")
        if scale is not None and tuple(scale.shape) != (kv_heads, capacity):
            raise ValueError(f"scales {list(scale.shape)} for slots {[kv_heads, capacity]}")
