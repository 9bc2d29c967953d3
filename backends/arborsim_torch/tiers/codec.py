"""How tokens are stored: as they are, in 8 bits with a scale each, or packed with group scales.

A *codec* turns vectors ``[..., 2, kv_heads, tokens, head_dim]``, keys and values, into data and
possibly scales.  `Fp8` keeps that shape and has float32 scales ``[..., tokens, 1]``; `Packed` makes
one record of bytes of each vector, scales included.

`Fp8` and `Packed` are bit for bit those of `arborsim.core.formats`, as replays compute errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from arborsim.core.formats import FP8, LARGEST_HALF, Format

SCALE_BYTES = 4  # float32
E4M3_UNIT = 256.0  # of what `e4m3_as_half` gives


class Codec(Protocol):
    """A way to store tokens' vectors, as numbers of type `storage`, with scales if `scaled`."""

    @property
    def name(self) -> str: ...
    @property
    def storage(self) -> torch.dtype: ...
    @property
    def scaled(self) -> bool: ...

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Vectors ``[..., tokens, head_dim]`` as data and scales, on the same device."""

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Vectors ``[..., tokens, head_dim]`` again from what `encode` stored."""

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes of the key and the value of one token and KV head."""

    def record(self, head_dim: int) -> tuple[int, int]:
        """Data of one token and KV head: how many records, and how many elements each."""


@dataclass(frozen=True)
class Plain:
    """Vectors as they are."""

    storage: torch.dtype  #: of the model's keys and values
    name: ClassVar[str] = "plain"
    scaled: ClassVar[bool] = False

    def encode(self, x: Tensor) -> tuple[Tensor, None]:
        """The vectors themselves (no copy); `TypeError` if it would change their type."""
        if x.dtype != self.storage:
            raise TypeError(f"vectors of {x.dtype} in a plain store of {self.storage}")
        return x, None

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return data.to(dtype)

    def bytes_per_token(self, head_dim: int) -> int:
        return 2 * head_dim * self.storage.itemsize

    def record(self, head_dim: int) -> tuple[int, int]:
        return 2, head_dim


@dataclass(frozen=True)
class Fp8:
    """FP8 e4m3 with scale ``amax / 448``: the largest magnitude of a vector becomes `largest`."""

    name: ClassVar[str] = "fp8"
    storage: ClassVar[torch.dtype] = torch.float8_e4m3fn
    largest: ClassVar[float] = 448.0
    scaled: ClassVar[bool] = True

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Data and scales; a zero vector stays zero, and what is not finite stays so."""
        amax = x.abs().amax(dim=-1, keepdim=True).float()
        # A tensor, not a number: CUDA divides by a number through its rounded reciprocal.
        scale = amax / torch.full_like(amax, self.largest)
        scale = scale.masked_fill_(scale == 0, 1.0)
        # The quotient passes `largest` where the scale itself was rounded down (subnormals).
        quotient = x.to(torch.float32, copy=True).div_(scale).clamp_(-self.largest, self.largest)
        return quotient.to(self.storage), scale

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        if scale is None:
            raise TypeError(f"{self.name} data needs its scales")
        return data.float().mul_(scale).to(dtype)

    def bytes_per_token(self, head_dim: int) -> int:
        return 2 * (head_dim + SCALE_BYTES)

    def record(self, head_dim: int) -> tuple[int, int]:
        return 2, head_dim


def e4m3_as_half(data: Tensor) -> Tensor:
    """Finite e4m3 numbers, or their bytes, over `E4M3_UNIT`: exact in float16.

    PyTorch converts them one by one on a CPU.  Sign, 4 bits of exponent and 3 of mantissa are where
    float16 has them after a shift, and mean 2^-8 of what they did.
    """
    wide = data.view(torch.int8).to(torch.int16)
    return wide.mul_(128).bitwise_and_(-0x4001).view(torch.float16)


def codec_of(each: Format, head_dim: int) -> Codec:
    """The codec that stores a format."""
    return Fp8() if each == FP8 else Packed(each, head_dim)


@dataclass(frozen=True)
class Packed:
    """Whole numbers of 8, 4 or 2 bits, as many to a byte as fit, with scales of groups.

    The record of a vector has its codes, then scales, zero points, outliers and where these stand.
    With keys in groups of tokens a record has a key's codes and a whole value; scales, zero points
    and outliers of the keys are one *span* of bytes per group, which `encode` returns as scales
    ``[..., 1, kv_heads, groups, bytes]``.  `decode` wants the span of every token, with the token's
    number in its group (int16) at the end: ``[..., 1, kv_heads, tokens, bytes + 2]``.
    """

    format: Format
    head_dim: int
    name: ClassVar[str] = "packed"
    storage: ClassVar[torch.dtype] = torch.uint8

    @property
    def scaled(self) -> bool:
        return self.scale_tokens > 1

    @property
    def scale_tokens(self) -> int:
        """Tokens that are encoded together."""
        return self.format.scale_tokens

    def bytes_per_token(self, head_dim: int) -> int:
        return sum(self.format.vector_bytes(head_dim, keys) for keys in (True, False))

    def record(self, head_dim: int) -> tuple[int, int]:
        value = self.format.vector_bytes(head_dim, keys=False)
        return (1, self.key_bytes + value) if self.scaled else (2, value)

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's record, or of its codes with keys in groups of tokens."""
        return self._code_bytes if self.scaled else self.value_bytes

    @property
    def value_bytes(self) -> int:
        return self.format.vector_bytes(self.head_dim, keys=False)

    @property
    def span_bytes(self) -> int:
        """Bytes of a group's scales, zero points and outliers of keys, of one KV head."""
        return self.head_dim * self.format.span_bytes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.scaled:
            codes, rest = self._encoded(x.float(), self.format.group)
            return torch.cat([self._packed(codes), rest], dim=-1), None
        keys, values = x.float().split(1, dim=-4)
        groups = keys.unflatten(-2, (-1, self.scale_tokens)).transpose(-1, -2)
        codes, spans = self._encoded(groups, self.scale_tokens)
        codes = codes.transpose(-1, -2).flatten(-3, -2)
        value_codes, rest = self._encoded(values, self.format.group)
        data = torch.cat([self._packed(codes), self._packed(value_codes), rest], dim=-1)
        return data, spans.flatten(-2)

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        if not self.scaled:
            return self.vectors(data).to(dtype)
        if scale is None:
            raise TypeError("keys in groups of tokens need their spans")
        codes, value = data.tensor_split([self.key_bytes], dim=-1)
        key = self.grouped_keys(codes, scale[..., :-2], _as(scale[..., -2:], torch.int16))
        return torch.cat([key, self.vectors(value)], dim=-4).to(dtype)

    # One vector: numbers [..., size], of which `group` share a scale.

    def _encoded(self, x: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Codes ``[..., size]`` and the rest of the record, both uint8."""
        size, steps = x.shape[-1], float(self.format.steps)
        count = self.format.outliers_of(size)
        dense, rest = x, []
        if count:
            middle = x.sort(dim=-1).values[..., (size - 1) // 2, None]
            at = (-(x - middle).abs()).argsort(dim=-1, stable=True)[..., :count]
            dense = x.scatter(-1, at, middle.expand(at.shape))
            rest = [_bytes(_half(x.gather(-1, at))), _bytes(at.to(torch.int16))]
        group = min(group, size)
        missing = -size % group
        if missing:
            dense = torch.cat([dense, dense[..., -1:].expand(*dense.shape[:-1], missing)], dim=-1)
        grouped = dense.unflatten(-1, (-1, group))
        if self.format.zero_bytes:
            low = grouped.amin(dim=-1, keepdim=True)
            # A tensor, not a number: CUDA divides by a number through its rounded reciprocal.
            scale = (grouped.amax(dim=-1, keepdim=True) - low) / torch.full_like(low, steps)
            low, scale = _half(low), _half(scale)
            step = scale.float()
            step = step.masked_fill(step == 0, 1.0)
            codes = (grouped - low.float()).div_(step).round_().clamp_(0, steps)
            scales = [_bytes(step.half().squeeze(-1)), _bytes(low.squeeze(-1))]
        else:
            amax = grouped.abs().amax(dim=-1, keepdim=True)
            step = amax / torch.full_like(amax, steps)
            if self.format.scale_bytes == 1:
                small = step.clamp(max=448.0).to(torch.float8_e4m3fn).float().clamp(min=2.0**-9)
                scales, step = [_bytes(small.to(torch.float8_e4m3fn).squeeze(-1))], small
            else:
                step = _half(step).float()
                step = step.masked_fill(step == 0, 1.0)
                scales = [_bytes(step.half().squeeze(-1))]
            codes = (grouped / step).round_().clamp_(-steps, steps).add_(steps)
        codes = codes.flatten(-2)[..., :size].to(torch.uint8)
        return codes, torch.cat([*scales, *rest], dim=-1)

    def vectors(self, record: Tensor) -> Tensor:
        """Vectors ``[..., head_dim]`` in float32 from whole records."""
        size = self.head_dim
        scales, count = self.format.scales(size), self.format.outliers_of(size)
        of_scales = [scales * self.format.scale_bytes, scales * self.format.zero_bytes]
        widths = [self._code_bytes, *of_scales, 2 * count, 2 * count]
        codes, scale, low, kept, at = record.split_with_sizes(widths, dim=-1)
        group = min(self.format.group, size)
        code = torch.nn.functional.pad(self._unpacked(codes), (0, -size % group))
        step = self._steps(scale)[..., None]
        out: Tensor = code.unflatten(-1, (-1, group))
        if self.format.zero_bytes:
            out = out * step + _as(low, torch.float16).float()[..., None]
        else:
            out = (out - self.format.steps) * step
        out = out.flatten(-2)[..., :size].contiguous()
        if count:
            out.scatter_(-1, _as(at, torch.int16).long(), _as(kept, torch.float16).float())
        return out

    def grouped_keys(self, codes: Tensor, spans: Tensor, number: Tensor) -> Tensor:
        """Keys ``[..., tokens, head_dim]`` in float32 from the bytes of their codes.

        And, of every token, the span of its group and its number there, ``[..., tokens, 1]``.
        """
        code = self._unpacked(codes)
        count = self.format.outliers_of(self.scale_tokens)
        widths = [self.format.scale_bytes, self.format.zero_bytes, 2 * count, 2 * count]
        channels = spans.unflatten(-1, (self.head_dim, -1))
        scale, low, kept, at = channels.split_with_sizes(widths, dim=-1)
        step = self._steps(scale)[..., 0]
        if self.format.zero_bytes:
            out = code * step + _as(low, torch.float16).float()[..., 0]
        else:
            out = (code - self.format.steps) * step
        if count:
            kept, at = _as(kept, torch.float16).float(), _as(at, torch.int16)
            for i in range(count):
                out = torch.where(at[..., i] == number, kept[..., i], out)
        return out

    # Bytes.

    def _steps(self, scale: Tensor) -> Tensor:
        """Float32 scales from their bytes."""
        if self.format.scale_bytes == 1:
            return e4m3_as_half(scale).float().mul_(E4M3_UNIT)
        return _as(scale, torch.float16).float()

    @property
    def _code_bytes(self) -> int:
        return -(-self.head_dim * self.format.bits // 8)

    def _packed(self, codes: Tensor) -> Tensor:
        """Codes ``[..., size]``, several to a byte, the first in the lowest bits."""
        bits = self.format.bits
        each = 8 // bits
        if each == 1:
            return codes
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each))
        found = codes.unflatten(-1, (-1, each))
        packed: Tensor = found[..., 0].clone()
        for i in range(1, each):
            packed |= found[..., i] << (bits * i)
        return packed

    def _unpacked(self, packed: Tensor) -> Tensor:
        """The codes again, float32 ``[..., head_dim]``."""
        bits = self.format.bits
        if bits == 8:
            return packed.float()
        # Each byte's codes move into bytes of a wider number, which lie in the same order.
        if bits == 4:
            wide = packed.to(torch.int16)
            wide = (wide | (wide << 4)).bitwise_and_(0x0F0F)
        else:
            wide = packed.to(torch.int32)
            wide = (wide | (wide << 12)).bitwise_and_(0x000F000F)
            wide = (wide | (wide << 6)).bitwise_and_(0x03030303)
        return wide.view(torch.uint8)[..., : self.head_dim].float()


def _half(x: Tensor) -> Tensor:
    """The nearest float16 numbers; none overflows."""
    return x.clamp(-float(LARGEST_HALF), float(LARGEST_HALF)).half()


def _bytes(x: Tensor) -> Tensor:
    """The bytes of numbers ``[..., n]``, side by side."""
    return _as(x, torch.uint8)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of ``[..., n]`` as numbers of another type."""
    return x.reshape(-1).view(dtype).view(*x.shape[:-1], -1)
