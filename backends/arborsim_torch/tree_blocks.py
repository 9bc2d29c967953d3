"""Compute a whole tree whose tokens are known, in blocks that go across its thoughts.

What several paths begin with is computed once.  Thoughts are computed depth first, so a block holds
neighbours: its queries read the union of their paths, and a mask says which entries lie on the path
of each.  Where a block is one line, as in a prompt or a chain, it needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from arborsim.play.given import GivenTree
from arborsim_torch.cache.forward import AttentionMetadata, Entries, SlotWriter, Span
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import Capture
from arborsim_torch.decoder import PREFILL_BLOCK, Pass, TreeDecoder, run_together
from arborsim_torch.sampling import scored
from arborsim_torch.tiers.copies import to_device

_MOST_VALUES = 1 << 28  # attention probabilities of a layer that a block may have
_LEAST_BLOCK = 16


class BlockCache(TieredCache):
    """Keys and values of a tree that is computed in blocks; all of them stay where they are."""

    def block(self, spans: Sequence[Span], ids: np.ndarray) -> AttentionMetadata:
        """Announce the tokens of a block, int ``[1, queries]``, whose nodes `spans` says."""
        fresh, positions = list[np.ndarray](), list[np.ndarray]()
        for span in spans:
            position = np.arange(span.position, span.position + span.stop - span.first)[None]
            own = ids[:, span.first : span.stop]
            fresh.append(self._table.append([span.node], own, position))
            positions.append(position)
        position, token = np.concatenate(positions, axis=1), np.concatenate(fresh)
        pool = self._pools[Place.HBM]
        writing = SlotWriter.new(pool, pool.enter(token))
        self.leaves, longest = [spans[0].node], int(position.max()) + 1
        self.lengths = [longest]
        entries, read = self._entries(spans)
        self._store, self._held = writing.store, entries.n

        def content(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = pool.slab(layer)[0]
            return _taken(keys, read), _taken(values, read)

        at = to_device(position, self.layout.device)
        given = (at, [int(position.min())], longest, lambda layer: entries, content, writing.store)
        one_line = entries.on_path is None
        return AttentionMetadata(*given, causal=one_line, spans=tuple(spans))

    def _entries(self, spans: Sequence[Span]) -> tuple[Entries, Tensor | int]:
        """The tokens that the block reads, of all its paths, and their slots (or the first n)."""
        paths = {span.node: self.tree.ancestors(span.node) for span in spans}
        nodes = np.array(sorted(set().union(*paths.values())))
        by_node = [self.tree.tokens(node) for node in nodes.tolist()]
        sizes = [len(tokens) for tokens in by_node]
        token = np.concatenate(by_node)
        n, device = len(token), self.layout.device
        read: Tensor | int = n
        if not np.array_equal(token, np.arange(n)):
            read = to_device(token, device)
        if len(paths[spans[-1].node]) == len(nodes):  # one path, which all of them lie on
            return Entries(None, None, n), read
        seen = np.repeat([np.isin(nodes, paths[s.node]) for s in spans], sizes, axis=1)
        mask = np.repeat(seen, [span.stop - span.first for span in spans], axis=0)
        position = self.position.values[token].astype(np.int64)
        on_path = to_device(mask[None, None], device)
        return Entries(on_path, to_device(position[None], device), n), read

    def newest(self, count: int) -> Tensor:
        """The tokens of the last block, ``[layers, 2, 1, kv_heads, count, head_dim]``."""
        first = self.num_tokens - count
        return self.tokens_kv(np.arange(first, self.num_tokens))[:, :, None]


def _taken(values: Tensor, read: Tensor | int) -> Tensor:
    return values[:, :read] if isinstance(read, int) else values.index_select(1, read)


@dataclass(frozen=True)
class TokenOrder:
    """The tokens of a tree in the order of computing: depth first, a thought at a time."""

    first: np.ndarray  #: int64 ``[nodes]``: number of each node's first token
    #: int64 ``[tokens]``: whose each is, its position, its vocabulary id, and what it follows (-1)
    node: np.ndarray
    position: np.ndarray
    vocabulary_id: np.ndarray
    before: np.ndarray

    @classmethod
    def of(cls, tree: GivenTree) -> TokenOrder:
        sizes = np.array([len(node.tokens) for node in tree.nodes])
        nodes = _depth_first(tree)
        first = np.zeros(len(nodes), dtype=np.int64)
        first[nodes] = np.cumsum(sizes[nodes]) - sizes[nodes]
        before = np.arange(-1, sizes.sum() - 1)
        for n, node in enumerate(tree.nodes[1:], 1):
            before[first[n]] = first[node.parent] + sizes[node.parent] - 1
        owner = np.repeat(nodes, sizes[nodes])
        start = np.array(tree.lengths) - sizes - first
        ids = np.concatenate([tree.nodes[n].tokens for n in nodes])
        return cls(first, owner, np.arange(len(owner)) + start[owner], ids, before)

    def spans(self, begin: int, end: int) -> list[Span]:
        """Those of the tokens ``begin .. end``."""
        cuts = np.flatnonzero(np.diff(self.node[begin:end])) + 1
        found = []
        for first, stop in pairwise([0, *cuts.tolist(), end - begin]):
            at, follows = begin + first, int(self.before[begin + first]) - begin
            found.append(
                Span(int(self.node[at]), first, stop, int(self.position[at]), max(-1, follows))
            )
        return found


def _depth_first(tree: GivenTree) -> np.ndarray:
    """Numbers of nodes, each after the one above it; int64 ``[nodes]``."""
    below: list[list[int]] = [[] for _ in tree.nodes]
    for number, node in enumerate(tree.nodes[1:], 1):
        below[node.parent].append(number)
    found, waiting = list[int](), [0]
    while waiting:
        found.append(waiting.pop())
        waiting += reversed(below[found[-1]])
    return np.array(found)


def block_tokens(heads: int, most_entries: int) -> int:
    """Tokens of a block, whose attention rows have a bounded number of entries."""
    return max(_LEAST_BLOCK, min(PREFILL_BLOCK, _MOST_VALUES // (heads * most_entries)))


class BlockDecoder(TreeDecoder):
    """Computes a given tree, node 0 the prompt; `capture` sees the passes."""

    def __init__(self, model: Any, capture: Capture | None, tree: GivenTree) -> None:
        block = block_tokens(model.config.num_attention_heads, tree.num_tokens)
        self._blocks = BlockCache(Layout.of(model))
        super().__init__(model, capture, block, self._blocks, graphs=False)
        self._blocks.pools[Place.HBM].reserve(tree.num_tokens)
        for number, node in enumerate(tree.nodes):
            self._blocks.open(number, node.parent)
        self._capture, self.order = capture, TokenOrder.of(tree)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute everything, in the order `order`.

        Returns float32 ``[tokens]``, nats: the log-probability of each token after what it follows
        (NaN of the very first), and the entropy of what follows it.
        """
        order, count = self.order, len(self.order.node)
        logprob, entropy = np.full((2, count), np.nan, dtype=np.float32)
        following = np.argsort(order.before, kind="stable")  # tokens, by what they follow
        borders = np.searchsorted(order.before[following], np.arange(count + 1))
        for begin in range(0, count, self.prefill_block):
            end = min(count, begin + self.prefill_block)
            logits = self._block_logits(begin, end)
            next_ones = following[borders[begin] : borders[end]]
            ids = order.vocabulary_id[next_ones]
            found = scored(logits, order.before[next_ones] - begin, ids)
            logprob[next_ones], entropy[begin:end] = (each.numpy(force=True) for each in found)
        return logprob, entropy

    def _block_logits(self, begin: int, end: int) -> Tensor:
        ids = self.order.vocabulary_id[None, begin:end]
        metadata = self._blocks.block(self.order.spans(begin, end), ids)
        (logits,) = run_together([Pass(self, ids, metadata, 0, self.observer is not None)])
        if self._capture is not None:
            self._capture.drain(self)
        return logits[0]
