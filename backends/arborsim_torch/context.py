"""The context of a forward pass: what it is told of the caches, and what it leaves behind.

A decoder makes one `PassContext` per pass.  The attention function (`arborsim_torch.attention`)
adds each layer's probabilities and query vectors to it.  What records or decides reads them
afterwards.  Rows are averaged over heads as they come, and over layers in the end.  For the layers
that are asked for, their own mean and variance over heads are kept too, where groups are asked for,
their sums and newest rows, and of single heads, how many entries are large.  Nothing grows with the
number of queries but what `rows` asks for, and these counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata, LayerView
from arborsim_torch.kernels.piece import BlockRows, MeanRows

_ASKED = (
    *("first_row", "groups", "first_of_groups", "recent", "part", "first_counted"),
    *("query_layers", "row_layers"),
)


@dataclass
class PassContext:
    """The context of one forward pass, and what it leaves behind."""

    metadata: AttentionMetadata  #: what the pass reads of the cache
    #: first query of the pass whose mean row over heads and layers is collected; None for none
    first_row: int | None = None
    #: {"layer", "head"}: whose rows to reduce apart: those of layers, or of KV heads
    groups: Literal["layer", "head"] | None = None
    first_of_groups: int = 0  #: first query of the pass that counts there
    recent: int = 0  #: how many of its newest positions a query pays nothing to in sums of groups
    #: entries of at least this part of their row's largest are counted, head by head
    part: float | None = None
    first_counted: int = 0  #: first query of the pass whose rows are
    query_layers: frozenset[int] = frozenset()  #: layers whose query vectors to collect
    #: layers whose own attention rows to collect, apart from the mean over all layers
    row_layers: frozenset[int] = frozenset()
    #: takes the output of each block of the model, ``[seqs, queries, size]``, when it comes, None
    #: if they are shown in the end, or not wanted
    take_output: Callable[[Tensor], None] | None = None
    query_vectors: dict[int, Tensor] = field(default_factory=dict)
    #: dict of int to float32 ``[2, seqs, queries, positions]``: per such layer the mean and the
    #: population variance over its query heads
    layer_rows: dict[int, Tensor] = field(default_factory=dict)
    _rows: list[Tensor] = field(default_factory=list)
    _sum: Tensor | None = None
    _layers: Tensor | None = None
    _group_sums: list[Tensor] = field(default_factory=list)
    _group_newest: list[Tensor] = field(default_factory=list)
    _counts: list[Tensor] = field(default_factory=list)
    _sparsity: Tensor | None = None

    @property
    def queries(self) -> int:
        return self.metadata.queries

    @property
    def asked(self) -> tuple[object, ...]:
        """All that says what is collected."""
        return tuple(getattr(self, name) for name in _ASKED)

    def again(self, metadata: AttentionMetadata) -> PassContext:
        """An empty context that is to collect the same."""
        return PassContext(metadata, **{name: getattr(self, name) for name in _ASKED})

    @property
    def collect(self) -> bool:
        """Whether attention has to give probabilities."""
        return self.wants_rows or self.part is not None

    @property
    def wants_rows(self) -> bool:
        """Whether rows themselves are taken, or added up."""
        return self.first_row is not None or self.groups is not None or bool(self.row_layers)

    @property
    def wants_means(self) -> bool:
        """Whether all that is wanted of a decode step are rows averaged over the model."""
        apart = self.groups is not None or self.part is not None or bool(self.row_layers)
        return self.first_row == 0 and self.queries == 1 and not apart

    def add(self, layer: int, *parts: tuple[LayerView, Tensor]) -> None:
        """Take one layer's probabilities, float32 ``[kv_heads, seqs, group, queries, n]``.

        Parts are about different tokens.
        """
        if layer in self.row_layers:
            rows = torch.stack([_by_position(by_head, view) for view, by_head in parts]).sum(0)
            variance, mean = torch.var_mean(rows, 1, correction=0)
            self.layer_rows[layer] = torch.stack((mean, variance))
        if self.part is not None:
            counted = [
                by_head[:, :, :, self.first_counted :] for _, by_head in parts if by_head.shape[-1]
            ]
            most = [rows.amax(-1, keepdim=True) for rows in counted]
            least = reduce(torch.maximum, most) * self.part
            self.count(reduce(torch.add, [(rows >= least).sum(-1) for rows in counted]))
        if self.groups is not None:
            self._add_groups(parts)
        if self.first_row is None:
            return
        means = []
        for view, by_head in parts:
            counts = by_head[:, :, :, self.first_row :] if self.first_row else by_head
            # Heads that hold the same entries are averaged before these are put in their places;
            # every KV head has as many query heads, so a mean of means is the mean.
            together = (0, 2) if view.position is None or len(view.position) == 1 else 2
            rows = counts.mean(together, keepdim=True)
            placed = _by_position(rows, view)
            means.append(placed[:, 0] if placed.shape[1] == 1 else placed.mean(1))
        self._rows.append(means[0] if len(means) == 1 else torch.stack(means).sum(0))
        if self.queries > 1:  # a block of the prompt: do not hold one array per layer
            self._fold()

    def count(self, large: Tensor) -> None:
        """Take a layer's counts, int64 ``[kv_heads, seqs, group, queries]``; 0 of rows with NaN."""
        self._counts.append(large)

    def block_rows(self, device: torch.device) -> BlockRows:
        """The rows that a layer is to keep of a block of a prompt; then goes to `add_block`."""
        kept = BlockRows(groups=self.groups)
        if self.groups is not None:
            kept.of_groups, kept.recent = self.queries - self.first_of_groups, self.recent
        if self.first_row is not None:
            total, numbers = self._totals(device)
            kept.mean, kept.numbers = total[0], numbers[0]
        return kept

    def mean_rows(self, position: Tensor, further: Tensor | None) -> MeanRows:
        """The rows that a layer is to add to, averaged over heads; see `MeanRows`."""
        total, numbers = self._totals(position.device)
        return MeanRows(total[:, 0], numbers[:, 0, 0], position, further)

    def _totals(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The sum of the rows over layers, and how many these are; zeros at first."""
        if self._sum is None or self._layers is None:
            assert self.first_row is not None
            shape = (self.metadata.num_seqs, self.queries - self.first_row, self.metadata.positions)
            self._sum = torch.zeros(shape, device=device)
            self._layers = torch.zeros((*shape[:2], 1), dtype=torch.int64, device=device)
        return self._sum, self._layers

    def add_block(self, kept: BlockRows) -> None:
        """Take what a layer has kept; mean rows have been added up already."""
        if kept.newest is not None:
            self._group_newest.append(kept.newest[None])
        if kept.sums is not None:
            self._group_sums.append(kept.sums[None])

    def _add_groups(self, parts: tuple[tuple[LayerView, Tensor], ...]) -> None:
        placed = [
            _by_position(_group_mean(by_head[:, :, :, self.first_of_groups :]), view)
            for view, by_head in parts
        ]
        rows = placed[0] if len(placed) == 1 else torch.stack(placed).sum(0)
        if self.groups == "layer":
            rows = rows.mean(1, keepdim=True)
        # A view would keep the rows of every layer until the pass is over.
        newest = rows[:, :, -1].clone() if rows.shape[2] > 1 else rows[:, :, -1]
        self._group_newest.append(newest)
        if rows.shape[2] > 1 or self.recent:
            numbers = rows.masked_fill(rows[..., :1].isnan(), 0.0)
            if self.recent:  # of a block of the prompt, which is one sequence
                at = self.metadata.first[0] + self.first_of_groups
                numbers = numbers.tril(at - self.recent)
            self._group_sums.append(numbers.sum(2, dtype=torch.float64))

    def _fold(self) -> None:
        stacked = torch.stack(self._rows)
        self._rows.clear()
        # A softmax row with a NaN in it is NaN throughout, so its first entry tells.
        broken = stacked[..., :1].isnan()
        total = stacked.masked_fill(broken, 0.0).sum(0)
        count = (~broken).sum(0)
        self._sum = total if self._sum is None else self._sum.add_(total)
        self._layers = count if self._layers is None else self._layers + count

    def _compare(self) -> None:
        large, of_model = torch.stack(self._counts), (0, 1, 3)
        self._counts.clear()
        rows = (large > 0).sum(of_model)
        self._sparsity = torch.stack((rows, large.sum(of_model)), dim=-1).double()

    def settle(self) -> None:
        """Put what the layers have left together: afterwards nothing is as long as the model."""
        if self._counts:
            self._compare()
        if self._rows:
            self._fold()
        if self._group_newest:
            self._group_newest = [self.group_newest()]

    def within(self, metadata: AttentionMetadata) -> PassContext:
        """The same of a pass with fewer sequences or shorter paths, without what is beyond."""
        own, end = metadata.num_seqs, metadata.positions
        return replace(
            self,
            metadata=metadata,
            query_vectors={layer: rows[:own] for layer, rows in self.query_vectors.items()},
            layer_rows={layer: rows[:, :own, :, :end] for layer, rows in self.layer_rows.items()},
            _sum=None if self._sum is None else self._sum[:own, :, :end],
            _layers=None if self._layers is None else self._layers[:own],
            _group_newest=[rows[:own, :, :end] for rows in self._group_newest],
            _sparsity=None if self._sparsity is None else self._sparsity[:own],
        )

    def tensors(self) -> list[Tensor]:
        """All tensors that have been left behind."""
        found = [x for x in (self._sum, self._layers, self._sparsity) if x is not None]
        found += [*self.query_vectors.values(), *self.layer_rows.values()]
        return found + self._rows + self._group_sums + self._group_newest + self._counts

    def attention(self) -> Tensor:
        """Mean over heads and the layers without NaN, float32 ``[seqs, queries, positions]``.

        Of the queries from `first_row` on.
        """
        if self._rows:
            self._fold()
        assert self._sum is not None
        assert self._layers is not None
        return self._sum / self._layers.clamp(min=1)

    def sparsity(self) -> Tensor:
        """How many rows of heads are numbers, and how many large entries these have.

        Float64 ``[seqs, queries, 2]``, of the queries from `first_counted` on.
        """
        if self._counts:
            self._compare()
        assert self._sparsity is not None
        return self._sparsity

    def group_newest(self) -> Tensor:
        """Rows of the last query, float32 ``[seqs, groups, positions]``; NaN: not a number."""
        return torch.stack(self._group_newest, dim=1).flatten(1, 2)

    def group_sums(self) -> Tensor:
        """Sum of rows without NaN, ``[seqs, groups, positions]``; float32 of one query or 64."""
        if self._group_sums:
            return torch.stack(self._group_sums, dim=1).flatten(1, 2)
        newest = self.group_newest()
        return newest.masked_fill(newest[..., :1].isnan(), 0.0)


def _group_mean(by_head: Tensor) -> Tensor:
    """Over the query heads of each KV head, ``[kv_heads, seqs, 1, queries, n]``."""
    return by_head if by_head.shape[2] == 1 else by_head.mean(2, keepdim=True)


def _by_position(by_head: Tensor, view: LayerView) -> Tensor:
    """One value per position on the path, ``[seqs, heads, queries, positions]``; 0 if not held."""
    kv_heads, seqs, group, queries, _ = by_head.shape
    if view.position is None:
        return by_head.transpose(0, 1).flatten(1, 2)
    rows = by_head.new_zeros((kv_heads, seqs, group, queries, view.positions))
    if len(view.position) == 1:
        rows.index_add_(4, view.position[0], by_head)
    else:
        spots = view.position[:, None, None, None].expand_as(by_head)
        rows.scatter_add_(4, spots, by_head)
    return rows.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class ForwardContext:
    """The passes that one forward computes together, as the keyword argument ``context``.

    Passes are over caches of their own; each has as many rows as sequences, one after the other.
    """

    passes: list[PassContext]
