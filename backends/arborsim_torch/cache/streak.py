"""Steps of one path in a row: announced at once, entered in the books when somebody reads them.

While one path decodes and all its tokens lie in HBM in order, a step changes nothing that needs
looking up: the next token's slot is its position, and attention reads every slot up to it.  What
the books would say of it is known beforehand, so it can wait.  The bookkeeping of a step takes an
eighth of the time of a small model; put off, it takes next to nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.pool import Pool
from arborsim_torch.cache.views import Entries, Reading

_MOST_STEPS = 256


class Streak:
    """Steps that have been announced and are not in the books.

    Parameters
    ----------
    pool : Pool
        HBM at full precision, of one bank.  Its tensors must stay what they are.
    first : int
        Position, and slot, of the next token.

    Attributes
    ----------
    ids : list of int
        Vocabulary ids of the tokens.
    """

    def __init__(self, pool: Pool, first: int) -> None:
        self.ids: list[int] = []
        self._next = first
        self._room = min(pool.capacity(), first + _MOST_STEPS)
        self._at = torch.arange(first, max(first, self._room), device=pool.device)[None]
        # [2 layers, 1, kv_heads, capacity, head_dim]: attention wants a batch of one.
        self._bank = pool.span(0, 0, pool.capacity()).unsqueeze(1)
        self._targets: tuple[Tensor, ...] = ()

    @property
    def full(self) -> bool:
        """Whether the next token finds no slot."""
        return self._next >= self._room

    def step(self, token: int) -> Reading:
        """Announce one token."""
        position, index = self._next, len(self.ids)
        self._next = position + 1
        self.ids.append(token)
        self._targets = self._bank.narrow(3, position, 1).unbind()
        contents = self._bank.narrow(3, 0, position + 1).unbind()
        entries = Entries(None, None, position + 1)
        return Reading(
            self._at[:, index : index + 1],
            [position],
            position + 1,
            lambda layer: entries,
            lambda layer: (contents[2 * layer][0], contents[2 * layer + 1][0]),
            self.store,
            causal=True,
            plain=contents,
        )

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write a layer's ``[1, kv_heads, 1, head_dim]``."""
        self._targets[2 * layer].copy_(keys)
        self._targets[2 * layer + 1].copy_(values)

    def to_enter(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens' vocabulary ids and positions, int64 ``[1, steps]`` each."""
        ids = np.array([self.ids], dtype=np.int64)
        return ids, np.arange(self._next - ids.size, self._next)[None]
