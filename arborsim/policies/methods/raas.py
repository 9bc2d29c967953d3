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

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=1, recent_share=ANY)

    @cached_property
    def score(self) -> Score:
        page = self.page if self.variant == "pages" else None
        return LastAttended(page, self.threshold, up_to_constant=True)
