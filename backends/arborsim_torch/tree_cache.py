"""Keys and values of a tree of thoughts: every node's stored once, paths assembled per batch.

The *store* holds one tensor per node, ``[layers, 2, kv_heads, tokens, head_dim]`` (keys, then
values).  The *lanes* are the working copy that the model reads: one preallocated tensor with one
row per active leaf, in which slot ``p`` is the token at position ``p``.  A lane that already holds
a prefix of a new leaf's path keeps it, so a chain is never copied and a child costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_CHUNK = 256  # lanes grow by at least this many slots


@dataclass
class StoredNode:
    """One node's place in the tree and its keys and values.

    Attributes
    ----------
    start : int
        Position of its first token.
    length : int
        Its tokens, those that are still only in a lane included.
    kv : Tensor ``[layers, 2, kv_heads, stored, head_dim]`` or None
    """

    parent: int
    start: int
    length: int = 0
    kv: Tensor | None = None
    dropped: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass
class Lane:
    """What a row of the working copy holds: the nodes of a path, root first."""

    path: list[int] = field(default_factory=list)


class TreeLayer(CacheLayerMixin):
    """One layer's view of the lanes, as transformers' models use it."""

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.slots, 0

    def get_seq_length(self) -> int:
        return self._cache.slots

    def get_max_length(self) -> int:
        return -1


class TreeCache:
    """The store, the lanes, and the transformers `Cache` over them (`hf`).

    Parameters
    ----------
    layers, kv_heads, head_dim : int
    dtype, device
        Of the model.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.nodes: dict[int, StoredNode] = {}
        self.lanes: list[Lane] = []
        self.slots = 0  # longest path after the pending write
        self._shape = (layers, kv_heads, head_dim)
        self._options = {"dtype": dtype, "device": device}
        self._work = torch.empty((layers, 2, 0, kv_heads, 0, head_dim), **self._options)
        self._views: list[tuple[Tensor, Tensor]] = []
        self._at: int | tuple[Tensor, Tensor] = 0
        self._queries = 1
        self.hf = Cache(layers=[TreeLayer(self, i) for i in range(layers)])

    @property
    def stored_bytes(self) -> int:
        """Bytes of the store: every node once."""
        return sum(
            n.kv.numel() * n.kv.element_size() for n in self.nodes.values() if n.kv is not None
        )

    def length(self, lane: int) -> int:
        """Tokens on the path that the lane holds."""
        return self.nodes[self.lanes[lane].path[-1]].end

    def open(self, node: int, parent: int) -> None:
        """Add an empty node under a complete one (parent -1 for the prompt)."""
        start = self.nodes[parent].end if parent >= 0 else 0
        self.nodes[node] = StoredNode(parent, start)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        chain = []
        while node >= 0:
            chain.append(node)
            node = self.nodes[node].parent
        return chain[::-1]

    def activate(self, leaves: Sequence[int]) -> list[int]:
        """Put these leaves into the lanes; return them in lane order.

        Leaves stay in, or take over, the lane that holds most of their path.
        """
        paths = {leaf: self.path(leaf) for leaf in leaves}
        pairs = sorted(
            (
                (_shared(lane.path, path), -i, -k, leaf)
                for i, lane in enumerate(self.lanes[: len(leaves)])
                for k, (leaf, path) in enumerate(paths.items())
            ),
            reverse=True,
        )
        order: dict[int, int] = {}
        for shared, lane, _, leaf in pairs:
            if shared and -lane not in order and leaf not in order.values():
                order[-lane] = leaf
        waiting = iter([leaf for leaf in leaves if leaf not in order.values()])
        placed = [order[i] if i in order else next(waiting) for i in range(len(leaves))]
        self._flush([i for i in range(len(self.lanes)) if i >= len(placed)
                     or self.lanes[i].path[-1:] != [placed[i]]])  # fmt: skip
        longest = max(self.nodes[leaf].end for leaf in placed)
        self._reserve(len(placed), longest + 1)
        for i, leaf in enumerate(placed):
            self._fill(i, paths[leaf])
        del self.lanes[len(placed) :]
        return placed

    def _flush(self, lanes: Sequence[int]) -> None:
        """Store what only these lanes hold."""
        for i in lanes:
            if not self.lanes[i].path:
                continue
            node = self.nodes[self.lanes[i].path[-1]]
            if node.dropped:
                continue
            stored = 0 if node.kv is None else node.kv.shape[3]
            if stored == node.length:
                continue
            new = self._work[:, :, i, :, node.start + stored : node.end].clone()
            node.kv = new if node.kv is None else torch.cat([node.kv, new], dim=3)

    def _fill(self, lane: int, path: list[int]) -> None:
        held = self.lanes[lane].path
        for node_id in path[_shared(held, path) :]:
            node = self.nodes[node_id]
            if node.length:
                assert node.kv is not None
                assert node.kv.shape[3] == node.length
                self._work[:, :, lane, :, node.start : node.end] = node.kv
        self.lanes[lane].path = path

    def _reserve(self, lanes: int, slots: int) -> None:
        """Make room; what the lanes hold is kept."""
        _, _, rows, _, room, _ = self._work.shape
        if lanes > rows or slots > room:
            layers, kv_heads, head_dim = self._shape
            room_now = room if slots <= room else max(slots + _CHUNK, room + room // 2)
            shape = (layers, 2, max(lanes, rows), kv_heads, room_now, head_dim)
            # Zeros: unread slots of shorter rows still meet the values' product, as 0 x slot.
            grown = torch.zeros(shape, **self._options)
            grown[:, :, :rows, :, :room] = self._work
            self._work = grown
        while len(self.lanes) < lanes:
            self.lanes.append(Lane())
        self._views = [(layer[0], layer[1]) for layer in self._work.unbind(0)]

    def expect(self, queries: int) -> tuple[list[int], bool]:
        """Announce `queries` tokens per lane; return the lanes' lengths, and if they vary."""
        lengths = [self.length(i) for i in range(len(self.lanes))]
        self._reserve(len(lengths), max(lengths) + queries)
        ragged = min(lengths) != max(lengths)
        if ragged and queries != 1:
            raise ValueError("several tokens at once need lanes of one length")
        self.slots = max(lengths) + queries
        self._queries = queries
        if ragged:
            device = self._options["device"]
            index = torch.arange(len(lengths), device=device)
            self._at = (index, torch.tensor(lengths, device=device))
        else:
            self._at = lengths[0]
        for lane in self.lanes:
            self.nodes[lane.path[-1]].length += queries
        return lengths, ragged

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new tokens of one layer; return what the attention reads."""
        all_keys, all_values = self._views[layer]
        rows = len(self.lanes)
        if isinstance(self._at, int):
            span = slice(self._at, self._at + self._queries)
            all_keys[:rows, :, span] = keys
            all_values[:rows, :, span] = values
        else:
            index, position = self._at
            all_keys[index, :, position] = keys[:, :, 0]
            all_values[index, :, position] = values[:, :, 0]
        return all_keys[:rows, :, : self.slots], all_values[:rows, :, : self.slots]

    def lane_kv(self, lane: int, start: int, stop: int) -> Tensor:
        """A lane's keys and values, ``[layers, 2, kv_heads, stop - start, head_dim]``; a view."""
        return self._work[:, :, lane, :, start:stop]

    def drop(self, node: int) -> None:
        """Free a node that nothing will read again."""
        self.nodes[node].kv = None
        self.nodes[node].dropped = True


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two paths."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
