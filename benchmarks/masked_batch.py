"""A batch of searches whose caches a policy thins out, and what it reads of their newest tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arborsim.core.observations import Signal
from arborsim.policies.base import Policy
from arborsim_torch.token_signals import float16, head_variance
from benchmarks.claims.masked import Batch

#: What can be observed.
SERVED = {
    Signal.ATTENTION, Signal.HEAD_ATTENTION, Signal.HIDDEN_CHANGE, Signal.KEY_VARIANCE,
    Signal.VALUE_VARIANCE, Signal.KEYS, Signal.READERS, Signal.ROPE,
}  # fmt: skip


class Searches(Batch):
    """Searches side by side under one policy, and what it reads of their newest tokens.

    Attributes
    ----------
    unread : bool Tensor ``[layers or 1, rows, KV heads or 1, capacity]``
        Slots that attention leaves out.
    slot : int64 ``[rows, capacity]``
        By token the slot that it is in; -1 if it has none any more.
    """

    def __init__(self, model: Any, prompts: torch.Tensor, capacity: int, policy: Policy) -> None:
        config, self._needs = model.config, policy.reads()
        apart = {"shared": (1, 1), "layer": (config.num_hidden_layers, 1),
                 "head": (config.num_hidden_layers, config.num_key_value_heads)}  # fmt: skip
        layers, heads = apart[policy.grouping]
        self.unread = torch.zeros(layers, len(prompts), heads, capacity, dtype=torch.bool)
        self.slot = np.tile(np.arange(capacity), (len(prompts), 1))
        self._token = torch.from_numpy(self.slot.copy())  # in each slot
        self._before = torch.empty(0)  # hidden states of each row's newest token, by layer
        self._queries: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._groups: list[torch.Tensor] = []
        self._hidden: list[torch.Tensor] = []
        super().__init__(model, prompts, capacity, gradient=False)

    def gone(self, layer: int, end: int) -> torch.Tensor:
        own = self.unread[layer if len(self.unread) > 1 else 0]
        return own[:, :, None, None, :end]

    def seen(self, queries: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> None:
        rows, count = weights.shape[0], weights.shape[2]
        if Signal.ATTENTION in self._needs:
            self._rows.append(weights.mean(1))
        if Signal.HEAD_ATTENTION in self._needs:
            self._groups.append(
                weights.view(rows, queries.shape[1], -1, *weights.shape[2:]).mean(2)
            )
            self._queries.append(queries.view(rows, weights.shape[1], count, -1))
        if Signal.HIDDEN_CHANGE in self._needs:
            self._hidden.append(hidden)

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.unread = self.unread[:, rows]
        self.slot, self._token = self.slot[rows], self._token[rows]
        if len(self._before):
            self._before = self._before[:, rows]

    def compact(self) -> None:
        """Free the slots that attention leaves out, if all layers do and it is worth the copy."""
        if self.unread.shape[0] > 1 or self.unread.shape[2] > 1:
            return
        gone, old = self.unread[0, :, 0, : self.held], self.held
        left = (~gone).sum(1)
        if (room := int(left.max())) > 0.85 * old:
            return
        order = gone.to(torch.uint8).argsort(dim=1, stable=True)[:, :room]
        by_head = order[:, None, :, None]
        for cache in (*self.keys, *self.values):
            shape = (-1, cache.shape[1], -1, cache.shape[3])
            cache[:, :, :room] = cache[:, :, :old].gather(2, by_head.expand(shape))
        self._token[:, :room] = self._token[:, :old].gather(1, order)
        newest = self.length + torch.arange(self._token.shape[1] - room)
        self._token[:, room:] = newest  # once they come
        self.unread[0, :, 0, :room] = torch.arange(room) >= left[:, None]
        self.unread[..., room:] = False
        self.held = room
        self.slot[:] = -1
        at = self._token.numpy()
        at = np.minimum(at, self.slot.shape[1])
        inverse = np.full((len(at), self.slot.shape[1] + 1), -1)
        np.put_along_axis(inverse, at, np.arange(at.shape[1])[None], 1)
        self.slot = inverse[:, :-1]

    def observed(self, count: int) -> list[dict[str, np.ndarray]]:
        """Of each row what was observed of its `count` newest tokens, by name.

        "rows", float16 ``[count, tokens]``; "groups", float32 ``[layers, KV heads, count,
        tokens]``; signals as in traces.
        """
        found: dict[str, np.ndarray] = {}
        if Signal.ATTENTION in self._needs:
            found["rows"] = self._by_token(
                (torch.stack(self._rows).sum(0) / len(self._rows)).half().numpy()
            )
        if Signal.HEAD_ATTENTION in self._needs:
            found["groups"] = torch.stack(self._groups, 1).numpy()
            queries = torch.stack(self._queries, 1)  # [rows, layers, heads, count, head_dim]
            found["queries"] = float16(queries.permute(0, 3, 1, 2, 4)).numpy()
        if Signal.HIDDEN_CHANGE in self._needs:
            now = torch.stack(self._hidden)  # [layers, rows, count, size]
            first = self._before[:, :, None] if len(self._before) else now[:, :, :1]
            before = torch.cat([first, now[:, :, :-1]], 2)
            change = torch.linalg.vector_norm(now - before, dim=-1)
            found["hidden_change"] = float16(change.permute(1, 2, 0)).numpy()
            self._before = now[:, :, -1]
        newest = slice(self.held - count, self.held)
        for signal, cache in (
            (Signal.KEY_VARIANCE, self.keys), (Signal.VALUE_VARIANCE, self.values)
        ):  # fmt: skip
            if signal in self._needs:
                own = torch.stack([each[:, :, newest] for each in cache])[:, None]
                variance = head_variance(own)[:, 0]  # [layers, rows, count]
                found[signal.value] = float16(variance.permute(1, 2, 0)).numpy()
        if self._needs & {Signal.KEYS, Signal.HEAD_ATTENTION}:
            own = torch.stack([each[:, :, newest] for each in self.keys], 1)
            found["keys"] = float16(own.permute(0, 3, 1, 2, 4)).numpy()
        self._rows, self._groups, self._queries, self._hidden = [], [], [], []
        rows = range(self.unread.shape[1])
        return [{name: values[row] for name, values in found.items()} for row in rows]

    def _by_token(self, rows: np.ndarray) -> np.ndarray:
        """Rows ``[rows, count, slots]`` as ``[rows, count, tokens]``."""
        if self.held == self.length:
            return rows
        found = np.zeros((*rows.shape[:2], self.length), dtype=rows.dtype)
        np.put_along_axis(found, self._token[:, None, : self.held].numpy(), rows, 2)
        return found
