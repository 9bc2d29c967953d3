"""H2O, TOVA, RaaS and VATP: rank tokens by the attention that they have received."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from arborsim.core.events import TokenRun
from arborsim.core.settings import setting
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import ANY, Protect, ProtectSome, pin_prompt_setting
from arborsim.policies.stream import ChangingPool, MakeCandidates, Stream, StreamPolicy
from arborsim.signals.attention import CumulativeAttention, NewestAttention, ValueWeightedAttention
from arborsim.signals.last_attended import LastAttended
from arborsim.signals.scores import GROUPINGS, Score
from arborsim.signals.vectors import ValueSize


@dataclass(frozen=True)
class H2O(StreamPolicy):
    """Half of the budget for the newest tokens, the rest for the most attended of the others.

    Every layer and KV head keeps tokens of its own, and prompt tokens are evictable too, as
    published.  With `per="shared"` one ranking serves the whole model, attention averaged over
    layers and heads: the EpiKV and memory-hierarchy papers run it so.
    """

    recent_share: float = setting(0.5, "share of the budget for the newest", low=0, high=1)
    sinks: int = setting(0, "protected tokens at the beginning", unit="tokens", low=0)
    per: str = setting(
        "head",
        "what ranks on its own: every captured layer and KV head (as published), every layer, or "
        "the whole model; only the shared ranking runs on traces without vectors",
        choices=GROUPINGS,
    )
    count_prompt: bool = setting(
        True,
        "attention of the prompt's own queries counts, as published; false: sums begin with the "
        "first generated token, as in the code of EpiKV and of the memory-hierarchy paper",
    )

    name = "h2o"

    @cached_property
    def score(self) -> Score:
        return CumulativeAttention(
            count_prompt=self.count_prompt, up_to_constant=True, grouping=self.per
        )

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, self.sinks, ANY, self.recent_share)


@dataclass(frozen=True)
class Tova(StreamPolicy):
    """Evict the token with the lowest attention from the newest query.

    Published per layer, over the mean of its heads.  With ``per=shared`` one ranking serves all
    layers, which runs on traces without vectors.
    """

    per: str = setting("layer", "what keeps tokens of its own", choices=GROUPINGS)

    name = "tova"

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=0)

    @cached_property
    def score(self) -> Score:
        return NewestAttention(up_to_constant=True, grouping=self.per)


@dataclass(frozen=True)
class Raas(StreamPolicy):
    """Least recently used, where attention is use.  The whole prompt stays.

    A page of 16 tokens is used when any of them gets more than `threshold`, as published.
    ``variant=median`` is how the EpiKV paper runs it: a token is used when the newest query pays it
    at least the median.
    """

    pin_prompt: bool = pin_prompt_setting(True)
    variant: str = setting("pages", "when a token counts as used", choices=("pages", "median"))
    page: int = setting(16, "page size, for variant=pages", unit="tokens", low=1)
    threshold: float = setting(
        0.01, "alpha: attention that counts as use, for variant=pages", low=0, high=1
    )

    name = "raas"

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=1, recent_share=ANY)

    @cached_property
    def score(self) -> Score:
        page = self.page if self.variant == "pages" else None
        return LastAttended(page, self.threshold, up_to_constant=True)


@dataclass(frozen=True)
class Vatp(StreamPolicy):
    """Evict the lowest product of attention received and L1 norm of the value.

    The first tokens receive much attention but have small values, so they are protected apart.
    Published per layer and KV head.  ``per=shared`` runs on traces without vectors.
    """

    per: str = setting("head", "what keeps tokens of its own", choices=GROUPINGS)
    recent_share: float = setting(0.5, "share of the budget for the newest", low=0, high=1)
    sinks: int = setting(
        20, "protected first tokens, at most a quarter of the budget", unit="tokens", low=0
    )

    name = "vatp"

    @cached_property
    def score(self) -> Score:
        return ValueWeightedAttention(self.per)

    @cached_property
    def protect(self) -> Protect:
        return ProtectSome(self.pin_prompt, self.sinks, ANY, self.recent_share, sinks_share=0.25)

    def scores(self) -> Mapping[str, Score]:
        """The factors: their product for every token would be made anew by every iteration."""
        return {"score": CumulativeAttention(grouping=self.per), "size": ValueSize(self.per)}

    def rank(self, view: CacheView) -> np.ndarray:
        return np.asarray(view.scores["score"] * view.scores["size"])

    def candidates(self, view: CacheView, run: TokenRun) -> MakeCandidates:
        return partial(ProductPool, view.scores["score"][0], view.scores["size"][0])


class ProductPool(ChangingPool):
    """Candidates that rank by the product of two scores."""

    def __init__(self, scores: np.ndarray, others: np.ndarray, stream: Stream) -> None:
        super().__init__(scores, stream)
        self._others = others

    def values_of(self, known: np.ndarray) -> np.ndarray:
        return np.asarray(self._scores.take(known) * self._others.take(known))
