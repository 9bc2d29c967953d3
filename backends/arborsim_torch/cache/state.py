"""The token table of a cache, its pools, and steps that are still to be entered in both.

While one path decodes and all its tokens lie in HBM in order, a step changes nothing that needs
looking up: the next token's slot is its position, and attention reads every slot up to it.  Such
steps are entered in the token table and the slot table only when one of them is read.  Entering
takes an eighth of the time of a small model's step; deferred, it takes next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from arborsim.core.tree import GrowingArray, GrowingTable, ThoughtTree
from arborsim_torch.cache.forward import AttentionMetadata, Entries
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.pool import Pool

_MOST_STEPS = 256  # pending at a time


class TokenTable:
    """Tables with one entry per token.

    `place` says where attention reads each token (`Place`), int8 ``[groups, tokens]``.  The others
    are int32 ``[tokens]``.
    """

    def __init__(self, groups: int) -> None:
        self.tree = ThoughtTree()
        self.place = GrowingTable(groups, np.int8)
        self.vocabulary_id = GrowingArray(np.int32)
        self.position = GrowingArray(np.int32)

    def __len__(self) -> int:
        return len(self.vocabulary_id)

    def append(self, leaves: Sequence[int], ids: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Add tokens to HBM in every group; both int ``[leaves, steps]``.

        Returns int64 ``[leaves x steps]``: their ids, step by step and within a step by leaf.
        """
        start, steps = len(self), ids.shape[1]
        self.tree.append(leaves, steps)
        self.vocabulary_id.extend(ids.T.reshape(-1))
        self.position.extend(position.T.reshape(-1))
        self.place.extend(ids.size, Place.HBM)
        return np.arange(start, start + ids.size)


class FastPath:
    """Steps of one contiguous path that have been announced and not entered yet.

    The pool is that of HBM at full precision, of one slab, and its tensors must not be replaced
    meanwhile.  `first` is the position and slot of the next token, `ids` are vocabulary ids.
    """

    def __init__(self, pool: Pool, first: int) -> None:
        self.ids: list[int] = []
        self._next = first
        self._room = min(pool.capacity(), first + _MOST_STEPS)
        self._at = torch.arange(first, max(first, self._room), device=pool.device)[None]
        # [2 layers, 1, kv_heads, capacity, head_dim]: attention wants a batch of one.
        self._slab = pool.span(0, 0, pool.capacity()).unsqueeze(1)
        self._targets: tuple[Tensor, ...] = ()

    @property
    def full(self) -> bool:
        """Whether the next token finds no slot."""
        return self._next >= self._room

    def step(self, token: int) -> AttentionMetadata:
        """Announce one token."""
        position, index = self._next, len(self.ids)
        self._next = position + 1
        self.ids.append(token)
        self._targets = self._slab.narrow(3, position, 1).unbind()
        contents = self._slab.narrow(3, 0, position + 1).unbind()
        entries = Entries(None, None, position + 1)
        return AttentionMetadata(
            self._at[:, index : index + 1],
            [position],
            position + 1,
            lambda layer: entries,
            lambda layer: (contents[2 * layer][0], contents[2 * layer + 1][0]),
            self.store,
            causal=True,
            plain=contents,
        )

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's ``[1, kv_heads, 1, head_dim]``."""
        self._targets[2 * layer].copy_(keys)
        self._targets[2 * layer + 1].copy_(values)

    def pending(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens' vocabulary ids and positions, int64 ``[1, steps]`` each."""
        ids = np.array([self.ids], dtype=np.int64)
        return ids, np.arange(self._next - ids.size, self._next)[None]


class CacheState:
    """The token table, the pools and the selection of a cache.

    Reading the table or the pools enters the pending steps first.  `leaves` are those that decode,
    in batch order, and `lengths` those of their paths, evicted and pending tokens included.
    """

    def __init__(self, layout: Layout, pools: dict[Place, Pool]) -> None:
        self.layout = layout
        self.leaves: list[int] = []
        self.lengths: list[int] = []
        self._table = TokenTable(layout.groups)
        self._pools = pools
        self._fast_path: FastPath | None = None
        self._reads: np.ndarray | None = None  # bool [groups, tokens then]

    def _flush(self) -> None:
        """Enter the pending steps and leave the fast path."""
        fast_path, self._fast_path = self._fast_path, None
        if fast_path is not None and fast_path.ids:
            fresh = self._table.append(self.leaves, *fast_path.pending())
            self._pools[Place.HBM].enter(fresh)

    @property
    def pools(self) -> dict[Place, Pool]:
        self._flush()
        return self._pools

    @property
    def tree(self) -> ThoughtTree:
        self._flush()
        return self._table.tree

    @property
    def place(self) -> GrowingTable:
        """Int8 ``[groups, tokens]``: where attention reads each token (`Place`)."""
        self._flush()
        return self._table.place

    @property
    def vocabulary_id(self) -> GrowingArray:
        self._flush()
        return self._table.vocabulary_id

    @property
    def position(self) -> GrowingArray:
        self._flush()
        return self._table.position

    @property
    def kv_heads(self) -> int:
        return self.layout.kv_heads

    @property
    def num_tokens(self) -> int:
        return len(self.vocabulary_id)

    @property
    def seen_tokens(self) -> int:
        return max(self.lengths, default=0)

    def _turn_to(self, leaves: Sequence[int]) -> None:
        """Make these the leaves."""
        tree = self.tree
        self.leaves = list(leaves)
        self.lengths = [len(tree.path(leaf)) for leaf in leaves]

    def _append(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add tokens of the leaves, int ``[leaves, steps]``, to HBM in every group.

        Returns int64 ids ``[leaves x steps]``, and positions ``[leaves, steps]``.
        """
        self._flush()
        position = np.asarray(self.lengths)[:, None] + np.arange(ids.shape[1])
        token = self._table.append(self.leaves, ids, position)
        self.lengths = [length + ids.shape[1] for length in self.lengths]
        return token, position

    def _step(self, token: int, begins: bool) -> AttentionMetadata | None:
        """Announce one token of the one leaf, if the fast path can take it.

        The path `begins` if the leaf's tokens lie in HBM in order and nothing else does.
        """
        if self._fast_path is None and begins:
            self._fast_path = FastPath(self._pools[Place.HBM], self.lengths[0])
        if self._fast_path is None or self._fast_path.full:
            return None
        metadata = self._fast_path.step(token)
        self.lengths = [metadata.positions]
        return metadata

    @property
    def selects(self) -> bool:
        """Whether some tokens are not to be read."""
        return self._reads is not None

    def selected(self, token: np.ndarray) -> np.ndarray:
        """Which of these tokens attention is to read, where they can be; bool ``[groups, n]``."""
        read = np.ones((self.layout.groups, len(token)), dtype=np.bool_)
        if self._reads is not None:
            old = token < self._reads.shape[1]
            read[:, old] = self._reads[:, token[old]]
        return read

    def selected_pairs(self, group: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Which of these pairs attention is to read, where they can be; bool ``[m]``."""
        if self._reads is None:
            return np.ones(len(group), dtype=np.bool_)
        known = self._reads.shape[1]
        read: np.ndarray = self._reads[group, np.minimum(token, known - 1)]
        return np.asarray(read | (token >= known))
