"""The price: what every phase of a program takes, as named terms, in one place.

An iteration of a batch takes, with sums over its searches::

    bound = longer + (1 - overlap) * shorter   of computing, and of reading weights, keys and values
    model = max(launching, bound + dequantising + what nothing hides)
    total = model + policies + max(0, streaming - model) + max(0, CPU attention - GPU attention)

With measured kernels, `bound` is attention alone, and the other kernels are what nothing hides.
Every term is a row of `ITERATION_TERMS`: its name, the *part* of this formula that it belongs to,
and its seconds over `CostModel`.  A row is all that a new term needs: the server adds up parts, and
`--explain` and a plan's terms itemise rows.  Within a piece every term is linear, so the server
keeps a first value and a growth for each part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from arborsim.core.errors import ResultError
from arborsim.core.sourced import Basis
from arborsim.machine.cost import Array
from arborsim.machine.integration import PolicySeconds
from arborsim.machine.passes import Passes

#: Arithmetic, reading keys and values, dequantising them, what nothing hides, and policies.
PARTS = ("compute", "kv", "dequantise", "serial", "policy")
#: Measured attention: of the batch, so that no search has a share of its own.
ATTENTION = "attention"


@dataclass(frozen=True)
class Term:
    """A part of a search's time, by its name (one of `names`)."""

    name: str
    seconds: float  # what it adds to the total
    #: What of it ran behind something else; not part of the total.  Of ``link busy`` how long the
    #: link was in use, waited for or not; these terms add nothing.
    hidden_s: float = 0.0
    basis: Basis = Basis.MEASURED  # what its seconds rest on, at worst


@dataclass(frozen=True)
class Asked:
    """The work of decode iterations of one search; int64 or float64 ``[n]``.

    `attended` and `rows` are tokens, summed over the sequences.  Where layers or groups differ, the
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
    kv_tokens: np.ndarray  # read in a layer that keeps every token
    pass_tokens: np.ndarray  # of the whole pass: `sequences`, and parts of prompts
    bounds_bytes: np.ndarray  # of pages that are chosen by them
    prompts: int = 0  # that end in the pass; their next token is computed, too

    @property
    def prefills(self) -> bool:
        return bool((self.pass_tokens > self.sequences).any())


@dataclass(frozen=True)
class IterationTerm:
    """A term of decode iterations."""

    name: str  # as ``--explain`` shows it
    plan: str  # as a plan's terms show it
    part: str  # one of `PARTS`
    #: Passes and what is asked for in, seconds out; linear in everything but `sequences`
    seconds: Callable[[Passes, Asked], Array]
    numbers: tuple[str, ...]  # fields of `HardwareProfile` that it rests on
    shared: bool = False  # the batch takes it once: `sequences` are those of the whole batch
    #: Whether it is a term with measured kernels, without, or both
    measured: bool | None = None
    kernels: str = ""  # the part of a pass that it is (`Forward.basis`)
    constants: tuple[str, ...] = ()  # fields of `EngineProfile` in the place of `numbers`


#: Numbers of a profile that all-reduces rest on where none were measured.
LINKS = ("all_reduce_bytes_per_s", "all_reduce_latency_s")

ITERATION_TERMS: list[IterationTerm] = [
    IterationTerm(
        "decode: FLOPs", "decode: arithmetic", "compute",
        lambda price, q: price.cost.flops_s(q.sequences, q.attended) / price.gpus,
        ("flops_per_s", "mfu"), measured=False,
    ),
    IterationTerm(
        "decode: weights read", "decode: reading weights", "kv",
        lambda price, q: price.cost.weights_read_s(q.sequences) / price.gpus,
        ("hbm_bytes_per_s", "mbu"), shared=True, measured=False,
    ),
    IterationTerm(
        "decode: KV read", "decode: reading keys and values", "kv",
        lambda price, q: price.cost.kv_read_s(q.read_bytes) / price.gpus,
        ("hbm_bytes_per_s", "kv_read_efficiency"), measured=False,
    ),
    IterationTerm(
        "decode: matrix products", "decode: matrix products", "serial",
        lambda price, q: _each(
            lambda n, decoding: price.products_s(n, decoding, q.prompts), q.pass_tokens, q.sequences
        ),
        (), shared=True, measured=True, kernels="products",
    ),
    IterationTerm(
        "decode: experts", "decode: experts", "serial",
        lambda price, q: _each(price.experts_s, q.pass_tokens, q.sequences),
        (), shared=True, measured=True, kernels="experts",
    ),
    IterationTerm(
        "decode: attention", "decode: attention", ATTENTION,
        lambda price, q: price.forward.attention_each(q.sequences, q.kv_tokens),
        (), measured=True, kernels="attention",
    ),
    IterationTerm(
        "decode: attention FLOPs", "decode: attention", "compute",
        lambda price, q: price.cost.attention_flops_s(q.attended) / price.gpus,
        ("flops_per_s", "mfu"), measured=True,
    ),
    IterationTerm(
        "decode: attention in windows", "decode: attention", "serial",
        lambda price, q: _each(price.forward.windows_s, q.sequences),
        (), shared=True, measured=True, kernels="windows",
    ),
    IterationTerm(
        "decode: element-wise", "decode: element-wise", "serial",
        lambda price, q: q.pass_tokens * price.forward.elementwise_s(1),
        ("hbm_bytes_per_s", "mbu"), shared=True, measured=True,
    ),
    IterationTerm(
        "decode: all-reduce", "decode: all-reduce", "serial",
        lambda price, q: _each(lambda n: price.all_reduce_s(n, q.prefills), q.pass_tokens),
        LINKS, shared=True, kernels="all-reduce",
    ),
    IterationTerm(
        "decode: copying the cache", "decode: copying the cache", "serial",
        lambda price, q: price.cache_passes * price.cost.copy_s(q.read_bytes) / price.gpus,
        ("hbm_bytes_per_s", "mbu"), constants=("cache_passes",),
    ),
    IterationTerm(
        "decode: recurrent states", "decode: recurrent states", "serial",
        lambda price, q: price.cost.states_s(q.sequences) / price.gpus,
        ("hbm_bytes_per_s", "mbu"),
    ),
    IterationTerm(
        "decode: choosing pages", "decode: choosing pages", "serial",
        lambda price, q: price.cost.page_choice_s(q.bounds_bytes / price.gpus),
        ("hbm_bytes_per_s", "mbu", "pcie_latency_s"),
    ),
    IterationTerm(
        "decode: dequantise", "decode: dequantising", "dequantise",
        lambda price, q: price.cost.dequantise_s(q.quantised_bytes) / price.gpus,
        ("dequantise_bytes_per_s",),
    ),
    IterationTerm(
        "decode: per layer", "decode: overhead of layers", "serial",
        lambda price, q: _each(
            lambda n, decoding, decided: price.layers_s(
                n, decoding, q.policy.longer(decided > 0)
            ),
            q.pass_tokens, q.sequences, q.decided,
        ),
        ("per_layer_s", "eager_per_layer_s", "wide_per_layer_s"), shared=True,
        constants=("layer_s",),
    ),
    IterationTerm(
        "decode: per step and sequence", "decode: overhead of iterations", "serial",
        lambda price, q: price.step_s, ("per_step_s",), shared=True, constants=("step_s",),
    ),
    IterationTerm(
        "decode: per step and sequence", "decode: overhead of sequences", "serial",
        lambda price, q: price.sequence_s * q.sequences, ("per_sequence_s",),
        constants=("sequence_s",),
    ),
    IterationTerm(
        "policy: decisions", "policy", "policy",
        lambda price, q: q.policy.observing_s(q.sequences, q.attended)
        + np.where(q.decided > 0, q.policy.decision_s(q.examined), 0.0),
        ("decision_base_s", "decision_per_token_s"),
    ),
    IterationTerm(
        "policy: attention rows", "policy", "policy",
        lambda price, q: price.cost.eager_rows_s(q.rows) / price.gpus, ("eager_bytes_per_s",),
    ),
    IterationTerm(
        "policy: repeated KV heads", "policy", "policy",
        lambda price, q: price.cost.repeated_kv_s(q.read_bytes, q.fused) / price.gpus,
        ("hbm_bytes_per_s", "mbu"),
    ),
]  # fmt: skip

LAUNCHES = "decode: launches that take longer"
#: Terms of phases other than iterations, and what they are in a plan's terms.
PREFILL_TERMS = (
    "prefill: matrix products",
    "prefill: attention",
    "prefill: weights and KV read",
    "prefill: per layer and step",
    "prefill: element-wise and all-reduce",
)
MATRICES = "policy: attention matrices of the prefill"
#: What device code copies or reads outside iterations, by `arborsim.machine.program.Copied`.
COPY_TERMS = ("policy: quantising", "policy: compaction", "policy: page bounds")
REHYDRATION = "rehydration"
BACKGROUND = "transfers: waiting for DDR and back"
MOVES = "transfers: the host's work on moves"
#: By recall mode, with the name of a plan's terms.
SIDE_TERMS = {
    "stream": ("transfers: streamed", "decode: streaming from DDR"),
    "near": ("transfers: near", "decode: work of the CPU"),
    "ondemand": ("transfers: ondemand", "decode: work of the CPU"),
}
LINK_TERMS = ("link busy with moves: to DDR", "link busy with moves: from DDR")


def _each(seconds: Callable[..., float], *counts: np.ndarray) -> np.ndarray:
    """A function of whole numbers at each of arrays ``[n]``."""
    if len(counts[0]) == 1:  # what a batch takes once
        return np.array([seconds(*(int(each[0]) for each in counts))])
    rows, at = np.unique(np.stack(counts), axis=1, return_inverse=True)
    return np.array([seconds(*map(int, row)) for row in rows.T])[at]


def names() -> tuple[str, ...]:
    """Names of all terms, in the order in which they are shown."""
    decode = [term.name for term in ITERATION_TERMS if term.part != "policy"]
    first, *others = [term.name for term in ITERATION_TERMS if term.part == "policy"]
    policies = (first, "policy: turns", MATRICES, *others, *COPY_TERMS)
    transfers = (BACKGROUND, MOVES, *(name for name, _ in SIDE_TERMS.values()))
    found = (*PREFILL_TERMS, *decode, LAUNCHES, *policies, *transfers, REHYDRATION, *LINK_TERMS)
    return tuple(dict.fromkeys(found))


def plan_name(name: str) -> str:
    """The name in a plan's terms of a term of a phase other than decoding."""
    if name == REHYDRATION:
        return "recomputing evicted tokens"
    if name == MOVES:
        return "the host's work on transfers"
    return "prefill" if name in PREFILL_TERMS else "policy"


#: Numbers of a profile that terms of other phases rest on.
_COPY, _LINK = ("hbm_bytes_per_s", "mbu"), ("block_efficiency", "pcie_latency_s")
_ROOFLINE = ("flops_per_s", "mfu", "hbm_bytes_per_s", "mbu", "kv_read_efficiency")
OTHER_NUMBERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*PREFILL_TERMS[:3], REHYDRATION), _ROOFLINE),
    PREFILL_TERMS[3]: ("per_layer_s", "wide_per_layer_s", "per_step_s", "per_sequence_s"),
    PREFILL_TERMS[4]: _COPY,
    "policy: turns": ("decision_base_s",),
    **dict.fromkeys(COPY_TERMS, _COPY),
    MATRICES: ("eager_bytes_per_s",),
    LINK_TERMS[0]: ("d2h_bytes_per_s", *_LINK),
    LINK_TERMS[1]: ("h2d_bytes_per_s", *_LINK),
    BACKGROUND: ("h2d_bytes_per_s", "d2h_bytes_per_s", *_LINK),
    SIDE_TERMS["stream"][0]: ("h2d_bytes_per_s", *_LINK),
    SIDE_TERMS["near"][0]: ("ddr_bytes_per_s", *_LINK),
    SIDE_TERMS["ondemand"][0]: ("h2d_bytes_per_s", *_LINK),
    MOVES: ("move_s", "move_group_s", "move_byte_s"),
}
#: Parts of a pass that terms of a prompt are, where kernels were measured.
PREFILL_KERNELS = {
    PREFILL_TERMS[0]: ("products", "experts"),
    PREFILL_TERMS[1]: ("prefill attention",),
    REHYDRATION: ("products", "prefill attention"),
}


_UNEXPLAINED = 0.005  # of the seconds


def check_explained(explained_s: float, measured_s: float, whose: str) -> None:
    """Raise `ResultError` if terms leave more than 0.5% of the seconds unexplained, either way."""
    rest_s = measured_s - explained_s
    if abs(rest_s) > _UNEXPLAINED * abs(measured_s):
        raise ResultError(
            f"{whose}: cost terms explain {explained_s:.6g} s of {measured_s:.6g} s and leave "
            f"{rest_s:.3g} s unexplained: a fault of arborsim or of a term of your own; report it"
        )


def total(searches: Iterable[Iterable[Term]]) -> tuple[Term, ...]:
    """The terms of several searches, added up."""
    found: dict[str, list[Term]] = {}
    for terms in searches:
        for term in terms:
            found.setdefault(term.name, []).append(term)
    return tuple(_sum(name, found[name]) for name in names() if name in found)


def _sum(name: str, terms: list[Term]) -> Term:
    seconds, hidden_s = (
        math.fsum(values) for values in zip(*((t.seconds, t.hidden_s) for t in terms), strict=True)
    )
    return Term(name, seconds, hidden_s, max(term.basis for term in terms))
