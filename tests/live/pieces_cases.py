"""Attention over pieces of every format: problems for all ways to compute it.

``TRITON_INTERPRET=1 python -m tests.live.pieces_cases FILE`` solves them in Triton's interpreter
and writes the results: it is chosen when Triton is imported, so that takes a process of its own.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from arborsim.core.formats import Format
from arborsim_torch.kernels.near import HostPiece, attend_packed
from arborsim_torch.kernels.piece import Elsewhere, MeanRows, Piece
from arborsim_torch.tiers.codec import Fp8, Packed, Plain

from .oracle_attention import numbers

#: Packed formats by name: along vectors, and with keys in groups of tokens.
PACKED = {
    "packed8": Format(8, 32, scale_bytes=2, zero_bytes=2),
    "packed4": Format(4, 16, scale_bytes=1),
    "packed4z": Format(4, 1 << 20, scale_bytes=2, zero_bytes=2),
    "packed2": Format(2, 16, scale_bytes=1),
    "packed4o": Format(4, 32, scale_bytes=2, zero_bytes=2, outliers=0.02),
    "kivi2": Format(2, 32, "channel", 2, 2),
    "kivi4": Format(4, 16, "channel", 2, 2),
    "kivi2o": Format(2, 16, "channel", 2, 2, outliers=0.05),
}
FORMATS = ("plain", "fp8", *PACKED)


def codec_named(stored, dim, dtype=torch.bfloat16):
    """The codec of a format by its name here."""
    if stored in PACKED:
        return Packed(PACKED[stored], dim)
    return {"plain": Plain(dtype), "fp8": Fp8()}[stored]


@dataclass(frozen=True)
class Part:
    """One piece: `room` entries of `capacity` slots."""

    stored: str = "plain"
    room: int = 77
    capacity: int = 160
    index: str = "flat"  # or "none", "by head"
    mask: str = "none"  # or "all" (sequences and heads alike), "sequences", "heads", "both"
    padding: int = 0  # among the room
    strided: bool = False  # keys and values interleaved, slots before heads

    @property
    def name(self) -> str:
        strided = "-strided" if self.strided else ""
        words = f"{self.stored}-{self.room}-{self.index}-{self.mask}-pad{self.padding}{strided}"
        return words.replace(" ", "-")


@dataclass(frozen=True)
class Case:
    """Attention of one query per sequence over some pieces."""

    parts: tuple[Part, ...] = (Part(),)
    dtype: torch.dtype = torch.float32
    dim: int = 64
    kv_heads: int = 2
    group: int = 4
    seqs: int = 2
    seed: int = field(default=0)

    @property
    def name(self) -> str:
        sizes = f"{self.seqs}x{self.kv_heads}x{self.group}x{self.dim}"
        kind = str(self.dtype).removeprefix("torch.")
        return "+".join([f"{kind}-{sizes}", *(part.name for part in self.parts)])

    @property
    def rounds(self) -> bool:
        """Whether packed keys are rounded to the queries' type on a GPU."""
        return self.dtype.itemsize == 2 and any(part.stored in PACKED for part in self.parts)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    def build(self) -> tuple[torch.Tensor, list[Piece]]:
        """Queries and pieces."""
        q = numbers(self.seed, self.seqs, self.kv_heads * self.group, self.dim, dtype=self.dtype)
        seeds = range(self.seed + 1, self.seed + 1 + len(self.parts))
        return q, [self._piece(part, seed)[0] for part, seed in zip(self.parts, seeds, strict=True)]

    def decoded(self, rounded: bool) -> list[torch.Tensor]:
        """Of each piece, keys and values by slot, float64 ``[2, kv_heads, capacity, dim]``.

        `rounded`: packed ones in the queries' type, in which a GPU multiplies.
        """
        seeds = range(self.seed + 1, self.seed + 1 + len(self.parts))
        each = [self._piece(part, seed)[1]() for part, seed in zip(self.parts, seeds, strict=True)]
        return [
            own.to(self.dtype).double() if rounded and part.stored in PACKED else own
            for own, part in zip(each, self.parts, strict=True)
        ]

    def _piece(self, part: Part, seed: int) -> tuple[Piece, Callable[[], torch.Tensor]]:
        random = torch.Generator().manual_seed(seed)
        *stored, vectors = self._pool(part, seed, random)
        mask = None
        if part.mask != "none":
            seqs = self.seqs if part.mask in ("sequences", "both") else 1
            heads = self.kv_heads if part.mask in ("heads", "both") else 1
            mask = torch.rand(seqs, heads, part.room, generator=random) < 0.4
            if seqs > 1:
                mask[-1] = False  # a sequence that reads nothing of this piece
        index = None if part.index == "none" else self._slots(part, random)
        codec, keys, values, key_scale, value_scale, member = stored
        piece = Piece(
            keys, values, codec, key_scale, value_scale, index, part.room, mask, member
        )  # fmt: skip
        return piece, vectors

    def _pool(self, part: Part, seed: int, random: torch.Generator) -> tuple:
        """Codec, keys, values, their scales, places in groups, and how to decode them all."""
        x = numbers(seed, 2, self.kv_heads, part.capacity, self.dim)
        if part.stored in PACKED:
            codec = codec_named(part.stored, self.dim)
            data, spans = codec.encode(x)
            if spans is None:
                decoded = partial(codec.decode, data, None, torch.float64)
                return codec, *data, None, None, None, decoded
            together = codec.scale_tokens
            order = torch.randperm(part.capacity, generator=random)  # the token in each slot ...
            by_head = part.index == "by head"
            orders = [order.roll(head * by_head) for head in range(self.kv_heads)]  # ... of a head
            groups = torch.randperm(part.capacity // together, generator=random)
            token = torch.arange(part.capacity)
            number = (token % together).to(torch.int16)
            tail = number[:, None].contiguous().view(torch.uint8).expand(1, self.kv_heads, -1, -1)
            each = torch.cat([spans.repeat_interleave(together, 2), tail], dim=-1)
            place = torch.argsort(groups)  # where each group's span is
            member = (place[token // together] * together + token % together).to(torch.int32)
            members = torch.stack([member[own] for own in orders])
            slots = torch.stack([data[0, head, own] for head, own in enumerate(orders)])
            keys, values = slots.tensor_split([codec.key_bytes], dim=-1)
            members = members if by_head else members[0]
            parts = codec, keys, values, spans[0][:, groups], None, members

            def decoded() -> torch.Tensor:
                found = codec.decode(data, each, torch.float64)
                return torch.stack([found[:, head, own] for head, own in enumerate(orders)], 1)

            return *parts, decoded
        codec = codec_named(part.stored, self.dim, self.dtype)
        data, scale = codec.encode(x.to(self.dtype))
        if part.strided:
            raw = data.view(torch.uint8) if part.stored == "fp8" else data
            data = raw.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3).view(codec.storage)
        scales = (None, None) if scale is None else scale[..., 0]
        factor = 1.0 if scale is None else scale
        return codec, *data, *scales, None, lambda: data.double() * factor

    def _slots(self, part: Part, random: torch.Generator) -> torch.Tensor:
        index = torch.full((self.kv_heads, part.room), -1, dtype=torch.int32)
        for row in index:
            held = torch.randperm(part.capacity, generator=random)[: part.room]
            row[: len(held)] = held
        if part.padding:
            index[:, torch.randperm(part.room, generator=random)[: part.padding]] = -1
        return index if part.index == "by head" else index[0]


def moved(piece: Piece, device: str) -> Piece:
    """The same on a device."""
    parts = {name: part for name, part in vars(piece).items() if isinstance(part, torch.Tensor)}
    return replace(piece, **{name: part.to(device) for name, part in parts.items()})


BY_FORMAT = [
    Case((Part(stored, 40, 64, index, mask, 3 if index != "none" else 0),), seed=i)
    for i, stored in enumerate(FORMATS)
    for index, mask in (("none", "both"), ("flat", "none"), ("by head", "heads"))
]
BY_TYPE = [
    Case((Part(room=70, index="none", mask=mask),), dtype, group=group, seqs=seqs)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for mask, group, seqs in (("none", 2, 1), ("all", 1, 3), ("both", 4, 2))
]
OTHERS = (
    # Triton's interpreter cuts bfloat16 off instead of rounding it, so packed keys come out apart.
    *(
        Case(tuple(Part(x, 32, 64, "flat", "sequences", 4) for x in stored), dtype, seqs=3)
        for dtype, stored in ((torch.float16, FORMATS), (torch.bfloat16, FORMATS[:2]))
    ),
    Case((Part(index="none", room=100), Part("fp8", 40), Part("fp8", 1, index="by head"))),
    Case((Part(room=0), Part(room=12, padding=12)), seqs=3),
    Case((Part(room=0, capacity=0), Part("fp8", 5), Part("kivi2", 0, 32))),
    Case((Part(room=9, capacity=0, padding=9), Part(room=3))),
    Case((Part(mask="sequences", strided=True), Part("fp8", 20, strided=True)), seqs=3),
    Case((Part(room=33), Part("fp8", 20), Part("packed4", 64, 64, "none")), dim=80),
    Case((Part(room=70, mask="sequences"),), group=3, seqs=9),  # more rows than one program takes
    Case((Part(room=150, mask="sequences"),), torch.bfloat16, 128, group=7, seqs=12),
    Case((Part(room=131), Part("fp8", 131)), torch.float16, 128),
)  # fmt: skip
CASES = (*BY_FORMAT, *BY_TYPE, *OTHERS)


def _each_once(cases: list[Case]) -> list[Case]:
    """Members of several parts in turn: the first of one, the second of the next, and so on."""
    return [case for i, case in enumerate(cases) if i % 3 == i // 3 % 3]


#: For Triton's interpreter, which takes up to a second for each.
INTERPRETED = tuple(dict.fromkeys([
    *_each_once(BY_FORMAT),
    *(case for case in BY_FORMAT if case.parts[0].stored in ("plain", "kivi2")),
    *_each_once(BY_TYPE), *OTHERS,
]))  # fmt: skip

#: Whose first sequence has a head that is not a number.
BROKEN = Case((Part(room=70, index="none"),))


def last_on_host(q: torch.Tensor, pieces: list[Piece], case: Case) -> Elsewhere:
    """The last piece as the host attends to it."""
    last = pieces[-1]
    index = torch.arange(last.room) if last.index is None else last.index
    piece = HostPiece(
        last.keys, last.values, index, None if last.mask is None else last.mask[:, :, None],
        last.key_scale, last.value_scale,
    )  # fmt: skip
    packed = attend_packed(q[:, :, None], [piece], case.scale, logits=True)
    return Elsewhere(lambda: packed, last.room)


#: Whose last piece the host can read.
WITH_HOST = [
    case for case in CASES
    if len(case.parts) > 1 and case.parts[-1].stored not in PACKED and case.parts[-1].capacity
]  # fmt: skip


def means_of(case: Case) -> MeanRows:
    """Places for rows of a case, of which some entries stand in another tensor."""
    entries = sum(part.room for part in case.parts)
    at = torch.randperm(entries + 5, generator=torch.Generator().manual_seed(entries))[:entries]
    total, numbers = torch.zeros(case.seqs, entries + 5), torch.zeros(case.seqs, dtype=torch.int64)
    return MeanRows(total, numbers, at[: entries // 3], at[entries // 3 :].to(torch.int32))


def main(path: str) -> None:
    """Solve the cases and write what came out, with masses, without, and with mean rows."""
    from arborsim_torch.kernels import pieces_triton

    found = {}
    for number, case in enumerate(INTERPRETED):
        q, pieces = case.build()
        assert all(pieces_triton.reads(piece, case.dim) for piece in pieces)
        found[case.name] = pieces_triton.attend_pieces_triton(q, pieces, case.scale, mass=True)
        if number % 4:
            continue
        bare = pieces_triton.attend_pieces_triton(q, pieces, case.scale)
        assert bare[2] is None
        assert all(torch.equal(a, b) for a, b in zip(bare[:2], found[case.name][:2], strict=True))
        rows = means_of(case)
        pieces_triton.attend_pieces_triton(q, pieces, case.scale, means=rows)
        found[f"{case.name} means"] = rows.total, rows.numbers
    for case in WITH_HOST:
        q, pieces = case.build()
        there = last_on_host(q, pieces, case)
        found[f"{case.name} host"] = pieces_triton.attend_pieces_triton(
            q, pieces[:-1], case.scale, mass=True, elsewhere=there
        )
        rows = means_of(case)
        pieces_triton.attend_pieces_triton(q, pieces[:-1], case.scale, means=rows, elsewhere=there)
        found[f"{case.name} host means"] = rows.total, rows.numbers
    q, pieces = BROKEN.build()
    q[0, 0] = torch.nan
    rows = means_of(BROKEN)
    pieces_triton.attend_pieces_triton(q, pieces, BROKEN.scale, means=rows)
    found["broken"] = rows.total, rows.numbers
    pieces_triton._e4m3_in_hardware = lambda _: False  # as an A100 has to
    for case in INTERPRETED:
        if "fp8-20" in case.name or "fp8-40" in case.name:
            q, pieces = case.build()
            apart = pieces_triton.attend_pieces_triton(q, pieces, case.scale)
            assert all(
                torch.equal(a, b) for a, b in zip(apart[:2], found[case.name][:2], strict=True)
            )
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
