"""How tokens are stored: as they are, or in 8 bits with a scale per token and KV head.

A *codec* turns vectors ``[..., tokens, head_dim]`` into data of the same shape and, if it
quantises, float32 scales ``[..., tokens, 1]``; what addresses tokens in one addresses them in the
other.  With keys and values as one of the leading axes, each has scales of its own.

``Fp8`` is `arborsim.core.tiers`, which replays compute output errors with, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

SCALE_BYTES = 4  # float32


class Codec(Protocol):
    """A way to store the vectors of tokens.

    Attributes
    ----------
    name : str
    storage : torch.dtype
        Of the stored data.
    scaled : bool
        Whether scales are stored with the data.
    """

    @property
    def name(self) -> str: ...
    @property
    def storage(self) -> torch.dtype: ...
    @property
    def scaled(self) -> bool: ...

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Vectors ``[..., tokens, head_dim]`` as data and scales, on the same device."""

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What `encode` stored, ``[..., tokens, head_dim]``."""

    def bytes_per_token(self, head_dim: int) -> int:
        """Bytes of one vector: of one token's key, or value, of one KV head."""


@dataclass(frozen=True)
class Plain:
    """Vectors as they are.

    Parameters
    ----------
    storage : torch.dtype
        Of the model's keys and values.
    """

    storage: torch.dtype
    name: ClassVar[str] = "plain"
    scaled: ClassVar[bool] = False

    def encode(self, x: Tensor) -> tuple[Tensor, None]:
        """The vectors themselves (no copy).

        Raises
        ------
        TypeError
            If they are of another type: storing them would change them.
        """
        if x.dtype != self.storage:
            raise TypeError(f"vectors of {x.dtype} in a plain store of {self.storage}")
        return x, None

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        return data.to(dtype)

    def bytes_per_token(self, head_dim: int) -> int:
        return head_dim * self.storage.itemsize


class _EightBit(ABC):
    """Symmetric, one byte per element: the largest magnitude of a vector becomes `largest`."""

    name: ClassVar[str]
    storage: ClassVar[torch.dtype]
    largest: ClassVar[float]
    scaled: ClassVar[bool] = True

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Data and scales; a zero vector stays zero, and what is not finite stays so."""
        amax = x.abs().amax(dim=-1, keepdim=True).float()
        # A tensor, not a number: CUDA divides by a number through its rounded reciprocal.
        scale = amax / torch.full_like(amax, self.largest)
        scale = scale.masked_fill_(scale == 0, 1.0)
        # The quotient passes `largest` where the scale itself was rounded down (subnormals).
        quotient = (x.float() / scale).clamp_(-self.largest, self.largest)
        return self._round(quotient), scale

    def decode(self, data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        if scale is None:
            raise TypeError(f"{self.name} data needs its scales")
        return (data.float() * scale).to(dtype)

    def bytes_per_token(self, head_dim: int) -> int:
        return head_dim + SCALE_BYTES

    @abstractmethod
    def _round(self, quotient: Tensor) -> Tensor:
        """The nearest numbers that can be stored; may overwrite its argument."""


@dataclass(frozen=True)
class Fp8(_EightBit):
    """FP8 e4m3 with scale ``amax / 448``."""

    name: ClassVar[str] = "fp8"
    storage: ClassVar[torch.dtype] = torch.float8_e4m3fn
    largest: ClassVar[float] = 448.0

    def _round(self, quotient: Tensor) -> Tensor:
        return quotient.to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Int8(_EightBit):
    """Whole numbers from -127 to 127 with scale ``amax / 127``, ties to even."""

    name: ClassVar[str] = "int8"
    storage: ClassVar[torch.dtype] = torch.int8
    largest: ClassVar[float] = 127.0

    def _round(self, quotient: Tensor) -> Tensor:
        return quotient.round_().to(torch.int8)
