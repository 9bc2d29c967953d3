"""PyramidKV: the deeper a layer, the less of the cache it keeps (Cai et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.settings import setting
from arborsim.policies.base import CacheView
from arborsim.policies.blocks import Allocation
from arborsim.policies.methods.snapkv import Voting
from arborsim.policies.placement import Pool


@dataclass(frozen=True)
class Pyramid(Pool):
    """The shares of layers fall linearly with their depth; on average it is the budget.

    Of a budget ``C`` and a window ``W`` (with a prompt that is pinned, and no smaller than the
    number of leaves), the last layer keeps ``W + (C - W) / beta``, the first as much more than
    ``C`` as that is less.  Where the first
    cannot fill its share yet, the others have what it leaves: the pyramid grows steep as the cache
    grows.
    """

    window: int = 64
    beta: int = 20
    pin_prompt: bool = False

    about = "shares that fall with depth"

    def headroom(self, view: CacheView) -> int:
        return view.budget_tokens - view.in_hbm  # a layer may exceed its share where others do not

    def shares(self, view: CacheView) -> np.ndarray:
        budget, layer = view.budget_tokens, view.shape.rows(len(view.tier))
        layers = int(layer[-1]) + 1
        newest = max(min(self.window, budget // 2), len(view.leaves))  # one of each leaf stays
        stays = newest + (view.prompt_tokens if self.pin_prompt else 0)
        base = budget - stays
        most = min(2 * base - base // self.beta, view.fullest - stays)
        if layers == 1 or most <= base:  # all fits
            return super().shares(view)
        # What the first i layers keep together beyond what stays, rounded up: shares add up.
        i = np.arange(layers + 1)
        fall = (2 * most - 2 * base) * i * (i - 1) // (2 * (layers - 1))
        return np.asarray((stays + np.diff(most * i - fall))[layer])


@dataclass(frozen=True)
class PyramidKV(Voting):
    """SnapKV with budgets that fall with depth, while tokens are generated too."""

    beta: int = setting(20, "the last layer keeps 1/beta of the budget beyond the window", low=1)

    name = "pyramidkv"

    @cached_property
    def allocate(self) -> Allocation:
        return Pyramid(self.adaptation, self.window, self.beta, self.pin_prompt)
