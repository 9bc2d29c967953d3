"""RaaS: evict what has not been attended to for longest (Hu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from arborsim.core.settings import setting
from arborsim.policies.blocks import ANY, Protect, pin_prompt_setting
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.last_attended import LastAttended
from arborsim.signals.scores import Score


@dataclass(frozen=True)
class Raas(StreamPolicy):
    """Least recently used, where attention is use; the whole prompt stays.

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
    paper = "Hu et al. 2025, ACL Findings; as run by EpiKV, arXiv:2606.26472"
    official = (
        "stevenkolawole/epiphany-kv-cache@d424208: literally, RaaSEviction on the rows of 22 live "
        "searches (chains of 12 lines, budgets of 91 and 110 tokens of about 160): 1,441 of 1,441 "
        "decisions are the same, with ties broken as here"
    )
    summary = "evict what attention has not refreshed for longest"
    formula = (
        "s(i) = last iteration t with max of a_t over the page of i > alpha (pages), or with "
        "a_t(i) >= the lower median of a_t over generated tokens (median)"
    )
    deviations = (
        "attention is averaged over layers and heads: one ranking for the whole model",
        "replayed, readable tokens are compared by the attention of a recording, which attends to "
        "evicted ones too",
        "median: on sparse recordings the positions that a row does not list share one value, "
        "which often is the median: then nearly every token counts as used",
        "pages: the highest attention of a page stands for the attention to its representative "
        "key; the oldest page gives up its tokens one at a time, so that the budget is used up",
    )

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=1, recent_share=ANY)

    @cached_property
    def score(self) -> Score:
        page = self.page if self.variant == "pages" else None
        return LastAttended(page, self.threshold, up_to_constant=True)
