"""Putting a pass's new keys and values into their slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.pool import Pool

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
    def new(cls, pool: Pool, slots: np.ndarray) -> Writing:
        """Tokens that enter every group; slots are int64 ``[groups, tokens]``."""
        layout = pool.layout
        if layout.grouping != "head":
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


def _rows(slots: np.ndarray, device: torch.device) -> Put:
    first, count = int(slots[0]), len(slots)
    if count == 1 or (slots == np.arange(first, first + count)).all():

        def put_span(target: Tensor, new: Tensor) -> None:
            target[:, first : first + count] = new

        return put_span
    index = torch.from_numpy(slots).to(device)

    def put(target: Tensor, new: Tensor) -> None:
        target.index_copy_(1, index, new)

    return put


def _rows_per_head(slots: np.ndarray, device: torch.device) -> Put:
    index = torch.from_numpy(slots).to(device)[:, :, None]

    def put(target: Tensor, new: Tensor) -> None:
        target.scatter_(1, index.expand(-1, -1, target.shape[2]), new)

    return put


def _some(which: np.ndarray, slot: np.ndarray, heads: slice, device: torch.device) -> Put:
    rows, index = torch.from_numpy(which).to(device), torch.from_numpy(slot).to(device)

    def put(target: Tensor, new: Tensor) -> None:
        target[heads].index_copy_(1, index, new[heads].index_select(1, rows))

    return put


def _all(puts: list[Put]) -> Put:
    def put(target: Tensor, new: Tensor) -> None:
        for one in puts:
            one(target, new)

    return put
