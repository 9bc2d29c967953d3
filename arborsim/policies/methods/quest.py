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
    paper = "Quest, Tang et al. 2024, arXiv:2406.10774"
    official = (
        "mit-han-lab/Quest@01c1623: literally, scores of pages as its evaluation code computes "
        "them and pages as its kernels choose them, the last one always, on 60 of 60 random caches "
        "of one layer (80 to 480 tokens, one query head per KV head, the same query)"
    )
    summary = "keep every token in HBM, read the pages that matter to the query"
    formula = (
        "score of a page = max over the group's query heads of sum over channels of "
        "max(q_c min_c, q_c max_c), min and max over the keys of the page (Algorithm 1)"
    )
    words = {
        "score": "bounds of pages of keys",
        "allocate": "pages until the budget of tokens to be read is used up, per KV head",
        "place": "all stay in HBM, the best pages are read",
        "schedule": "every iteration, once a path is longer than the budget",
        "granularity": "page",
        "tiers": (Tier.HBM,),
    }
    deviations = (
        "pages are chosen with the query of the token just decoded, one step before they are read, "
        "because decisions fall between steps; docs/decisions.md says what that costs",
        "the query heads of a KV head choose together, by the largest of their bounds (the paper "
        "has one query head per KV head)",
        "the budget is a number of tokens: a page that is not full counts what it holds",
        "on a tree, all active leaves choose together what their paths share",
    )
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
