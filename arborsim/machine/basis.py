"""The basis of each term's seconds: measured kernels, or numbers of a profile or an engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from arborsim.core.sourced import Basis
from arborsim.machine.price import Price
from arborsim.machine.terms import (
    ITERATION_TERMS,
    LAUNCHES,
    LINKS,
    MATRICES,
    OTHER_NUMBERS,
    PREFILL_KERNELS,
    PREFILL_TERMS,
)

_OF_A_PASS = ("prefill_layer_s", "step_s", "sequence_s")


def basis_of(
    price: Price,
    name: str,
    widths: Sequence[int] = (1,),
    context: Sequence[float] = (4096.0,),
    prompts: Sequence[int] = (1024,),
    policy: str = "",
) -> Basis:
    """The basis of a term's seconds, at worst.

    `widths` are sequences that decode together, `context` tokens that each of them reads in a
    layer, and `prompts` the tokens of passes over prompts.
    """
    profile = price.cost.profile
    if name.startswith("policy: decisions") and policy in profile.policies:
        return Basis.MEASURED
    if price.measured and name in PREFILL_KERNELS:
        passes = product(PREFILL_KERNELS[name], prompts)
        return max(price.forward.basis(part, tokens) for part, tokens in passes)
    if price.measured and price.engine is not None and name == PREFILL_TERMS[3]:
        return max(price.engine.basis(each) for each in _OF_A_PASS)
    others = (
        LINKS if name == PREFILL_TERMS[4] and not price.measured else OTHER_NUMBERS.get(name, ())
    )
    found = [profile.basis(number) for number in others]
    for term in ITERATION_TERMS:
        if term.name != name or term.measured not in (None, price.measured):
            continue
        if term.kernels and price.measured:
            found += [price.forward.basis(term.kernels, *at) for at in product(widths, context)]
        elif term.constants and price.measured and price.engine is not None:
            found += [price.engine.basis(each) for each in term.constants]
        else:
            stated = profile.numbers()  # others are 0 unless a file gives them
            found += [profile.basis(number) for number in term.numbers if number in stated]
    if name == MATRICES and price.cost.tiles_rows:  # these are products first of all
        found += [profile.basis(number) for number in ("flops_per_s", "mfu")]
    if name == LAUNCHES and price.engine is not None:
        found.append(price.engine.basis("launch_s"))
        if price.engine.graphs and price.engine.graph_s:
            found.append(price.engine.basis("graph_s"))
    return max(found, default=Basis.MEASURED)


def bases(price: Price) -> dict[str, Basis]:
    """The basis of every term of a prompt or an iteration of this model, at usual sizes."""
    geometry, engine = price.cost.geometry, price.engine
    absent = set(PREFILL_TERMS[2:3] if price.measured else ())
    if price.gpus == 1:
        absent |= {"decode: all-reduce"} | set(() if price.measured else PREFILL_TERMS[4:])
    if not geometry.experts:
        absent.add("decode: experts")
    if not geometry.window_layers:
        absent.add("decode: attention in windows")
    if engine is None or not engine.repeats_kv_heads:
        absent.add("policy: repeated KV heads")
    terms = [t.name for t in ITERATION_TERMS if t.measured in (None, price.measured)]
    names = dict.fromkeys(name for name in (*PREFILL_TERMS, *terms) if name not in absent)
    return {name: basis_of(price, name) for name in names}
