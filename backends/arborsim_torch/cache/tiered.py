"""The cache of one tree search on a live model: every token once per group, in tiers.

A forward pass: `begin` gives slots to its tokens and returns what it reads; each layer stores its
keys and values (`AttentionMetadata.store`) and gets its view.  Moves between tiers come after it
(`arborsim_torch.cache.mover`).

A decode step reads every pool in place (`arborsim_torch.cache.pieces`).  If results must not depend
on where tokens are stored (`ordered`), each layer's keys and values are gathered in the order of
tokens instead.  So they are where lost tokens are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from arborsim.core.errors import UnknownName
from arborsim.core.tiers import RECALLS
from arborsim_torch.cache.forward import AttentionMetadata, SlotWriter, Span, SpanWriter
from arborsim_torch.cache.gather import GatherPlan, GatherReader
from arborsim_torch.cache.hf import hf_cache
from arborsim_torch.cache.host import HostAttention
from arborsim_torch.cache.host_stream import HostStream
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.ondemand import PageAttention
from arborsim_torch.cache.reader import PiecePlan, PieceReader
from arborsim_torch.cache.spans import make_pools
from arborsim_torch.cache.state import CacheState
from arborsim_torch.tiers.codec import Codec, Fp8
from arborsim_torch.tiers.copies import to_device
from arborsim_torch.tiers.link import HostLink


class TieredCache(CacheState):
    """Keys and values of one tree.

    `quantised` are the formats of quantised tokens and of coarse ones, FP8 without any.  Pools grow
    and shrink by `page_tokens` slots.  `ordered` gathers what attention reads in the order of
    tokens, so that results do not depend on slots or tiers.  `recall` says how tokens in DDR that
    are not staged take part in attention: without a link they are copied layer by layer while
    computation waits.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        quantised: Sequence[Codec] = (),
        page_tokens: int = 16,
        ordered: bool = False,
        recall: str = "stage",
        link: HostLink | None = None,
    ) -> None:
        if recall not in RECALLS:
            raise UnknownName("recall mode", recall, RECALLS)
        by_layer = recall != "stage"
        super().__init__(layout, make_pools(layout, quantised or (Fp8(),), page_tokens, by_layer))
        self._contiguous = False  # the next step may take the fast path
        self.hf = hf_cache(self, layout.layers)
        self.ordered = ordered
        self.stream: HostStream | None = None
        self.host_attention: HostAttention | None = None
        if link is not None and recall == "stream":
            self.stream = HostStream(link, layout.layers)
        if link is not None and recall == "near":
            self.host_attention = HostAttention(self)
        if link is not None and recall == "ondemand":
            self.host_attention = PageAttention(self, link)
        split_host = self.host_attention is not None
        self._gather = GatherReader(self, split_host, self.stream)
        self._pieces = PieceReader(self, split_host, self.stream)
        self._store: Callable[[int, Tensor, Tensor], None] = _unannounced
        self._held = 0

    def close(self) -> None:
        """End the threads that attend on the host."""
        if self.host_attention is not None:
            self.host_attention.close()

    @property
    def buffer_bytes(self) -> int:
        """Bytes on the device that tokens from the host pass through, and of bounds of pages."""
        if self.stream is None and self.host_attention is None:
            return 0
        held = [each for each in (self.stream, self.host_attention) if each is not None]
        return sum(each.buffer_bytes for each in held)

    @property
    def pass_exposed_s(self) -> float:
        """Seconds that forward passes waited for tokens from the host."""
        held = [each for each in (self.stream, self.host_attention) if each is not None]
        return sum(each.held_up.seconds for each in held)

    # -- the tree ------------------------------------------------------------------------------

    def open(self, node: int, parent: int) -> None:
        """Add an empty node under a complete one (parent -1 for the prompt)."""
        self.tree.open(node, parent)

    def parent(self, node: int) -> int:
        return self.tree.nodes[node].parent

    def activate(self, leaves: Sequence[int]) -> None:
        """The next passes are over these leaves, in this order."""
        self._turn_to(leaves)
        self.tree.forget_paths(leaves)
        self._turned()

    def length(self, seq: int) -> int:
        """Tokens on the path of a sequence, evicted ones included."""
        return self.lengths[seq]

    def readable(self, seq: int) -> np.ndarray | None:
        """Positions on the path of a sequence whose tokens some group holds, int64; None: all."""
        path = self.tree.path(self.leaves[seq])
        held = (self.place.values[:, path] != Place.LOST).any(axis=0)
        return None if held.all() else np.flatnonzero(held)

    @torch.inference_mode()
    def drop(self, node: int) -> None:
        """Free all tokens of a node that nothing will read again."""
        self.grow_slot_tables()
        token = self.tree.tokens(node)
        for pool in self.pools.values():
            group, at = np.nonzero(pool.slots.of[:, token] >= 0)
            pool.give_back(group, token[at])
        self.place.values[:, token] = Place.LOST
        self.shrink()
        self.changed()

    # -- bytes ---------------------------------------------------------------------------------

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

    def grow_slot_tables(self) -> None:
        """Let all pools know of all tokens; passes only tell HBM."""
        for pool in self.pools.values():
            pool.grow(self.num_tokens)

    def changed(self) -> None:
        """Tokens have moved; pools know which."""
        self._gather.stale, self._contiguous = True, False

    def _turned(self) -> None:
        """Other tokens are to be read, wherever they are."""
        self.changed()
        self._pieces.stale = True

    def select(self, reads: np.ndarray | None) -> bool:
        """Attention reads these tokens and those to come: `arborsim.memory.moves.Plan.reads`.

        Frees nothing.  Returns whether that is, or was, not simply all of them.
        """
        before, self._reads = self._reads, None if reads is None or reads.all() else reads
        if before is None and self._reads is None:
            return False
        self.changed()
        old, new = (_all_but(each, self.num_tokens) for each in (before, self._reads))
        self._pieces.look_again(*np.nonzero(old != new))
        return True

    # -- forward passes ------------------------------------------------------------------------

    def begin(self, ids: np.ndarray) -> AttentionMetadata:
        """Announce the next tokens, int ``[seqs, queries]``; several of one sequence only."""
        width, queries = ids.shape
        if width != len(self.leaves) or (queries > 1 and width > 1):
            raise ValueError(f"{ids.shape} tokens for {len(self.leaves)} leaves")
        if width == queries == 1:
            metadata = self._step(int(ids[0, 0]), self._contiguous)
            if metadata is not None:
                self._store, self._held = metadata.store, metadata.positions
                return metadata
        first, pool = self.lengths, self.pools[Place.HBM]
        fresh, position = self._append(ids)
        writing = SlotWriter.new(pool, pool.enter(fresh))
        return self._metadata(writing, position, first, fresh)

    @property
    def in_place(self) -> bool:
        """Whether all that the next step reads can be read where the last step read it.

        Tokens in DDR may have staged copies, not be on a path, not be among those chosen, or reach
        the device as whole rows.
        """
        if self.ordered:
            return False
        held = any(pool.slots.total for place, pool in self.pools.items() if place.on_host)
        return not held or not self._pieces.reads_host or self._pieces.streams_whole_rows

    def enter(
        self, ids: np.ndarray, rounded: Callable[[int], int], rows: int
    ) -> tuple[np.ndarray, np.ndarray, PiecePlan]:
        """Give slots to the next token of each leaf, which a static step computes.

        Takes ids, int ``[seqs, 1]``, and the arguments of `PieceReader.plan`.  Returns positions,
        int64 ``[seqs, 1]``, slots, int64 ``[groups, rows]``, and the plan.  Slots beyond the
        leaves' have no token: what is written there is never read.
        """
        fresh, position = self._append(ids)
        pool = self.pools[Place.HBM]
        slots = pool.enter(fresh)
        if rows > 1:  # of every batch, so that pools grow alike whether it is padded or not
            unused = np.repeat(pool.unused_slots()[:, None], rows - len(ids), axis=1)
            slots = np.concatenate([slots, unused], axis=1)
        self._gather.stale, self._contiguous = True, False
        self._store = _unannounced  # the last pass's holds on to the tensors that it wrote
        plan = self._pieces.plan(rounded, rows)
        self._held = plan.held
        return position, slots, plan

    def recompute(self, leaf: int, tokens: np.ndarray) -> AttentionMetadata:
        """Announce that lost tokens on the path of one active leaf are computed again.

        They have slots (see `Mover.restore`); groups that never lost a token keep theirs.
        """
        self._turn_to([leaf])
        self._turned()
        position = self.position.values[tokens].astype(np.int64)[None]
        lost = self.place.values[:, tokens] == Place.LOST
        writing = SlotWriter.rewrite(self.pools[Place.HBM], tokens, lost)
        group, at = np.nonzero(lost)
        self.place.values[group, tokens[at]] = Place.HBM
        return self._metadata(writing, position, [int(position[0, 0])], np.empty(0, np.int64))

    def _metadata(
        self,
        writing: SlotWriter | SpanWriter,
        position: np.ndarray,
        first: list[int],
        fresh: np.ndarray,
    ) -> AttentionMetadata:
        one, longest = position.shape[1] == 1, self.seen_tokens
        position = position.astype(np.int64)
        plan: PiecePlan | GatherPlan = self._gather.plan() if self.ordered else self._pieces.plan()
        if isinstance(plan, PiecePlan) and not one and not plan.contiguous:
            plan = self._gather.plan()  # tokens that are recomputed
        in_place = isinstance(plan, PiecePlan)
        self._contiguous = in_place and plan.contiguous and self.layout.groups == 1
        at = to_device(position, self.layout.device)
        self._store, self._held = writing.store, plan.held
        host_attention = self.host_attention if plan.host else None
        if host_attention is not None:
            host_attention.begin(plan.host, plan.fresh)
        given = (at, first, longest, plan.entries, plan.content, writing.store, host_attention)
        metadata = AttentionMetadata(*given)
        metadata.causal = plan.contiguous and len(fresh) == position.shape[1] and len(first) == 1
        if not one:
            metadata.spans = (Span(self.leaves[0], 0, position.shape[1], first[0]),)
        if isinstance(plan, PiecePlan):
            metadata.pieces = plan.pieces if one else None
            metadata.plain = plan.plain() if position.size == 1 else None
        if host_attention is not None:
            host_attention.attach(metadata, torch.from_numpy(position))
        return metadata

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Take a layer's new keys and values, ``[seqs, kv_heads, queries, head_dim]``."""
        self._store(layer, keys, values)

    def newest(self, count: int) -> Tensor:
        """The last `count` tokens of every sequence; they must not have been moved yet.

        Returns a Tensor ``[layers, 2, seqs, kv_heads, count, head_dim]``.
        """
        token = np.stack([self.tree.path(leaf)[-count:] for leaf in self.leaves])
        found = self.tokens_kv(token.reshape(-1))
        return found.view(*found.shape[:3], *token.shape, -1).movedim(3, 2)

    def keys(self, layer: int, head: int) -> Tensor:
        """Keys of a KV head of a layer, on the path of the first sequence, ``[tokens, head_dim]``.

        None of them may have been moved yet.
        """
        return self.pools[Place.HBM].read_keys(layer, head, self.tree.path(self.leaves[0]))

    def tokens_kv(self, token: np.ndarray) -> Tensor:
        """Keys and values of tokens in HBM, ``[layers, 2, kv_heads, tokens, head_dim]``."""
        return self.pools[Place.HBM].read_tokens(token)


def _all_but(reads: np.ndarray | None, tokens: int) -> np.ndarray:
    """Bool ``[groups, tokens]``: a selection, with tokens that came after it."""
    if reads is None:
        return np.ones((1, tokens), dtype=np.bool_)
    return np.pad(reads, ((0, 0), (0, tokens - reads.shape[1])), constant_values=True)


def _unannounced(layer: int, keys: Tensor, values: Tensor) -> None:
    raise RuntimeError(f"keys and values of layer {layer}, but no pass has begun")
