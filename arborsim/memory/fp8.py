"""What a number becomes when it is stored as FP8 e4m3 with a scale per token and KV head."""

from __future__ import annotations

import numpy as np

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
    """Vectors ``[..., head_dim]`` after a round trip through FP8, scaled by amax / 448; float32."""
    x = vectors.astype(np.float32)
    scale = np.abs(x).max(axis=-1, keepdims=True) / _LARGEST
    scale[scale == 0] = 1
    return np.asarray(round_e4m3(x / scale) * scale)
