"""KIVI (Liu et al. 2024): all but the newest tokens in 2 or 4 bits, and nothing is evicted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.events import Boundary, Event, Prune
from arborsim.core.formats import Format
from arborsim.core.settings import setting
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.policies.base import NEVER, CacheView, Policy, Protection
from arborsim.policies.blocks import ANY, Protect, pin_prompt_setting


@dataclass(frozen=True)
class KIVI(Policy):
    """Quantise keys per channel and values per token, in whole groups of tokens.

    The newest `residual` tokens of every active path, and those older ones that do not fill a group
    yet, stay at full precision.
    """

    bits: int = setting(2, "of a number: 2, 4 or 8", low=2, high=8)
    group: int = setting(
        32, "tokens of a key's channel, and channels of a value, under one scale", low=8, high=128
    )
    residual: int = setting(128, "newest tokens at full precision", unit="tokens", low=1)
    outliers: float = setting(
        0.0, "share of each vector in 16 bits, at least one number; KVQuant: 0.01", low=0, high=0.5
    )
    pin_prompt: bool = pin_prompt_setting(False)

    name = "kivi"
    tiers = (Tier.HBM, Tier.HBM_QUANTISED)
    bounded = False
    uses_budget = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4, 8):
            raise UsageError(f"{self.name}: no numbers have {self.bits} bits here: use 2, 4 or 8")

    @cached_property
    def formats(self) -> tuple[Format, ...]:
        return (Format(self.bits, self.group, "channel", 2, 2, self.outliers),)

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.residual, recent_share=ANY)

    def protection(self, budget_tokens: int) -> Protection:
        return self.protect.protection(budget_tokens)

    def next_decision(self, view: CacheView) -> int:
        full = np.asarray(view.tier[0] == Tier.HBM)
        if self.pin_prompt:
            full[: view.prompt_tokens] = False
        paths = [view.tree.path(leaf) for leaf in view.leaves]
        # The iteration after which a token is in no leaf's window any more.
        free = np.zeros(view.num_tokens, dtype=np.int64)
        for path in paths:
            last = np.arange(1, len(path) + 1) - len(path) + self.residual
            free[path] = np.maximum(free[path], last)
        due = NEVER
        for path in paths:
            old = free[path[full[path]]]
            if len(old) < self.group:  # tokens yet to be born complete it
                due = min(due, self.residual + self.group - len(old))
            else:
                due = min(due, int(np.partition(old, self.group - 1)[self.group - 1]))
        return max(1, due)

    def decide(self, view: CacheView, event: Event) -> Plan | None:
        if isinstance(event, Boundary | Prune):
            return None
        paths = [view.tree.path(leaf) for leaf in view.leaves]
        free = np.asarray(view.tier[0] == Tier.HBM)
        if self.pin_prompt:
            free[: view.prompt_tokens] = False
        for path in paths:
            free[path[max(0, len(path) - self.residual) :]] = False
        tiers = view.tier.copy()
        for path in paths:
            old = path[free[path]]
            whole = old[: len(old) - len(old) % self.group]
            tiers[:, whole] = Tier.HBM_QUANTISED
            free[whole] = False
        return Plan(tiers) if (tiers != view.tier).any() else None
