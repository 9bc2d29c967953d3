"""The queries of tokens, for policies that compute attention of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.tree import GrowingArray, ThoughtTree
from arborsim.signals.scores import ScoreState


@dataclass(frozen=True)
class Queries:
    """Scaled queries of the captured layers; float32 ``[layers x heads, tokens, head_dim]``.

    The product with a post-RoPE key is the logit.  Heads are in order, so the query heads that read
    KV head ``g`` (layer by layer) are the ``g``-th of as many equal parts as there are KV heads.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _QueryState()


class _QueryState:
    def __init__(self) -> None:
        self._kept: GrowingArray | None = None  # how many heads there are shows with the first

    @property
    def values(self) -> np.ndarray:
        assert self._kept is not None, "no token has been observed"
        return self._kept.values.swapaxes(0, 1)

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        rows = run.observed.head_attention
        assert rows is not None, "the reader was not asked for the attention of heads"
        fresh = np.stack([rows.query(i) for i in range(run.num_tokens)])
        fresh = fresh.reshape(len(fresh), -1, fresh.shape[-1])
        if self._kept is None:
            self._kept = GrowingArray(np.float32, row=fresh.shape[1:])
        self._kept.extend(fresh)

    def observe(self, step: int) -> None:
        pass
