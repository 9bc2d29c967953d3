"""Rows of single query heads, reduced: those of a prompt's last queries.

They are made of queries and keys once the prompt is over, as the host makes those of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from arborsim.core.row_uses import RowUse
from arborsim.machine.live_memory import TILE_BYTES
from arborsim_torch.cache.forward import AttentionMetadata
from arborsim_torch.row_reducer import first_of
from arborsim_torch.token_signals import float16


class WindowRows:
    """Reduces the rows of single query heads of the prompt's last queries.

    Attention has no such rows to give.  Queries wait until the prompt is over; then rows are made
    of them, a KV head at a time, as the host makes those of a trace: from queries and keys in
    float16, in float32, with statistics in float64.

    Device memory: the queries that wait, of a KV head, keys in float32, its query heads x queries
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

        Returns a dict of RowUse to Tensor ``[1, groups, positions]``, of moments ``[1, groups,
        3]``: float32, and float64.
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
        """Reduce the rows of a KV head as each use asks."""
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
        variance = second.sum() * queries / max(1, queries - 1)
        kurtosis = (fourth / second.clamp(min=1e-8) ** 2).sum()
        total += torch.stack((entropy, variance, kurtosis))
    return total


def _of_groups(use: RowUse, parts: Tensor) -> Tensor:
    """A row for each of a layer's groups, from ``[kv_heads, ...]``."""
    if use.keeps == "moments":
        return parts.sum(0).expand(len(parts) if use.grouping == "head" else 1, -1)
    total = parts if use.grouping == "head" else parts.sum(0, keepdim=True)
    return (total[:, 0] / total[:, 1].clamp(min=1)).float()
