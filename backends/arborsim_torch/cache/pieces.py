"""Which tokens a pass reads from which place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from arborsim_torch.cache.places import Place


@dataclass
class Piece:
    """Tokens of one place: int64 Tensor ``[m]`` of slots, on the pool's device."""

    place: Place
    slots: Tensor


@dataclass(frozen=True)
class HostPiece:
    """Tokens of one place on the host.

    Attributes
    ----------
    place : Place
    index : int64 Tensor ``[m]`` or ``[kv_heads, m]``
        Slots; -1 is padding.
    span : slice
        The piece's entries among all of the layer's.
    """

    place: Place
    index: Tensor
    span: slice

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """The piece's part of a mask ``[..., n]``."""
        return None if mask is None else mask[..., self.span]


@dataclass(frozen=True)
class HostTokens:
    """The tokens of one layer that stay on the host; tensors are there, too.

    Attributes
    ----------
    pieces : list of HostPiece
    position : int64 Tensor ``[kv_heads or 1, n]``
    lanes : bool Tensor ``[kv_heads or 1, lanes, n]``
    n : int
    """

    pieces: list[HostPiece]
    position: Tensor
    lanes: Tensor
    n: int

    @property
    def real(self) -> Tensor:
        """Bool ``[kv_heads or 1, n]``: False for padding, which lies on no path."""
        return self.lanes.any(1)


@dataclass
class Row:
    """The tokens that one group reads.

    Attributes
    ----------
    token : int64 array ``[n]``, rising
    pieces : list of Piece
    order : int64 Tensor ``[n]`` or None
        Puts the pieces, one after the other, into the order of tokens; None if they are.
    """

    token: np.ndarray
    pieces: list[Piece]
    order: Tensor | None
