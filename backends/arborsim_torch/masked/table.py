"""Keys and values of searches side by side, from which nothing is taken: masks say what is read.

The model's own layers run; its attention (`arborsim_torch.attention`) hands over to `Table.attend`.
All searches have as many tokens.  Of a block of tokens every query may read others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from arborsim_torch import attention
from arborsim_torch.kernels.fused import sdpa
from arborsim_torch.static import block_outputs


class Table:
    """The keys and values of `rows` searches, of at most `capacity` tokens each, `length` by now.

    A smaller `length` forgets the newest tokens.
    """

    wants_hidden = False  #: whether `output` is to be called
    wants_weights = True  #: whether `seen` is to get attention weights

    def __init__(self, model: Any, rows: int, capacity: int) -> None:
        config = model.config
        attention.register()
        if config._attn_implementation != attention.NAME:
            model.set_attn_implementation(attention.NAME)
        self.model, self.rows = model, rows
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.length = 0
        shape, kind = (rows, self.kv_heads, capacity, dim), {"dtype": model.dtype}
        each = range(self.layers)
        self.keys = [torch.zeros(shape, device=model.device, **kind) for _ in each]
        self.values = [torch.zeros(shape, device=model.device, **kind) for _ in each]

    def forward(self, ids: Tensor) -> Tensor:
        """Append tokens ``[rows, count]``; the normalised last hidden states of each."""
        count = ids.shape[1]
        at = torch.arange(self.length, self.length + count, device=ids.device)
        watch = block_outputs(self.model.model.layers, self.output)
        with watch if self.wants_hidden else nullcontext():
            last: Tensor = self.model.model(
                input_ids=ids, position_ids=at.expand(len(ids), -1), use_cache=False, table=self
            ).last_hidden_state
        self.length += count
        return last

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Store new keys and values ``[rows, KV heads, count, head_dim]``; what queries read.

        ``[rows, count, heads, head_dim]``, of queries ``[rows, heads, count, head_dim]``.
        """
        rows, heads, count, dim = query.shape
        keys, values = self.store(layer, key, value)
        end = keys.shape[2]
        unread = self.unread(layer, count, end)
        if window is not None and window < end:
            unread = unread | self._beyond(window, count, end)
        # The query heads of a group become rows of one matrix: nothing is repeated.
        packed = query.reshape(rows, self.kv_heads, -1, dim)
        shape = (rows, self.kv_heads, heads // self.kv_heads, count, end)
        if self.wants_weights:
            logits = torch.matmul(packed * scaling, keys.transpose(2, 3))
            logits.view(shape).masked_fill_(unread, float("-inf"))
            weights = torch.softmax(logits, dim=-1, dtype=torch.float32)
            out = torch.matmul(weights.to(values.dtype), values)
            self.seen(layer, query, weights.view(rows, heads, count, end))
        else:
            mask = (~unread).expand(*shape[:2], *shape[2:]).reshape(*shape[:2], -1, end)
            out = sdpa(packed, keys, values, scaling, mask)
            self.seen(layer, query, None)
        return out.view(rows, heads, count, dim).transpose(1, 2)

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep a layer's new keys and values; all that there are, new ones last."""
        end = self.length + key.shape[2]
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            cache[:, :, self.length : end] = new
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def unread(self, layer: int, count: int, end: int) -> Tensor:
        """Those of `end` tokens that the newest `count` queries of a layer leave out.

        Bool, to be broadcast to ``[rows, KV heads, heads of a group, count, end]``.
        """
        gone = self.gone(layer, end)
        if count == 1:
            return gone
        later = torch.ones(count, end, dtype=torch.bool, device=gone.device).triu(end - count + 1)
        return gone | later

    def gone(self, layer: int, end: int) -> Tensor:
        """Those of `end` tokens that no new query of a layer reads: see `unread`."""
        return torch.zeros(1, 1, 1, 1, end, dtype=torch.bool, device=self.model.device)

    def _beyond(self, window: int, count: int, end: int) -> Tensor:
        """Tokens that lie beyond a sliding window."""
        at = torch.arange(end, device=self.model.device)
        return at[None] <= at[end - count :, None] - window

    def seen(self, layer: int, queries: Tensor, weights: Tensor | None) -> None:
        """A layer attended: its rotated queries ``[rows, heads, count, head_dim]`` and weights.

        Float32 ``[rows, heads, count, tokens]``, None if they are not wanted.
        """

    def output(self, hidden: Tensor) -> None:
        """A layer's output ``[rows, count, size]``."""

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these searches only, in rising order."""
        for cache in (*self.keys, *self.values):  # in place: copies of all would take seconds
            for new, old in enumerate(rows):
                if new != old:
                    cache[new, :, : self.length] = cache[old, :, : self.length]
        self.keys = [each[: len(rows)] for each in self.keys]
        self.values = [each[: len(rows)] for each in self.values]
        self.rows = len(rows)
