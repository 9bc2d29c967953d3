"""TOVA: what the newest query pays least attention goes (Oren et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from arborsim.core.settings import setting
from arborsim.policies.blocks import Protect
from arborsim.policies.methods import same_as_kvpress
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
    paper = "Oren et al. 2024, arXiv:2401.06104"
    official = same_as_kvpress("TOVAPress")
    summary = "evict what the newest query attends to least"
    formula = "s(i) = a_t(i), t the newest query, mean over heads"
    deviations = (
        "on a tree, leaves that decode together all are newest: a token that several of them "
        "see gets the mean",
        "per=head and per=shared are not in the paper, which ranks per layer",
    )

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=0)

    @cached_property
    def score(self) -> Score:
        return NewestAttention(up_to_constant=True, grouping=self.per)
