"""Every term of a search's time: which formula it comes from, and what ran behind something else.

The terms add up to `TimeSplit.total_s`.  Where computing and reading memory overlap, the longer of
both counts in full and the shorter only with what the machine does not hide of it; what is hidden
stands beside it and is no part of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arborsim.machine.cost_records import Array, DecodeCost, PrefillCost

if TYPE_CHECKING:
    from arborsim.machine.iterations import IterationCosts

#: All terms in the order in which they are shown.
TERMS = (
    "prefill: matrix products",
    "prefill: attention",
    "prefill: weights and KV read",
    "prefill: per layer and step",
    "decode: FLOPs",
    "decode: weights read",
    "decode: KV read",
    "decode: dequantise",
    "decode: per layer",
    "decode: per step and sequence",
    "policy: decisions",
    "policy: turns",
    "policy: attention matrices of the prefill",
    "policy: attention rows",
    "policy: quantising",
    "policy: compaction",
    "transfers: waiting for DDR and back",
    "transfers: streamed",
    "transfers: near",
    "transfers: ondemand",
    "rehydration",
    "link busy with moves: to DDR",
    "link busy with moves: from DDR",
)
BACKGROUND = "transfers: waiting for DDR and back"


@dataclass(frozen=True)
class Term:
    """A part of a search's time.

    Attributes
    ----------
    name : str
        One of `TERMS`.
    seconds : float
        What it adds to the total.
    hidden_s : float
        What of it ran behind something else; not part of the total.  Of ``link busy`` how long the
        link was in use, waited for or not; these terms add nothing.
    """

    name: str
    seconds: float
    hidden_s: float = 0.0


class Terms:
    """Collects the terms of one search."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(TERMS, 0.0)
        self._hidden = dict.fromkeys(TERMS, 0.0)

    def add(self, name: str, seconds: float, hidden_s: float = 0.0) -> None:
        """`name` took longer."""
        self._seconds[name] += seconds
        self._hidden[name] += hidden_s

    def prefill(self, cost: PrefillCost) -> None:
        """The prompt has been computed."""
        compute_s = cost.matrices_s + cost.attention_s
        computing, reading = _shares(compute_s, cost.memory_s, cost.overlap)
        self._split("prefill: matrix products", cost.matrices_s, computing)
        self._split("prefill: attention", cost.attention_s, computing)
        self._split("prefill: weights and KV read", cost.memory_s, reading)
        self.add("prefill: per layer and step", cost.overhead_s)

    def iterations(self, costs: IterationCosts, recall: str) -> None:
        """A run of decode iterations."""
        steps = len(costs.policy_s)
        self._decode(costs.decode, steps)
        rows_s = float(np.sum(costs.rows_s))
        self.add("policy: attention rows", rows_s)
        self.add("policy: decisions", float(costs.policy_s.sum()) - rows_s)
        if costs.beside is not None:
            name = {"stream": "transfers: streamed"}.get(recall, f"transfers: {recall}")
            exposed_s = float(costs.beside.exposed_s.sum())
            self.add(name, exposed_s, float(costs.beside.total_s.sum()) - exposed_s)

    def _decode(self, cost: DecodeCost, steps: int) -> None:
        computing, reading = _shares(cost.flops_s, cost.weights_s + cost.kv_s, cost.overlap)
        for name, seconds, share in (
            ("decode: FLOPs", cost.flops_s, computing),
            ("decode: weights read", cost.weights_s, reading),
            ("decode: KV read", cost.kv_s, reading),
        ):
            self._split(name, np.broadcast_to(np.asarray(seconds), steps), share)
        dequantise_s = np.broadcast_to(np.asarray(cost.dequantise_s), steps)
        self.add("decode: dequantise", float(dequantise_s.sum()))
        self.add("decode: per layer", cost.layers_s * steps)
        self.add("decode: per step and sequence", cost.step_s * steps)

    def _split(self, name: str, seconds: Array, shown: Array) -> None:
        """The share `shown` of the seconds counts, the rest is hidden."""
        counted = float(np.sum(seconds * shown))
        self.add(name, counted, float(np.sum(seconds)) - counted)

    def close(
        self, background_hidden_s: float, down_s: float = 0.0, up_s: float = 0.0
    ) -> tuple[Term, ...]:
        """All terms that took any time, in the order of `TERMS`.

        Parameters
        ----------
        background_hidden_s : float
            Transfers in the background that nobody waited for.
        down_s, up_s : float
            How long each direction of the link carried moves.
        """
        hidden = {**self._hidden, BACKGROUND: background_hidden_s}
        hidden |= {TERMS[-2]: down_s, TERMS[-1]: up_s}
        found = (Term(name, self._seconds[name], max(0.0, hidden[name])) for name in TERMS)
        return tuple(term for term in found if term.seconds or term.hidden_s)


def _shares(compute_s: Array, memory_s: Array, overlap: float) -> tuple[Array, Array]:
    """What of computing and of reading memory is not hidden behind the other."""
    computes = np.asarray(compute_s) >= np.asarray(memory_s)
    return np.where(computes, 1.0, 1.0 - overlap), np.where(computes, 1.0 - overlap, 1.0)


def total(searches: Iterable[Iterable[Term]]) -> tuple[Term, ...]:
    """The terms of several searches, added up."""
    seconds: dict[str, list[float]] = {name: [] for name in TERMS}
    hidden: dict[str, list[float]] = {name: [] for name in TERMS}
    for terms in searches:
        for term in terms:
            seconds[term.name].append(term.seconds)
            hidden[term.name].append(term.hidden_s)
    return tuple(
        Term(name, math.fsum(seconds[name]), math.fsum(hidden[name]))
        for name in TERMS
        if seconds[name]
    )
