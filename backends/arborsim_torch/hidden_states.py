"""Hidden states of a search as they are captured: outputs of layers, and how they change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata, Span
from arborsim_torch.decoder import ObservedCache
from arborsim_torch.tiers.copies import to_device
from arborsim_torch.token_signals import float16


@dataclass
class _BlockOutputs:
    """The outputs of a block of tokens, by layer, as far as they are kept."""

    spans: Sequence[Span]
    before: Tensor  #: int64 ``[queries]``: what each token follows; itself if not of the block
    edges: Tensor  #: int64 ``[2 spans]``: first tokens, then last ones
    layer: int = 0  #: the next one
    chosen: list[Tensor] = field(default_factory=list)  #: float16 ``[1, queries, size]``
    changes: list[Tensor] = field(default_factory=list)  #: float32 ``[queries]``
    ends: list[Tensor] = field(default_factory=list)  #: float32 ``[2 spans, size]``, at the edges

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> _BlockOutputs:
        spans, device = metadata.spans, metadata.at.device
        before = np.arange(metadata.queries) - 1
        first = np.array([span.first for span in spans])
        before[first] = [s.first if s.follows < 0 else s.follows for s in spans]
        edges = np.concatenate([first, [span.stop - 1 for span in spans]])
        return cls(spans, to_device(before, device), to_device(edges, device))


class HiddenStates:
    """Takes outputs of `layers`, in order, and the `changes` of all layers from token to token.

    `add` takes columns of the trace, ``[tokens, seqs, n]``.
    """

    def __init__(
        self, layers: tuple[int, ...], changes: bool, add: Callable[[str, Tensor], None]
    ) -> None:
        self.layers, self._changes, self._add = layers, changes, add
        self.wanted = changes or bool(layers)
        self._block: _BlockOutputs | None = None
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

    def begin_block(self, metadata: AttentionMetadata) -> None:
        """A block comes: `take_output` will be given what its layers put out."""
        self._block = _BlockOutputs.of(metadata)

    def take_output(self, output: Tensor) -> None:
        """Take the next layer's output of a block, ``[1, queries, size]``.

        What is made of it is small: outputs of all layers of a long block take gigabytes.
        """
        block = self._block
        assert block is not None, "no block has begun"
        if block.layer in self.layers:
            block.chosen.append(float16(output))
        if self._changes:
            now = output[0].float()
            block.changes.append(torch.linalg.vector_norm(now - now[block.before], dim=-1))
            block.ends.append(now[block.edges])
        block.layer += 1

    def end_block(self, cache: ObservedCache) -> None:
        """Add what was made of the outputs of a block."""
        block, self._block = self._block, None
        assert block is not None, "no block has begun"
        if block.chosen:
            self._add_chosen(block.chosen)
        if not block.changes:
            return
        change = torch.stack(block.changes)  # [layers, queries]
        first, last = torch.stack(block.ends).unflatten(1, (2, -1)).unbind(1)
        for i, span in enumerate(block.spans):
            known = self._known(cache, span.node)
            if span.follows < 0 and known is not None:
                change[:, span.first] = torch.linalg.vector_norm(first[:, i] - known, dim=-1)
            self._last[span.node] = last[:, i]
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
            known = self._known(cache, leaf)
            # The first prompt token has none before it: it changes by 0.
            found.append(now[:, seq] if known is None else known)
        return torch.stack(found, dim=1)

    def _known(self, cache: ObservedCache, node: int) -> Tensor | None:
        """States of the newest token of a node, or of what it follows, ``[layers, size]``."""
        known = self._last.get(node)
        return self._last.get(cache.parent(node)) if known is None else known

    def _add_chosen(self, outputs: list[Tensor]) -> None:
        """Outputs ``[seqs, queries, size]`` of the `layers`."""
        self._add("hidden", torch.stack(outputs).permute(2, 1, 0, 3).flatten(2))
