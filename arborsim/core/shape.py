"""The model of a cache as policies know it: the layers and heads of its groups, and its RoPE.

Plans have a row per *group*: the whole cache, a captured layer, or a KV head of one, layer by
layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: how queries and keys are turned by their positions.

    The same in every layer and at every length of the context.  Su et al. 2021, arXiv:2104.09864.
    Channels are paired as in transformers' ``rotate_half``: the first half of the rotated channels
    with the second.  Channels beyond `rotary_dim` are not rotated.
    """

    #: Radians per position, as the model uses them: a scaling of long contexts is in them
    inverse_frequencies: tuple[float, ...]
    scaling: float = 1.0  # factor of rotated channels (YaRN's attention scaling)

    def __post_init__(self) -> None:
        numbers = (*self.inverse_frequencies, self.scaling)
        if not self.inverse_frequencies or not all(0 < x < math.inf for x in numbers):
            raise ValueError("RoPE needs frequencies and a scaling above 0, all of them finite")

    @property
    def rotary_dim(self) -> int:
        """Channels that are rotated: the first of each head."""
        return 2 * len(self.inverse_frequencies)

    def rotate(self, vectors: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Vectors ``[..., head_dim]`` turned by their positions. Float64.

        `positions`, int, has the shape ``[...]``, or one that broadcasts to it.
        """
        cos, sin = self._cos_sin(positions)
        return self._rotated(vectors, cos * self.scaling, sin * self.scaling)

    def unrotate(self, vectors: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The vectors that `rotate` turns into these. Float64 ``[..., head_dim]``."""
        cos, sin = self._cos_sin(positions)
        return self._rotated(vectors, cos / self.scaling, -sin / self.scaling)

    def mean_rotation(self, first: int, count: int, size: int) -> np.ndarray:
        """Mean of the rotations by the positions ``first .. first + count - 1``.

        Float64 ``[size, size]``, for vectors of `size` channels: ``matrix @ vector`` is the mean of
        the vector's rotations.
        """
        positions = np.arange(first, first + count)[:, None]
        return self.rotate(np.eye(size), positions).mean(axis=0).T if count else np.eye(size)

    def _cos_sin(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Rounded to float32 as the model's own angles are: that matters at large positions.
        at = np.asarray(positions, dtype=np.float32)[..., None]
        angles = (at * np.asarray(self.inverse_frequencies, np.float32)).astype(np.float64)
        return np.cos(angles), np.sin(angles)

    def _rotated(self, vectors: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        half = len(self.inverse_frequencies)
        wide = np.asarray(vectors, dtype=np.float64)
        one, other = wide[..., :half], wide[..., half : 2 * half]
        parts = [one * cos - other * sin, other * cos + one * sin, wide[..., 2 * half :]]
        shape = np.broadcast_shapes(parts[0].shape[:-1], parts[2].shape[:-1])
        parts[2] = np.broadcast_to(parts[2], (*shape, parts[2].shape[-1]))
        return np.concatenate(parts, axis=-1)


@dataclass(frozen=True)
class CacheShape:
    """The model whose vectors and rows are observed, as far as a policy may know it."""

    #: Model layers that the rows of layers and heads stand for, rising: the captured ones of a
    #: trace, all of a live model; empty if none was captured
    layers: tuple[int, ...] = ()
    kv_heads: int = 1
    head_dim: int = 1
    rope: Rope | None = None  # None if unknown, or not the same at every length

    def rows(self, groups: int) -> np.ndarray:
        """Which of `layers`, counted from 0, each of the plan's groups lies in. Int64 ``[groups]``.

        One group stands for all layers and counts as the first.
        """
        per_layer = max(1, groups // max(1, len(self.layers)))
        return np.arange(groups) // per_layer


UNKNOWN = CacheShape()
"""The shape of a model of which nothing is captured."""
