"""Putting a pass's new keys and values into their slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.pool import Pool
from arborsim_torch.upload import uploaded

Put = Callable[[Tensor, Tensor], None]  # (bank's keys or values, new ones): all [kv_heads, ...]


@dataclass(frozen=True)
class Writing:
    """Where the tokens of one pass go.

    Attributes
    ----------
    pool : Pool
        HBM at full precision.
    puts : list
        One per bank.
    """

    pool: Pool
    puts: list[Put]

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[lanes, kv_heads, queries, head_dim]``."""
        (data,) = self.pool.bank(layer)
        put = self.puts[self.pool.layout.bank_of_layer(layer)[0]]
        for target, new in ((data[0], keys), (data[1], values)):
            # [kv_heads, tokens, head_dim]: one lane with its queries, or one query of each lane
            put(target, new[0] if len(new) == 1 else new[:, :, 0].transpose(0, 1))

    @classmethod
    def new(cls, pool: Pool, slots: np.ndarray) -> Writing | Span:
        """Tokens that enter every group; slots are int64 ``[groups, tokens]``."""
        layout = pool.layout
        if layout.grouping != "head":
            if all(_follow_one_another(row) for row in slots):
                return Span.new(pool, slots)
            return cls(pool, [_rows(row, pool.device) for row in slots])
        by_layer = slots.reshape(layout.layers, layout.kv_heads, -1)
        return cls(pool, [_rows_per_head(own, pool.device) for own in by_layer])

    @classmethod
    def again(cls, pool: Pool, tokens: np.ndarray, lost: np.ndarray) -> Writing:
        """Tokens that are computed once more; `lost`, bool ``[groups, tokens]``, says for whom."""
        layout = pool.layout
        puts: list[list[Put]] = [[] for _ in range(layout.banks)]
        for group, own in enumerate(lost):
            bank, heads = layout.bank_of_group(group)
            which = np.flatnonzero(own)
            slot = pool.slots.of[group, tokens[which]].astype(np.int64)
            puts[bank].append(_some(which, slot, heads, pool.device))
        return cls(pool, [_all(own) for own in puts])


@dataclass(frozen=True)
class Span:
    """Tokens whose slots follow one another: a step of one lane, or a block of a prompt.

    Attributes
    ----------
    targets : list of Tensor ``[1, kv_heads, tokens, head_dim]``
        Where each layer's keys, then its values go: views of the pool.
    """

    targets: list[Tensor]

    @classmethod
    def new(cls, pool: Pool, slots: np.ndarray) -> Span:
        """Of slots int64 ``[banks, tokens]`` that follow one another."""
        targets: list[Tensor] = []
        for bank, row in enumerate(slots):
            # One call for all layers: a step of a small model is mostly made of such calls.
            targets += pool.span(bank, int(row[0]), len(row)).unsqueeze(1).unbind()
        return cls(targets)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[lanes, kv_heads, queries, head_dim]``."""
        if len(keys) > 1:  # one query of each lane
            keys, values = keys.transpose(0, 2), values.transpose(0, 2)
        self.targets[2 * layer].copy_(keys)
        self.targets[2 * layer + 1].copy_(values)


def _follow_one_another(slots: np.ndarray) -> bool:
    return len(slots) == 1 or bool((slots[1:] - slots[:-1] == 1).all())


def _rows(slots: np.ndarray, device: torch.device) -> Put:
    index = uploaded(slots, device)

    def put(target: Tensor, new: Tensor) -> None:
        target.index_copy_(1, index, new)

    return put


def _rows_per_head(slots: np.ndarray, device: torch.device) -> Put:
    index = uploaded(slots, device)[:, :, None]

    def put(target: Tensor, new: Tensor) -> None:
        target.scatter_(1, index.expand(-1, -1, target.shape[2]), new)

    return put


def _some(which: np.ndarray, slot: np.ndarray, heads: slice, device: torch.device) -> Put:
    rows, index = uploaded(which, device), uploaded(slot, device)

    def put(target: Tensor, new: Tensor) -> None:
        target[heads].index_copy_(1, index, new[heads].index_select(1, rows))

    return put


def _all(puts: list[Put]) -> Put:
    def put(target: Tensor, new: Tensor) -> None:
        for one in puts:
            one(target, new)

    return put
