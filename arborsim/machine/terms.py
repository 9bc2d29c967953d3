"""The price: what every phase of a program takes, as named terms, in one place.

An iteration of a batch takes, with sums over its searches::

    bound = longer + (1 - overlap) * shorter   of computing, and of reading weights, keys and values
    model = bound + dequantising + what nothing hides
    total = model + policies + max(0, streaming - model) + max(0, CPU attention - GPU attention)

Every term is a row of `ITERATION_TERMS`: its name, the *part* of this formula that it belongs to,
and its seconds over `CostModel`.  A row is all that a new term needs: the server adds up parts, and
`--explain` and a plan's terms itemise rows.  Within a piece every term is linear, so the server
keeps a first value and a growth for each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arborsim.machine.cost import Array
from arborsim.machine.profile import PolicySeconds

if TYPE_CHECKING:
    from arborsim.machine.price import Price

#: Arithmetic, reading keys and values, dequantising them, what nothing hides, and policies.
PARTS = ("compute", "kv", "dequantise", "serial", "policy")


@dataclass(frozen=True)
class Term:
    """A part of a search's time, by its name (one of `names`)."""

    name: str
    seconds: float  # what it adds to the total
    #: What of it ran behind something else; not part of the total.  Of ``link busy`` how long the
    #: link was in use, waited for or not; these terms add nothing.
    hidden_s: float = 0.0


@dataclass(frozen=True)
class Asked:
    """What decode iterations of one search ask for; int64 or float64 ``[n]``.

    `attended` and `rows` are tokens, summed over the sequences; where layers or groups differ, the
    mean over them.  The others are as in `SearchDemand.pieces`.
    """

    policy: PolicySeconds
    fused: bool
    sequences: np.ndarray
    decided: np.ndarray
    streamed_bytes: np.ndarray
    remote_bytes: np.ndarray
    window_bytes: np.ndarray
    read_bytes: np.ndarray
    quantised_bytes: np.ndarray
    attended: np.ndarray
    rows: np.ndarray
    examined: np.ndarray


@dataclass(frozen=True)
class IterationTerm:
    """A term of decode iterations."""

    name: str  # as ``--explain`` shows it
    plan: str  # as a plan's terms show it
    part: str  # one of `PARTS`
    #: The price and what is asked for in, seconds out; linear in everything but `sequences`.
    seconds: Callable[[Price, Asked], Array]
    numbers: tuple[str, ...]  # fields of `HardwareProfile` that it rests on
    shared: bool = False  # the batch takes it once: `sequences` are those of the whole batch


ITERATION_TERMS: list[IterationTerm] = [
    IterationTerm(
        "decode: FLOPs", "decode: arithmetic", "compute",
        lambda price, q: price.cost.flops_s(q.sequences, q.attended) / price.gpus,
        ("flops_per_s", "mfu"),
    ),
    IterationTerm(
        "decode: weights read", "decode: reading weights", "kv",
        lambda price, q: price.cost.weights_read_s(q.sequences) / price.gpus,
        ("hbm_bytes_per_s", "mbu"), shared=True,
    ),
    IterationTerm(
        "decode: KV read", "decode: reading keys and values", "kv",
        lambda price, q: price.cost.kv_read_s(q.read_bytes) / price.gpus,
        ("hbm_bytes_per_s", "kv_read_efficiency"),
    ),
    IterationTerm(
        "decode: dequantise", "decode: dequantising", "dequantise",
        lambda price, q: price.cost.dequantise_s(q.quantised_bytes) / price.gpus,
        ("dequantise_bytes_per_s",),
    ),
    IterationTerm(
        "decode: per layer", "decode: overhead of layers", "serial",
        lambda price, q: price.cost.layers_s(q.fused),
        ("per_layer_s", "eager_per_layer_s"), shared=True,
    ),
    IterationTerm(
        "decode: per step and sequence", "decode: overhead of iterations", "serial",
        lambda price, q: price.step_s, ("per_step_s",), shared=True,
    ),
    IterationTerm(
        "decode: per step and sequence", "decode: overhead of sequences", "serial",
        lambda price, q: price.sequence_s * q.sequences, ("per_sequence_s",),
    ),
    IterationTerm(
        "policy: decisions", "policy", "policy",
        lambda price, q: q.policy.observing_s(q.sequences)
        + np.where(q.decided > 0, q.policy.decision_s(q.examined), 0.0),
        ("decision_base_s", "decision_per_token_s"),
    ),
    IterationTerm(
        "policy: attention rows", "policy", "policy",
        lambda price, q: price.cost.eager_rows_s(q.rows) / price.gpus, ("eager_bytes_per_s",),
    ),
]  # fmt: skip

#: Terms of phases other than iterations, and what they are in a plan's terms.
PREFILL_TERMS = (
    "prefill: matrix products", "prefill: attention", "prefill: weights and KV read",
    "prefill: per layer and step",
)  # fmt: skip
MATRICES = "policy: attention matrices of the prefill"
REHYDRATION = "rehydration"
BACKGROUND = "transfers: waiting for DDR and back"
#: By recall mode, with the name of a plan's terms.
SIDE_TERMS = {
    "stream": ("transfers: streamed", "decode: streaming from DDR"),
    "near": ("transfers: near", "decode: work of the CPU"),
    "ondemand": ("transfers: ondemand", "decode: work of the CPU"),
}
LINK_TERMS = ("link busy with moves: to DDR", "link busy with moves: from DDR")


def names() -> tuple[str, ...]:
    """Of all terms, in the order in which they are shown."""
    policy = [term.name for term in ITERATION_TERMS if term.part == "policy"]
    return tuple(dict.fromkeys((
        *PREFILL_TERMS, *(t.name for t in ITERATION_TERMS if t.part != "policy"), policy[0],
        "policy: turns", MATRICES, *policy[1:], "policy: quantising", "policy: compaction",
        BACKGROUND, *(name for name, _ in SIDE_TERMS.values()), REHYDRATION, *LINK_TERMS,
    )))  # fmt: skip


def plan_name(name: str) -> str:
    """What a term of a phase other than decoding is called in a plan's terms."""
    if name == REHYDRATION:
        return "recomputing evicted tokens"
    return "prefill" if name in PREFILL_TERMS else "policy"


def resting_on(numbers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Terms of iterations that rest on any of these numbers of a profile, and on which."""
    wanted = set(numbers)
    found = {term.name: tuple(n for n in term.numbers if n in wanted) for term in ITERATION_TERMS}
    return {name: used for name, used in found.items() if used}


def total(searches: Iterable[Iterable[Term]]) -> tuple[Term, ...]:
    """The terms of several searches, added up."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for terms in searches:
        for term in terms:
            seconds, hidden = found.setdefault(term.name, ([], []))
            seconds.append(term.seconds)
            hidden.append(term.hidden_s)
    order = [name for name in names() if name in found]
    return tuple(Term(name, *map(math.fsum, found[name])) for name in order)
