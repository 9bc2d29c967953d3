"""Keys and values that vary most: the KV-vector family of EpiKV (arXiv:2606.26472, section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arborsim.core.observations import Signal
from arborsim.policies.base import Method
from arborsim.policies.methods.epikv import PAPER, POSITIONS, WINDOW, RollingPolicy
from arborsim.signals.rolling import WHOLE_MODEL, RollingBands
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class KVKey(RollingPolicy):
    """Rank by the rolling mean of the key's variance over the head dimension."""

    name: ClassVar[str] = "kv-key"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "keep tokens around keys that vary most over their channels"
    method: ClassVar[Method] = Method(
        "s(t) = mean_w of mean over layers and heads of var(k_t), the variance over the head "
        "dimension",
        score="key variance, rolling mean",
        deviations=(
            "keys after RoPE; the paper found no difference before it (appendix E)",
            POSITIONS,
            WINDOW,
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEY_VARIANCE})

    def score(self) -> Score:
        return RollingBands(Signal.KEY_VARIANCE, (WHOLE_MODEL,), "mean", self.window)


@dataclass(frozen=True)
class KVValue(RollingPolicy):
    """Rank by the rolling mean of the value's variance over the head dimension."""

    name: ClassVar[str] = "kv-value"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "keep tokens around values that vary most over their channels"
    method: ClassVar[Method] = Method(
        "s(t) = mean_w of mean over layers and heads of var(v_t), the variance over the head "
        "dimension",
        score="value variance, rolling mean",
        deviations=(POSITIONS, WINDOW),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.VALUE_VARIANCE})

    def score(self) -> Score:
        return RollingBands(Signal.VALUE_VARIANCE, (WHOLE_MODEL,), "mean", self.window)
