"""Attention kernels against plain operations in float64, and copies between device and host."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.tiers import Tier
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.prefix import SharedPrefix
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.hardware.kernels import buffers
from arborsim_torch.hardware.timing import Timer
from arborsim_torch.kernels.dense import attend
from arborsim_torch.kernels.flash import attend_prefill, choose
from arborsim_torch.kernels.fused import choose_decode, choose_sdpa, sdpa
from arborsim_torch.kernels.packages import DECODERS
from arborsim_torch.kernels.piece import Piece, in_triton
from arborsim_torch.kernels.pieces import attend_pieces
from arborsim_torch.models import load_model
from arborsim_torch.tiers.codec import Plain
from arborsim_torch.tiers.link import HostLink
from benchmarks.gpu.journal import Facts
from tests.live.oracle_attention import numbers
from tests.live.pieces_cases import FORMATS, Case, Part, means_of, moved

# Of the largest output: it is rounded once to the queries' type, and weights of 16 bits are rounded
# before they meet the values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
#: Llama-3.1-8B's heads over a quarter of 64k tokens: plain, in 8 bits, for four leaves, and mixed.
LONG_PIECES = tuple(
    Case(tuple(Part(stored, room, 2 * room, mask=mask) for stored, room in parts),
               torch.bfloat16, 128, 8, 4, seqs)
    for parts, mask, seqs in (
        ((("plain", 16384),), "none", 1), ((("fp8", 16384),), "none", 1),
        ((("plain", 16384),), "sequences", 4),
        ((("plain", 12288), ("fp8", 4096)), "none", 1),
    )
)  # fmt: skip
#: Every format, read by all heads alike and by each on its own.
SMALL_PIECES = tuple(
    Case((Part(stored, 40, 64, index, mask, 3), Part(index="none")), dtype, seqs=seqs)
    for stored in FORMATS
    for dtype, index, mask, seqs in (
        (torch.float32, "flat", "none", 1), (torch.bfloat16, "by head", "both", 3),
    )
)  # fmt: skip
_MOST_POOLS = 16  # that a kernel is timed over; only toy problems would need more


def compare_pieces(case: Case, device: str) -> Facts:
    """`attend_pieces` on the device, with masses and mean rows, against float64 on the CPU.

    The seconds are the device's own, over pools that its cache does not hold together; beside them
    those of PyTorch's flash attention over as many tokens, where the case is plain attention.
    """
    q, pieces = case.build()
    wanted: Any = attend_pieces(q.double(), [_in_float64(p) for p in pieces], case.scale, mass=True)
    there, ours = q.to(device), [moved(piece, device) for piece in pieces]
    found: Any = attend_pieces(there, ours, case.scale, mass=True)
    rows, added = means_of(case), means_of(case)
    rows.add(wanted[2])
    added = replace(added, **{name: part.to(device) for name, part in vars(added).items()})
    attend_pieces(there, ours, case.scale, means=added)
    apart = {
        "out": _largest_apart(found[0], wanted[0]), "lse": _largest_apart(found[1], wanted[1]),
        "mass": _largest_apart(found[2], wanted[2]),
        "mean rows": _largest_apart(added.total, rows.total),
    }  # fmt: skip
    most_mass = _largest(wanted[2])
    # Packed keys are rounded to the queries' type before they are multiplied.
    close = TOLERANCE[case.dtype] if case.rounds else 1e-4
    within = (
        TOLERANCE[case.dtype] * _largest(wanted[0]),
        close,
        close * most_mass,
        close * most_mass,
    )
    read_bytes = sum(_read_bytes(piece) for piece in pieces)
    pools = _pools(there.device, read_bytes)
    works = [partial(attend_pieces, there, [*map(_own, ours)], case.scale) for _ in range(pools)]
    seconds = _timer(there.device).seconds(*works)
    return {
        "ok": all(a <= most for a, most in zip(apart.values(), within, strict=True)),
        "form": "triton" if in_triton(there.device, there.dtype) else "torch",
        "largest_difference": apart,
        "median_s": seconds,
        "read_bytes_per_s": read_bytes / seconds,
        "timed_over_bytes": pools * read_bytes,
        **_plain_attention(case, there),
    }


def _timer(device: torch.device) -> Timer:
    return Timer(device, 3, 5, 0.5)


def _pools(device: torch.device, size: int) -> int:
    return min(_MOST_POOLS, buffers(device, max(1, size)))


def _own(piece: Piece) -> Piece:
    """The same with keys, values and scales of its own, laid out as they are."""
    named = {name: getattr(piece, name) for name in ("keys", "values", "key_scale", "value_scale")}
    return replace(piece, **{name: x.clone() for name, x in named.items() if x is not None})


def _plain_attention(case: Case, q: Tensor) -> Facts:
    """Seconds of PyTorch's flash attention over as many keys and values, one after the other.

    Nothing where the case is no plain attention, or flash attention does not take its types.
    """
    if len(case.parts) > 1 or case.parts[0].stored != "plain" or case.parts[0].mask != "none":
        return {}
    kind = choose_sdpa(q.device, q.dtype, case.dim).name
    if kind not in ("torch-flash", "torch-cpu"):
        return {}
    shape = (2, case.seqs, case.kv_heads, case.parts[0].room, case.dim)
    size = math.prod(shape) * q.element_size()
    pools = torch.randn(_pools(q.device, size), *shape, dtype=q.dtype, device=q.device)
    rows = q.view(case.seqs, case.kv_heads, case.group, case.dim)
    seconds = _timer(q.device).seconds(*(partial(sdpa, rows, k, v) for k, v in pools))
    return {"sdpa_s": seconds, "sdpa_form": kind, "sdpa_bytes_per_s": size / seconds}


def compare_prefix(tokens: int, seqs: int, device: str) -> Facts:
    """Shared tokens of a pool read by an attention package, those of single sequences by Triton.

    Against all of it in Triton, and both against float64 on the CPU.
    """
    heads, kv_heads, dim, own, dtype = 32, 8, 128, 64, torch.bfloat16
    here = torch.device(device)
    kind = choose_decode(here, dtype, dim)
    if kind.name not in DECODERS:
        return {"ok": True, "form": kind.name, "why": kind.reason}
    slots = tokens + seqs * own
    q = numbers(tokens, seqs, heads, dim, dtype=dtype)
    keys, values = numbers(tokens + 1, 2, kv_heads, slots, dim, dtype=dtype)
    read = np.ones((seqs, slots), dtype=np.bool_)
    read[:, tokens:] = np.repeat(np.eye(seqs, dtype=np.bool_), own, axis=1)
    mask = torch.from_numpy(read)[:, None]
    wanted = attend(
        q.double()[:, :, None], keys.double(), values.double(), dim**-0.5, mask[:, None]
    )
    shared = SharedPrefix(here, kind.name)
    shared.reset(np.arange(slots), read, seqs)
    codec = Plain(dtype)
    whole = Piece(keys.to(here), values.to(here), codec, None, None, None, slots, mask.to(here))
    wholes = [_own(whole) for _ in range(_pools(here, keys.nbytes + values.nbytes))]
    there, apart, seconds = q.to(here), {}, {}
    for name, own in (("triton", wholes), (kind.name, [*map(shared.of, wholes)])):
        works = [partial(attend_pieces, there, [piece], dim**-0.5) for piece in own]
        out, lse, _ = works[0]()
        apart[name] = max(
            _largest_apart(out, wanted[0][:, :, 0]), _largest_apart(lse, wanted[1][:, :, 0])
        )
        seconds[name] = _timer(here).seconds(*works)
    return {
        "ok": max(apart.values()) <= TOLERANCE[dtype] * max(1.0, _largest(wanted[0])),
        "form": kind.name,
        "largest_difference": apart,
        "median_s": seconds[kind.name],
        "triton_s": seconds["triton"],
    }


def _in_float64(piece: Piece) -> Piece:
    if not isinstance(piece.codec, Plain):
        return piece
    keys, values = piece.keys.double(), piece.values.double()
    return replace(piece, keys=keys, values=values, codec=Plain(torch.float64))


def _read_bytes(piece: Piece) -> int:
    """Of keys, values and scales; what a mask leaves out is read, too."""
    heads = piece.keys.shape[0]
    index = piece.index
    entries = heads * piece.room if index is None else int((index >= 0).expand(heads, -1).sum())
    vectors = [piece.keys, piece.values, *(s[..., None] for s in (piece.key_scale,
               piece.value_scale) if s is not None and s.dim() == 2)]  # fmt: skip
    return entries * sum(x.shape[2] * x.element_size() for x in vectors)


def compare_prefill(dtype: torch.dtype, history: int, device: str, queries: int = 192) -> Facts:
    """A block of a prompt over what came before and itself, by the kernel that is chosen there."""
    heads, kv_heads, dim = 8, 2, 64
    q = numbers(history, 1, heads, queries, dim, dtype=dtype)
    k, v = (numbers(history + i, kv_heads, history + queries, dim, dtype=dtype) for i in (1, 2))
    at = torch.arange(history + queries)
    mask = (at <= at[history:, None]).expand(1, kv_heads, -1, -1)
    wanted = attend(q.double(), k.double(), v.double(), dim**-0.5, mask)
    there = [x.to(device) for x in (q, k, v)]
    past = (there[1][:, :history], there[2][:, :history]) if history else None
    own = (there[1][:, history:], there[2][:, history:])
    found = attend_prefill(there[0], *own, dim**-0.5, past)
    apart = [_largest_apart(a, b) for a, b in zip(found, wanted, strict=True)]
    return {
        "ok": apart[0] <= TOLERANCE[dtype] * _largest(wanted[0]) and apart[1] <= 5e-4,
        "form": choose(there[0].device, dtype, dim).name,
        "largest_difference": {"out": apart[0], "lse": apart[1]},
    }


def _largest_apart(found: Tensor, wanted: Tensor) -> float:
    """Equal infinities are no difference."""
    one, other = found.detach().double().cpu(), wanted.double()
    apart = torch.where(one == other, 0.0, (one - other).abs())
    return float(apart.max()) if apart.numel() else 0.0


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def compare_copies(device: str, block_bytes: tuple[int, ...]) -> Facts:
    """Random bytes down to the host and up again, several at a time, while the device computes."""
    random = torch.Generator().manual_seed(0)
    wrong = 0
    with HostLink(device) as link:
        busy = torch.rand(512, 512, device=link.device)
        for size in block_bytes:
            blocks = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)
                      for _ in range(3)]  # fmt: skip
            there = [block.to(link.device) for block in blocks]
            host = [link.host_empty(block.shape, block.dtype) for block in blocks]
            down = [link.down(a, b) for a, b in zip(there, host, strict=True)]
            busy = busy @ busy / busy.norm()
            for ticket in down:
                ticket.wait()
            back = [torch.empty_like(block) for block in there]
            up = [link.up(a, b) for a, b in zip(host, back, strict=True)]
            busy = busy @ busy / busy.norm()
            for ticket in up:
                ticket.wait()
            pairs = [*zip(blocks, host, strict=True), *zip(there, back, strict=True)]
            wrong += sum(not torch.equal(a, b) for a, b in pairs)
        down_rate, up_rate = (_rate(side) for side in (link.downward, link.upward))
        pinned = link.host_empty((1,), torch.uint8).is_pinned() if link.pinned else False
    return {
        "ok": wrong == 0 and math.isfinite(float(busy.sum())), "wrong": wrong, "pinned": pinned,
        "down_bytes_per_s": down_rate, "up_bytes_per_s": up_rate,
    }  # fmt: skip


def _rate(traffic: Any) -> float:
    return float(traffic.carried_bytes / traffic.busy_s) if traffic.busy_s else 0.0


def compare_moved_tokens(device: str, grouping: str, tokens: int = 96) -> Facts:
    """Keys and values are the same bits after HBM, DDR, HBM; in 8 bits, the same bits in both."""
    model = load_model("chain", "", device, "float32").model
    cache = TieredCache(Layout.of(model, grouping))
    every = np.argwhere(np.ones((cache.layout.groups, tokens), dtype=bool))
    half = every[every[:, 1] % 2 == 0]
    cells = GroupTokenPairs(half[:, 0], half[:, 1])
    with HostLink(cache.layout.device) as link:
        mover = Mover(cache, link)
        decoder = TreeDecoder(model, cache=cache)
        ids = np.random.default_rng(1).integers(0, model.config.vocab_size, tokens)
        decoder.prefill(ids.tolist())
        before = cache.tokens_kv(np.arange(tokens)).clone()
        _move(mover, cells, Tier.DDR)
        in_ddr = cache.used_bytes(Place.DDR)
        _move(mover, cells, Tier.HBM)
        same = torch.equal(cache.tokens_kv(np.arange(tokens)), before)
        _move(mover, cells, Tier.HBM_QUANTISED)
        device_bits = _bits(cache, Place.HBM_QUANTISED, half)
        _move(mover, cells, Tier.DDR_QUANTISED)
        same_bits = torch.equal(_bits(cache, Place.DDR_QUANTISED, half), device_bits)
    expected = len(half) * cache.pools[Place.DDR].bytes_per_slot
    return {"ok": same and same_bits and in_ddr == expected, "same_after_ddr": same,
            "same_bits_in_ddr": same_bits, "ddr_bytes": in_ddr}  # fmt: skip


def _move(mover: Mover, cells: GroupTokenPairs, tier: Tier) -> None:
    mover.move(cells, np.full(len(cells), tier, dtype=np.int8))
    mover.settle(wait=True)


def _bits(cache: TieredCache, place: Place, cells: np.ndarray) -> Tensor:
    """All bytes that a pool holds of these cells, group by group."""
    pool, parts = cache.pools[place], []
    for group in range(cache.layout.groups):
        token = cells[cells[:, 0] == group, 1]
        block = pool.read(group, pool.slots.of[group, token])
        parts += [part.contiguous().view(torch.uint8).reshape(-1).cpu() for part in block.parts()]
    return torch.cat(parts)
