"""How sparse the attention of a token is (ThinKV)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.tree import ThoughtTree
from arborsim.signals.scores import FrozenState, ScoreState


@dataclass(frozen=True)
class AttentionSparsity:
    """Share of a row's entries under a part of its maximum, mean over captured layers and heads.

    Ramachandran et al. 2025, arXiv:2510.01290.  Heads whose softmax overflowed are left out.

    Parameters
    ----------
    part : float
        Of the row's maximum; the paper's 1 %.
    """

    part: float = 0.01
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})

    def start(self, layers: int) -> ScoreState:
        return _SparsityState(self.part)


def row_sparsity(row: np.ndarray, part: float) -> float:
    """Sparsity of one token's rows ``[layers, heads, positions]``; 0 if all are NaN."""
    heads = row.reshape(-1, row.shape[-1])
    heads = heads[~np.isnan(heads).any(axis=1)]
    small = np.count_nonzero(heads < np.float32(part) * heads.max(axis=1, keepdims=True))
    return float(small / max(1, heads.size))


class _SparsityState(FrozenState):
    def __init__(self, part: float) -> None:
        super().__init__()
        self._part = part

    def begin(self, run: TokenRun, tree: ThoughtTree, generated: bool) -> None:
        rows = run.observed.head_attention
        assert rows is not None, "the reader was not asked for the attention of heads"
        fresh = [row_sparsity(rows.row(i), self._part) for i in range(run.num_tokens)]
        self._values.extend(np.array(fresh))
