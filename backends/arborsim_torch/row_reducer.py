"""Attention rows of a run, reduced where they are computed to what scores need of them.

A run is what lies between two decisions: its rows are added up, the newest kept, or what they use
noted, and one vector per path and group crosses to the host (`arborsim.core.row_uses`).  Rows
averaged over the model are rounded to float16 first, as traces hold them, so that sums have the
same bits as those of a replay.

Device memory: 8 bytes for each group, path and position per use that keeps sums, in a buffer that
stays, and 4 for the newest rows of groups and the last uses (2 for newest rows of the model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from arborsim.core.row_uses import RowUse
from arborsim.machine.live_memory import TILE_BYTES
from arborsim_torch.cache.forward import AttentionMetadata
from arborsim_torch.context import PassContext
from arborsim_torch.tiers.copies import to_device
from arborsim_torch.token_signals import float16

_POSITIONS = 1024  # buffers grow by this


class RowReducer:
    """What some uses need of the rows of one search.

    Parameters
    ----------
    uses : iterable of RowUse
        Those that are reduced as rows come.

    Attributes
    ----------
    groups : {"layer", "head"} or None
        Whose rows are reduced apart from the model's.
    part : float or None
        Of "sparsity" (`RowUse.part`).

    Raises
    ------
    ValueError
        If rows of layers and of KV heads are wanted at once, or of different queries or keys, or
        the sparsity of different queries or parts.
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

    def first_row(self, metadata: AttentionMetadata, prompt: int) -> int:
        """First query of a pass whose row, averaged over the model, counts; else their number."""
        shared = (use for use in self._held if use.grouping == "shared" and use.keeps != "sparsity")
        return min((first_of(use, metadata, prompt) for use in shared), default=metadata.queries)

    def first_of_groups(self, metadata: AttentionMetadata, prompt: int) -> int:
        """The same of rows of groups."""
        apart = (use for use in self._held if use.grouping != "shared")
        return min((first_of(use, metadata, prompt) for use in apart), default=metadata.queries)

    def first_counted(self, metadata: AttentionMetadata, prompt: int) -> int:
        """The same of rows of single query heads."""
        counted = (use for use in self._held if use.keeps == "sparsity")
        return min((first_of(use, metadata, prompt) for use in counted), default=metadata.queries)

    def recent(self, prompt: int) -> int:
        """How many of its newest positions a query pays nothing to in sums of groups."""
        return max((use.spared(prompt)[1] for use in self._held), default=0)

    @property
    def wants_readable(self) -> bool:
        """Whether `take` has to know what can be read."""
        return any(use.keeps == "last" for use in self._held)

    def take(
        self, state: PassContext, rows: Tensor | None, prompt: int,
        readable: Sequence[np.ndarray | None] = (),
    ) -> None:  # fmt: skip
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
                    held.add(state.group_sums(), use.spared(prompt)[0])
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
        found = {use: held.finish() for use, held in self._held.items()}
        # Sums of groups are of float32 weights: once added up, float32 says enough of them.
        return {
            use: rows.float() if use.grouping != "shared" and use.keeps == "sum" else rows
            for use, rows in found.items() if rows is not None
        }  # fmt: skip


def first_of(use: RowUse, metadata: AttentionMetadata, prompt: int) -> int:
    """First query of a pass that counts, after a prompt of `prompt` tokens; else their number."""
    queries, at = metadata.queries, metadata.first[0]
    if at >= prompt:
        return 0 if use.generated else queries
    return min(queries, max(0, use.first(prompt) - at))


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
        kind = next(
            kind for kind in (torch.uint8, torch.int16, torch.int32)
            if count <= torch.iinfo(kind).max
        )  # fmt: skip
        return found[:, None].to(kind)


class WindowRows:
    """What some uses need of rows of single query heads: those of the prompt's last queries.

    Attention has no such rows to give.  Queries wait until the prompt is over; then rows are made
    of them, a KV head at a time, as the host makes those of a trace: from queries and keys in
    float16, in float32, with statistics in float64.

    Device memory: the queries that wait; of a KV head, keys in float32, its query heads x queries
    x positions, twice 4 bytes, and of statistics a few times `TILE_BYTES` at most.
    """

    def __init__(self, uses: Iterable[RowUse]) -> None:
        self._uses = tuple(uses)
        self._window = max((use.prompt for use in self._uses), default=0)
        self._queries: list[Tensor] = []  # float16 [layers, heads, queries, head_dim]

    def __bool__(self) -> bool:
        return bool(self._uses)

    def first(self, metadata: AttentionMetadata, prompt: int) -> int:
        """First query of a pass that counts, or their number."""
        return first_of(RowUse("head", "rows", self._window, False), metadata, prompt)

    @property
    def waits(self) -> bool:
        """Whether there are queries to be reduced."""
        return bool(self._queries)

    def add(self, vectors: Sequence[Tensor], first: int) -> None:
        """Take a pass's queries from `first` on; by layer ``[1, heads, queries, head_dim]``."""
        self._queries.append(float16(torch.stack([each[0, :, first:] for each in vectors])))

    def finish(self, kv_heads: int, keys: Callable[[int, int], Tensor]) -> dict[RowUse, Tensor]:
        """End the prompt; `keys` gives those of a layer and a KV head, ``[positions, head_dim]``.

        Returns
        -------
        dict of RowUse to Tensor ``[1, groups, positions]``, of moments ``[1, groups, 3]``
            Float32, and float64.
        """
        queries = torch.cat(self._queries, dim=2).float()
        queries *= queries.shape[-1] ** -0.5
        self._queries.clear()
        found: dict[RowUse, list[Tensor]] = {use: [] for use in self._uses}
        for layer, own in enumerate(queries):
            by_head = [
                self._of_head(some, keys(layer, head))
                for head, some in enumerate(own.view(kv_heads, -1, *own.shape[1:]))
            ]
            for use, parts in zip(self._uses, zip(*by_head, strict=True), strict=True):
                found[use].append(_of_groups(use, torch.stack(parts)))
        return {use: torch.cat(parts)[None] for use, parts in found.items()}

    def _of_head(self, queries: Tensor, keys: Tensor) -> list[Tensor]:
        """What each use keeps of the rows of a KV head."""
        rows = _rows_of(queries, float16(keys).float())
        newest = [(use, rows[:, -use.prompt :]) for use in self._uses]
        return [
            _moments(own) if use.keeps == "moments" else _spread(own, use.weight)
            for use, own in newest
        ]


def _rows_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Rows of the last queries of a prompt, float32 ``[heads, queries, positions]``.

    Of scaled queries ``[heads, queries, head_dim]`` and keys ``[positions, head_dim]``, float32.
    """
    count, positions = queries.shape[1], len(keys)
    later = torch.ones((count, positions), dtype=torch.bool, device=keys.device)
    logits = queries @ keys.T
    logits.masked_fill_(later.triu_(positions - count + 1), float("-inf"))
    return torch.softmax(logits, dim=-1)


def _tiles(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The rows in float64, some positions at a time, and the first of these."""
    heads, queries, positions = rows.shape
    size = max(1, TILE_BYTES // (8 * heads * queries))
    for first in range(0, positions, size):
        yield first, rows[..., first : first + size].double()


def _spread(rows: Tensor, weight: float) -> Tensor:
    """Mean plus `weight` times variance of what positions are paid, then whether any query counts.

    Over the queries that see a position and whose row is a number, summed over heads;
    ``[2, positions]``, the second of them how many heads have such a query.
    """
    _, queries, positions = rows.shape
    good, found = ~rows[..., :1].isnan(), list[Tensor]()
    for first, paid in _tiles(rows):
        at = torch.arange(first, first + paid.shape[2], device=rows.device) - (positions - queries)
        counts = good & (at <= torch.arange(queries, device=rows.device)[:, None])
        number = counts.sum(1)
        paid.masked_fill_(~counts, 0.0)
        mean = paid.sum(1) / number.clamp(min=1)
        squares = paid.sub_(mean[:, None]).square_().masked_fill_(~counts, 0.0).sum(1)
        heavy = mean + weight * squares / (number - 1).clamp(min=1)
        found.append(torch.stack((heavy.sum(0), (number > 0).sum(0))))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def _moments(rows: Tensor) -> Tensor:
    """``[3]``: `arborsim.signals.spread.layer_statistics` of heads, for keys before the queries."""
    queries = rows.shape[1]
    good = ~rows[..., 0].isnan().any(1)
    total = rows.new_zeros(3, dtype=torch.float64)
    for _, a in _tiles(rows[..., : max(0, rows.shape[2] - queries)]):
        a.masked_fill_(~good[:, None, None], 0.0)
        entropy = -(a + 1e-10).log_().mul_(a).sum()
        deviation = a.sub_(a.mean(1, keepdim=True)).square_()
        second = deviation.mean(1)
        fourth = deviation.square_().mean(1)
        total += torch.stack((
            entropy,
            second.sum() * queries / max(1, queries - 1),
            (fourth / second.clamp(min=1e-8) ** 2).sum(),
        ))  # fmt: skip
    return total


def _of_groups(use: RowUse, parts: Tensor) -> Tensor:
    """What the groups of a layer have, from ``[kv_heads, ...]``: a row for each of them."""
    if use.keeps == "moments":
        return parts.sum(0).expand(len(parts) if use.grouping == "head" else 1, -1)
    total = parts if use.grouping == "head" else parts.sum(0, keepdim=True)
    return (total[:, 0] / total[:, 1].clamp(min=1)).float()
