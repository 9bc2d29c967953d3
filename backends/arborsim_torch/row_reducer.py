"""Attention rows of a run, reduced where they are computed to what scores need of them.

A run is what lies between two decisions: its rows are added up, the newest kept, or what they use
noted, and one vector per path and group crosses to the host (`arborsim.core.row_uses`).  Rows
averaged over the model are rounded to float16 first, as traces hold them, so that sums have the
same bits as those of a replay.

Device memory: 8 bytes for each group, path and position per use that keeps sums, in a buffer that
stays, and 4 for the newest rows of groups and the last uses (2 for newest rows of the model).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from arborsim.core.row_uses import ALL_QUERIES, RowUse
from arborsim_torch.cache.forward import AttentionMetadata
from arborsim_torch.context import PassContext
from arborsim_torch.tiers.copies import to_device

_POSITIONS = 1024  # buffers grow by this


class RowReducer:
    """Reduces the rows of one search to what some uses need of them, as they come.

    Rows of `groups` are reduced apart from the model's; `part` is that of "sparsity"
    (`RowUse.part`). Raises `ValueError` if rows of layers and of KV heads are wanted at once, or of
    different queries or keys, or the sparsity of different queries or parts.
    """

    def __init__(self, uses: Iterable[RowUse]) -> None:
        self._held = {use: _kept(use) for use in uses}
        apart = {use for use in self._held if use.grouping != "shared"}
        asked = {(u.grouping, u.prompt, u.generated, u.sinks, u.recent) for u in apart}
        if len(asked) > 1:
            raise ValueError("rows of layers and of heads at once, or of different queries or keys")
        counted = [use for use in self._held if use.keeps == "sparsity"]
        if len(counted) > 1:
            raise ValueError("sparsity of different queries, or by different parts")
        self.part = counted[0].part if counted else None
        self.groups: Literal["layer", "head"] | None = None
        if apart:
            self.groups = "layer" if apart.pop().grouping == "layer" else "head"

    def __bool__(self) -> bool:
        return bool(self._held)

    def first(self, what: str, metadata: AttentionMetadata, prompt: int) -> int:
        """First query of a pass that counts, else their number.

        Of what is averaged over the model ("rows"), of groups ("groups"), or counted ("counts").
        """
        found = (first_of(use, metadata, prompt) for use in self._held if _part_of(use) == what)
        return min(found, default=metadata.queries)

    def recent(self, prompt: int) -> int:
        """How many of its newest positions a query pays nothing to in sums of groups."""
        return max((use.excluded(prompt)[1] for use in self._held), default=0)

    @property
    def wants_readable(self) -> bool:
        """Whether `take` has to know what can be read."""
        return any(use.keeps == "last" for use in self._held)

    def take(
        self,
        state: PassContext,
        rows: Tensor | None,
        prompt: int,
        readable: Sequence[np.ndarray | None] = (),
    ) -> None:
        """Take in a pass; `rows` are those of the model, float16, from `state.first_row` on.

        `readable` are by sequence the positions that can be read, int64, None where all can.
        """
        for use, held in self._held.items():
            first = first_of(use, state.metadata, prompt)
            if first >= state.queries:
                continue
            if isinstance(held, _Joined):
                held.add(state.sparsity())
                continue
            if use.grouping != "shared":
                assert not isinstance(held, _Last)
                if isinstance(held, _Reach):
                    held.add(state.group_sums(), use.excluded(prompt)[0])
                else:
                    held.add(state.group_sums() if use.keeps == "sum" else state.group_newest())
                continue
            assert rows is not None
            assert state.first_row is not None
            assert not isinstance(held, _Reach)
            own = rows[:, first - state.first_row :]
            if isinstance(held, _Last):
                held.use(own, [at + first for at in state.metadata.first], prompt, readable)
            elif use.keeps == "newest" or own.shape[1] == 1:
                held.add(own[:, -1:])
            else:
                held.add(own.sum(1, keepdim=True, dtype=torch.float64))

    def finish(self) -> dict[RowUse, Tensor]:
        """End the run: ``[seqs, groups, positions]`` of each use of which a query counted.

        To be copied before the next pass.
        """
        found: dict[RowUse, Tensor] = {}
        for use, held in self._held.items():
            if (rows := held.finish()) is not None:
                # Sums of groups are of float32 weights: once added up, float32 says enough of them.
                summed = use.grouping != "shared" and use.keeps == "sum"
                found[use] = rows.float() if summed else rows
        return found


def first_of(use: RowUse, metadata: AttentionMetadata, prompt: int) -> int:
    """First query of a pass that counts, after a prompt of `prompt` tokens; else their number."""
    queries, at = metadata.queries, metadata.first[0]
    if at >= prompt:
        return 0 if use.generated else queries
    return min(queries, max(0, use.first(prompt) - at))


@dataclass(frozen=True)
class RowSpan:
    """How many of the prompt's last rows or queries are taken, and whether generated ones are.

    Of those of a run, the queries of the `newest` iterations are enough.
    """

    prompt: int = ALL_QUERIES
    generated: bool = True
    newest: int = ALL_QUERIES

    @classmethod
    def of(cls, uses: frozenset[RowUse], grouping: str) -> RowSpan:
        """Those that some use needs; without any, all are."""
        if not uses:
            return cls()
        kept = [u for u in uses if u.grouping == grouping and u.keeps in ("rows", "queries")]
        prompt = max((use.prompt for use in kept), default=0)
        newest = max((use.newest for use in kept), default=ALL_QUERIES)
        return cls(prompt, any(use.generated for use in kept), newest)

    def first(self, metadata: AttentionMetadata, prompt_tokens: int) -> int:
        """First query of a pass that is taken, or their number."""
        use = RowUse("shared", "rows", self.prompt, self.generated)
        return first_of(use, metadata, prompt_tokens)


def _part_of(use: RowUse) -> str:
    if use.keeps == "sparsity":
        return "counts"
    return "rows" if use.grouping == "shared" else "groups"


def _kept(use: RowUse) -> _Sum | _Newest | _Last | _Reach | _Joined:
    if use.keeps == "sparsity":
        return _Joined()
    if use.keeps == "reach":
        return _Reach()
    if use.keeps == "last":
        return _Last(use)
    return _Sum() if use.keeps == "sum" else _Newest()


class _Sum:
    """A sum of rows ``[seqs, groups, positions]`` that grow longer; a single one is kept as is."""

    def __init__(self) -> None:
        self._only: Tensor | None = None
        self._buffer: Tensor | None = None
        self._positions = 0  # in use, if several have been added up

    def add(self, rows: Tensor) -> None:
        if self._only is None and not self._positions:
            self._only = rows
            return
        total = self._room(rows)
        if self._only is not None:
            total.zero_()
            total[..., : self._only.shape[2]] = self._only
            self._only = None
        self._positions = rows.shape[2]
        total[..., : self._positions] += rows

    def _room(self, rows: Tensor) -> Tensor:
        """The buffer, which has room for such rows."""
        seqs, groups, positions = rows.shape
        held = self._buffer
        if held is None or held.shape[:2] != (seqs, groups) or held.shape[2] < positions:
            more = positions + _POSITIONS - positions % _POSITIONS
            self._buffer = rows.new_zeros((seqs, groups, more), dtype=torch.float64)
            if held is not None and self._positions:
                self._buffer[..., : self._positions] = held[..., : self._positions]
            held = self._buffer
        return held

    def finish(self) -> Tensor | None:
        found = self._only
        if self._positions:
            assert self._buffer is not None
            found = self._buffer[..., : self._positions]
        self._only, self._positions = None, 0
        return found


class _Reach:
    """A number for each sequence and group, float64 ``[seqs, groups, 1]``."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, sums: Tensor, first: int) -> None:
        """Take in sums of rows ``[seqs, groups, positions]``; positions from `first` on count."""
        found = sums[..., first:].sum(-1, keepdim=True, dtype=torch.float64)
        self._total = found if self._total is None else self._total + found

    def finish(self) -> Tensor | None:
        found, self._total = self._total, None
        return found


class _Joined:
    """Numbers of each query, one query after the other: ``[seqs, numbers, queries]``."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, numbers: Tensor) -> None:
        """Take in a pass's ``[seqs, queries, numbers]``, which the next one may overwrite."""
        self._parts.append(numbers.clone())

    def finish(self) -> Tensor | None:
        parts, self._parts = self._parts, []
        return torch.cat(parts, dim=1).transpose(1, 2) if parts else None


class _Newest:
    """The newest of rows ``[seqs, groups, positions]``; one with NaN leaves what was before."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        before = self._rows
        if before is not None and rows.dtype == torch.float32:  # those of the model are numbers
            before = torch.nn.functional.pad(before, (0, rows.shape[2] - before.shape[2]))
            rows = torch.where(rows[..., :1].isnan(), before, rows)
        self._rows = rows

    def finish(self) -> Tensor | None:
        found, self._rows = self._rows, None
        return found


class _Last:
    """By position the last row that uses it, counted from 1; 0 if none does."""

    def __init__(self, use: RowUse) -> None:
        self._use = use
        self._last: Tensor | None = None  # int32 [seqs, positions]
        self._count = 0

    def use(
        self, rows: Tensor, at: list[int], prompt: int, readable: Sequence[np.ndarray | None] = ()
    ) -> None:
        """Take in rows ``[seqs, queries, positions]``, of sequences whose first ones stand `at`."""
        seqs, queries, positions = rows.shape
        last = rows.new_zeros((seqs, positions), dtype=torch.int32)
        if self._last is not None:
            last[:, : self._last.shape[1]] = self._last
        begin = 0 if self._use.prompt else prompt
        for query in range(queries):
            self._count += 1
            for seq in range(seqs):
                end, some = at[seq] + query + 1, readable[seq] if readable else None
                if some is not None and self._use.page is None:
                    own = to_device(some[np.searchsorted(some, begin) :], rows.device)
                    used = self._used(rows[seq, query].index_select(0, own))
                    before = last[seq].index_select(0, own)
                    last[seq].index_copy_(0, own, before.masked_fill_(used, self._count))
                else:  # pages take what was evicted for what it is paid: nothing
                    used = self._used(rows[seq, query, begin:end])
                    last[seq, begin:end].masked_fill_(used, self._count)
        self._last = last

    def _used(self, paid: Tensor) -> Tensor:
        """Which positions a query uses that pays them this, bool ``[positions]``."""
        page = self._use.page
        if page is None:
            wide = paid.float()
            return wide >= wide.kthvalue((len(wide) - 1) // 2 + 1).values
        pages = -(-len(paid) // page)
        # In float64, where the threshold is what the policy says.
        whole = torch.nn.functional.pad(paid.double(), (0, pages * page - len(paid)))
        used = whole.view(pages, page).amax(1) > self._use.threshold
        used[-1] = True
        return used.repeat_interleave(page)[: len(paid)]

    def finish(self) -> Tensor | None:
        """``[seqs, 1, positions]``, in the smallest type that holds the number of rows."""
        found, self._last = self._last, None
        count, self._count = self._count, 0
        if found is None:
            return None
        kinds = (torch.uint8, torch.int16, torch.int32)
        return found[:, None].to(next(kind for kind in kinds if count <= torch.iinfo(kind).max))
