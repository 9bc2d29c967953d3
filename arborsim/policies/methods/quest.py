"""Quest: keep everything, read the pages that the query needs (Tang et al., ICML 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView
from arborsim.policies.reading import PageReader, Pages


@dataclass(frozen=True)
class Quest(PageReader):
    """Nothing leaves HBM; of each KV head, attention reads pages with the largest bounds.

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
