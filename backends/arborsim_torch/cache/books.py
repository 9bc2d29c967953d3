"""What a cache knows of every token, by its id, and the steps that are still to be written down."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from arborsim.core.tree import GrowingArray, GrowingTable, ThoughtTree
from arborsim_torch.cache.places import Place
from arborsim_torch.cache.pool import Pool
from arborsim_torch.cache.streak import Streak
from arborsim_torch.cache.views import Reading


class Books:
    """Tables with one entry per token.

    Parameters
    ----------
    groups : int

    Attributes
    ----------
    tree : ThoughtTree
    place : GrowingTable of int8 ``[groups, tokens]``
        Where attention reads each token (`Place`).
    vocabulary_id, position : GrowingArray of int32 ``[tokens]``
    """

    def __init__(self, groups: int) -> None:
        self.tree = ThoughtTree()
        self.place = GrowingTable(groups, np.int8)
        self.vocabulary_id = GrowingArray(np.int32)
        self.position = GrowingArray(np.int32)

    def __len__(self) -> int:
        return len(self.vocabulary_id)

    def enter(self, leaves: Sequence[int], ids: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Note tokens that enter HBM in every group; both int ``[leaves, steps]``.

        Returns
        -------
        int64 ``[leaves x steps]``
            Their ids: step by step, and within a step by leaf.
        """
        start, steps = len(self), ids.shape[1]
        self.tree.append(leaves, steps)
        self.vocabulary_id.extend(ids.T.reshape(-1))
        self.position.extend(position.T.reshape(-1))
        self.place.extend(ids.size, Place.HBM)
        return np.arange(start, start + ids.size)


class OpenBooks:
    """Books that a streak may be ahead of; whoever looks finds all steps in them.

    Parameters
    ----------
    groups : int
    pools : dict of Place to Pool

    Attributes
    ----------
    leaves : list of int
        Those that decode, in batch order.
    lengths : list of int
        Of their paths, evicted tokens and those of the streak included.
    """

    def __init__(self, groups: int, pools: dict[Place, Pool]) -> None:
        self.leaves: list[int] = []
        self.lengths: list[int] = []
        self._books = Books(groups)
        self._pools = pools
        self._streak: Streak | None = None

    @property
    def books(self) -> Books:
        self._write_up()
        return self._books

    @property
    def pools(self) -> dict[Place, Pool]:
        self._write_up()
        return self._pools

    def _write_up(self) -> None:
        """Enter the steps of the streak; it ends."""
        streak, self._streak = self._streak, None
        if streak is not None and streak.ids:
            fresh = self._books.enter(self.leaves, *streak.to_enter())
            self._pools[Place.HBM].enter(fresh)

    def turn(self, leaves: Sequence[int]) -> None:
        """Make these the leaves."""
        tree = self.books.tree
        self.leaves = list(leaves)
        self.lengths = [len(tree.path(leaf)) for leaf in leaves]

    def enter(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Note tokens of the leaves, int ``[leaves, steps]``, that enter HBM in every group.

        Returns
        -------
        token : int64 ``[leaves x steps]``
            Their ids.
        position : int64 ``[leaves, steps]``
        """
        position = np.asarray(self.lengths)[:, None] + np.arange(ids.shape[1])
        token = self.books.enter(self.leaves, ids, position)
        self.lengths = [length + ids.shape[1] for length in self.lengths]
        return token, position

    def step(self, token: int, begins: bool) -> Reading | None:
        """Announce one token of the one leaf, if it belongs to a streak.

        Parameters
        ----------
        token : int
            Vocabulary id.
        begins : bool
            The leaf's path lies in HBM in order and nothing else does: a streak may begin.
        """
        if self._streak is None and begins:
            self._streak = Streak(self._pools[Place.HBM], self.lengths[0])
        if self._streak is None or self._streak.full:
            return None
        reading = self._streak.step(token)
        self.lengths = [reading.positions]
        return reading
