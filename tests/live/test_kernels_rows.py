"""Blocks of a prompt: attention that adds up its rows, against rows written out in float64."""

import math
import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from arborsim_torch.kernels import rows as kernel
from arborsim_torch.kernels.piece import BlockRows
from arborsim_torch.kernels.rows import attend_rows, count_paid

from .oracle_attention import assert_near, by_group, literal, numbers
from .test_kernels_pieces import ROOT, interpreter_works, needs_triton

SCALE = 0.3
few = settings(max_examples=60, deadline=None)


@st.composite
def blocks(draw):
    """Queries, keys and values of a block, and how many of its queries count."""
    kv_heads, members = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    queries, before = draw(st.integers(1, 9)), draw(st.integers(0, 7))
    dim, seed = draw(st.sampled_from([8, 12])), draw(st.integers(0, 2**31))
    q = numbers(seed, kv_heads * members, queries, dim)
    k, v = (numbers(seed + i, kv_heads, before + queries, dim) for i in (1, 2))
    counts = draw(st.integers(0, queries)), draw(st.integers(0, queries))
    return q, k, v, *counts, draw(st.integers(0, before + queries + 1))


def expected(q, k, v):
    """Output, and weights ``[heads, queries, n]``."""
    queries, n = q.shape[1], k.shape[1]
    seen = torch.arange(n) <= torch.arange(queries)[:, None] + n - queries
    out, _, weights = literal(q[None], k, v, SCALE, seen.expand(1, len(k), queries, n))
    return out[0], weights[0]


def wanted(of_mean, of_groups, groups, n, recent=0):
    return BlockRows(
        torch.zeros(of_mean, n) if of_mean else None,
        torch.zeros((of_mean, 1), dtype=torch.int64) if of_mean else None,
        groups if of_groups else None,
        of_groups if groups else 0,
        recent,
    )


def summed(rows, of_groups, recent):
    """Of the last rows ``[groups, queries, n]``, without their newest keys."""
    queries, n = rows.shape[1:]
    return np.nansum(np.tril(rows, n - queries - recent)[:, queries - of_groups :], axis=1)


@few
@given(blocks(), st.sampled_from(["layer", "head", None]), st.integers(1, 400))
def test_rows_are_added_up_as_if_they_were_written_out(case, groups, tile_bytes):
    q, k, v, of_mean, of_groups, recent = case
    kept = wanted(of_mean, of_groups, groups, k.shape[1], recent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "TILE_BYTES", tile_bytes)
        out = attend_rows(q, k, v, SCALE, kept)
        attend_rows(q, k, v, SCALE, kept_of_two := wanted(of_mean, 0, None, k.shape[1]))
        attend_rows(q, k, v, SCALE, kept_of_two)
    whole, weights = expected(q, k, v)
    assert_near(out, whole)
    if of_mean:
        mean = weights.mean(0)[-of_mean:]
        assert_near(kept.mean, mean)
        assert_near(kept_of_two.mean, 2 * mean)
        assert kept_of_two.numbers.flatten().tolist() == [2] * of_mean
    if kept.groups is None:
        assert kept.newest is kept.sums is None
        return
    rows = by_group(weights[None], len(k) if groups == "head" else 1)[0]
    assert_near(kept.newest, rows[:, -1])
    if of_groups == 1 and not recent:
        assert kept.sums is None
    else:
        assert kept.sums.dtype == torch.float64
        assert_near(kept.sums, summed(rows, of_groups, recent))


@few
@given(blocks(), st.sampled_from([1e-3, 0.2, 0.5]), st.integers(1, 400))
def test_large_entries_are_those_of_rows_written_out(case, part, tile_bytes):
    """But for entries that lie within rounding of the limit."""
    q, k, v, *_ = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "TILE_BYTES", tile_bytes)
        found = count_paid(q, k, SCALE, part)
    assert found.shape == (len(k), len(q) // len(k), q.shape[1])
    found = found.flatten(0, 1).numpy()
    _, weights = expected(q, k, v)
    limit = part * weights.max(-1, keepdims=True)
    assert ((weights >= limit * 1.0001).sum(-1) <= found).all()
    assert (found <= (weights >= limit * 0.9999).sum(-1)).all()


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_a_number_has_no_large_entries(broken):
    q, k = numbers(0, 4, 5, 8), numbers(1, 2, 7, 8)
    q[3, 1, 0], k[..., 0] = broken, k[..., 0].abs()  # all of its logits are infinite, or all NaN
    found = count_paid(q, k, SCALE, 0.01).flatten(0, 1)
    assert (found == 0).nonzero().tolist() == [[3, 1]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_keep_wide_rows(dtype):
    q, k, v = (
        numbers(i, heads, n, 8, dtype=dtype) for i, heads, n in ((0, 4, 3), (1, 2, 6), (2, 2, 6))
    )
    kept = wanted(3, 3, "head", 6)
    out = attend_rows(q, k, v, SCALE, kept)
    whole, weights = expected(q, k, v)
    assert out.dtype == dtype
    assert_near(out, whole, *((1e-2, 1e-2) if dtype.itemsize == 2 else ()))
    assert kept.mean.dtype == kept.newest.dtype == torch.float32
    assert_near(kept.mean, weights.mean(0))
    assert_near(kept.sums, by_group(weights[None], 2)[0].sum(1))


@pytest.mark.parametrize("groups", ["layer", "head"])
def test_a_row_that_is_not_a_number_counts_nowhere(groups):
    """Query head 3 of 4, in KV head 1 of 2, has a query that overflows."""
    q, k, v = numbers(0, 4, 5, 8), numbers(1, 2, 7, 8), numbers(2, 2, 7, 8)
    _, weights = expected(q, k, v)
    q[3, 1] = math.inf
    kept = wanted(5, 5, groups, 7)
    attend_rows(q, k, v, SCALE, kept)
    others = [0, 2, 3, 4]
    assert kept.numbers.flatten().tolist() == [1, 0, 1, 1, 1]
    assert not kept.mean[1].any()
    assert_near(kept.mean[others], weights.mean(0)[others])
    rows = by_group(weights[None], 2 if groups == "head" else 1)[0]
    assert_near(kept.sums[-1], rows[-1, others].sum(0))
    if groups == "head":
        assert_near(kept.sums[0], rows[0].sum(0))
    q[3] = math.inf
    attend_rows(q, k, v, SCALE, kept := wanted(0, 2, groups, 7))
    assert kept.newest.isnan().all(1).tolist() == [False, True][-len(kept.newest) :]


#: KV heads, query heads of each, queries, keys before them, dimension, queries that count in the
#: mean and in groups, groups, type, newest keys that do not count in sums.
ON_GPU = (
    (2, 2, 40, 50, 16, 37, 40, "head", torch.float32, 0),
    (2, 2, 40, 0, 24, 3, 1, "layer", torch.float32, 0),
    (1, 4, 70, 131, 64, 70, 69, "layer", torch.bfloat16, 0),
    (2, 3, 1, 65, 32, 1, 1, "head", torch.float16, 2),
    (2, 1, 66, 5, 16, 0, 66, "head", torch.float32, 33),
)


def problem(case, broken):
    kv_heads, members, queries, before, dim, of_mean, of_groups, groups, dtype, recent = case
    q = numbers(0, kv_heads * members, queries, dim, dtype=dtype)
    k, v = (numbers(i, kv_heads, before + queries, dim, dtype=dtype) for i in (1, 2))
    _, weights = expected(q, k, v)
    if broken:
        q[-1, -1] = math.inf
    return q, k, v, weights, wanted(of_mean, of_groups, groups, before + queries, recent)


def solve(path):
    """In Triton's interpreter."""
    from arborsim_torch.kernels.rows_triton import add_rows

    found = []
    for case in ON_GPU:
        for broken in (False, True):
            q, k, _, _, kept = problem(case, broken)
            queries, n = q.shape[1], k.shape[1]
            logits = q.double().view(len(k), -1, q.shape[2]) @ k.double().transpose(1, 2) * SCALE
            logits = logits.view(len(q), queries, n)
            seen = torch.ones(queries, n, dtype=torch.bool).tril(n - queries)
            lse = logits.masked_fill(~seen, -math.inf).logsumexp(-1).float()
            add_rows(q, k, lse, SCALE, kept)
            found.append(vars(kept))
    torch.save(found, path)


@needs_triton
@pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter fails: 3.6 with NumPy 2.4"
)
def test_the_triton_kernels_add_up_the_same_rows(tmp_path):
    path = tmp_path / "found.pt"
    call = f"from tests.live.test_kernels_rows import solve; solve({str(path)!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", call], check=True, cwd=ROOT, env=environment)
    found = torch.load(path)
    for i, case in enumerate(ON_GPU):
        for j, broken in enumerate((False, True)):
            compare(case, broken, BlockRows(**found[2 * i + j]))


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_a_gpu_adds_up_the_same_rows(case):
    q, k, v, _, kept = problem(case, False)
    if kept.mean is not None:
        kept.mean, kept.numbers = kept.mean.cuda(), kept.numbers.cuda()
    out = attend_rows(q.cuda(), k.cuda(), v.cuda(), SCALE, kept)
    loose = (1.6e-2, 1.6e-2) if q.element_size() == 2 else (2e-5, 2e-5)
    assert_near(out.cpu(), expected(q, k, v)[0], *loose)
    found = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in vars(kept).items()}
    # The log-sum-exp is of 16-bit products where the queries are.
    compare(case, False, BlockRows(**found), 2e-4 if q.element_size() == 2 else 2e-5)


def compare(case, broken, kept, tolerance=2e-6):
    """`broken`: the last query of the last head is not a number."""
    *_, weights, _ = problem(case, broken)
    kv_heads, of_mean, of_groups, groups, recent = case[0], case[5], case[6], case[7], case[9]
    good = of_mean - broken
    if of_mean:
        assert kept.numbers.flatten().tolist() == [1] * good + [0] * broken
        assert_near(kept.mean[:good], weights.mean(0)[-of_mean:][:good], tolerance)
        assert not kept.mean[good:].any()
    rows = by_group(weights[None], kv_heads if groups == "head" else 1)[0]
    if broken:
        rows[-1, -1] = math.nan
    assert_near(kept.newest, rows[:, -1], tolerance)
    if of_groups == 1 and not recent:
        assert kept.sums is None
    else:
        assert kept.sums.shape == (len(rows), weights.shape[2])
        assert_near(kept.sums, summed(rows, of_groups, recent), 2e-5)
