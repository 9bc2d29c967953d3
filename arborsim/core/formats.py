"""Formats of quantised keys and values: how many bytes a token takes, and what is left of it.

A policy names the formats of its quantised tiers (`arborsim.policies.base.Policy.formats`).  The
simulator counts their bytes, the live cache stores exactly those, and `Format.rounded` is what
attention reads back on both sides, bit for bit.

Numbers that share a scale are a *group*.  Groups lie along the channels of a token's vector. Keys
can also be grouped along tokens, one group per channel (KIVI, Liu et al. 2024, arXiv:2402.02750,
section 3): some channels of keys are large in every token.  Such a group is quantised when all its
tokens are there.  Its scales are counted by token, so that one that leaves takes its share along.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.geometry import Geometry

OUTLIER_BYTES = 4  # a float16 number and where it stands in its vector, an int16
LARGEST_HALF = np.float32(65504.0)

_LARGEST = np.float32(448.0)  # of e4m3
_LEAST = np.float32(2.0**-9)
_LEAST_EXPONENT = -6  # below 2^-6 numbers are subnormal: steps of 2^-9
_MANTISSA_BITS = 3


@dataclass(frozen=True)
class Format:
    """How a quantised tier stores vectors of `head_dim` numbers (keys and values of a KV head).

    With 8 bits and `group` 0: FP8 e4m3 with a float32 scale per vector.  Else whole numbers: with a
    zero point codes 0 .. 2^bits - 1 reach from the smallest number of a group to its largest.
    Without, they are symmetric, of ``2^(bits - 1) - 1`` steps to each side (2 bits: -1, 0, 1).

    Raises `UsageError` if there is no such format.
    """

    bits: int = 8  # 8, 4 or 2
    #: Numbers that share a scale: channels of a vector (all, if it has fewer), or tokens of a
    #: channel; 0 for FP8
    group: int = 0
    key_axis: str = "token"  # what groups of keys lie in: one "token", or one "channel"
    #: 2 for float16; scales can also take 1 (e4m3), then without zero point
    scale_bytes: int = 4
    zero_bytes: int = 0
    #: Share of each vector kept in float16, at least one number: those farthest from its median
    #: (KVQuant, Hooper et al. 2024, arXiv:2401.18079, section 3.3).  A vector is that of a token,
    #: or with keys in groups of tokens the group's numbers of a channel.
    outliers: float = 0.0

    def __post_init__(self) -> None:
        widths = (self.scale_bytes, self.zero_bytes)
        whole = self.group > 0 and widths in ((2, 2), (2, 0), (1, 0))
        floating = (self.group, self.bits, self.outliers, self.key_axis) == (0, 8, 0.0, "token")
        if self.bits not in (2, 4, 8) or not (whole or (floating and widths == (4, 0))):
            raise UsageError(
                f"no format has {self.bits} bits in groups of {self.group} with scales and zero "
                f"points of {self.scale_bytes} + {self.zero_bytes} bytes: use 8, 4 or 2 bits, "
                "groups of 1 or more and 2 + 2, 2 + 0 or 1 + 0 bytes"
            )
        if self.key_axis not in ("token", "channel") or not 0 <= self.outliers < 1:
            raise UsageError(
                f"no format has keys in groups of a {self.key_axis} and {self.outliers:g} of them "
                "as outliers: use token or channel, and a share from 0 up to 1"
            )

    @property
    def floating(self) -> bool:
        """FP8 rather than whole numbers."""
        return not self.group

    @property
    def scale_tokens(self) -> int:
        """Tokens that must be quantised together: their number must be a multiple of this."""
        return self.group if self.key_axis == "channel" else 1

    @property
    def steps(self) -> int:
        """Whole numbers that a group's range is cut into, or one side of it without zero point."""
        return (1 << self.bits) - 1 if self.zero_bytes else (1 << self.bits - 1) - 1

    @cached_property
    def about(self) -> str:
        """In words, e.g. ``"2 bits, keys in groups of 32 tokens, values of 32 channels"``."""
        if self.floating:
            return "8 bits (e4m3)"
        groups = f"groups of {self.group} channels"
        if self.key_axis == "channel":
            groups = f"keys in groups of {self.group} tokens, values of {self.group} channels"
        kept = f", {self.outliers:.3g} of each vector in 16 bits" if self.outliers else ""
        return f"{self.bits} bits, {groups}{kept}"

    def scales(self, size: int) -> int:
        """Groups of channels in a vector of `size` numbers. The last may be smaller."""
        return -(-size // self.group) if self.group else 1

    def outliers_of(self, numbers: int) -> int:
        """Outliers of a vector of `numbers`."""
        return max(1, round(self.outliers * numbers)) if self.outliers else 0

    def vector_bytes(self, size: int, keys: bool) -> int:
        """Bytes of a token's key, or value, of `size` numbers, with its share of the scales.

        Raises `UsageError` if that is no whole number.
        """
        code_bytes = -(-size * self.bits // 8)
        if not (keys and self.key_axis == "channel"):
            scale_bytes = self.scales(size) * (self.scale_bytes + self.zero_bytes)
            return code_bytes + scale_bytes + self.outliers_of(size) * OUTLIER_BYTES
        shared = size * self.span_bytes
        if shared % self.group:
            smaller = (replace(self, group=group) for group in range(self.group - 1, 0, -1))
            fits = next(each.group for each in smaller if size * each.span_bytes % each.group == 0)
            raise UsageError(
                f"keys of {size} channels in groups of {self.group} tokens: a token's share of the "
                f"{shared} bytes of scales and outliers is not whole bytes; use groups of {fits}"
            )
        return code_bytes + shared // self.group

    @property
    def span_bytes(self) -> int:
        """Bytes of scale, zero point and outliers of a channel's group of keys along tokens."""
        outliers = self.outliers_of(self.group)
        return self.scale_bytes + self.zero_bytes + outliers * OUTLIER_BYTES

    def token_bytes(self, geometry: Geometry) -> int:
        """One token over the layers that keep every token. A latent vector is stored as a key."""
        size = geometry.elements_per_layer // geometry.vectors_per_layer
        values = geometry.vectors_per_layer // 2
        keys = geometry.vectors_per_layer - values
        layer = keys * self.vector_bytes(size, True) + values * self.vector_bytes(size, False)
        return geometry.full_layers * layer

    def rounded(self, vectors: np.ndarray, keys: bool) -> np.ndarray:
        """Vectors ``[..., tokens, size]`` as the format returns them, float32.

        Keys in groups along tokens stand group by group, all of them whole.
        """
        x = vectors.astype(np.float32)
        if self.floating:
            scale = np.abs(x).max(axis=-1, keepdims=True) / _LARGEST
            scale[scale == 0] = 1
            return np.asarray(round_e4m3(x / scale) * scale)
        if not (keys and self.key_axis == "channel"):
            return self._rounded(x)
        groups = x.reshape(*x.shape[:-2], -1, self.group, x.shape[-1]).swapaxes(-1, -2)
        return np.asarray(self._rounded(groups).swapaxes(-1, -2).reshape(x.shape))

    def _rounded(self, x: np.ndarray) -> np.ndarray:
        """Numbers ``[..., vector]``, a group of them under each scale."""
        size = x.shape[-1]
        count, dense = self.outliers_of(size), x
        if count:
            middle = np.sort(x, axis=-1)[..., (size - 1) // 2, None]
            at = np.argsort(-np.abs(x - middle), axis=-1, kind="stable")[..., :count]
            dense = x.copy()
            np.put_along_axis(dense, at, middle, axis=-1)
        scales = self.scales(size)
        missing = [(0, 0)] * (x.ndim - 1) + [(0, scales * min(self.group, size) - size)]
        grouped = np.pad(dense, missing, mode="edge").reshape(*x.shape[:-1], scales, -1)
        steps = np.float32(self.steps)
        if self.zero_bytes:
            low = grouped.min(axis=-1, keepdims=True)
            scale = (grouped.max(axis=-1, keepdims=True) - low) / steps
            low, scale = _half(low), _half(scale)
            scale[scale == 0] = 1
            code = np.clip(np.rint((grouped - low) / scale), 0, steps)
            out = code * scale + low
        else:
            scale = np.abs(grouped).max(axis=-1, keepdims=True) / steps
            if self.scale_bytes == 1:
                scale = np.maximum(round_e4m3(scale), _LEAST)
            else:
                scale = _half(scale)
                scale[scale == 0] = 1
            code = np.clip(np.rint(grouped / scale), -steps, steps)
            out = (code + np.float32(0)) * scale  # codes know no negative zero
        out = out.reshape(*x.shape[:-1], -1)[..., :size].copy()
        if count:
            np.put_along_axis(out, at, _half(np.take_along_axis(x, at, axis=-1)), axis=-1)
        return np.asarray(out)


#: What quantised tiers hold unless a policy says otherwise: a scale per token and KV head.
FP8 = Format()


def _half(x: np.ndarray) -> np.ndarray:
    """The nearest float16 numbers, as float32. None overflows."""
    x = np.clip(x, -LARGEST_HALF, LARGEST_HALF)
    return np.asarray(x.astype(np.float16), dtype=np.float32)


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest FP8 e4m3 number, ties to even. Float32, same shape.

    Magnitudes above 448, the largest number of the format, become 448.
    """
    x = np.clip(x.astype(np.float32), -_LARGEST, _LARGEST)
    _, exponent = np.frexp(x)  # x = m 2^exponent, m in [0.5, 1)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, _LEAST_EXPONENT) - _MANTISSA_BITS)
    return np.asarray(np.rint(x / step) * step, dtype=np.float32)
