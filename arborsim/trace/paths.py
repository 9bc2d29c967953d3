"""Which tokens lie at positions 0 .. p of a token's path."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import numpy as np

_KEPT_PATHS = 64


class TokenPaths:
    """Paths of the tokens of one recorded search.

    Parameters
    ----------
    node : int ``[tokens]``
        Block of each token, in order of entry.
    parent : mapping-like int ``[nodes]``
        Parent of each block; -1 for the root.
    """

    def __init__(self, node: np.ndarray, parent: np.ndarray) -> None:
        self._node = node
        self._parent = parent
        order = np.argsort(node, kind="stable")
        bounds = np.searchsorted(node[order], np.arange(len(parent) + 1))
        self._own = [order[a:b] for a, b in pairwise(bounds.tolist())]
        self._paths: OrderedDict[int, np.ndarray] = OrderedDict()

    def of(self, token: int, length: int) -> np.ndarray:
        """Ids of the tokens at positions ``0 .. length - 1`` of the path that ends in `token`."""
        return self._of_node(int(self._node[token]))[:length]

    def _of_node(self, node: int) -> np.ndarray:
        known = self._paths.get(node)
        if known is not None:
            return known
        parts, up = [self._own[node]], int(self._parent[node])
        while up >= 0:
            parts.append(self._own[up])
            up = int(self._parent[up])
        path = np.concatenate(parts[::-1])
        self._paths[node] = path
        if len(self._paths) > _KEPT_PATHS:
            self._paths.popitem(last=False)
        return path


def paths_of(kind_rows: np.ndarray, node: np.ndarray, parent: np.ndarray) -> TokenPaths:
    """Paths from the columns of an episode.

    Parameters
    ----------
    kind_rows : int64 ``[tokens]``
        Rows that hold a token (`Episode.token_rows`).
    node, parent : int32 ``[rows]``
    """
    parents = np.full(int(node.max()) + 1, -1, dtype=np.int64)
    parents[node] = parent
    return TokenPaths(node[kind_rows], parents)
