"""Quest's bounds and the pages they choose."""

import math
import os
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from arborsim_torch.kernels.ondemand import PageBounds, choose_pages
from arborsim_torch.kernels.piece import Piece
from arborsim_torch.kernels.pieces import attend_pieces
from arborsim_torch.tiers.codec import Plain

from .oracle_attention import assert_near, literal, numbers
from .test_kernels_pieces import ROOT, interpreter_works, needs_triton

few = settings(max_examples=60, deadline=None)


@st.composite
def filled(draw):
    """Queries and bounds over pages, some empty, of small whole numbers: float32 is exact."""
    kv_heads, group, seqs = draw(st.sampled_from([(1, 4, 2), (2, 1, 3), (2, 7, 1)]))
    pages, tokens, dim = draw(st.integers(1, 6)), draw(st.integers(0, 14)), 4
    seed = draw(st.integers(0, 2**31))
    random = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    q = torch.randint(-9, 10, (seqs, kv_heads * group, dim), generator=random).to(dtype)
    keys = torch.randint(-9, 10, (kv_heads, tokens, dim), generator=random).to(dtype)
    page = torch.randint(0, pages, (kv_heads, tokens), generator=random)
    if draw(st.booleans()):
        page = page[0]
    bounds = PageBounds(pages, kv_heads, dim, dtype)
    cut = draw(st.integers(0, tokens))
    for part in (slice(0, cut), slice(cut, tokens)):
        bounds.update(page[..., part], keys[:, part])
    return q, keys, page.expand(kv_heads, -1), bounds


@few
@given(filled())
def test_no_key_of_a_page_scores_above_its_bound(case):
    q, keys, page, bounds = case
    found = bounds.bound(q)
    group = q.shape[1] // len(keys)
    for seq, head in np.ndindex(*q.shape[:2]):
        for token, at in enumerate(page[head // group].tolist()):
            score = int(q[seq, head].long() @ keys[head // group, token].long())
            assert found[seq, head, at] >= score


@few
@given(filled())
def test_the_bound_is_quests_sum_over_channels(case):
    q, keys, page, bounds = case
    found = bounds.bound(q)
    group = q.shape[1] // len(keys)
    for seq, head, at in np.ndindex(*found.shape):
        own = keys[head // group][page[head // group] == at].long()
        assert bool(bounds.filled[head // group, at]) == bool(len(own))
        if not len(own):
            assert found[seq, head, at] == -math.inf
            continue
        literal_bound = sum(
            max(int(x) * int(channel.min()), int(x) * int(channel.max()))
            for x, channel in zip(q[seq, head].long(), own.T, strict=True)
        )
        assert found[seq, head, at] == literal_bound


@few
@given(filled(), st.integers(0, 7))
def test_the_pages_with_the_largest_bounds_are_chosen(case, top):
    q, keys, _, bounds = case
    kv_heads, pages = len(keys), bounds.filled.shape[1]
    by_group = bounds.bound(q).view(len(q), kv_heads, -1, pages)

    def ranked(scores, head):
        best = sorted(range(pages), key=lambda at: (-float(scores[at]), at))
        return [at if bounds.filled[head, at] else -1 for at in best[:top]]

    found = bounds.select(q, top)
    shared = bounds.select(q, top, shared=True)
    for head in range(kv_heads):
        for seq in range(len(q)):
            assert found[seq, head].tolist() == ranked(by_group[seq, head].amax(0), head)
        assert shared[head].tolist() == ranked(by_group[:, head].amax((0, 1)), head)


def test_a_page_is_narrow_again_once_cleared():
    bounds = PageBounds(3, 1, 2, torch.float32)
    bounds.update(1, torch.tensor([[[5.0, -5.0], [7.0, 1.0]]]))
    bounds.update(2, torch.tensor([[[1.0, 1.0]]]))
    q = torch.ones(1, 1, 2)
    assert bounds.bound(q)[0, 0].tolist() == [-math.inf, 8.0, 2.0]
    bounds.clear(1)
    assert bounds.bound(q)[0, 0].tolist() == [-math.inf, -math.inf, 2.0]
    bounds.update(1, torch.tensor([[[0.5, 0.5]]]))
    assert bounds.bound(q)[0, 0].tolist() == [-math.inf, 1.0, 2.0]
    bounds.clear(torch.tensor([1, 2]))
    assert not bounds.filled.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_empty_pages_do_not_spoil_the_choice_whatever_the_query(dtype):
    """Their placeholders times large queries overflow, and times 0 must not be NaN."""
    bounds = PageBounds(4, 1, 2, dtype)
    bounds.update(2, torch.tensor([[[1.0, -1.0]]], dtype=dtype))
    for q in ([0.0, 0.0], [6e4, -6e4], [-6e4, 0.0]):
        found = bounds.bound(torch.tensor([[q]], dtype=dtype))
        assert found[0, 0, [0, 1, 3]].tolist() == [-math.inf] * 3
        assert found[0, 0, 2] == q[0] - q[1]
        assert bounds.select(torch.tensor([[q]], dtype=dtype), 2).tolist() == [[[2, -1]]]


def test_attention_over_the_chosen_pages_is_attention_over_their_tokens():
    """And all pages together are the whole; padding of missing pages reads nothing."""
    page_tokens, pages = 4, 5
    pool = numbers(0, 2, 2, pages * page_tokens, 16)
    q = numbers(1, 1, 8, 16)
    bounds = PageBounds(pages, 2, 16, torch.float32)
    held = [0, 2, 3, 4]  # page 1 is empty
    for page in held:
        bounds.update(page, pool[0, :, page * page_tokens :][:, :page_tokens])
    for top in (2, 5):
        chosen = bounds.select(q, top)[0]
        slots = chosen[..., None] * page_tokens + torch.arange(page_tokens)
        index = slots.masked_fill((chosen < 0)[..., None], -1).flatten(-2).to(torch.int32)
        piece = Piece(*pool, Plain(q.dtype), None, None, index, index.shape[-1])
        out, lse, mass = attend_pieces(q, [piece], 0.25, mass=True)
        mask = torch.zeros(1, 2, 1, pages * page_tokens, dtype=torch.bool)
        for head, own in enumerate(chosen.tolist()):
            assert len(set(own)) == top
            for page in own:
                if page >= 0:
                    mask[:, head, :, page * page_tokens : (page + 1) * page_tokens] = True
        expected = literal(q[:, :, None], pool[0], pool[1], 0.25, mask)
        assert_near(out, expected[0][:, :, 0])
        assert_near(lse, expected[1][:, :, 0])
        assert torch.all(mass[0][index < 0] == 0)
    assert sorted(chosen[0].tolist()) == [-1, *held]


#: KV heads, query heads of each, sequences, pages of each set, dimension, pages to choose, type.
SETS = (
    (2, 4, 1, (5,), 16, 3, torch.bfloat16), (1, 3, 2, (40, 17), 24, 16, torch.float16),
    (3, 1, 1, (1, 2), 8, 16, torch.float32), (2, 2, 3, (130,), 64, 16, torch.bfloat16),
)  # fmt: skip


def sets_of(case, dtype, device="cpu"):
    """Queries, bounds and readable pages of small whole numbers: many bounds are the same."""
    kv_heads, members, seqs, pages, dim, _, own = case
    random = torch.Generator().manual_seed(sum(pages))
    q = torch.randint(-2, 3, (seqs, kv_heads * members, 2, dim), generator=random)
    q[:, 0] = 0  # of which all bounds are 0
    found = []
    for count in pages:
        bounds = PageBounds(count, kv_heads, dim, own)
        keys = torch.randint(-2, 3, (kv_heads, count, dim), generator=random)
        bounds.update(torch.randint(0, count, (kv_heads, count), generator=random), keys.to(own))
        bounds.low, bounds.high = bounds.low.to(device, dtype), bounds.high.to(device, dtype)
        bounds.filled = bounds.filled.to(device)
        found.append(bounds)
    kinds = kv_heads if len(pages) > 1 else 1
    readable = torch.rand((kinds, sum(pages)), generator=random) < 0.8
    return found, q.to(device, dtype)[:, :, 1], readable.to(device)


def chosen_by_definition(case):
    bounds, q, readable = sets_of(case, torch.float64)
    return choose_pages(bounds, q, case[5], readable)


def solve(path):
    """In Triton's interpreter."""
    from arborsim_torch.kernels.ondemand_triton import choose

    found = []
    for case in SETS:
        bounds, q, readable = sets_of(case, case[-1])
        sets = [(each.low, each.high, each.filled) for each in bounds]
        found.append(choose(sets, q, min(case[5], sum(case[3])), readable))
    torch.save(found, path)


@needs_triton
@pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter fails: 3.6 with NumPy 2.4"
)
def test_the_triton_kernels_choose_the_same_pages(tmp_path):
    path = tmp_path / "found.pt"
    call = f"from tests.live.test_kernels_ondemand import solve; solve({str(path)!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", call], check=True, cwd=ROOT, env=environment)
    for case, found in zip(SETS, torch.load(path), strict=True):
        assert found.tolist() == chosen_by_definition(case).tolist(), case


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", SETS, ids=str)
def test_a_gpu_chooses_the_same_pages(case):
    bounds, q, readable = sets_of(case, case[-1], "cuda")
    assert (
        choose_pages(bounds, q, case[5], readable).tolist() == chosen_by_definition(case).tolist()
    )
