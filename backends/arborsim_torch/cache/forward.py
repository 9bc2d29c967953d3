"""The reads of one forward pass from the cache, and where its new keys and values go.

`LayerView` is all that the attention function needs: keys and values of one layer in some order of
tokens, which sequence may read which, and the positions they stand for.  Keys carry their rotary
positions, so the order does not matter to the result (but for rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.pool import Pool
from arborsim_torch.kernels.piece import Elsewhere, Piece
from arborsim_torch.tiers.copies import to_device


class OffloadedAttention(Protocol):
    """Attention over tokens that stay on the host: see `arborsim_torch.cache.host`."""

    def start(
        self, layer: int, query: Tensor, scale: float, window: int | None
    ) -> Callable[[], tuple[Tensor, Tensor]] | None: ...

    def host_share(
        self, layer: int, query: Tensor, scale: float, window: int | None, mass: bool
    ) -> HostShare | None: ...

    def rows(
        self, layer: int, query: Tensor, scale: float, window: int | None, lse: Tensor
    ) -> tuple[Tensor, LayerView]: ...


@dataclass(frozen=True)
class PlacedPiece:
    """A piece, and where its entries stand on their path."""

    piece: Piece
    #: gives an int64 Tensor ``[kv_heads or 1, room]``; 0 where nothing is read
    position: Callable[[], Tensor]
    key: Hashable  #: pieces of one pass with the same key have the same entries

    def of_each(self, members: int) -> Piece:
        """For as many copies of every sequence."""
        mask = self.piece.mask
        if mask is None or len(mask) == 1:
            return self.piece
        return replace(self.piece, mask=mask.repeat_interleave(members, 0))

    def masked(self, mask: Tensor) -> PlacedPiece:
        """The same with another mask."""
        return replace(self, piece=replace(self.piece, mask=mask, prefix=None))


@dataclass(frozen=True)
class PlacedElsewhere:
    """The host's share of attention, with position and key as of a `PlacedPiece`."""

    elsewhere: Elsewhere
    position: Callable[[], Tensor]
    key: Hashable


@dataclass(frozen=True)
class HostShare:
    """A layer's reads of the host, next to its pieces on the device."""

    pieces: list[PlacedPiece]  #: on their way to the device (`Piece.ready`)
    elsewhere: PlacedElsewhere | None = None
    #: int ``[kv_heads or 1, entries]``: of all pieces, if they are a layer's own
    position: Tensor | None = None


@dataclass(frozen=True)
class LayerView:
    """Keys and values of one layer as one forward pass reads them."""

    #: ``[kv_heads, n, head_dim]``
    keys: Tensor
    values: Tensor
    #: bool ``[seqs or 1, kv_heads or 1, queries, n]``: true = readable; None if all of it is
    mask: Tensor | None
    #: int64 ``[kv_heads or 1, n]``: positions of entries on their path, None for 0, 1, ...
    position: Tensor | None
    positions: int  #: length of the longest path


class Span(NamedTuple):
    """Tokens of one node in a block, one after the other."""

    node: int
    first: int  #: of the block's tokens
    stop: int
    position: int  #: of the first of them on its path
    #: which of the block's tokens that one follows; -1 if it is not among them
    follows: int = -1


@dataclass(frozen=True)
class Entries:
    """The entries of the layers of one kind: same mask, same positions."""

    #: bool ``[groups, seqs, n]``: which entries lie on a sequence's path; None if all do.  Of a
    #: block of a tree, whose queries have paths of their own, ``[groups, 1, queries, n]``
    on_path: Tensor | None
    position: Tensor | None  #: int64 ``[groups, n]``
    n: int


@dataclass
class AttentionMetadata:
    """One forward pass over the cache."""

    at: Tensor  #: int64 ``[seqs, queries]``: positions of the queries
    first: list[int]  #: position of each sequence's first query
    positions: int  #: length of the longest path, the new tokens included
    entries: Callable[[int], Entries]  #: of a layer: its `Entries`
    #: of a layer: keys and values ``[kv_heads, n, head_dim]`` each, the new tokens included
    content: Callable[[int], tuple[Tensor, Tensor]]
    #: take a layer's new keys and values ``[seqs, kv_heads, queries, head_dim]``
    store: Callable[[int, Tensor, Tensor], None]
    host_attention: OffloadedAttention | None = None  #: attends to tokens that stay on the host
    #: the queries are the last tokens of one sequence and entry ``p`` has position ``p``
    causal: bool = False
    #: of a layer: what it reads, in place; of passes with one query per sequence
    pieces: Callable[[int], list[PlacedPiece]] | None = None
    #: ``[1, kv_heads, n, head_dim]``, keys, then values of a layer, if one query reads them all
    plain: Sequence[Tensor] | None = None
    spans: Sequence[Span] = ()  #: of a block: the nodes that its tokens belong to
    _masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)
    _placed: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        return self.at.shape[0]

    @property
    def queries(self) -> int:
        return self.at.shape[1]

    @property
    def lengths(self) -> list[Sequence[int]]:
        """How long the path up to each query is, by sequence."""
        if not self.spans:
            return [range(at + 1, at + 1 + self.queries) for at in self.first]
        own = (range(s.position + 1, s.position + 1 + s.stop - s.first) for s in self.spans)
        return [[length for span in own for length in span]]

    def block(self, layer: int, window: int | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values if the queries are the last entries and read what is before them.

        Then no mask is needed; None otherwise.
        """
        if not self.causal or self.queries == 1 or self.limits(window) is not None:
            return None
        return self.content(layer)

    def parts(
        self, layer: int, window: int | None, host_share: HostShare | None = None
    ) -> list[PlacedPiece]:
        """A layer's reads of one query per sequence, in place, and what comes from the host."""
        assert self.pieces is not None
        found, limit = self.pieces(layer), self.limits(window)
        if host_share is not None:
            found = found + host_share.pieces
        return found if limit is None else [self._inside(part, limit) for part in found]

    def placed(self, parts: Sequence[PlacedPiece | PlacedElsewhere]) -> Tensor:
        """Positions of the entries of all parts, int64 ``[kv_heads or 1, entries]``."""
        if len(parts) == 1:
            return parts[0].position()
        key = tuple(part.key for part in parts)
        known = self._placed.get(key)
        if known is None:  # layers of one group have the same
            known = self._placed[key] = torch.cat([part.position() for part in parts], dim=-1)
        return known

    def _inside(self, part: PlacedPiece, window: int) -> PlacedPiece:
        """A piece of which only what lies in the window is read."""
        key, mask = (part.key, window), part.piece.mask
        if key not in self._placed:
            inside = part.position() > self.at[:, :, None] - window  # [seqs, kv_heads or 1, room]
            self._placed[key] = inside if mask is None else inside & mask
        return part.masked(self._placed[key])

    def limits(self, window: int | None) -> int | None:
        """The window, if it is shorter than the path."""
        return None if window is not None and self.positions <= window else window

    def view(self, layer: int, window: int | None = None) -> LayerView:
        """The reads of a layer's queries; `window` is that of sliding attention."""
        entries, window = self.entries(layer), self.limits(window)
        key = (id(entries), window)
        if key not in self._masks:
            self._masks[key] = self._mask(entries, window)
        keys, values = self.content(layer)
        return LayerView(keys, values, self._masks[key], entries.position, self.positions)

    def _mask(self, entries: Entries, window: int | None) -> Tensor | None:
        if entries.on_path is None and self.queries == 1 and window is None:
            return None
        mask = None if entries.on_path is None else entries.on_path.transpose(0, 1)
        if mask is not None and mask.dim() == 3:
            mask = mask[:, :, None]
        if self.queries == 1 and window is None:
            return mask
        position = entries.position
        if position is None:
            position = torch.arange(entries.n, device=self.at.device)[None]
        at = self.at[:, None, :, None]  # [seqs, 1, queries, 1]
        spots = position[None, :, None]  # [1, groups, 1, n]
        seen = spots <= at
        if window is not None:
            seen = seen & (spots > at - window)
        return seen if mask is None else seen & mask


#: Of a layer's keys or values, ``[kv_heads, capacity, head_dim]``, or with plans per head
#: ``[slots of all heads, head_dim]``, and new ones, ``[kv_heads, tokens, head_dim]``.
Put = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class SlotWriter:
    """Where the tokens of one pass go."""

    pool: Pool  #: HBM at full precision
    puts: list[Put]  #: one per slab

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[seqs, kv_heads, queries, head_dim]``."""
        pool = self.pool
        data = pool.rows(layer) if pool.layout.grouping == "head" else pool.slab(layer)[0]
        put = self.puts[pool.layout.slab_of_layer(layer)[0]]
        for target, new in ((data[0], keys), (data[1], values)):
            # [kv_heads, tokens, head_dim]: queries of one sequence, or one query of each
            put(target, new[0] if len(new) == 1 else new[:, :, 0].transpose(0, 1))

    @classmethod
    def new(cls, pool: Pool, slots: np.ndarray) -> SlotWriter | SpanWriter:
        """Tokens that enter every group; slots are int64 ``[groups, tokens]``."""
        layout = pool.layout
        if layout.grouping != "head":
            if (slots[:, 1:] - slots[:, :-1] == 1).all():
                return SpanWriter.new(pool, slots)
            return cls(pool, [partial(_put_rows, to_device(row, pool.device)) for row in slots])
        rows = (slots + pool.first_row[:, None]).reshape(layout.layers, -1)
        return cls(pool, [partial(_put_heads, own) for own in to_device(rows, pool.device)])

    @classmethod
    def rewrite(cls, pool: Pool, tokens: np.ndarray, lost: np.ndarray) -> SlotWriter:
        """Tokens that are recomputed, in the groups where `lost` (bool ``[groups, tokens]``)."""
        layout = pool.layout
        puts: list[list[Put]] = [[] for _ in range(layout.slabs)]
        for group, own in enumerate(lost):
            slab, heads = layout.slab_of_group(group)
            which = np.flatnonzero(own)
            slot = pool.slots.of[group, tokens[which]].astype(np.int64)
            slot += pool.first_row[group] if layout.grouping == "head" else 0
            head = heads.start if layout.grouping == "head" else None
            chosen, index = to_device(which, pool.device), to_device(slot, pool.device)
            puts[slab].append(partial(_put_some, chosen, index, head))
        return cls(pool, [partial(_put_all, own) for own in puts])


@dataclass(frozen=True)
class SpanWriter:
    """Tokens whose slots follow one another: a step of one sequence, or a block of a prompt."""

    #: views ``[1, kv_heads, tokens, head_dim]`` of the pool, for each layer's keys, then values
    targets: list[Tensor]

    @classmethod
    def new(cls, pool: Pool, slots: np.ndarray) -> SpanWriter:
        """A writer to slots int64 ``[slabs, tokens]`` that follow one another."""
        targets: list[Tensor] = []
        for slab, row in enumerate(slots):
            # One call for all layers: a step of a small model is mostly made of such calls.
            targets += pool.span(slab, int(row[0]), len(row)).unsqueeze(1).unbind()
        return cls(targets)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[seqs, kv_heads, queries, head_dim]``."""
        if len(keys) > 1:  # one query of each sequence
            keys, values = keys.transpose(0, 2), values.transpose(0, 2)
        self.targets[2 * layer].copy_(keys)
        self.targets[2 * layer + 1].copy_(values)


def _put_rows(index: Tensor, target: Tensor, new: Tensor) -> None:
    target.index_copy_(1, index, new)


def _put_heads(index: Tensor, target: Tensor, new: Tensor) -> None:
    target.index_copy_(0, index, new.reshape(-1, target.shape[1]))


def _put_some(chosen: Tensor, index: Tensor, head: int | None, target: Tensor, new: Tensor) -> None:
    """Write the `chosen` tokens, of all heads or of one."""
    own = new if head is None else new[head]
    target.index_copy_(own.dim() - 2, index, own.index_select(own.dim() - 2, chosen))


def _put_all(puts: list[Put], target: Tensor, new: Tensor) -> None:
    for put in puts:
        put(target, new)
