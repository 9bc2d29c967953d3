"""Signals of a table's newest tokens, as live runs have them, one entry per token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim_torch.masked.table import Table
from arborsim_torch.token_signals import (
    ChunkExtremes,
    float16,
    head_variance,
    key_norm,
    sketch_matrix,
    value_norm,
)

#: What is observed of one search: arrays whose first axis are tokens.  Those of `Signal` by their
#: names, float16 as in traces; "rows", a list of the model's rows, float16 ``[position + 1]``;
#: "groups", float32 ``[tokens, groups, tokens]``; and of a prompt by `RowUse` float64 ``[groups,
#: tokens]``, its rows reduced.
Found = dict[Any, Any]

_OF_VECTORS = {
    Signal.KEY_VARIANCE: lambda kv: head_variance(kv[:, :1])[:, 0],
    Signal.VALUE_VARIANCE: lambda kv: head_variance(kv[:, 1:])[:, 0],
    Signal.KEY_NORM: key_norm,
    Signal.VALUE_NORM: value_norm,
}


def apart(use: RowUse) -> bool:
    """Whether rows of groups are reduced here for a use.

    Those of the model are handed over whole, and those of query heads made of queries and keys.
    """
    return use.grouping != "shared" and use.keeps in ("sum", "newest")


class Observing(Table):
    """A table that observes what policies with these needs and uses of rows read."""

    def __init__(self, model: Any, rows: int, capacity: int) -> None:
        super().__init__(model, rows, capacity)
        # Hidden states of each row's newest token, and of what was taken last.
        self._before: Tensor | None = None
        self._states: Tensor | None = None
        self._lag = [ChunkExtremes() for _ in range(rows)]
        self._sketch: Tensor | None = None
        self.observe(frozenset(), frozenset())

    def observe(self, needs: frozenset[Signal], uses: frozenset[RowUse]) -> None:
        """Take these signals, and rows for these uses, from now on."""
        self._needs, self._uses = needs, [use for use in uses if apart(use)]
        self._by_layer = all(use.grouping == "layer" for use in self._uses)
        # Rows of groups that are reduced here need no queries.
        if uses and all(map(apart, uses)):
            self._needs = needs - {Signal.HEAD_ATTENTION}
        self.wants_hidden = bool(needs & {Signal.HIDDEN_CHANGE, Signal.HIDDEN})
        # Where rows are made of queries and keys, attention may be fused.
        self.wants_weights = Signal.ATTENTION in needs or bool(self._uses)
        self._clear()

    def _clear(self) -> None:
        self._sum: Tensor | None = None
        self._groups: list[Tensor] = []
        self._queries: list[Tensor] = []
        self._hidden: list[Tensor] = []

    def seen(self, layer: int, queries: Tensor, weights: Tensor | None) -> None:
        if Signal.HEAD_ATTENTION in self._needs:
            self._queries.append(queries)
        if weights is None:
            return
        if Signal.ATTENTION in self._needs:
            mean = weights.mean(1)
            self._sum = mean if self._sum is None else self._sum.add_(mean)
        if self._uses:
            shape = (len(weights), 1 if self._by_layer else self.kv_heads, -1, *weights.shape[2:])
            self._groups.append(weights.view(shape).mean(2))

    def output(self, hidden: Tensor) -> None:
        self._hidden.append(hidden)

    def take(self, count: int) -> list[Found]:
        """Observations of the `count` newest tokens of each row."""
        parts: dict[Any, np.ndarray] = {}
        if self._sum is not None:
            parts["rows"] = (self._sum / self.layers).half().cpu().numpy()
        if self._groups:
            by_token = torch.stack(self._groups, 1).flatten(1, 2).transpose(1, 2)
            parts["groups"] = by_token.cpu().numpy()  # [rows, count, groups, tokens]
        if self._queries:
            queries = torch.stack(self._queries, 1)  # [rows, layers, heads, count, head_dim]
            parts[Signal.HEAD_ATTENTION.value] = _host(queries.permute(0, 3, 1, 2, 4))
        if self._hidden:
            parts |= self._of_hidden(torch.stack(self._hidden, 1))
        parts |= self._of_vectors(count)
        self._clear()
        found = [{name: each[row] for name, each in parts.items()} for row in range(self.rows)]
        for each in found:
            if "rows" in each:
                first = self.length - count + 1
                each["rows"] = [row[: first + i] for i, row in enumerate(each["rows"])]
        return found

    def prompt(self, ids: Tensor, block: int) -> tuple[Tensor, list[Found]]:
        """Compute prompts ``[rows, count]``: last hidden states of the last tokens, and signals."""
        parts, last = list[list[Found]](), torch.empty(0)
        reduced: dict[RowUse, Tensor] = {}
        for start in range(0, ids.shape[1], block):
            own = ids[:, start : start + block]
            last = self.forward(own)[:, -1]
            for use in self._uses:  # a block at a time: all rows would take layers x n x n
                self._reduce(use, ids.shape[1], start, reduced)
            self._groups = []
            parts.append(self.take(own.shape[1]))
        found = [joined([part[row] for part in parts]) for row in range(self.rows)]
        for row, each in enumerate(found):
            for use in self._uses:
                each[use] = reduced[use][row].cpu().numpy() if use in reduced else np.empty((0, 0))
        return last, found

    def _reduce(self, use: RowUse, prompt: int, start: int, found: dict[RowUse, Tensor]) -> None:
        """Take the rows of a block of a prompt into what a use has, ``[rows, groups, tokens]``."""
        first = max(0, use.first(prompt) - start)
        if first >= self._groups[0].shape[2]:
            return
        rows = torch.stack(self._groups, 1)[:, :, :, first:]  # [rows, layers, heads, queries, n]
        if use.grouping == "layer":
            rows = rows.mean(2, keepdim=True)
        rows = rows[..., -1, :] if use.keeps == "newest" else rows.sum(-2, dtype=torch.float64)
        now = rows.flatten(1, 2).double()
        if use.keeps == "sum" and use in found:
            now[..., : found[use].shape[2]] += found[use]
        found[use] = now

    def _of_hidden(self, now: Tensor) -> dict[Any, np.ndarray]:
        """Signals of hidden states ``[rows, layers, count, size]``."""
        found: dict[Any, np.ndarray] = {}
        if Signal.HIDDEN in self._needs:
            found[Signal.HIDDEN.value] = _host(now.transpose(1, 2))
        if Signal.HIDDEN_CHANGE in self._needs:
            first = now[:, :, :1] if self._before is None else self._before
            before = torch.cat([first, now[:, :, :-1]], 2)
            change = torch.linalg.vector_norm((now - before).float(), dim=-1)
            found[Signal.HIDDEN_CHANGE.value] = _host(change.transpose(1, 2))
            self._before, self._states = now[:, :, -1:], now
        return found

    def _vectors(self, span: slice) -> Tensor:
        """Keys and values of tokens ``[layers, 2, rows, KV heads, count, head_dim]``."""
        both = (torch.stack([own[:, :, span] for own in kept]) for kept in (self.keys, self.values))
        return torch.stack(tuple(both), 1)

    def _of_vectors(self, count: int) -> dict[Any, np.ndarray]:
        wanted = self._needs & {*_OF_VECTORS, *_OTHERS}
        if not wanted:
            return {}
        kv = self._vectors(slice(self.length - count, self.length))
        found: dict[Any, np.ndarray] = {
            signal.value: _host(of(kv).permute(1, 2, 0))
            for signal, of in _OF_VECTORS.items()
            if signal in wanted
        }
        by_token = kv.permute(1, 2, 4, 0, 3, 5)  # [2, rows, count, layers, KV heads, head_dim]
        if wanted & {Signal.KEYS, Signal.HEAD_ATTENTION}:
            found[Signal.KEYS.value] = _host(by_token[0])
        if Signal.VALUES in wanted:
            found[Signal.VALUES.value] = _host(by_token[1])
        if Signal.KEY_SKETCH in wanted:
            flat = by_token[0].float().flatten(3).flatten(2)
            if self._sketch is None:
                self._sketch = sketch_matrix(flat.shape[-1], flat.device)
            found[Signal.KEY_SKETCH.value] = _host(flat @ self._sketch)
        if wanted & {Signal.LAG_KEY, Signal.LAG_VALUE}:
            start = self.length - count
            each = [own.deviations(kv[:, :, row], start) for row, own in enumerate(self._lag)]
            lag = torch.stack(each).permute(2, 0, 3, 1)  # [2, rows, count, layers]
            found |= {Signal.LAG_KEY.value: _host(lag[0]), Signal.LAG_VALUE.value: _host(lag[1])}
        return found

    def mark(self) -> Any:
        """The state that `return_to` needs to forget the tokens that come from now on."""
        return self.length, self._before, [each.copy() for each in self._lag]

    def return_to(self, mark: Any) -> None:
        """Forget the tokens since a mark."""
        self.length, self._before, lag = mark
        self._lag = [each.copy() for each in lag]

    def rewind(self, mark: Any, count: int) -> None:
        """Forget what came since a mark, but for the first `count` tokens, of one row."""
        states = self._states
        self.return_to(mark)
        first, self.length = self.length, self.length + count
        if states is not None:
            self._before = states[:, :, count - 1 : count]
        if self._needs & {Signal.LAG_KEY, Signal.LAG_VALUE}:
            self._lag[0].deviations(self._vectors(slice(first, self.length))[:, :, 0], first)

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._lag = [self._lag[row] for row in rows]
        if self._before is not None:
            self._before = self._before[list(rows)]


_OTHERS = {
    Signal.KEYS,
    Signal.VALUES,
    Signal.HEAD_ATTENTION,
    Signal.KEY_SKETCH,
    Signal.LAG_KEY,
    Signal.LAG_VALUE,
}
#: Signals that can be observed; a task adds its readers, and rope is the model's.
SERVED = {*_OF_VECTORS, *_OTHERS, Signal.ATTENTION, Signal.HIDDEN_CHANGE, Signal.HIDDEN}


def joined(parts: Sequence[Found]) -> Found:
    """Observations of tokens that follow one another."""
    if len(parts) == 1:
        return parts[0]
    found: Found = {}
    for name in parts[0]:
        own = [part[name] for part in parts]
        if name == "rows":
            found[name] = list(chain.from_iterable(own))
            continue
        found[name] = np.concatenate(own)
    return found


def _host(values: Tensor) -> np.ndarray:
    return float16(values).cpu().numpy()
