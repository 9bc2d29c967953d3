"""Attention rows of single query heads, computed from recorded queries and keys when asked for."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np

from arborsim.core.shape import Rope

_KEPT_BYTES = 1 << 28  # rows that are kept for the next policy (256 MiB)
_KEPT_PATHS = 64


class HeadRows(Protocol):
    """Attention rows of single query heads, by number of the token."""

    @property
    def kv_heads(self) -> int:
        """KV heads per layer. Query head ``h`` reads KV head ``h // (heads // kv_heads)``."""
        ...

    @property
    def rope(self) -> Rope | None:
        """How queries and keys were rotated. None if unknown."""
        ...

    def row(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, position + 1]`` of token `i`. NaN where the softmax was."""
        ...

    def query(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, head_dim]``: the scaled query of token `i`."""
        ...


class ShiftedRows:
    """The `HeadRows` of a run: row 0 is that of its first token, number `start` in `rows`."""

    def __init__(self, rows: HeadRows, start: int) -> None:
        self._rows: HeadRows = rows._rows if isinstance(rows, ShiftedRows) else rows
        self._start: int = start + (rows._start if isinstance(rows, ShiftedRows) else 0)

    @property
    def kv_heads(self) -> int:
        return self._rows.kv_heads

    @property
    def rope(self) -> Rope | None:
        return self._rows.rope

    def row(self, i: int) -> np.ndarray:
        return self._rows.row(self._start + i)

    def query(self, i: int) -> np.ndarray:
        return self._rows.query(self._start + i)


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
    """Softmax of a scaled query ``[layers, heads, head_dim]`` over keys, in float32.

    `keys` are ``[layers, KV heads, head_dim, n]``, the result ``[layers, heads, n]``.  Keys that
    are not `readable`, bool ``[layers, KV heads, n]``, get 0. At least one per KV head is.
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
    """The `HeadRows` of a recorded search, from its queries and keys.

    ``softmax(q . k / sqrt(head_dim))`` in float32, over the token's own path. Vectors are
    post-RoPE, so nothing else is needed.  A row is computed when a policy or a meter asks for it,
    once per token: all policies of a replay share the rows that fit into `_KEPT_BYTES`.

    Parameters
    ----------
    queries, keys : float16 ``[tokens, layers, heads or KV heads, head_dim]``
    position : int ``[tokens]``
    token_rows : int64 ``[tokens]``
        Rows that hold a token.
    node, parent : int32 ``[rows]``
    rope : Rope, optional
        How queries and keys were rotated.
    """

    def __init__(
        self,
        queries: np.ndarray,
        keys: np.ndarray,
        position: np.ndarray,
        token_rows: np.ndarray,
        node: np.ndarray,
        parent: np.ndarray,
        rope: Rope | None = None,
    ) -> None:
        self.queries, self.rope = queries, rope
        # [layers, KV heads, head_dim, tokens]: a row is one product per KV head
        self._keys = np.ascontiguousarray(keys.transpose(1, 2, 3, 0), dtype=np.float32)
        self._position = position
        self._rows: dict[int, np.ndarray] = {}
        self._held_bytes = 0
        self._node = node[token_rows]
        self._parent = np.full(int(node.max()) + 1, -1, dtype=np.int64)
        self._parent[node] = parent
        order = np.argsort(self._node, kind="stable")
        bounds = np.searchsorted(self._node[order], np.arange(len(self._parent) + 1))
        self._own = [order[a:b] for a, b in pairwise(bounds.tolist())]  # tokens of each node
        self._paths: dict[int, np.ndarray] = {}  # the newest `_KEPT_PATHS`

    @property
    def kv_heads(self) -> int:
        return int(self._keys.shape[1])

    def row(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, position + 1]`` of token `i`. Not to be written to."""
        known = self._rows.get(i)
        if known is not None:
            return known
        path = self._path(int(self._node[i]))[: int(self._position[i]) + 1]
        row = attention_row(self.query(i), keys_of(self._keys, path))
        if self._held_bytes + row.nbytes <= _KEPT_BYTES:
            self._rows[i] = row
            self._held_bytes += row.nbytes
        return row

    def query(self, i: int) -> np.ndarray:
        """Float32 ``[layers, heads, head_dim]``: the query of token `i`, scaled."""
        return scaled(self.queries[i])

    def _path(self, leaf: int) -> np.ndarray:
        """Ids of the tokens from the root to the end of `leaf`, by position."""
        if leaf not in self._paths:
            if len(self._paths) == _KEPT_PATHS:
                del self._paths[next(iter(self._paths))]
            parts, node = [], leaf
            while node >= 0:
                parts.append(self._own[node])
                node = int(self._parent[node])
            self._paths[leaf] = np.concatenate(parts[::-1])
        return self._paths[leaf]
