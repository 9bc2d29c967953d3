"""Quest and FreeKV: keep every token, read the pages that the query needs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView, Protection
from arborsim.policies.reading import PageReader, Pages


@dataclass(frozen=True)
class Quest(PageReader):
    """Nothing leaves HBM. Each KV head's attention reads the pages with the largest bounds.

    The budget is how many tokens a step reads of each KV head, without the token that it computes.
    The page that is being filled is always read, and so is a pinned prompt.
    """

    dense: int = setting(2, "first layers of the model that read everything", unit="layers", low=0)

    name = "quest"
    tiers = (Tier.HBM,)
    bounded = False

    def choose(self, view: CacheView) -> Plan:
        pages = Pages(view)
        score = np.full((len(view.tier), len(pages)), -np.inf)
        prompt = np.arange(view.num_tokens) < self.pin_prompt * view.prompt_tokens
        for leaf in view.leaves:
            own = pages.of(leaf)
            bounds = pages.bounds(leaf, own).max(axis=1)
            bounds[:, -1] = np.inf  # the page that is being filled
            score[:, own] = np.maximum(score[:, own], bounds)
        score[:, pages.any(prompt)] = np.inf
        taken = pages.best(score, np.full(len(score), view.budget_tokens))
        reads = pages.tokens(taken)
        layers = np.asarray(view.shape.layers)
        if len(layers):
            reads[layers[view.shape.rows(len(reads))] < self.dense] = True
        return Plan(view.tier, reads=reads)


@dataclass(frozen=True)
class FreeKV(PageReader):
    """Pages move to DDR once they leave the window.

    The rest of the budget is for pages that are fetched back.

    DDR keeps its copy of what is fetched, so that giving a page up costs nothing, and a page that
    is chosen again crosses PCIe no second time.  With ``--recall stream`` pages are fetched a layer
    ahead of their use, as published.  With ``stage`` decoding waits for them.
    """

    sinks: int = setting(
        128, "first tokens that stay in HBM, at most a quarter of the budget", unit="tokens", low=0
    )
    recent: int = setting(
        128, "newest tokens that stay in HBM, at most a quarter of the budget", unit="tokens", low=1
    )

    name = "freekv"
    tiers = (Tier.HBM, Tier.DDR)

    def protection(self, budget_tokens: int) -> Protection:
        quarter = budget_tokens // 4
        sinks, recent = min(self.sinks, quarter), max(1, min(self.recent, quarter))
        return Protection(self.pin_prompt, sinks, recent)

    def floor(self, prompt_tokens: int, budget_tokens: int) -> tuple[int, str]:
        needed, made_of = super().floor(prompt_tokens, budget_tokens)
        ends = 2 * (self.page - 1)  # pages leave whole
        return needed + ends, f"{made_of} + ends of pages {ends}"

    def ddr_tokens(self, prompt_tokens: int, new_tokens: int, budget_tokens: int) -> int:
        if prompt_tokens + new_tokens <= budget_tokens:
            return 0  # nothing leaves before the budget is used up, then all but the ends does
        return new_tokens + (0 if self.pin_prompt else prompt_tokens)

    def all_fits(self, view: CacheView) -> bool:
        return False  # what has left HBM does not come back for good

    def next_decision(self, view: CacheView) -> int:
        return max(0, view.budget_tokens - view.num_tokens) // len(view.leaves) + 1

    def choose(self, view: CacheView) -> Plan:
        pages, groups = Pages(view), len(view.tier)
        stays = pages.any(self.protected(view))
        (here,) = pages.tokens(stays[None])
        tiers = np.where(here, Tier.HBM, Tier.DDR).astype(np.int8)[None].repeat(groups, axis=0)
        score = np.full((groups, len(pages)), -np.inf)
        for leaf in view.leaves:
            own = pages.of(leaf)
            own = own[~stays[own]]
            if len(own):
                score[:, own] = np.maximum(score[:, own], self._score(view, pages, leaf, own))
        room = view.budget_tokens - int(np.count_nonzero(here))
        taken = pages.best(score, np.full(groups, room)) | stays
        return Plan(tiers, reads=pages.tokens(taken))

    def _score(self, view: CacheView, pages: Pages, leaf: int, own: np.ndarray) -> np.ndarray:
        """Mean over query heads of the softmax over these pages, float64 ``[groups, m]``."""
        bounds = pages.bounds(leaf, own) * np.sqrt(view.scores["queries"].shape[2])
        weight = np.exp(bounds - bounds.max(axis=2, keepdims=True))
        return np.asarray((weight / weight.sum(axis=2, keepdims=True)).mean(axis=1))
