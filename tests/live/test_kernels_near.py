"""Attention over host pools: its definition, the background, the merge with the device's part."""

import math
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from arborsim_torch.kernels import near
from arborsim_torch.kernels.dense import attend, merge
from arborsim_torch.kernels.near import HostPiece, NearAttention, attend_host

from .oracle_attention import assert_near, literal, numbers

SCALE = 0.3
few = settings(max_examples=40, deadline=None)


@st.composite
def pools(draw):
    """Queries, a pool, an index with padding into it and a mask that may close sequences."""
    kv_heads, group, seqs = draw(st.sampled_from([(1, 4, 2), (2, 1, 3), (2, 7, 1), (3, 2, 2)]))
    queries, n, seed = (
        draw(st.integers(1, 3)),
        draw(st.integers(0, 11)),
        draw(st.integers(0, 2**31)),
    )
    capacity, dim = 12, 8
    q = numbers(seed, seqs, kv_heads * group, queries, dim)
    k, v = numbers(seed + 1, 2, kv_heads, capacity, dim)
    random = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(capacity, generator=random)[:n] for _ in range(kv_heads)])
    index[torch.rand(index.shape, generator=random) < 0.2] = -1
    if draw(st.booleans()):
        index = index[0]
    mask = None
    if draw(st.booleans()):
        shape = (
            seqs,
            draw(st.sampled_from([1, kv_heads])),
            draw(st.sampled_from([1, queries])),
            n,
        )
        mask = torch.rand(shape, generator=random) < 0.5
        mask[0] &= draw(st.booleans())
    return q, k, v, index, mask


def wanted(q, k, v, index, mask):
    seqs, _, queries, _ = q.shape
    slots = index.expand(len(k), -1)
    n = slots.shape[1]
    readable = (slots >= 0)[None, :, None].expand(seqs, len(k), queries, n)
    readable = readable if mask is None else readable & mask
    head = torch.arange(len(k))[:, None]
    return literal(q, k[head, slots], v[head, slots], SCALE, readable)


@few
@given(pools(), st.integers(1, 5), st.sampled_from([1, 3, 8]), st.booleans())
def test_host_attention_in_tiles_is_the_definition(case, tile, threads, background):
    q, k, v, index, mask = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near, "_TILE_TOKENS", tile)
        patch.setattr(near, "_LEAST_PART", 1)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        with NearAttention(torch.device("cpu"), background=background) as attention:
            out, lse = attention.start(q, [HostPiece(k, v, index, mask)], SCALE).result()
    expected = wanted(*case)
    assert_near(out, expected[0])
    assert_near(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_pools_are_attended_in_float32(dtype):
    q = numbers(0, 2, 8, 1, 64, dtype=dtype)
    k, v = numbers(1, 2, 2, 50, 64, dtype=dtype)
    out, lse = attend_host(q, HostPiece(k, v), 0.125)
    expected = literal(q, k, v, 0.125)
    assert out.dtype == dtype
    assert_near(lse, expected[1], atol=5e-6)
    spacing = torch.finfo(dtype).eps  # one rounding, of the result
    assert_near(out, expected[0], atol=1e-6, rtol=spacing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_of_all_heads_are_read_as_they_lie(dtype, parts, monkeypatch):
    """As the host's pools store them: token by token, keys and values side by side."""
    monkeypatch.setattr(near, "_LEAST_PART", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2 * parts)
    rows = numbers(0, 90, 2, 2, 32).to(dtype)
    k, v = rows.permute(1, 2, 0, 3)
    q, by = numbers(1, 1, 8, 1, 32), numbers(2, 2, 90, 2, 1).abs()
    scales = by.permute(0, 2, 1, 3)[..., 0] if dtype == torch.float8_e4m3fn else None
    k_scale, v_scale = (None, None) if scales is None else scales
    wide = torch.stack([k, v]).double()
    wide = wide if scales is None else wide * scales[..., None].double()
    scattered = torch.randperm(90, generator=torch.Generator().manual_seed(3))[:61]
    for index, of in ((None, wide), (scattered, wide[:, :, scattered])):
        out, lse = attend_host(q, HostPiece(k, v, index, None, k_scale, v_scale), 0.125)
        expected = literal(q, of[0], of[1], 0.125)
        assert_near(out, expected[0])
        assert_near(lse, expected[1])


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
def test_eight_bit_pools_are_decoded_with_their_scales(stored):
    q = numbers(0, 1, 4, 1, 16)
    data = (numbers(1, 2, 2, 20, 16) * 30).to(stored)
    by = numbers(2, 2, 2, 20).abs() / 30
    decoded = data.double() * by.double()[..., None]
    some = torch.tensor([3, 19, -1, 0], dtype=torch.int32)
    for index, rows in ((some, decoded[:, :, [3, 19, 0]]), (None, decoded)):
        out, lse = attend_host(q, HostPiece(*data, index, None, *by), 0.25)
        expected = literal(q, rows[0], rows[1], 0.25)
        assert_near(out, expected[0])
        assert_near(lse, expected[1])


@few
@given(pools(), st.integers(0, 11))
def test_near_and_device_parts_merge_into_the_whole(case, cut):
    q, k, v, index, _ = case
    slots = index.expand(len(k), -1).clamp(min=0)
    head = torch.arange(len(k))[:, None]
    keys, values = k[head, slots], v[head, slots]
    pending = NearAttention(torch.device("cpu")).start(q, [HostPiece(k, v, slots[:, cut:])], SCALE)
    here = attend(q, keys[:, :cut], values[:, :cut], SCALE)
    there = pending.result()
    out, lse = merge((here[0], there[0]), (here[1], there[1]))
    whole = literal(q, keys, values, SCALE)
    assert_near(out, whole[0])
    assert_near(lse, whole[1])


def test_the_caller_goes_on_while_the_background_works(monkeypatch):
    """The work waits for something that the caller does after `start`."""
    go = threading.Event()
    real = near.attend_host

    def waiting(*arguments, **options):
        assert go.wait(600)
        return real(*arguments, **options)

    monkeypatch.setattr(near, "attend_host", waiting)
    q, k = numbers(0, 1, 2, 1, 8), numbers(1, 2, 5, 8)
    with NearAttention(torch.device("cpu"), background=True) as attention:
        first = attention.start(q, [HostPiece(k, k)], SCALE)
        second = attention.start(2 * q, [HostPiece(k, k)], SCALE)
        go.set()
        for pending, queries in ((second, 2 * q), (first, q)):
            expected = real(queries, HostPiece(k, k), SCALE)
            for _ in range(2):
                assert all(map(torch.equal, pending.result(), expected))


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_the_work_is_raised_with_its_result(background):
    q, k = numbers(0, 1, 3, 1, 8), numbers(1, 2, 5, 8)
    with NearAttention(torch.device("cpu"), background=background) as attention:
        pending = attention.start(q, [HostPiece(k, k)], SCALE)
        with pytest.raises(ValueError, match="3 query heads do not divide into 2 groups"):
            pending.result()


def test_an_empty_pool_gives_nothing():
    q, k = numbers(0, 1, 2, 1, 8), torch.zeros(2, 0, 8)
    for index in (None, torch.tensor([-1, -1])):
        out, lse = attend_host(q, HostPiece(k, k, index), SCALE)
        assert torch.all(out == 0)
        assert torch.all(lse == -math.inf)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@given(pools())
@settings(max_examples=10, deadline=None)
def test_queries_on_a_gpu_get_their_part_back_there(case):
    q, k, v, index, mask = case
    with NearAttention(torch.device("cuda")) as attention:
        out, lse = attention.start(q.cuda(), [HostPiece(k, v, index, mask)], SCALE).result()
    assert out.is_cuda
    expected = wanted(*case)
    assert_near(out.cpu(), expected[0])
    assert_near(lse.cpu(), expected[1])
