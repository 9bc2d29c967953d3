"""What passes read of the pools on the host: brought to the device layer by layer, or there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from arborsim_torch.cache.forward import PlacedPiece
from arborsim_torch.cache.host import HostSlots, HostStream, HostTokens
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.pieces import NOT_READ, PieceTable
from arborsim_torch.cache.pool import Pool


class HostPieces:
    """The pieces of all layers that lie on the host.

    Parameters
    ----------
    layout : Layout
    stay : bool
        Tokens are read on the host, as `HostTokens`.
    stream : HostStream or None
        Brings them to the device ahead of their layer; without, they are copied when it is their
        turn.

    Attributes
    ----------
    tables : list of PieceTable
        Of pools that are read.
    tokens : list of HostTokens
        By layer, if there are any and they stay.
    """

    def __init__(self, layout: Layout, stay: bool, stream: HostStream | None) -> None:
        self._layout, self._stay, self._stream = layout, stay, stream
        self._version = 0
        self._slots: list[list[Tensor]] = []  # of each table, by group
        self.tables: list[PieceTable] = []
        self.tokens: list[HostTokens] = []

    def begin(self, tables: Sequence[PieceTable], seqs: int) -> bool:
        """What the next pass reads, of tables that may be empty; whether it is something new."""
        version = sum(table.version for table in tables)
        anew, self._version = version != self._version, version
        if anew:
            self.tables = [table for table in tables if table.count.any()]
            self._slots = [table.listed() for table in self.tables]
            self.tokens = self._tokens_of_layers(seqs) if self._stay and self.tables else []
        if self._stream is not None and (self.tables or anew):
            self._stream.begin(self._streamed, anew)
        return anew

    def _of_layer(self, layer: int) -> list[tuple[PieceTable, list[Tensor]]]:
        """Each table that a layer reads, and the slots of its groups."""
        groups = self._layout.groups_of_layer(layer)
        pairs = zip(self.tables, self._slots, strict=True)
        return [(table, slots[groups]) for table, slots in pairs if table.reads(layer)]

    def _streamed(self, layer: int) -> list[tuple[Pool, slice, Tensor]]:
        return [
            (table.pool, _heads(slots, head), own)
            for table, slots in self._of_layer(layer)
            for head, own in enumerate(slots)
        ]

    def brought(self, layer: int) -> list[PlacedPiece]:
        """A layer's pieces, on the device."""
        if self._stay or not self.tables:
            return []
        arrived = iter([] if self._stream is None else self._stream.take(layer))
        found = []
        for table, slots in self._of_layer(layer):
            pool, room = table.pool, max(len(own) for own in slots)
            heads = []
            for head, own in enumerate(slots):
                if self._stream is not None:
                    parts = [next(arrived) for _ in range(1 + pool.codec.scaled)]
                else:
                    parts = pool.gather(layer, _heads(slots, head), own)
                    parts = [part.to(self._layout.device) for part in parts]
                heads.append([F.pad(part, (0, 0, 0, room - part.shape[2])) for part in parts])
            parts = heads[0]
            if len(heads) > 1:
                parts = [torch.cat(own, dim=1) for own in zip(*heads, strict=True)]
            found.append(table.brought(layer, parts))
        return found

    def _tokens_of_layers(self, seqs: int) -> list[HostTokens]:
        spread = [table.spread() for table in self.tables]
        by_kind = {}
        for layer in range(self._layout.layers):
            first = self._layout.groups_of_layer(layer).start
            if first not in by_kind:
                by_kind[first] = self._tokens_of(layer, spread, seqs)
        return [
            by_kind[self._layout.groups_of_layer(layer).start]
            for layer in range(self._layout.layers)
        ]

    def _tokens_of(
        self, layer: int, spread: list[tuple[np.ndarray, np.ndarray]], seqs: int
    ) -> HostTokens:
        """What the groups of a layer hold on the host, padded to the longest."""
        groups = self._layout.groups_of_layer(layer)
        pieces: list[HostSlots] = []
        first = 0
        position = [torch.zeros((1, 0), dtype=torch.int64)]
        on_path = [torch.zeros((1, seqs, 0), dtype=torch.bool)]
        for table, every, (spots, on) in zip(self.tables, self._slots, spread, strict=True):
            slots = every[groups]
            room = max(len(own) for own in slots)
            if not room:
                continue
            if not pieces:
                position, on_path = [], []
            index = torch.stack([F.pad(own, (0, room - len(own)), value=NOT_READ) for own in slots])
            where = slice(first, first + room)
            pieces.append(HostSlots(table.place, index if len(slots) > 1 else index[0], where))
            position.append(torch.from_numpy(spots[groups, :room]))
            on_path.append(torch.from_numpy(on[groups, :, :room]))
            first += room
        return HostTokens(pieces, torch.cat(position, 1), torch.cat(on_path, 2), first)


def _heads(slots: list[Tensor], head: int) -> slice:
    """The KV heads that the slots of one of a layer's groups are of."""
    return slice(None) if len(slots) == 1 else slice(head, head + 1)
