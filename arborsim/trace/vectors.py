"""Attention rows of single heads, and the paths that they run along.

The `qkv` capture level stores vectors instead of one attention row per head, which would be heads
times larger.  Rows are computed when a policy or a meter asks for them, once per token: all
policies of a replay share them as long as they fit into `_KEPT_BYTES`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np

_KEPT_BYTES = 1 << 28  # rows that are kept for the next policy (256 MiB)
_KEPT_PATHS = 64


class TokenPaths:
    """Which tokens lie at positions 0 .. p of the path of each token of a search.

    Parameters
    ----------
    token_rows : int64 ``[tokens]``
        Rows that hold a token (`Episode.token_rows`).
    node, parent : int32 ``[rows]``
    """

    def __init__(self, token_rows: np.ndarray, node: np.ndarray, parent: np.ndarray) -> None:
        self._node = node[token_rows]
        self._parent = np.full(int(node.max()) + 1, -1, dtype=np.int64)
        self._parent[node] = parent
        order = np.argsort(self._node, kind="stable")
        bounds = np.searchsorted(self._node[order], np.arange(len(self._parent) + 1))
        self._own = [order[a:b] for a, b in pairwise(bounds.tolist())]
        self._paths: dict[int, np.ndarray] = {}  # the newest `_KEPT_PATHS`

    def of(self, token: int, length: int) -> np.ndarray:
        """Ids of the tokens at positions ``0 .. length - 1`` of the path that ends in `token`."""
        node = int(self._node[token])
        if node not in self._paths:
            if len(self._paths) == _KEPT_PATHS:
                del self._paths[next(iter(self._paths))]
            self._paths[node] = self._path(node)
        return self._paths[node][:length]

    def _path(self, node: int) -> np.ndarray:
        parts = []
        while node >= 0:
            parts.append(self._own[node])
            node = int(self._parent[node])
        return np.concatenate(parts[::-1])


def scaled(query: np.ndarray) -> np.ndarray:
    """A recorded query, float16 ``[layers, heads, head_dim]``, as attention takes it: float32."""
    return np.asarray(query.astype(np.float32) * np.float32(query.shape[-1] ** -0.5))


def keys_of(keys: np.ndarray, path: np.ndarray) -> np.ndarray:
    """The keys of a path, from those of all tokens ``[layers, KV heads, head_dim, tokens]``."""
    straight = int(path[-1]) == len(path) - 1  # ids rise, so this means 0, 1, 2, ...
    return keys[..., : len(path)] if straight else keys[..., path]


def attention_row(
    query: np.ndarray, keys: np.ndarray, readable: np.ndarray | None = None
) -> np.ndarray:
    """Softmax of a scaled query over keys, in float32.

    Parameters
    ----------
    query : float32 ``[layers, heads, head_dim]``
    keys : float32 ``[layers, KV heads, head_dim, n]``
    readable : bool ``[layers, KV heads, n]``, optional
        The others get 0; at least one per KV head.

    Returns
    -------
    float32 ``[layers, heads, n]``
    """
    layers, heads, size = query.shape
    kv_heads = keys.shape[1]
    logits = np.matmul(query.reshape(layers, kv_heads, heads // kv_heads, size), keys)
    if readable is not None:
        logits[~np.broadcast_to(readable[:, :, None], logits.shape)] = -np.inf
    logits -= logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return np.asarray(logits.reshape(layers, heads, -1))


class VectorRows:
    """Attention rows of single query heads, from recorded queries and keys (`HeadRows`).

    ``softmax(q . k / sqrt(head_dim))`` in float32, over the token's own path; vectors are
    post-RoPE, so nothing else is needed.

    Parameters
    ----------
    queries : float16 ``[tokens, layers, heads, head_dim]``
    keys : float16 ``[tokens, layers, KV heads, head_dim]``
    position : int ``[tokens]``
    paths : TokenPaths
    """

    def __init__(
        self, queries: np.ndarray, keys: np.ndarray, position: np.ndarray, paths: TokenPaths
    ) -> None:
        self.queries = queries
        # [layers, KV heads, head_dim, tokens]: a row is one product per KV head
        self._keys = np.ascontiguousarray(keys.transpose(1, 2, 3, 0), dtype=np.float32)
        self._position = position
        self._paths = paths
        self._rows: dict[int, np.ndarray] = {}
        self._held_bytes = 0

    @property
    def kv_heads(self) -> int:
        return int(self._keys.shape[1])

    def row(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, position + 1]`` of token `i`; not to be written to."""
        known = self._rows.get(i)
        if known is not None:
            return known
        row = self._compute(i)
        if self._held_bytes + row.nbytes <= _KEPT_BYTES:
            self._rows[i] = row
            self._held_bytes += row.nbytes
        return row

    def query(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, head_dim]``: the query of token `i`, scaled."""
        return scaled(self.queries[i])

    def _compute(self, i: int) -> np.ndarray:
        length = int(self._position[i]) + 1
        path = self._paths.of(i, length)
        return attention_row(self.query(i), keys_of(self._keys, path))

    def __getitem__(self, tokens: slice) -> ShiftedRows:
        start, _, _ = tokens.indices(len(self._position))
        return ShiftedRows(self, start)


class TokenRows(Protocol):
    """Rows by number of the token in the whole search."""

    @property
    def kv_heads(self) -> int: ...

    def row(self, i: int) -> np.ndarray: ...

    def query(self, i: int) -> np.ndarray: ...


class ShiftedRows:
    """The rows of a run: row 0 is that of its first token."""

    def __init__(self, rows: TokenRows, start: int) -> None:
        self._rows = rows
        self._start = start

    @property
    def kv_heads(self) -> int:
        return self._rows.kv_heads

    def row(self, i: int) -> np.ndarray:
        return self._rows.row(self._start + i)

    def query(self, i: int) -> np.ndarray:
        return self._rows.query(self._start + i)

    def __getitem__(self, tokens: slice) -> ShiftedRows:
        return ShiftedRows(self._rows, self._start + (tokens.start or 0))
