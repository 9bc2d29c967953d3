"""Where a token's keys and values live, how many tokens HBM may hold, what quantising keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from arborsim.core.errors import UsageError


class Tier(IntEnum):
    """Where a token's keys and values live, best first.

    The order matters: a larger value is further down, and *protected* tokens never move down.
    """

    HBM = 0
    HBM_QUANTISED = 1
    DDR = 2
    DDR_QUANTISED = 3
    EVICTED = 4

    @property
    def in_hbm(self) -> bool:
        return self <= Tier.HBM_QUANTISED

    @property
    def in_ddr(self) -> bool:
        return self in (Tier.DDR, Tier.DDR_QUANTISED)

    @property
    def quantised(self) -> bool:
        return self in (Tier.HBM_QUANTISED, Tier.DDR_QUANTISED)


NUM_TIERS = len(Tier)

#: How tokens in DDR take part in attention: `arborsim.machine.reading` says what each means.
RECALLS = ("stage", "stream", "near", "ondemand")


@dataclass(frozen=True)
class Budget:
    """How many tokens HBM may hold, as the user gave it."""

    text: str  # as given, for tables
    tokens: int | None = None  # an absolute number of tokens,
    share: float | None = None  # or a share in (0, 1] of the episode's full-retention peak

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``"2048"`` is tokens, ``"0.25"`` a share, ``"1"`` the whole; else a `UsageError`."""
        text = text.strip()
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= 0:
            what = "must be above 0" if math.isfinite(number) else "is not a number"
            raise UsageError(f"budget '{text}' {what}: give tokens (2048) or a share (0.25)")
        if number <= 1:
            return cls(text, share=number)
        if number != int(number):
            raise UsageError(
                f"budget '{text}' is neither a share up to 1 nor a whole number of tokens"
            )
        return cls(text, tokens=int(number))

    def in_tokens(self, full_peak_tokens: int) -> int:
        """Tokens for an episode that peaks at `full_peak_tokens` when nothing is evicted."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(1, math.floor(self.share * full_peak_tokens))


_LARGEST = np.float32(448.0)
_LEAST_EXPONENT = -6  # below 2^-6 numbers are subnormal: steps of 2^-9
_MANTISSA_BITS = 3


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest FP8 e4m3 number, ties to even; float32, same shape.

    Magnitudes above 448, the largest number of the format, become 448.
    """
    x = np.clip(x.astype(np.float32), -_LARGEST, _LARGEST)
    _, exponent = np.frexp(x)  # x = m 2^exponent, m in [0.5, 1)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, _LEAST_EXPONENT) - _MANTISSA_BITS)
    return np.asarray(np.rint(x / step) * step, dtype=np.float32)


def quantised(vectors: np.ndarray) -> np.ndarray:
    """Vectors ``[..., head_dim]`` as the quantised tiers hold them, float32.

    FP8 e4m3 with a scale per token and KV head, amax / 448.
    """
    x = vectors.astype(np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) / _LARGEST
    scale[scale == 0] = 1
    return np.asarray(round_e4m3(x / scale) * scale)
