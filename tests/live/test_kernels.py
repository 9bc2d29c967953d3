"""Dense, fused and merged attention against its definition in float64."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from arborsim_torch.kernels import fused
from arborsim_torch.kernels import packages as kernel_packages
from arborsim_torch.kernels.dense import attend, attend_weights, merge
from arborsim_torch.kernels.flash import attend_flash, attend_prefill, choose

from .oracle_attention import assert_near, by_group, literal, numbers

SCALE = 0.3
few = settings(max_examples=60, deadline=None)


def attend_with_mass(q, k, v, scale, mask=None):
    """`attend`, and the rows averaged over query heads."""
    out, lse, weights = attend_weights(q, k, v, scale, mask)
    return out, lse, weights.flatten(1, 2).mean(1)


@st.composite
def problems(draw, most_queries=4):
    """Queries, keys and values of a small problem."""
    kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3, 4, 7]))
    seqs, count = draw(st.integers(1, 3)), draw(st.integers(1, most_queries))
    n = draw(st.integers(0, 9))
    dim, seed = draw(st.sampled_from([8, 16])), draw(st.integers(0, 2**31))
    q = numbers(seed, seqs, kv_heads * group, count, dim)
    return q, numbers(seed + 1, kv_heads, n, dim), numbers(seed + 2, kv_heads, n, dim)


@st.composite
def masked(draw):
    """A problem and a mask, which may leave sequences with nothing to read."""
    q, k, v = draw(problems())
    full = (q.shape[0], len(k), q.shape[2], k.shape[1])
    shape = [draw(st.sampled_from([1, size])) for size in full[:3]] + [full[3]]
    share = draw(st.sampled_from([0.1, 0.5, 0.9]))
    seed = draw(st.integers(0, 2**31))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    return q, k, v, mask, mask.expand(full)


def causal_mask(q, k, offset):
    keys = torch.arange(k.shape[1])
    allowed = keys <= torch.arange(q.shape[2])[:, None] + offset
    return allowed.expand(q.shape[0], len(k), *allowed.shape)


@few
@given(masked())
def test_dense_attention_and_its_mass_are_the_definition(case):
    q, k, v, mask, full = case
    out, lse, mass = attend_with_mass(q, k, v, SCALE, mask)
    wanted = literal(q, k, v, SCALE, full)
    assert_near(out, wanted[0])
    assert_near(lse, wanted[1])
    assert_near(mass, wanted[2].mean(1))
    grouped = attend_weights(q, k, v, SCALE, mask)[2].mean(2)
    assert_near(grouped, by_group(wanted[2], len(k)))
    for found, again in zip(attend(q, k, v, SCALE, mask), (out, lse), strict=True):
        assert torch.equal(found, again)


def test_a_query_that_may_read_nothing_gets_zeros_and_minus_infinity():
    q, k, v = numbers(0, 2, 4, 1, 8), numbers(1, 2, 5, 8), numbers(2, 2, 5, 8)
    mask = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 5)
    out, lse, mass = attend_with_mass(q, k, v, SCALE, mask)
    assert torch.all(out[1] == 0)
    assert torch.all(lse[1] == -math.inf)
    assert torch.all(mass[1] == 0)
    assert_near(mass[0].sum(-1), [1.0])
    assert torch.isfinite(lse[0]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_inputs_keep_wide_logits(dtype):
    """Inner products of 80,000, beyond float16, that differ by less than bfloat16 resolves."""
    q = torch.full((1, 1, 1, 8), 100.0, dtype=dtype)
    k = torch.full((1, 2, 8), 100.0, dtype=dtype)
    k[0, 1, 0] = 101.0
    v = torch.tensor([[[0.0] * 8, [1.0] * 8]], dtype=dtype)
    out, lse, mass = attend_with_mass(q, k, v, 0.01)
    assert out.dtype == dtype
    assert lse.dtype == mass.dtype == torch.float32
    assert_near(lse, [[[801.0 + math.log1p(math.exp(-1))]]])
    assert_near(mass, [[[1 / (1 + math.e), 1 / (1 + math.exp(-1))]]], rtol=1e-4)


def test_heads_that_do_not_divide_are_refused():
    q, k = torch.zeros(1, 5, 1, 8), torch.zeros(2, 3, 8)
    for function in (attend, attend_flash):
        with pytest.raises(ValueError, match="5 query heads do not divide into 2 groups"):
            function(q, k, k, SCALE)


@few
@given(masked(), st.lists(st.integers(0, 9), max_size=3))
def test_merged_parts_are_the_whole(case, cuts):
    q, k, v, mask, _ = case
    n = k.shape[1]
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    parts = [attend(q, k[:, a:b], v[:, a:b], SCALE, mask[..., a:b]) for a, b in pairwise(edges)]
    outs, lses = zip(*parts, strict=True)
    whole = attend(q, k, v, SCALE, mask)
    merged = merge(outs, lses)
    assert_near(merged[0], whole[0])
    assert_near(merged[1], whole[1])


def test_what_stands_where_no_key_was_read_does_not_matter():
    outs = torch.tensor([[math.nan, math.inf], [2.0, 3.0]])
    lses = torch.tensor([-math.inf, 1.5])
    out, lse = merge(list(outs), list(lses))
    assert out.tolist() == [2.0, 3.0]
    assert lse.item() == 1.5
    nothing = torch.full((2,), -math.inf)
    out, lse = merge(list(outs), list(nothing))
    assert out.tolist() == [0.0, 0.0]
    assert lse.item() == -math.inf


def test_unequal_numbers_of_parts_are_refused():
    with pytest.raises(ValueError, match="1 outputs and 0 log-sum-exps"):
        merge([torch.zeros(2)], [])
    with pytest.raises(ValueError, match="0 outputs"):
        merge([], [])


@few
@given(problems(), st.sampled_from(["torch-cpu", "dense", None]))
def test_fused_attention_is_the_definition(case, kernel):
    q, k, v = case
    out, lse = attend_flash(q, k, v, SCALE, kernel=kernel)
    wanted = literal(q, k, v, SCALE)
    assert_near(out, wanted[0])
    assert_near(lse, wanted[1])


@few
@given(problems(most_queries=9), st.integers(0, 6), st.sampled_from(["torch-cpu", "dense"]))
def test_a_block_over_its_history_and_itself_is_the_definition(case, history, kernel):
    q, _, _ = case
    kv_heads = 1 if q.shape[1] % 2 else 2
    n = history + q.shape[2]
    k, v = numbers(5, kv_heads, n, q.shape[3]), numbers(6, kv_heads, n, q.shape[3])
    past = (k[:, :history], v[:, :history]) if history else None
    out, lse = attend_prefill(q, k[:, history:], v[:, history:], SCALE, past, kernel=kernel)
    wanted = literal(q, k, v, SCALE, causal_mask(q, k, history))
    assert_near(out, wanted[0])
    assert_near(lse, wanted[1])


def test_fused_attention_reads_slices_of_a_pool_longer_than_a_tile():
    """Strided keys, more of them than one block of the kernel, 16-bit."""
    pool = numbers(7, 2, 3, 700, 64, dtype=torch.bfloat16)  # keys and values, KV heads, slots
    k, v = pool[0, :2, 20:620], pool[1, :2, 20:620]
    q = numbers(8, 1, 8, 600, 64, dtype=torch.bfloat16)
    mask = causal_mask(q, k, 0)[:, :, ::97]
    for causal, allowed in ((True, mask), (False, None)):
        out, lse = attend_flash(q, k, v, 0.125, causal)
        wanted = literal(q[:, :, ::97], k, v, 0.125, allowed)
        assert_near(out[:, :, ::97], wanted[0], atol=0.02, rtol=0.02)
        assert_near(lse[:, :, ::97], wanted[1], atol=0.01)


def test_causal_attention_wants_one_key_per_query():
    with pytest.raises(ValueError, match="2 queries over 3 keys"):
        attend_flash(torch.zeros(1, 1, 2, 8), torch.zeros(1, 3, 8), torch.zeros(1, 3, 8), 1.0, True)


def test_an_unknown_kernel_is_refused_by_name():
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, 3, 8)
    with pytest.raises(ValueError, match="no attention kernel 'flush'; there are dense, torch-cpu"):
        attend_flash(q, k, k, 1.0, kernel="flush")


@pytest.mark.parametrize(
    ("device", "dtype", "dim", "capability", "packages", "name"),
    [
        ("cpu", torch.bfloat16, 128, None, [], "torch-cpu"),
        ("meta", torch.float32, 64, None, [], "dense"),
        ("cuda", torch.float32, 128, (9, 0), [], "torch-efficient"),
        ("cuda", torch.float64, 128, (9, 0), [], "dense"),
        ("cuda", torch.bfloat16, 128, (9, 0), [], "torch-flash"),
        ("cuda", torch.bfloat16, 128, (7, 5), ["flash-attn"], "torch-efficient"),
        ("cuda", torch.bfloat16, 100, (9, 0), ["flash-attn"], "dense"),
        ("cuda", torch.float16, 128, (9, 0), ["flash-attn", "flashinfer"], "flash-attn"),
        ("cuda", torch.float16, 128, (9, 0), ["flash-attn", "flash-attn-3"], "flash-attn-3"),
        ("cuda", torch.float16, 128, (9, 0), ["flash-attn-4", "flashinfer"], "flash-attn-4"),
        ("cuda", torch.float16, 128, (9, 0), ["flashinfer"], "flashinfer"),
    ],
)
def test_the_kernel_that_fits_is_chosen(
    monkeypatch, device, dtype, dim, capability, packages, name
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(
        kernel_packages, "why_not", lambda name, *_: "" if name in packages else "not installed"
    )
    choice = choose(torch.device(device), dtype, dim)
    assert choice.name == name
    assert choice.name == "dense" or choice.name in fused.KERNELS
    assert choice.reason
