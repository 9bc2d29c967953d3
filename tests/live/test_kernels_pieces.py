"""Attention over pieces of pools, read in place, against the definition in float64."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from arborsim_torch.kernels.pieces import attend_pieces

from .oracle_attention import assert_near, by_group, literal
from .pieces_cases import FORMATS, Case, Part

# Of the result, which is rounded once to the queries' type; weights of 16 bits are rounded before
# they meet the values.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
CASES = (
    *(
        Case((Part(stored, 40, 64, index, mask, 3 if index != "none" else 0),), seed=i)
        for i, stored in enumerate(FORMATS)
        for index, mask in (("none", "both"), ("flat", "none"), ("by head", "heads"))
    ),
    *(
        Case((Part(room=70, index="none", mask=mask),), dtype, group=group, seqs=seqs)
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        for mask, group, seqs in (("none", 2, 1), ("all", 1, 3), ("both", 4, 2))
    ),
    Case(
        tuple(Part(stored, 32, 64, "flat", "sequences", 4) for stored in FORMATS),
        torch.bfloat16, seqs=3,
    ),
    Case((Part(index="none", room=100), Part("fp8", 40), Part("int8", 1, index="by head"))),
    Case((Part(room=0), Part(room=12, padding=12)), seqs=3),
    Case((Part(room=0, capacity=0), Part("fp8", 5), Part("kivi2", 0, 32))),
    Case((Part(room=9, capacity=0, padding=9), Part(room=3))),
    Case((Part(mask="sequences", strided=True), Part("fp8", 20, strided=True)), seqs=3),
    Case((Part(room=33), Part("int8", 20), Part("packed4", 64, 64, "none")), dim=80),
    Case((Part("int8", 1030, 1100, mask="sequences"), Part("fp8", 600, 700, "none"))),
)  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def wanted(case):
    """Output, log-sum-exp and masses by the definition, entry by entry."""
    q, pieces = case.build()
    rows, readable = [], []
    for piece, vectors in zip(pieces, case.decoded(), strict=True):
        index = torch.arange(piece.room) if piece.index is None else piece.index
        index = index.expand(case.kv_heads, -1).long()
        held = index >= 0
        own = vectors.new_zeros(2, case.kv_heads, piece.room, case.dim)
        for head in range(case.kv_heads):
            own[:, head, held[head]] = vectors[:, head, index[head][held[head]]]
        rows.append(own)
        read = held[None].expand(case.seqs, -1, -1)
        readable.append(read if piece.mask is None else read & piece.mask)
    keys, values = torch.cat(rows, dim=2)
    out, lse, weights = literal(
        q[:, :, None], keys, values, case.scale, torch.cat(readable, dim=-1)[:, :, None]
    )
    mass = torch.from_numpy(by_group(weights, case.kv_heads)[:, :, 0])
    return out[:, :, 0], lse[:, :, 0], mass.split([piece.room for piece in pieces], dim=-1)


def compare(case, found):
    q, _ = case.build()
    out, lse, masses = wanted(case)
    assert found[0].dtype == q.dtype
    assert found[1].dtype == torch.promote_types(q.dtype, torch.float32)
    assert_near(found[0], out, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    # Fused kernels for 16 bits multiply in them.
    assert_near(found[1], lse, atol=2e-5 if q.element_size() == 2 else 5e-6)
    if found[2] is not None:
        assert len(found[2]) == len(masses)
        for own, mass in zip(found[2], masses, strict=True):
            assert_near(own, mass)


@each_case
def test_pieces_are_the_definition(case):
    q, pieces = case.build()
    compare(case, attend_pieces(q, pieces, case.scale))
    compare(case, attend_pieces(q, pieces, case.scale, mass=True))


parts = st.builds(
    Part,
    st.sampled_from(FORMATS), st.integers(0, 64), st.just(64),
    st.sampled_from(["none", "flat", "by head"]),
    st.sampled_from(["none", "all", "sequences", "heads", "both"]),
)  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(parts, min_size=1, max_size=3), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]),
    st.sampled_from([16, 64]), st.sampled_from(list(TOLERANCE)), st.integers(0, 99),
)  # fmt: skip
def test_any_pieces_are_the_definition(parts, seqs, group, dim, dtype, seed):
    case = Case(tuple(parts), dtype, dim, 2, group, seqs, seed)
    q, pieces = case.build()
    compare(case, attend_pieces(q, pieces, case.scale))
    compare(case, attend_pieces(q, pieces, case.scale, mass=True))


@pytest.mark.parametrize("mass", [False, True])
def test_a_step_over_pieces_is_one_graph(mass):
    """No break, hence no wait, and no shape that depends on data."""
    case = Case(tuple(Part(stored, 600, 640, index) for stored, index in
                      (("plain", "none"), ("int8", "by head"), ("fp8", "flat"), ("kivi2", "flat"),
                       ("packed4", "none"))))  # fmt: skip
    q, pieces = case.build()
    traced = torch.compile(attend_pieces, fullgraph=True, backend="eager", dynamic=False)
    found = traced(q, pieces, case.scale, mass=mass)
    same = attend_pieces(q, pieces, case.scale, mass=mass)
    assert torch.equal(found[0], same[0])
    assert torch.equal(found[1], same[1])


def test_heads_of_one_table_are_read_by_an_index_each():
    """Heads of different lengths lie one after the other: a view of stride 0, and offsets."""
    case = Case((Part(index="by head"),))
    q, (piece,) = case.build()
    base = torch.tensor([[0], [160]], dtype=torch.int32)
    rows = [part.reshape(1, 320, 64).expand(2, -1, -1) for part in (piece.keys, piece.values)]
    table = type(piece)(*rows, piece.codec, None, None, piece.index + base, piece.room)
    found = attend_pieces(q, [table], case.scale)
    same = attend_pieces(q, [piece], case.scale)
    assert torch.equal(found[0], same[0])


def changed(stored="plain", **changes):
    q, (piece,) = Case((Part(stored, 32, 64),)).build()
    return q, replace(piece, **changes)


@pytest.mark.parametrize(
    ("match", "stored", "changes"),
    [
        ("64. is needed", "plain", {"keys": torch.zeros(2, 64, 32)}),
        ("values .*64, 64. is needed", "plain", {"values": torch.zeros(2, 9, 64)}),
        ("as plain", "plain", {"keys": torch.zeros(2, 64, 64, dtype=torch.float16)}),
        ("index of shape .3, 32.", "plain", {"index": torch.zeros(3, 32, dtype=torch.int32)}),
        ("no index, and room 65", "plain", {"index": None, "room": 65}),
        ("mask of shape .32.", "plain", {"mask": torch.ones(32, dtype=torch.bool)}),
        ("needs scales exactly", "fp8", {"key_scale": None}),
        ("needs scales exactly", "plain", {"value_scale": torch.ones(2, 64)}),
        ("scales .2, 9.", "int8", {"key_scale": torch.ones(2, 9)}),
        ("need their spans", "kivi2", {"member": None}),
        ("places in groups .9.", "kivi2", {"member": torch.zeros(9, dtype=torch.int32)}),
    ],
)
def test_what_does_not_fit_is_refused(match, stored, changes):
    q, piece = changed(stored, **changes)
    with pytest.raises(ValueError, match=match):
        attend_pieces(q, [piece], 0.125)


def test_queries_that_do_not_fit_are_refused():
    _, piece = changed()
    with pytest.raises(ValueError, match="7 query heads do not divide into 2 groups"):
        attend_pieces(torch.zeros(2, 7, 64), [piece], 0.125)
    with pytest.raises(ValueError, match="at least one"):
        attend_pieces(torch.zeros(2, 8, 64), [], 0.125)
