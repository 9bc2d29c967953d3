"""Tokens in host memory: rows in page-locked chunks, copied as lists of blocks.

All that a token has in one group lies in one *row*, so that tokens whose rows follow one another
cross the link in one copy, whatever their number.  Memory grows by chunks, which never move, and is
kept until the search ends: copies that are under way stay valid, and nothing is copied within the
host.  vLLM's offloading and SGLang's HiCache keep host memory in the same way, by pages.

Where every layer is read by itself, while the others are not (all recall modes but ``stage``), rows
are of one layer: what SGLang calls ``layer_first``; otherwise of all layers (``page_first``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.host_rows import BlockList, RowTable
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.pool import Pool, StoredTokens, addressable
from arborsim_torch.cache.slots import NOWHERE
from arborsim_torch.tiers.codec import Codec
from arborsim_torch.tiers.copies import Block, to_device
from arborsim_torch.tiers.link import host_empty

PAGE_TOKENS = 16  #: rows of a page: what chunks are made of, and `ondemand` fetches
#: Free rows are taken again if they make a block of this size, or one of the whole batch: below
#: it, a copy's own cost is that of its bytes.
LEAST_BLOCK_BYTES = 128 << 10
#: Copies to the device that are so close to each other are joined on CUDA.
JOIN_BYTES = 64 << 10
_MOST_UNREAD = 0.25  # of rows that cross as a whole; rounding alone makes an eighth
_FIRST_CHUNK_BYTES = 1 << 20
_LARGEST_CHUNK_BYTES = 1 << 30  # unless more is needed at once


class HostPool(Pool):
    """Rows for tokens in one format in the host's memory, page-locked if `pinned`.

    Scales that tokens share are not stored here: these stay in HBM.  `by_layer`, rows are of one
    layer each.  `arriving` are the rows of copies that have not ended: what lies between two runs
    may then be written, so no runs are joined.
    """

    slots: RowTable

    def __init__(
        self, layout: Layout, codec: Codec, *, pinned: bool = False, by_layer: bool = False
    ) -> None:
        super().__init__(layout, codec, torch.device("cpu"))
        self._pinned = pinned
        shared = layout.grouping == "shared"
        #: Of a shared token every layer has a row, with the same number, if rows are of layers.
        self._every_lane = shared and by_layer
        self._lanes = layout.layers if by_layer else 1
        self._row_layers = layout.layers if shared and not by_layer else 1
        self._row_heads = 1 if layout.grouping == "head" else layout.kv_heads
        lane = np.zeros(layout.groups, dtype=np.int64)
        if by_layer and not shared:
            lane = np.arange(layout.groups) // (layout.groups // layout.layers)
        self._lane_of_group = lane
        self.row_bytes = self.bytes_per_slot // (layout.layers if self._every_lane else 1)
        self.slots = RowTable(lane, -(-LEAST_BLOCK_BYTES // self.row_bytes))
        self._join = JOIN_BYTES // self.row_bytes if pinned else 0
        self.arriving: list[BlockList] = []
        self._chunks: list[list[Tensor]] = []  # parts [lanes, rows, layers, records, heads, ...]
        self._first = np.zeros(1, dtype=np.int64)  # row of each chunk, and the end

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the chunks."""
        return sum(part.nbytes for chunk in self._chunks for part in chunk)

    @property
    def parts(self) -> int:
        """Tensors that make up a chunk: data, and scales if each token has its own."""
        return len(self._row_parts())

    @property
    def pages(self) -> int:
        """Pages of `PAGE_TOKENS` rows that there is memory for."""
        return int(self._first[-1]) // PAGE_TOKENS

    def chunk_of(self, row: np.ndarray) -> np.ndarray:
        """The number of the chunk that each row lies in."""
        return np.searchsorted(self._first, row, side="right") - 1

    def first_of(self, chunk: int) -> int:
        """The first row of a chunk."""
        return int(self._first[chunk])

    def reserve(self, tokens: int) -> None:
        """Have memory for `tokens` tokens in every group; what there is stays where it is."""
        self._reserve(self._rows_of(tokens))

    def reserve_up_to(self, tokens: int, most_bytes: int) -> int:
        """The same as far as `most_bytes` go, rounding included, and as the host has memory.

        Locking pages takes seconds per few GB, which a search that is timed should not pay.  What
        does not fit is left to growing.  Returns the bytes that were added.
        """
        held, held_bytes = int(self._first[-1]), self.capacity_bytes
        most_rows = (1 << most_bytes.bit_length() >> 1) // (self._lanes * self.row_bytes)
        rows = min(self._rows_of(tokens), held + most_rows // PAGE_TOKENS * PAGE_TOKENS)
        with contextlib.suppress(MemoryError, RuntimeError):
            self._reserve(rows)
        return self.capacity_bytes - held_bytes

    def _make_room(self) -> None:
        self._reserve(self.slots.rows)

    def _reserve(self, rows: int) -> None:
        held = int(self._first[-1])
        if rows <= held:
            return
        more = self._chunk_rows(held, rows)
        # Zeros: a row that is masked still meets the values' product, as 0 x row.
        self._chunks.append(
            [
                host_empty((self._lanes, more, *shape), dtype, self._pinned).zero_()
                for shape, dtype in self._row_parts()
            ]
        )
        self._first = np.append(self._first, held + more)

    def _chunk_rows(self, held: int, rows: int) -> int:
        """Rows of the chunk that is added to `held` ones where `rows` are needed."""
        per_row = self._lanes * self.row_bytes
        doubled = min(held * per_row, _LARGEST_CHUNK_BYTES)
        wanted = max((rows - held) * per_row, doubled, _FIRST_CHUNK_BYTES)
        room = (1 << (wanted - 1).bit_length()) // per_row  # PyTorch locks powers of two
        return max(-(-(rows - held) // PAGE_TOKENS), room // PAGE_TOKENS) * PAGE_TOKENS

    def pages_of(self, tokens: int) -> int:
        """`pages_taken` once `tokens` tokens of every group have come, some at a time."""
        return self._pages_of_rows(self._rows_of(tokens))

    @property
    def pages_taken(self) -> int:
        """`pages`, had nothing been reserved: what the device has of each page needs no more."""
        return min(self.pages, self._pages_of_rows(self.slots.rows))

    def _rows_of(self, tokens: int) -> int:
        """Rows, in the longest space, of `tokens` tokens of every group."""
        return tokens * self.layout.groups // (int(self._lane_of_group.max()) + 1)

    def _pages_of_rows(self, rows: int) -> int:
        held = 0
        while held < rows:
            held += self._chunk_rows(held, held + 1)
        return held // PAGE_TOKENS

    def _row_parts(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes ``(layers, records, heads, ...)`` and types of the parts of a row."""
        records, width = self.codec.record(self.layout.head_dim)
        shape = (self._row_layers, records, self._row_heads)
        rows: list[tuple[tuple[int, ...], torch.dtype]]
        rows = [((*shape, width), addressable(self.codec.storage))]
        if self.codec.scaled:
            rows.append(((*shape, 1), torch.float32))
        return rows

    def shrink(self) -> bool:
        """Chunks are kept for what comes next."""
        return False

    # -- copies ------------------------------------------------------------------------------------

    def blocks(self, group: np.ndarray, token: np.ndarray, *, join: bool = False) -> BlockList:
        """The runs of rows of pairs, in the order of rows.

        `join` runs that are close to each other where a copy costs more than what lies between
        them: for copies from here alone.
        """
        row = self.slots.of[group, token].astype(np.int64)
        gap = self._join if join and not self.arriving else 0
        if self._every_lane:
            return self._runs(np.arange(self._lanes), row[None], gap)
        return self._runs(self._lane_of_group[group], row, gap)

    def blocks_of_layer(self, layer: int, row: np.ndarray, *, join: bool = True) -> BlockList:
        """The runs of some rows of a layer; rows are of one layer each."""
        gap = self._join if join and not self.arriving else 0
        return self._runs(np.full(len(row), layer), row, gap)

    def first_rows(self, layer: int, rows: int) -> list[list[Tensor]]:
        """The first rows of a layer, of each part: a view of every chunk that they lie in.

        Rows are of one layer each.  Those that nothing was written to are 0.
        """
        found: list[list[Tensor]] = [[] for _ in range(self.parts)]
        for chunk, first in zip(self._chunks, self._first.tolist(), strict=False):
            for part, views in zip(chunk, found, strict=True):
                if rows > first:
                    views.append(part[layer][: rows - first])
        return found

    @property
    def page_locked(self) -> bool:
        """Whether a CUDA graph can copy from all of it: locking memory can fail."""
        return all(part.is_pinned() for chunk in self._chunks for part in chunk)

    def worth_carrying_whole(self, rows: int, read: int, copies: int) -> bool:
        """Whether all of `rows` may cross in `copies` copies where no more than `read` are read."""
        unread = rows - read
        return unread <= _MOST_UNREAD * rows or unread * self.row_bytes <= copies * JOIN_BYTES

    def arriving_in(self, layer: int, page: np.ndarray) -> bool:
        """Whether copies are under way into any of these pages; rows are of one layer each."""
        for blocks in self.arriving:
            own = blocks.lane == layer
            first, last = blocks.first[own], blocks.first[own] + blocks.count[own] - 1
            if np.any(
                (page[:, None] >= first // PAGE_TOKENS) & (page[:, None] <= last // PAGE_TOKENS)
            ):
                return True
        return False

    def opened_pages(self, group: np.ndarray, row: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Pages in which these rows, just taken, are the only ones, by layer (0 if shared)."""
        found = []
        lane = self._lane_of_group[group]
        for each in np.unique(lane).tolist():
            page, count = np.unique(row[lane == each] // PAGE_TOKENS, return_counts=True)
            found.append((each, page[self.slots.taken(each, page, PAGE_TOKENS) == count]))
        return found

    def _runs(self, lane: np.ndarray, row: np.ndarray, gap: int) -> BlockList:
        """The runs of rows ``[tokens]`` in their lanes, or ``[1, tokens]`` of each lane."""
        shape = np.broadcast_shapes((len(lane), 1), row.shape) if row.ndim == 2 else (1, len(row))
        lane = np.broadcast_to(lane[:, None] if row.ndim == 2 else lane, shape).reshape(-1)
        row = np.broadcast_to(row, shape).reshape(-1)
        order = np.lexsort((row, lane))
        lane, row = lane[order], row[order]
        step = np.diff(row, prepend=NOWHERE)
        new = (step < 1) | (step > 1 + gap) | (np.diff(lane, prepend=-1) != 0)
        new |= np.diff(self.chunk_of(row), prepend=-1) != 0
        begin = np.flatnonzero(new)
        last = np.append(begin, len(row))[1:] - 1
        count = row[last] - row[begin] + 1
        start = np.cumsum(count) - count
        run = np.cumsum(new) - 1
        at = np.empty(len(row), dtype=np.int64)
        at[order] = start[run] + row - row[begin[run]]
        return BlockList(lane[begin], row[begin], count, start, at.reshape(shape), int(count.sum()))

    def buffers(self, rows: int, device: torch.device) -> list[Tensor]:
        """Memory for the parts of rows, ``[rows, layers, records, heads, ...]``."""
        return [
            torch.empty((rows, *shape), dtype=dtype, device=device)
            for shape, dtype in self._row_parts()
        ]

    def views(self, blocks: BlockList) -> list[list[Tensor]]:
        """The runs in the host's memory, of each part."""
        chunk = self.chunk_of(blocks.first)
        first = blocks.first - self._first[chunk]
        columns = (chunk, blocks.lane, first, blocks.count)
        runs = list(zip(*(column.tolist() for column in columns), strict=True))
        return [
            [self._chunks[c][part][lane].narrow(0, start, n) for c, lane, start, n in runs]
            for part in range(self.parts)
        ]

    def pairs(self, blocks: BlockList, buffers: Sequence[Tensor]) -> list[Block]:
        """(host, buffer) of every run and part."""
        bounds = list(zip(blocks.start.tolist(), blocks.count.tolist(), strict=True))
        return [
            (host, buffer.narrow(0, start, count))
            for views, buffer in zip(self.views(blocks), buffers, strict=True)
            for host, (start, count) in zip(views, bounds, strict=True)
        ]

    @staticmethod
    def order(at: np.ndarray, device: torch.device) -> Tensor | slice:
        """The index of the rows `at` of buffers; `content` takes it ready-made, too."""
        flat = at.reshape(-1)
        first = int(flat[0]) if len(flat) else 0
        if (flat == np.arange(first, first + len(flat))).all():
            return slice(first, first + len(flat))
        return to_device(flat, device)

    def content(
        self, buffers: Sequence[Tensor], at: np.ndarray, order: Tensor | slice | None = None
    ) -> list[Tensor]:
        """Rows of buffers as other pools store them, ``[layers, records, heads, tokens, ...]``."""
        lanes, count = at.shape
        order = self.order(at, buffers[0].device) if order is None else order
        if isinstance(order, slice):
            rows = [buffer[order] for buffer in buffers]
        else:
            rows = [buffer.index_select(0, order) for buffer in buffers]
        return [
            row.view(lanes, count, *row.shape[1:]).permute(0, 2, 3, 4, 1, 5).flatten(0, 1)
            for row in rows
        ]

    @staticmethod
    def rows_in(buffers: Sequence[Tensor], at: np.ndarray) -> list[Tensor]:
        """Where tokens of one group lie in buffers for what goes down: views.

        Returns a list of Tensor ``[tokens, layers, records, heads, ...]``.
        """
        lanes, count = at.shape
        whole = (buffer.view(lanes, -1, *buffer.shape[1:]) for buffer in buffers)
        own = (each.narrow(1, int(at[0, 0]), count).transpose(0, 1) for each in whole)
        return [each.flatten(1, 2) for each in own]  # lanes and layers: one of them is 1

    @staticmethod
    def fill(rows: Sequence[Tensor], block: StoredTokens) -> None:
        """Put tokens into their `rows_in` buffers."""
        for row, part in zip(rows, block.parts(), strict=True):
            row.copy_(part.view(row.dtype).movedim(3, 0))

    # -- reads by the host -------------------------------------------------------------------------

    def layer_rows(self, layer: int, chunk: int) -> list[Tensor]:
        """Parts of a layer in one chunk, ``[rows, records, heads, ...]``: views.

        There is one head in the rows of a single head.
        """
        lane = layer if self._lanes > 1 else 0
        index = layer if self._row_layers > 1 else 0
        return [part[lane, :, index] for part in self._chunks[chunk]]

    def gather(self, layer: int, heads: slice, slots: Tensor) -> list[Tensor]:
        """Copy tokens of some heads of a layer as they are stored, ``[records, heads, m, ...]``.

        The heads are one group, or all of them.
        """
        row = slots.numpy()
        chunks = {
            chunk: self.layer_rows(layer, chunk) for chunk in np.unique(self.chunk_of(row)).tolist()
        }
        return [part.permute(1, 2, 0, 3) for part in self._select(chunks, row)]

    def read(self, group: int, slot: np.ndarray) -> StoredTokens:
        """Copy the tokens in some rows of one group, as they are stored."""
        row = slot.astype(np.int64)
        lanes = range(self._lanes) if self._every_lane else [int(self._lane_of_group[group])]
        by_lane = []
        for lane in lanes:
            chunks = {
                chunk: [part[lane] for part in self._chunks[chunk]]
                for chunk in np.unique(self.chunk_of(row)).tolist()
            }
            own = self._select(chunks, row)
            by_lane.append([part.permute(1, 2, 3, 0, 4) for part in own])
        parts = [torch.cat(each) for each in zip(*by_lane, strict=True)]
        return StoredTokens(parts[0].view(self.codec.storage), *parts[1:])

    def _select(self, chunks: dict[int, list[Tensor]], row: np.ndarray) -> list[Tensor]:
        """Copy rows; `chunks` has the parts, ``[rows, ...]``, of every chunk that they lie in."""
        chunk = self.chunk_of(row)
        local = torch.from_numpy(row - self._first[chunk])
        if len(chunks) == 1:
            return [part.index_select(0, local) for part in chunks[int(chunk[0])]]
        found = [
            part.new_empty((len(row), *part.shape[1:])) for part in next(iter(chunks.values()))
        ]
        for each, parts in chunks.items():
            own = torch.from_numpy(np.flatnonzero(chunk == each))
            for whole, part in zip(found, parts, strict=True):
                whole.index_copy_(0, own, part.index_select(0, local.index_select(0, own)))
        return found
