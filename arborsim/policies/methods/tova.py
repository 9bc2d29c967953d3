"""TOVA: what the newest query pays least attention goes (Oren et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from arborsim.core.settings import setting
from arborsim.policies.blocks import Protect
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.attention import NewestAttention
from arborsim.signals.scores import GROUPINGS, Score


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
