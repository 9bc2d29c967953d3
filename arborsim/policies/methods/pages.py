"""Quest and FreeKV: keep every token, read the pages that the query needs.

A `PageReader` looks at the query of the newest token of every active path, and at the bounds of the
pages on it (`arborsim.signals.pages`).  Pages are then taken by score until the room is used up.
Among equal scores the page with the older tokens loses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from arborsim.core.events import Decode, Event, Prefill, Transition
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import CacheView, LiveHints, Policy, Protection
from arborsim.policies.blocks import pin_prompt_setting
from arborsim.signals.pages import PageBounds, PageOf, Queries
from arborsim.signals.scores import Score, rounded


class Pages:
    """The pages on the active paths of a view."""

    def __init__(self, view: CacheView) -> None:
        self.view = view
        self.path = view.path
        page = view.scores["page"][0, self.path]
        if len(view.leaves) == 1:  # pages rise along a path
            first = np.flatnonzero(np.diff(page, prepend=-1))
            self.number, self.sizes = page[first], np.diff(first, append=len(page))
            self.at = np.repeat(np.arange(len(first)), self.sizes)
        else:
            self.number, self.at, self.sizes = np.unique(
                page, return_inverse=True, return_counts=True
            )

    def __len__(self) -> int:
        return len(self.number)

    def any(self, mask: np.ndarray) -> np.ndarray:
        """Pages on the paths with a token in `mask`, bool ``[tokens]``, as bool ``[pages]``."""
        return np.bincount(self.at[mask[self.path]], minlength=len(self)) > 0

    def tokens(self, taken: np.ndarray) -> np.ndarray:
        """The tokens on the paths that are in these pages, of bool ``[groups, pages]``."""
        # Along one path the tokens of a page follow one another, and repeating is faster.
        one = len(self.view.leaves) == 1
        wide = np.repeat(taken, self.sizes, axis=1) if one else taken[:, self.at]
        if len(self.path) == self.view.num_tokens:
            return wide
        found = np.zeros((len(taken), self.view.num_tokens), dtype=bool)
        found[:, self.path] = wide
        return found

    def of(self, leaf: int) -> np.ndarray:
        """Those on the path to a leaf, the oldest first: indices ``[m]``."""
        if len(self.view.leaves) == 1:
            return np.arange(len(self))
        own = self.view.scores["page"][0, self.view.tree.path(leaf)]
        return np.asarray(np.searchsorted(self.number, own[np.diff(own, prepend=-1) > 0]))

    def bounds(self, leaf: int, pages: np.ndarray) -> np.ndarray:
        """Upper bounds of the products of the leaf's newest query with the keys of these pages.

        One for every query head that reads a group: float64 ``[groups, heads, m]``.
        """
        view, number = self.view, self.number[pages]
        newest = view.tree.path(leaf)[-1]
        query = view.scores["queries"][:, newest].astype(np.float64)
        query = query.reshape(len(view.tier), -1, query.shape[1])
        known = view.scores["bounds"]
        if len(number) and number[-1] - number[0] + 1 == len(number):  # no copy
            known = known[:, number[0] : number[-1] + 1]
        else:
            known = known[:, number]
        wide = np.concatenate([np.minimum(query, 0.0), np.maximum(query, 0.0)], axis=2)
        return rounded(np.matmul(wide, known.transpose(0, 2, 1)))

    def best(self, score: np.ndarray, room: np.ndarray) -> np.ndarray:
        """The pages with the largest scores, one after the other as long as there is room.

        Scores are ``[groups, pages]``, room is in tokens, ``[groups]``.  Pages at -inf are never
        taken, those at inf always.  Bool ``[groups, pages]``.
        """
        newest = np.zeros(len(self), dtype=np.int64)
        newest[self.at] = self.path  # tokens rise: the last one stays
        latest = np.argsort(-newest)
        order = latest[np.argsort(-score[:, latest], axis=1, kind="stable")]
        ordered = np.take_along_axis(score, order, axis=1)
        fits = np.cumsum(self.sizes[order], axis=1) <= room[:, None]
        taken = np.zeros(score.shape, dtype=bool)
        np.put_along_axis(taken, order, (fits & (ordered > -np.inf)) | (ordered == np.inf), axis=1)
        return taken


@dataclass(frozen=True)
class PageReader(LiveHints, Policy):
    """Decides after every iteration which pages the next one reads."""

    page: int = setting(16, "of a page", unit="tokens", low=1)
    pin_prompt: bool = pin_prompt_setting(False)

    fused = True  # queries and keys, but no probabilities of attention
    grouping = "head"

    @property
    def bounds_page(self) -> int:
        return self.page

    def scores(self) -> Mapping[str, Score]:
        page = self.page
        return {"queries": Queries(1), "page": PageOf(page), "bounds": PageBounds(page)}

    def protection(self, budget_tokens: int) -> Protection:
        return Protection(self.pin_prompt)

    @abstractmethod
    def choose(self, view: CacheView) -> Plan:
        """The plan of what to read, where it does not all fit the budget."""

    def all_fits(self, view: CacheView) -> bool:
        """Whether nothing has to be chosen."""
        return len(view.path) <= view.budget_tokens

    def next_decision(self, view: CacheView) -> int:
        headroom = view.budget_tokens - len(view.path)
        return max(0, headroom) // len(view.leaves) + 1

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if not isinstance(event, Prefill | Decode | Transition):
            return None
        if view.num_tokens <= view.budget_tokens:  # nor did it ever have to choose
            return None
        if self.all_fits(view):
            return Plan(view.tier)
        return self.choose(view)


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
