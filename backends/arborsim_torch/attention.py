"""The attention function that the live backend registers with transformers.

Row ``i`` of a batch is one leaf; slot ``p`` of its cache holds the token at position ``p`` of its
path, so causality is a comparison of positions and padding on the right takes care of itself.  The
model's keyword argument ``batch`` (a `BatchState`) says where the queries stand and collects what
a recording needs; transformers hands it through to this function, so nothing here is global.

When nothing is collected, PyTorch's fused attention runs.  When rows are collected, probabilities
are computed once, used for the output, and averaged over heads; for the layers that are asked for,
their variance over heads is kept too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "arborsim_tree"


@dataclass
class BatchState:
    """What one forward pass needs to know, and what it leaves behind.

    Attributes
    ----------
    first : int64 Tensor ``[batch]``
        Position of each row's first query.
    queries : int
        Queries per row, at consecutive positions.
    slots : int
        Cache slots that the attention sees (the longest path).
    ragged : bool
        Whether rows have different lengths.
    collect : bool
        Whether to collect attention rows.
    query_layers : frozenset of int
        Layers whose query vectors to collect.
    row_layers : frozenset of int
        Layers whose own attention rows to collect, apart from the mean over all layers.
    layer_rows : dict of int to float32 Tensor ``[2, batch, queries, slots]``
        Per such layer the mean and the population variance over its query heads.
    """

    first: Tensor
    queries: int
    slots: int
    ragged: bool
    collect: bool = False
    query_layers: frozenset[int] = frozenset()
    row_layers: frozenset[int] = frozenset()
    query_vectors: dict[int, Tensor] = field(default_factory=dict)
    layer_rows: dict[int, Tensor] = field(default_factory=dict)
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    _rows: list[Tensor] = field(default_factory=list)
    _sum: Tensor | None = None
    _layers: Tensor | None = None

    def mask(self, window: int | None) -> Tensor | None:
        """Bool ``[batch or 1, 1, queries, slots]``, True = readable; None if all of it is."""
        if window is not None and self.slots <= window:
            window = None
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        if self.queries == 1 and not self.ragged and window is None:
            return None
        device = self.first.device
        at = self.first[:, None] + torch.arange(self.queries, device=device)
        slot = torch.arange(self.slots, device=device)
        readable = slot <= at[:, :, None]
        if window is not None:
            readable &= slot > at[:, :, None] - window
        return readable[:, None]

    def add_rows(self, rows: Tensor) -> None:
        """Take one layer's head-mean rows, float32 ``[batch, queries, slots]``."""
        self._rows.append(rows)
        if self.queries > 1:  # a block of the prompt: do not hold one array per layer
            self._fold()

    def _fold(self) -> None:
        stacked = torch.stack(self._rows)
        self._rows.clear()
        # A softmax row with a NaN in it is NaN throughout, so its first entry tells.
        broken = stacked[..., :1].isnan()
        total = stacked.masked_fill(broken, 0.0).sum(0)
        count = (~broken).sum(0)
        self._sum = total if self._sum is None else self._sum.add_(total)
        self._layers = count if self._layers is None else self._layers + count

    def attention(self) -> Tensor:
        """Mean over heads and over the layers without NaN, float32 ``[batch, queries, slots]``."""
        if self._rows:
            self._fold()
        assert self._sum is not None
        assert self._layers is not None
        return self._sum / self._layers.clamp(min=1)


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    batch: BatchState | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over padded paths; the signature is that of transformers' attention interface.

    The query heads of a group become rows of one matrix, so keys and values are never repeated.
    """
    if batch is None:
        raise ValueError(f"{NAME} attention runs only through arborsim's decoder")
    size, heads, queries, dim = query.shape
    groups = key.shape[1]
    packed = query.reshape(size, groups, heads // groups * queries, dim)
    mask = batch.mask(sliding_window)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if layer in batch.query_layers:
        batch.query_vectors[layer] = query
    if batch.collect:
        logits = torch.matmul(packed, key.transpose(2, 3)).mul_(scaling)
        if mask is not None:
            spread = logits.view(size, groups, heads // groups, queries, -1)
            spread.masked_fill_(~mask[:, :, None], float("-inf"))
        mass = torch.softmax(logits, dim=-1, dtype=torch.float32)
        by_head = mass.view(size, heads, queries, -1)
        mean = by_head.mean(1)
        batch.add_rows(mean)
        if layer in batch.row_layers:
            batch.layer_rows[layer] = torch.stack((mean, by_head.var(1, correction=0)))
        out = torch.matmul(mass.to(query.dtype), value)
    else:
        if mask is not None and queries > 1:
            mask = mask.repeat(1, 1, heads // groups, 1)
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.view(size, heads, queries, dim).transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are made from positions, above: transformers need not build any."""
    return None


def register() -> None:
    """Make `NAME` known to transformers; calling it again does no harm."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
