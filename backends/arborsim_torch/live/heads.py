"""Attention rows of single query heads while a search runs, from its queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.trace.vectors import ShiftedRows, attention_row, keys_of, scaled

#: Of one group's tokens: which can be read now.  Int64 tokens -> bool ``[layers, kv_heads, n]``.
Readable = Callable[[np.ndarray], np.ndarray]


class LiveHeadRows:
    """Rows as `arborsim.trace.vectors.VectorRows` computes them from a trace, token by token.

    Parameters
    ----------
    tree : ThoughtTree
        Holds the tokens whose vectors have been appended.
    readable : callable, optional
        Which tokens can be read now: the others have no part in the softmax.
    """

    def __init__(self, tree: ThoughtTree, readable: Readable | None = None) -> None:
        self._tree = tree
        self._readable = readable
        self._queries: GrowingArray | None = None  # float16 [tokens, layers, heads, head_dim]
        self._keys = np.empty((0, 0, 0, 0), dtype=np.float32)  # [layers, KV heads, dim, tokens]
        self._count = 0

    @property
    def kv_heads(self) -> int:
        return int(self._keys.shape[1])

    def append(self, queries: np.ndarray, keys: np.ndarray) -> ShiftedRows:
        """Take in tokens; both float16 ``[tokens, layers, heads or KV heads, head_dim]``."""
        if self._queries is None:
            self._queries = GrowingArray(np.float16, row=queries.shape[1:])
        start, self._count = self._count, self._count + len(queries)
        self._queries.extend(queries)
        new = keys.transpose(1, 2, 3, 0)
        if self._count > self._keys.shape[3]:
            grown = np.zeros((*new.shape[:3], max(self._count, 2 * start, 256)), dtype=np.float32)
            if start:
                grown[..., :start] = self._keys[..., :start]
            self._keys = grown
        self._keys[..., start : self._count] = new
        return ShiftedRows(self, start)

    def query(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, head_dim]``: the query of token `i`, scaled."""
        assert self._queries is not None
        return scaled(self._queries.values[i])

    def row(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, position + 1]`` of token `i`."""
        path = self._tree.path(int(self._tree.node_of_token.values[i]))
        path = path[: int(np.searchsorted(path, i)) + 1]
        readable = None if self._readable is None else self._readable(path)
        return attention_row(self.query(i), keys_of(self._keys, path), readable)
