"""Fidelity: how far a policy moves the next token's distribution, as a request and its results.

A document is a prompt and what follows it.  The model reads it token by token under a policy, and
its distribution after every token is compared with the one under full retention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from arborsim.core.tiers import Budget
from arborsim.play.backends import LiveRequest, Observer
from arborsim.play.episode import Cell

#: A line of a file of prompts, by what followed it, if that is known.
FOLLOWED = '{"prompt": "...", "tokens": "..."}'
#: Parts of a document, equal in judged tokens, by which results are distinguished.
PARTS = 8
TAIL = 0.95  #: the quantile of a document's divergences that is kept besides their mean


@dataclass(frozen=True, kw_only=True)
class FidelityRequest(LiveRequest):
    """Documents that a model reads under every cell.

    Those of `prompts` are what follows each prompt: its tokens if the file has them, else what
    full retention generates, `max_tokens` at most.  A model with a task needs neither `texts` nor
    `prompts`: it follows its own problems.
    """

    texts: tuple[Path, ...] = ()  #: UTF-8 files, cut into documents
    document_tokens: int = 1024  #: of a document of a text, at most
    #: How much of a document of a text is its prompt: computed at once, and not judged
    prefill: Budget = field(default_factory=lambda: Budget.parse("0.25"))
    masked: bool = False  #: mask what is evicted: the same distributions, no bytes


@dataclass(frozen=True)
class FidelityResult:
    """One document under one cell.

    A token is *judged* if it was predicted from a cache that the policy had decided on: all but
    the prompt and the token after it.  Tuples hold a figure for each of `PARTS` parts.
    """

    episode: int  #: number of the document
    document: str
    policy: str
    budget: str
    budget_tokens: int
    tokens: int  #: of the document, prompt included
    counts: tuple[int, ...] = ()  #: judged tokens
    agree: tuple[int, ...] = ()  #: of these, those whose most probable token is full retention's
    kl: tuple[float, ...] = ()  #: mean KL(full || policy), nats; 0 for a part without tokens
    nll: tuple[float, ...] = ()  #: mean negative log-probability of the text's own token, nats
    full_nll: tuple[float, ...] = ()  #: the same under full retention
    kl_tail: float = 0.0  #: `TAIL` quantile of the divergences, nats
    peak_kv_bytes: int = 0  #: most that keys and values took in HBM; 0 if tokens were masked
    infeasible: str = ""  #: why the budget cannot hold the document; empty if it could

    @property
    def judged(self) -> int:
        """Tokens in all parts."""
        return sum(self.counts)


class FidelityObserver(Observer, Protocol):
    """Called while documents are read."""

    def wants(self, episode: int, cell: Cell) -> bool:
        """Whether this result is still missing (a resumed run has some)."""

    def finished(self, result: FidelityResult) -> None:
        """A document is complete under a cell."""


@dataclass(frozen=True)
class Judged:
    """The figures of a document's judged tokens, an entry each."""

    kl: Sequence[float]
    agrees: Sequence[bool]
    nll: Sequence[float]
    full_nll: Sequence[float]

    def figures(self) -> dict[str, tuple[float, ...] | tuple[int, ...] | float]:
        """Fields of a `FidelityResult`."""
        part = np.arange(len(self.kl)) * PARTS // max(1, len(self.kl))
        counts = np.bincount(part, minlength=PARTS)

        def sums(values: Sequence[float]) -> np.ndarray:
            return np.bincount(part, np.asarray(values, dtype=np.float64), PARTS)

        def means(values: Sequence[float]) -> tuple[float, ...]:
            return tuple((sums(values) / np.maximum(1, counts)).tolist())

        return {
            "counts": tuple(counts.tolist()),
            "agree": tuple(sums(self.agrees).astype(int).tolist()),
            "kl": means(self.kl),
            "nll": means(self.nll),
            "full_nll": means(self.full_nll),
            "kl_tail": float(np.quantile(self.kl, TAIL)) if len(self.kl) else 0.0,
        }
