"""Hidden states of a search as they are captured: outputs of layers, and how they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arborsim_torch.decoder import ObservedCache
from arborsim_torch.token_signals import float16


@dataclass
class _BlockOutputs:
    """The outputs of a block of tokens of one sequence, by layer, as far as they are kept."""

    layer: int = 0  #: the next one
    chosen: list[Tensor] = field(default_factory=list)  #: float16 ``[1, queries, size]``
    #: float32 ``[queries - 1]``, of all tokens but the first
    changes: list[Tensor] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)  #: float32 ``[2, size]``: first and last token


class HiddenStates:
    """Takes outputs of `layers`, in order, and the `changes` of all layers from token to token.

    `add` takes columns of the trace, ``[tokens, seqs, n]``.
    """

    def __init__(
        self, layers: tuple[int, ...], changes: bool, add: Callable[[str, Tensor], None]
    ) -> None:
        self.layers, self._changes, self._add = layers, changes, add
        self.wanted = changes or bool(layers)
        self._block = _BlockOutputs()
        self._last: dict[int, Tensor] = {}  # by node, of its last token
        self._before: Tensor | None = None  # of each leaf's newest token

    def take(self, cache: ObservedCache, hidden: list[Tensor]) -> None:
        """Take the outputs of a decode step, ``[seqs, 1, size]`` by layer."""
        if self.layers:
            self._add_chosen([hidden[layer] for layer in self.layers])
        if not self._changes:
            return
        now = torch.stack(hidden)[:, :, 0].float()  # [layers, seqs, size]
        change = torch.linalg.vector_norm(now - self._states_before(cache, now), dim=-1)
        self._before = now
        self._add("hidden_change", change.T[None])

    def take_output(self, output: Tensor) -> None:
        """Take the next layer's output of a block of one sequence, ``[1, queries, size]``.

        What is made of it is small: outputs of all layers of a long block take gigabytes.
        """
        block = self._block
        if block.layer in self.layers:
            block.chosen.append(float16(output))
        if self._changes:
            now = output[0].float()
            block.changes.append(torch.linalg.vector_norm(now[1:] - now[:-1], dim=-1))
            block.ends.append(torch.stack((now[0], now[-1])))
        block.layer += 1

    def end_block(self, cache: ObservedCache) -> None:
        """Add what was made of the outputs of a block."""
        block, self._block = self._block, _BlockOutputs()
        if block.chosen:
            self._add_chosen(block.chosen)
        if block.changes:
            first, last = torch.stack(block.ends, dim=1)[:, :, None].unbind()
            start = torch.linalg.vector_norm(first - self._states_before(cache, first), dim=-1)
            self._before = last
            change = torch.cat([start, torch.stack(block.changes)], dim=1)  # [layers, queries]
            self._add("hidden_change", change.T[:, None])

    def settle(self, leaves: Sequence[int]) -> None:
        """Keep the leaves' newest states, before the decoder turns to others."""
        if self._before is not None:
            self._last |= {leaf: self._before[:, i].clone() for i, leaf in enumerate(leaves)}
            self._before = None

    def forget(self, node: int) -> None:
        self._last.pop(node, None)

    def _states_before(self, cache: ObservedCache, now: Tensor) -> Tensor:
        """Hidden states before each leaf's newest tokens, ``[layers, seqs, size]``."""
        if self._before is not None:
            return self._before
        found = []
        for seq, leaf in enumerate(cache.leaves):
            known = self._last.get(leaf)
            if known is None:
                known = self._last.get(cache.parent(leaf))
            # The first prompt token has none before it: it changes by 0.
            found.append(now[:, seq] if known is None else known)
        return torch.stack(found, dim=1)

    def _add_chosen(self, outputs: list[Tensor]) -> None:
        """Outputs ``[seqs, queries, size]`` of the `layers`."""
        self._add("hidden", torch.stack(outputs).permute(2, 1, 0, 3).flatten(2))
