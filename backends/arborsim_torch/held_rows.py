"""Rows of attention cross to the host without the positions that nothing was read at.

A position whose token is not held is paid nothing, and the host knows which these are: of the rest
the values cross, in the order of positions, and are put back in their places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from arborsim.core.row_uses import RowUse
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.tiers.copies import to_device

#: Of what other uses make of rows, a position that is paid nothing has a value, too.
_ZERO_IF_LOST = ("sum", "newest")
_INDEX_BYTES = 4


class HeldRows:
    """Which positions of some paths are held; none is lost or recovered between two decisions.

    Parameters
    ----------
    cache : TieredCache
    leaves : sequence of int
        Ends of the paths, one per sequence.
    """

    def __init__(self, cache: TieredCache, leaves: Sequence[int]) -> None:
        place = cache.place.values
        self._held: list[np.ndarray] = []  # bool [groups of the cache, positions] of each path
        self._taken: dict[RowUse, tuple[np.ndarray, tuple[int, ...]]] = {}  # where, of what shape
        if cache.layout.device.type == "cuda" and (place == Place.LOST).any():
            self._held = [place[:, cache.tree.path(leaf)] != Place.LOST for leaf in leaves]

    def taken(self, use: RowUse, rows: Tensor) -> Tensor:
        """What crosses of reduced rows ``[seqs, groups, positions]``.

        All of it where the values and their places, which cross as well, are not less than that.
        """
        if not self._held or use.keeps not in _ZERO_IF_LOST:
            return rows
        groups, positions = rows.shape[1:]
        held = np.zeros(tuple(rows.shape), dtype=np.bool_)
        for seq, path in enumerate(self._held):
            same = len(path) == groups
            of_groups = path if same else np.asarray(path.any(axis=0, keepdims=True))
            length = min(positions, path.shape[1])
            held[seq, :, :length] = of_groups[:, :length]
        size = rows.element_size()
        if np.count_nonzero(held) * (size + _INDEX_BYTES) >= held.size * size:
            return rows
        index = np.flatnonzero(held).astype(np.int32)
        self._taken[use] = index, held.shape
        return rows.reshape(-1).index_select(0, to_device(index, rows.device))

    def whole(self, use: RowUse, values: np.ndarray) -> np.ndarray:
        """The rows again, once what was taken of them is on the host."""
        if use not in self._taken:
            return values
        index, shape = self._taken[use]
        rows = np.zeros(shape, dtype=values.dtype)
        rows.reshape(-1)[index] = values
        return rows
