"""What attention sees of the cache in one forward pass.

`LayerView` is all that the attention function needs: keys and values of one layer in some order of
tokens, who may read which, and the positions they stand for.  Keys carry their rotary positions,
so the order does not matter to the result (but for rounding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from arborsim_torch.cache.remote import Remote


@dataclass(frozen=True)
class LayerView:
    """Keys and values of one layer as one forward pass reads them.

    Attributes
    ----------
    keys, values : Tensor ``[kv_heads, n, head_dim]``
    mask : bool Tensor ``[lanes or 1, kv_heads or 1, queries, n]`` or None
        True = readable; None if all of it is.
    position : int64 Tensor ``[kv_heads or 1, n]`` or None
        Position of each entry on its path; None if entry ``p`` has position ``p``.
    positions : int
        Length of the longest path.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    position: Tensor | None
    positions: int


@dataclass(frozen=True)
class Entries:
    """The entries of the layers of one kind: same mask, same positions.

    Attributes
    ----------
    lanes : bool Tensor ``[groups, lanes, n]`` or None
        Which entries lie on a lane's path; None if all do.
    position : int64 Tensor ``[groups, n]`` or None
    n : int
    """

    lanes: Tensor | None
    position: Tensor | None
    n: int


@dataclass
class Reading:
    """One forward pass over the cache.

    Parameters
    ----------
    at : int64 Tensor ``[lanes, queries]``
        Positions of the queries.
    first : list of int
        Position of each lane's first query.
    positions : int
        Length of the longest path, the new tokens included.
    entries : callable
        Of a layer: its `Entries`.
    content : callable
        Of a layer: keys and values ``[kv_heads, n, head_dim]`` each, the new tokens included.
    store : callable
        Take a layer's new keys and values ``[lanes, kv_heads, queries, head_dim]``.
    remote : Remote or None
        Attends to tokens that stay on the host.
    causal : bool
        The queries are the last tokens of one lane and entry ``p`` has position ``p``.
    paths : int64 Tensor ``[lanes, positions]`` or None
        Slots on the path of each lane, in order of position and anything beyond its end: if lanes
        have one query each and it is cheaper to read paths one by one than all of `content`.
    plain : sequence of Tensor ``[1, kv_heads, n, head_dim]``, or None
        If one query reads all there is: keys, then values of each layer.
    """

    at: Tensor
    first: list[int]
    positions: int
    entries: Callable[[int], Entries]
    content: Callable[[int], tuple[Tensor, Tensor]]
    store: Callable[[int, Tensor, Tensor], None]
    remote: Remote | None = None
    causal: bool = False
    paths: Tensor | None = None
    plain: Sequence[Tensor] | None = None
    _masks: dict[tuple[int, int | None], Tensor | None] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        return self.at.shape[0]

    @property
    def queries(self) -> int:
        return self.at.shape[1]

    def block(self, layer: int, window: int | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values if the queries are the last entries and read what is before them.

        Then no mask is needed; None otherwise.
        """
        if not self.causal or self.queries == 1 or self.limits(window) is not None:
            return None
        return self.content(layer)

    def by_path(
        self, layer: int, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Keys and values ``[kv_heads, lanes, longest path, head_dim]`` of each lane's own path.

        And which of them a lane may read, ``[lanes, longest path]`` (None if all); None if
        everything is to be read at once.
        """
        if self.paths is None:
            return None
        lanes, longest = self.paths.shape
        flat = self.paths.view(-1)
        keys, values = (
            part.index_select(1, flat).view(len(part), lanes, longest, part.shape[2])
            for part in self.content(layer)
        )
        return keys, values, self._path_mask(self.limits(window))

    def _path_mask(self, window: int | None) -> Tensor | None:
        if window is None and min(self.first) + 1 == self.positions:
            return None
        key = (0, window)  # no view is made of such a pass, so nothing else is kept under 0
        if key not in self._masks:
            spots = torch.arange(self.positions, device=self.at.device)
            seen = spots <= self.at
            self._masks[key] = seen if window is None else seen & (spots > self.at - window)
        return self._masks[key]

    def limits(self, window: int | None) -> int | None:
        """The window, if it is shorter than the path."""
        return None if window is not None and self.positions <= window else window

    def view(self, layer: int, window: int | None = None) -> LayerView:
        """What the queries of a layer may read; `window` is that of sliding attention."""
        entries, window = self.entries(layer), self.limits(window)
        key = (id(entries), window)
        if key not in self._masks:
            self._masks[key] = self._mask(entries, window)
        keys, values = self.content(layer)
        return LayerView(keys, values, self._masks[key], entries.position, self.positions)

    def _mask(self, entries: Entries, window: int | None) -> Tensor | None:
        if entries.lanes is None and self.queries == 1 and window is None:
            return None
        mask = None if entries.lanes is None else entries.lanes.transpose(0, 1)[:, :, None]
        if self.queries == 1 and window is None:
            return mask
        position = entries.position
        if position is None:
            position = torch.arange(entries.n, device=self.at.device)[None]
        at = self.at[:, None, :, None]  # [lanes, 1, queries, 1]
        spots = position[None, :, None]  # [1, groups, 1, n]
        seen = spots <= at
        if window is not None:
            seen = seen & (spots > at - window)
        return seen if mask is None else seen & mask
