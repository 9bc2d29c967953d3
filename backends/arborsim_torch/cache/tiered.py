"""The cache of one tree search on a live model: every token once per group, in tiers.

What a forward pass does: `begin` gives slots to its tokens and says what it reads; each layer hands
in its keys and values (`Reading.store`) and gets its view; `moves` between tiers come after, from
`arborsim_torch.cache.mover`.

How attention reads: as long as all tokens it needs are in HBM at full precision it reads the pool
as it lies, with a mask where the pool holds other tokens too.  Otherwise, or if results must not
depend on where tokens lie (`ordered`), the layer's keys and values are put together in the order of
tokens first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from arborsim.core.errors import UnknownName
from arborsim.core.tree import GrowingArray, GrowingTable, ThoughtTree
from arborsim_torch.cache.assembly import AssembledPlan, Assembly
from arborsim_torch.cache.books import OpenBooks
from arborsim_torch.cache.dense import DensePool, ReadPlan
from arborsim_torch.cache.hf import hf_cache
from arborsim_torch.cache.host_stream import HostStream
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.places import Place
from arborsim_torch.cache.pool import Pool, make_pools
from arborsim_torch.cache.remote import PAGES_TOP, HostAttention
from arborsim_torch.cache.views import Reading
from arborsim_torch.cache.writing import Span, Writing
from arborsim_torch.tiers.codec import Codec, Fp8
from arborsim_torch.tiers.link import Link
from arborsim_torch.upload import uploaded

RECALLS = ("stage", "stream", "near", "ondemand")


class TieredCache:
    """Keys and values of one tree.

    Parameters
    ----------
    layout : Layout
    quantised : Codec
        Format of quantised tokens.
    page_tokens : int
        Pools grow and shrink by so many slots.
    ordered : bool
        Put keys and values in the order of tokens before attention reads them, so that results do
        not depend on slots or places.
    recall : {"stage", "stream", "near", "ondemand"}
        How tokens in DDR that are not staged take part in attention.  Without a link, they are
        copied layer by layer while the computation waits.
    link : Link, optional
    by_path : bool
        Where lanes share little of what the pool holds, read each lane's path by itself: for trees
        of thousands of short nodes.

    Attributes
    ----------
    tree : ThoughtTree
    leaves : list of int
        Those that decode, in batch order.
    place : GrowingTable of int8 ``[groups, tokens]``
        Where attention reads each token (`Place`).
    pools : dict of Place to Pool
    """

    def __init__(
        self,
        layout: Layout,
        *,
        quantised: Codec | None = None,
        page_tokens: int = 16,
        ordered: bool = False,
        recall: str = "stage",
        link: Link | None = None,
        by_path: bool = False,
    ) -> None:
        if recall not in RECALLS:
            raise UnknownName("recall mode", recall, RECALLS)
        self.layout = layout
        self._open = OpenBooks(layout.groups, make_pools(layout, quantised or Fp8(), page_tokens))
        self._in_order = False  # the next step may begin a streak
        self.hf = hf_cache(self, layout.layers)
        self.ordered = ordered
        self._dense = DensePool(self, by_path)
        self.stream: HostStream | None = None
        self.remote: HostAttention | None = None
        if link is not None and recall == "stream":
            self.stream = HostStream(link, layout.layers)
        if link is not None and recall in ("near", "ondemand"):
            self.remote = HostAttention(self, link, PAGES_TOP if recall == "ondemand" else 0)
        self._assembly = Assembly(self, self.remote is not None, self.stream)
        self._store: Callable[[int, Tensor, Tensor], None] = _unannounced
        self._held = 0

    def close(self) -> None:
        """End what runs beside the computation."""
        if self.remote is not None:
            self.remote.close()

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device that tokens are streamed through."""
        return 0 if self.stream is None else self.stream.buffer_bytes

    @property
    def stream_exposed_s(self) -> float:
        """Seconds that forward passes waited for streamed tokens."""
        return 0.0 if self.stream is None else self.stream.exposed_s

    # -- the books -------------------------------------------------------------------------------

    @property
    def leaves(self) -> list[int]:
        return self._open.leaves

    @property
    def tree(self) -> ThoughtTree:
        return self._open.books.tree

    @property
    def place(self) -> GrowingTable:
        return self._open.books.place

    @property
    def vocabulary_id(self) -> GrowingArray:
        return self._open.books.vocabulary_id

    @property
    def position(self) -> GrowingArray:
        return self._open.books.position

    @property
    def pools(self) -> dict[Place, Pool]:
        return self._open.pools

    # -- the tree ------------------------------------------------------------------------------

    def open(self, node: int, parent: int) -> None:
        """Add an empty node under a complete one (parent -1 for the prompt)."""
        self.tree.open(node, parent)

    def parent(self, node: int) -> int:
        return self.tree.nodes[node].parent

    def activate(self, leaves: Sequence[int]) -> None:
        """The next passes are over these leaves, in this order."""
        self._open.turn(leaves)
        self.tree.forget_paths(leaves)
        self.changed()

    def length(self, lane: int) -> int:
        """Tokens on the path of a lane, evicted ones included."""
        return self._open.lengths[lane]

    @torch.inference_mode()
    def drop(self, node: int) -> None:
        """Free all tokens of a node that nothing will read again."""
        self.catch_up()
        token = self.tree.tokens(node)
        for pool in self.pools.values():
            group, at = np.nonzero(pool.slots.of[:, token] >= 0)
            pool.give_back(group, token[at])
        self.place.values[:, token] = Place.LOST
        self.shrink()
        self.changed()

    # -- bytes ---------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return len(self.vocabulary_id)

    @property
    def seen_tokens(self) -> int:
        return max(self._open.lengths, default=0)

    @property
    def held_tokens(self) -> int:
        return self._held

    def used_bytes(self, *places: Place) -> int:
        """Bytes of the tokens in these places."""
        return sum(self.pools[place].used_bytes for place in places)

    def capacity_bytes(self, *places: Place) -> int:
        """Bytes of the tensors of these places."""
        return sum(self.pools[place].capacity_bytes for place in places)

    def shrink(self) -> None:
        """Give memory back where half of it is unused."""
        shrunk = [pool.shrink() for pool in self.pools.values()]
        if any(shrunk):
            self.changed()

    def catch_up(self) -> None:
        """Let all pools know of all tokens; passes only tell HBM."""
        for pool in self.pools.values():
            pool.slots.grow(self.num_tokens)

    def changed(self) -> None:
        """Tokens have moved: what attention reads must be looked up anew."""
        self._dense.stale = True
        self._assembly.stale = True

    # -- forward passes ------------------------------------------------------------------------

    def begin(self, ids: np.ndarray) -> Reading:
        """Announce the next tokens of the leaves.

        Parameters
        ----------
        ids : int ``[lanes, queries]``
            Vocabulary ids; several queries only with one lane.
        """
        width, queries = ids.shape
        if width != len(self.leaves) or (queries > 1 and width > 1):
            raise ValueError(f"{ids.shape} tokens for {len(self.leaves)} leaves")
        if width == queries == 1:
            reading = self._open.step(int(ids[0, 0]), self._in_order and not self._dense.stale)
            if reading is not None:
                self._store, self._held = reading.store, reading.positions
                return reading
        first, pool = self._open.lengths, self.pools[Place.HBM]
        fresh, position = self._open.enter(ids)
        writing = Writing.new(pool, pool.enter(fresh))
        return self._reading(writing, position, first, fresh)

    def again(self, leaf: int, tokens: np.ndarray) -> Reading:
        """Announce that lost tokens on the path of one active leaf are computed again.

        They have slots already (see `Mover.restore`); groups that never lost a token keep what
        they have.
        """
        self._open.turn([leaf])
        self.changed()
        position = self.position.values[tokens].astype(np.int64)[None]
        lost = self.place.values[:, tokens] == Place.LOST
        writing = Writing.again(self.pools[Place.HBM], tokens, lost)
        group, at = np.nonzero(lost)
        self.place.values[group, tokens[at]] = Place.HBM
        return self._reading(writing, position, [int(position[0, 0])], np.empty(0, np.int64))

    def _reading(
        self, writing: Writing | Span, position: np.ndarray, first: list[int], fresh: np.ndarray
    ) -> Reading:
        longest = self.seen_tokens
        source = self._assembly if self._assembles() else self._dense
        plan = source.plan(fresh)
        self._in_order = source is self._dense and plan.straight and self.layout.groups == 1
        position = position.astype(np.int64)
        at = uploaded(position, self.layout.device)
        self._store, self._held = writing.store, plan.held
        remote = None
        if self.remote is not None and isinstance(plan, AssembledPlan):
            remote = self.remote
            remote.begin(plan.host, plan.fresh)
        reading = Reading(
            at, first, longest, plan.entries, plan.content, writing.store, remote,
            causal=plan.straight and len(fresh) == position.shape[1] and len(first) == 1,
            paths=plan.paths if isinstance(plan, ReadPlan) else None,
            plain=plan.plain if isinstance(plan, ReadPlan) and position.size == 1 else None,
        )  # fmt: skip
        if remote is not None:
            remote.attach(reading, torch.from_numpy(position))
        return reading

    def _assembles(self) -> bool:
        if self.ordered:
            return True
        return any(p.slots.total for place, p in self.pools.items() if place is not Place.HBM)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take a layer's new keys and values, ``[lanes, kv_heads, queries, head_dim]``."""
        self._store(layer, keys, values)

    def newest(self, count: int) -> Tensor:
        """The last `count` tokens of every lane, ``[layers, 2, lanes, kv_heads, count, head_dim]``.

        They must not have been moved yet.
        """
        token = np.stack([self.tree.path(leaf)[-count:] for leaf in self.leaves])
        found = self.tokens_kv(token.reshape(-1))
        return found.view(*found.shape[:3], *token.shape, -1).movedim(3, 2)

    def tokens_kv(self, token: np.ndarray) -> Tensor:
        """Keys and values of tokens in HBM, ``[layers, 2, kv_heads, tokens, head_dim]``."""
        return self.pools[Place.HBM].read_tokens(token)


def _unannounced(layer: int, keys: Tensor, values: Tensor) -> None:
    raise RuntimeError(f"keys and values of layer {layer}, but no pass has begun")
