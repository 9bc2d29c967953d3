"""Attention over pieces of pools, read in place, against the definition in float64."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from packaging.version import Version

from arborsim.core.formats import Format
from arborsim_torch.kernels import piece as chosen
from arborsim_torch.kernels.piece import Piece, in_triton
from arborsim_torch.kernels.pieces import attend_pieces
from arborsim_torch.tiers.codec import Packed

from .oracle_attention import assert_near, by_group, literal
from .pieces_cases import (
    CASES,
    FORMATS,
    INTERPRETED,
    WITH_HOST,
    Case,
    Part,
    last_on_host,
    means_of,
    moved,
)

ROOT = Path(__file__).parents[2]
# Of the result, which is rounded once to the queries' type; weights of 16 bits are rounded before
# they meet the values.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
ON_CPU = (
    *CASES,
    *(
        Case((Part(room=70, index="none", mask=mask),), torch.float64, group=group, seqs=seqs)
        for mask, group, seqs in (("none", 2, 1), ("all", 1, 3), ("both", 4, 2))
    ),
    Case(
        tuple(Part(stored, 32, 64, "flat", "sequences", 4) for stored in FORMATS),
        torch.bfloat16,
        seqs=3,
    ),
    Case((Part("fp8", 1030, 1100, mask="sequences"), Part("fp8", 600, 700, "none"))),
)


def each_of(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def interpreter_works() -> bool:
    """Triton's interpreter before 3.7 cannot loop up to a number that a kernel computes, as NumPy
    turns no array of one element into an index since 2.4; compiled kernels are not concerned.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    fixed = Version(version("triton")) >= Version("3.7")
    return fixed or Version(np.__version__) < Version("2.4")


def wanted(case, rounded):
    """Output, log-sum-exp and masses by the definition, entry by entry; see `Case.decoded`."""
    q, pieces = case.build()
    rows, readable = [], []
    for piece, vectors in zip(pieces, case.decoded(rounded), strict=True):
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
    return out[:, :, 0], lse[:, :, 0], mass


def compare(case, found, rounded=False):
    q, _ = case.build()
    out, lse, mass = wanted(case, rounded)
    assert found[0].dtype == q.dtype
    assert found[1].dtype == torch.promote_types(q.dtype, torch.float32)
    assert_near(found[0], out, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    # PyTorch's fused attention takes exponentials of 16-bit numbers to about 20 bits.
    assert_near(found[1], lse, atol=2e-4 if q.element_size() == 2 else 5e-6)
    if found[2] is not None:
        assert_near(found[2], mass)


def compare_means(case, total, numbers, rounded=False):
    """Rows averaged over all heads, where `means_of` puts their entries."""
    row, places = wanted(case, rounded)[2].mean(1), means_of(case)
    at = torch.cat([places.position, places.further])
    assert_near(total, torch.zeros(total.shape, dtype=row.dtype).index_add_(1, at, row))
    assert numbers.tolist() == [1] * case.seqs


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What the kernels give in Triton's interpreter, by the name of the case."""
    path = tmp_path_factory.mktemp("triton") / "found.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.live.pieces_cases", str(path)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    return torch.load(path)


@needs_triton
@pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter fails: 3.6 with NumPy 2.4"
)
@each_of(INTERPRETED)
def test_the_triton_kernels_are_the_definition(interpreted, case):
    compare(case, interpreted[case.name], rounded=True)


@needs_triton
@pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter fails: 3.6 with NumPy 2.4"
)
@each_of(WITH_HOST)
def test_the_triton_kernels_merge_what_the_host_attends_to(interpreted, case):
    compare(case, interpreted[f"{case.name} host"], rounded=True)


@needs_triton
@pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter fails: 3.6 with NumPy 2.4"
)
def test_the_triton_kernels_add_mean_rows(interpreted):
    for case in (*INTERPRETED[::4], *WITH_HOST):
        host = " host" if f"{case.name} host means" in interpreted else ""
        compare_means(case, *interpreted[f"{case.name}{host} means"], rounded=True)
    total, numbers = interpreted["broken"]
    assert numbers.tolist() == [0, 1]
    assert not total[0].any()
    assert total[1].sum() == pytest.approx(1)


@each_of(ON_CPU)
def test_mean_rows_are_added(case):
    q, pieces = case.build()
    rows = means_of(case)
    assert attend_pieces(q, pieces, case.scale, means=rows)[2] is None
    compare_means(case, rows.total, rows.numbers)


@each_of(WITH_HOST)
def test_what_the_host_attends_to_is_merged(case):
    q, pieces = case.build()
    elsewhere = last_on_host(q, pieces, case)
    for mass in (False, True):
        compare(case, attend_pieces(q, pieces[:-1], case.scale, mass=mass, elsewhere=elsewhere))


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_of(CASES)
def test_the_kernels_on_a_gpu_are_the_definition(case):
    q, pieces = case.build()
    out, lse, mass = attend_pieces(
        q.cuda(), [moved(p, "cuda") for p in pieces], case.scale, mass=True
    )
    compare(case, (out.cpu(), lse.cpu(), mass.cpu()), rounded=True)


@each_of(ON_CPU)
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
                      (("plain", "none"), ("fp8", "by head"), ("fp8", "flat"), ("kivi2", "flat"),
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
        ("scales .2, 9.", "fp8", {"key_scale": torch.ones(2, 9)}),
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


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "runs"),
    [
        ("cuda", (9, 0), torch.bfloat16, True),
        ("cuda", (8, 0), torch.float32, True),
        ("cuda", (7, 5), torch.float16, False),
        ("cuda", (9, 0), torch.float64, False),
        ("cpu", (9, 0), torch.float32, False),
    ],
)
@needs_triton
def test_the_kernels_are_used_where_they_can_run(monkeypatch, device, capability, dtype, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    chosen._kernels_for.cache_clear()
    assert in_triton(torch.device(device), dtype) is runs
    chosen._kernels_for.cache_clear()


@needs_triton
def test_formats_that_the_kernels_cannot_unpack_are_known():
    from arborsim_torch.kernels.pieces_triton import reads

    def readable(*form, dim=64, **named):
        codec = Packed(Format(*form, **named), dim)
        data, spans = codec.encode(torch.zeros(2, 2, 48, dim))
        parts = data[0].tensor_split([codec.key_bytes], -1) if codec.scaled else data
        piece = Piece(*parts, codec, None if spans is None else spans[0], None, None, 48)
        return reads(piece, dim)

    assert readable(4, 16, scale_bytes=1)
    assert readable(4, 64, scale_bytes=2, zero_bytes=2)
    assert not readable(4, 24, scale_bytes=2)  # groups that fill no power of 2
    assert readable(4, 96, scale_bytes=2)  # but one that is the whole vector
    assert readable(2, 16, "channel", 2, 2)
    assert not readable(2, 16, "channel", 1)  # spans of an odd number of bytes


@needs_triton
@given(
    st.integers(1, 200_000), st.integers(1, 300), st.integers(1, 16),
    st.sampled_from([64, 80, 128, 256]), st.sampled_from([2, 4]), st.integers(1, 160),
    st.booleans(),
)  # fmt: skip
def test_a_plan_covers_all_entries_and_rows_and_fills_the_gpu(
    room, rows, kv_heads, dim, itemsize, processors, packed
):
    from arborsim_torch.kernels.pieces_triton import launch_shape

    cut = launch_shape(room, rows, kv_heads, dim, itemsize, processors, packed)
    assert (cut.splits - 1) * cut.per_split < room <= cut.splits * cut.per_split
    assert cut.per_split % cut.block == 0
    assert (cut.row_blocks - 1) * cut.block_rows < rows <= cut.row_blocks * cut.block_rows
    assert cut.splits <= 128
    programs = cut.splits * kv_heads * cut.row_blocks
    # Rounding splits up to whole blocks costs at most half of them.
    assert programs >= processors or cut.per_split == cut.block or cut.splits > 64


@needs_triton
@pytest.mark.parametrize("stored", ["plain", "fp8", "kivi2"])
def test_the_kernel_compiles_for_an_h200_within_its_shared_memory(monkeypatch, tmp_path, stored):
    """No GPU is needed to compile; what it takes at run time is what the compiler reports."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from .compile_pieces import compile_attend

    found = compile_attend(stored, 16)
    assert found.metadata.shared <= 227 * 1024 // 2  # two programs on a multiprocessor
    assert "mma" in found.asm["ptx"]
    # Rows of slots are read 16 bytes at a time, while the block before is computed with.
    assert ("cp.async.cg.shared.global [" in found.asm["ptx"]) is (stored != "kivi2")


@needs_triton
def test_the_other_kernels_compile_for_an_h200(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from .compile_pieces import (
        LAYER,
        compile_layer,
        compile_mass,
        compile_mean,
        compile_merge,
        compile_pages,
        compile_rows,
    )

    rows = (compile_rows(name) for name in ("add_mean_rows", "sum_group_rows"))
    pages = (compile_pages(name) for name in ("rank_pages", "take_pages"))
    layer = (compile_layer(name) for name in LAYER)
    for found in (compile_merge(), compile_mass(), compile_mean(), *rows, *pages, *layer):
        assert found.asm["cubin"]
        assert found.metadata.shared <= 227 * 1024 // 2
