"""SnapKV: compress the prompt once, by what its last queries look at (Li et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Event, Prefill
from arborsim.core.observations import Signal
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView, Method, Policy, Protection
from arborsim.policies.blocks import lowest
from arborsim.signals.attention import PromptAttention
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class SnapKV(Policy):
    """After the prefill, keep the last `window` prompt tokens and those they attend to most.

    The budget is what the prompt may keep.  What is generated stays, whatever its length: the
    cache outgrows the budget.  There is one stream only, the prompt, on trees too.
    """

    per: str = setting("head", "what keeps tokens of its own", choices=("shared", "layer", "head"))
    window: int = setting(64, "last prompt tokens: they vote, and stay", unit="tokens", low=1)
    kernel: int = setting(5, "width of the pooling; odd", unit="tokens", low=1)

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "Li et al. 2024, arXiv:2404.14469"
    summary: ClassVar[str] = "compress the prompt by the attention of its last queries, once"
    method: ClassVar[Method] = Method(
        "s(i) = avgpool over `kernel` tokens i of the sum over the last W prompt queries of a(i) "
        "(Eqs. 1-3)",
        score="attention from the end of the prompt, pooled",
        schedule="once, after the prefill",
        deviations=(
            "probabilities are averaged over the query heads that share a KV head",
            "a budget below the window keeps the newest tokens of the window",
        ),
    )
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEAD_ATTENTION})
    fused: ClassVar[bool] = False
    bounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise UsageError(f"{self.name}: kernel must be odd, not {self.kernel}")

    @property
    def grouping(self) -> str:
        return self.per

    def reads(self) -> frozenset[Signal]:
        return PromptAttention(grouping=self.per).needs

    def scores(self) -> dict[str, Score]:
        return {"votes": PromptAttention(self.window, self.per)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(recent=min(self.window, budget_tokens))

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        excess = view.num_tokens - view.budget_tokens
        if not isinstance(event, Prefill) or excess <= 0:
            return None
        before = view.num_tokens - self.protection(view.budget_tokens).recent
        pooled = average_pool(view.scores["votes"][:, :before], self.kernel)
        tiers = view.tier.copy()
        for group, votes in enumerate(pooled):
            tiers[group, lowest(votes, excess)] = Tier.EVICTED
        return Plan(tiers)


def average_pool(values: np.ndarray, kernel: int) -> np.ndarray:
    """Mean over `kernel` neighbours, the missing ones at both ends counting as 0.

    Parameters
    ----------
    values : float64 ``[groups, n]``
    kernel : int
        Odd.

    Returns
    -------
    float64 ``[groups, n]``
    """
    reach = kernel // 2
    padded = np.pad(values, ((0, 0), (reach, reach)))
    total = np.zeros_like(values)
    for shift in range(kernel):  # in a fixed order, so that equal neighbourhoods tie
        total += padded[:, shift : shift + values.shape[1]]
    return np.asarray(total / kernel)
