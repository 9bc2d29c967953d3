"""Every term of the time that a search takes alone on a machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from arborsim.machine.demand import Op
from arborsim.machine.pricing import Piece, PricedDemand, Pricing

#: Terms that hide behind others, or behind each other; what is not hidden adds up.
HIDDEN = "hidden behind others"
_PHASES = {
    Op.PREFILL: "prefill", Op.RECOMPUTE: "recomputing evicted tokens", Op.DECIDE: "policy",
    Op.TURN: "policy", Op.COPY: "policy",
}  # fmt: skip


def cost_terms(priced: PricedDemand, pricing: Pricing, alone_s: float) -> Mapping[str, float]:
    """Seconds of each cost term of one search; they add up to `alone_s`.

    Reading memory and computing hide behind each other (a roofline), and streaming and attention on
    the CPU behind both: what is hidden is the last term, and negative.

    Parameters
    ----------
    priced : PricedDemand
    pricing : Pricing
        Of the same machine.
    alone_s : float
        What the search takes by itself.
    """
    terms: dict[str, float] = defaultdict(float)
    for op, seconds in zip(priced.ops, priced.seconds, strict=True):
        if op[0] in _PHASES:
            terms[_PHASES[Op(op[0])]] += seconds
        elif op[0] == Op.DECODE:
            _add_piece(terms, priced.pieces[op[1]], pricing)
    for chain in priced.chains:
        for leg in chain:
            name = "transfers to HBM" if leg.up else "transfers to DDR"
            terms[name] += pricing.transfer_s(leg.bytes, leg.up)
    terms[HIDDEN] = alone_s - sum(terms.values())
    return dict(terms)


def _add_piece(terms: dict[str, float], piece: Piece, pricing: Pricing) -> None:
    n = piece.iterations

    def total(pair: tuple[float, float]) -> float:
        return n * pair[0] + pair[1] * (n * (n - 1) / 2)

    layers_s = pricing.eager_layers_s if piece.eager else pricing.layers_s
    terms["decode: arithmetic"] += total(piece.flops_s)
    terms["decode: reading weights"] += n * pricing.weights_s(piece.sequences)
    terms["decode: reading keys and values"] += total(piece.kv_s)
    terms["decode: dequantising"] += total(piece.dequantise_s)
    terms["decode: overhead of layers"] += n * layers_s
    terms["decode: overhead of iterations"] += n * pricing.step_s
    terms["decode: overhead of sequences"] += n * piece.sequences * pricing.sequence_s
    terms["decode: streaming from DDR"] += n * piece.stream_s
    terms["decode: work of the CPU"] += n * piece.near_s
    terms["policy"] += total(piece.policy_s)
