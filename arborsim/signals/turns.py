"""How far the residual stream turns from token to token: cosines of hidden vectors.

What EpiKV measures is the length of a change (`arborsim.signals.rolling`).  Here it is the angle:
between successive hidden vectors of a layer, or between its successive changes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.signals.rolling import EPSILON, Band, RollingBands, RollingState
from arborsim.signals.scores import Score, ScoreState, norms, sum_in_order

TURNS = ("state", "change")
_AT_ONCE = 256  # vectors to widen at once


@dataclass(frozen=True)
class HiddenTurn(Score):
    """``1 - cos`` of hidden vectors at one layer, z-scored over the token's own path.

    Of the vectors of a token and the one before it ("state"), or of the changes that led to them
    ("change"); 0 where there are not as many tokens, or a vector is zero.  The layer is the
    recorded one nearest to the one asked for.  Prompt tokens count as in `RollingBands`.
    """

    turn: str = setting("state", "what turns: the hidden state, or its change", choices=TURNS)
    layer: float = setting(10 / 32, "layer", unit="share of the depth", low=0, high=1)
    window: int = setting(64, "trailing window", unit="tokens", low=2, high=65536)
    epsilon: float = setting(EPSILON, "added to the standard deviation", low=1e-12, high=1)
    prompt: bool = False
    needs = frozenset({Signal.HIDDEN})

    @property
    def about(self) -> str:
        return f"turn of the hidden {self.turn}, z-scored"

    def with_prompt(self) -> Score:
        return replace(self, prompt=True)

    @property
    def band(self) -> Band:
        """Its one layer."""
        return Band(self.layer, self.layer)

    def hidden_layers(self, layers: int) -> frozenset[int]:
        return frozenset({self.band.layers(layers)[0]})

    def start(self, layers: int) -> ScoreState:
        return _TurnState(self, layers)


class _TurnState(RollingState):
    def __init__(self, spec: HiddenTurn, layers: int) -> None:
        what = Signal.HIDDEN, (spec.band,), "z", spec.window, spec.epsilon, spec.prompt
        super().__init__(RollingBands(*what), layers)
        self._layer, _ = spec.band.layers(layers)
        self._back = 1 + TURNS.index(spec.turn)  # vectors before a token that its turn is made of
        self._newest: dict[int, np.ndarray] = {}  # of a node's tokens and those before them

    def streams(self, run: TokenRun) -> list[np.ndarray]:
        assert run.observed.hidden is not None, "the reader was not asked for hidden vectors"
        vectors = run.observed.hidden.nearest(self._layer)
        width, fresh = len(run.leaves), np.zeros(run.num_tokens)
        for w, leaf in enumerate(run.leaves):
            own = vectors[w::width]
            before = self._before(leaf) if self._generated else own[:0]
            if self._generated or self._spec.prompt:  # else the windows leave it out
                fresh[w::width] = self._turns(before, own)
            path = np.concatenate([before, own[-self._back :]])
            self._newest[leaf] = path[-self._back :]
        return [fresh]

    def _before(self, leaf: int) -> np.ndarray:
        """The newest vectors on the path to `leaf`, float16 ``[at most back, size]``."""
        while leaf not in self._newest:  # the prompt is
            leaf = self._tree.nodes[leaf].parent
        return self._newest[leaf]

    def _turns(self, before: np.ndarray, own: np.ndarray) -> np.ndarray:
        path = np.concatenate([before, own])
        parts = [np.zeros(self._back - len(before))]  # of tokens that have too few before them
        for first in range(0, len(path) - self._back, _AT_ONCE):
            some = path[first : first + _AT_ONCE + self._back].astype(np.float64)
            parts.append(_angles(np.diff(some, axis=0) if self._back > 1 else some))
        return np.concatenate(parts)[: len(own)]


def _angles(vectors: np.ndarray) -> np.ndarray:
    """``1 - cos`` of each vector ``[n, size]`` and the one before it; float64 ``[n - 1]``."""
    length = norms(vectors)
    both = length[1:] * length[:-1]
    product = sum_in_order(vectors[1:] * vectors[:-1])
    return np.where(both > 0, 1 - product / np.where(both > 0, both, 1.0), 0.0)
