"""The kernels that only a GPU runs: what can be held against them without one.

PyTorch's operators are called on its meta device, which checks their signature and gives shapes
and types.  For the two packages stands a module that computes what their documentation says, in
their layout and to their base: that tests the conversions around them, not the packages.  On a GPU
the real ones are held against the definition.
"""

import importlib.util
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from arborsim_torch.kernels.dense import attend
from arborsim_torch.kernels.flash import attend_flash
from arborsim_torch.kernels.fused import KERNELS

from .oracle_attention import assert_near, literal, numbers

SCALE = 0.3


def causal(q, k):
    return torch.ones(q.shape[2], k.shape[1], dtype=torch.bool).tril()


def whole(q, k, v, is_causal):
    mask = causal(q, k).expand(len(q), len(k), -1, -1) if is_causal else None
    return literal(q, k, v, SCALE, mask)


def problem(is_causal, dtype=torch.float32):
    seqs, queries = (1, 5) if is_causal else (2, 3)
    q = numbers(0, seqs, 6, queries, 64, dtype=dtype)
    k, v = numbers(1, 2, 2, 5, 64, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["torch-flash", "torch-efficient"])
def test_pytorchs_operators_take_the_arguments_and_give_the_shapes(kernel, is_causal):
    q, k, v = (part.to("meta") for part in problem(is_causal, torch.bfloat16))
    out, lse = attend_flash(q, k, v, SCALE, is_causal, kernel=kernel)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    assert lse.shape == q.shape[:3]
    assert lse.dtype == torch.float32


def flash_attn_func(q, k, v, softmax_scale, causal, return_attn_probs):
    """Batch first, then tokens, then heads; log-sum-exp ``[batch, heads, queries]``, to base e."""
    assert return_attn_probs
    found = [
        by_request(*(part.transpose(0, 1) for part in parts), softmax_scale, causal)
        for parts in zip(q, k, v, strict=True)
    ]
    outs, lses = zip(*found, strict=True)
    return torch.stack(outs).transpose(1, 2), torch.stack(lses), None


def single_prefill_with_kv_cache(q, k, v, causal, sm_scale, return_lse):
    """Tokens first, then heads; log-sum-exp ``[queries, heads]``, to base 2."""
    assert return_lse
    out, lse = by_request(*(part.transpose(0, 1) for part in (q, k, v)), sm_scale, causal)
    return out.transpose(0, 1), lse.T / math.log(2)


def by_request(q, k, v, scale, is_causal):
    mask = causal(q[None], k)[None, None] if is_causal else None
    out, lse = attend(q[None], k, v, scale, mask)
    return out[0], lse[0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "package", "function"),
    [
        ("flash-attn", "flash_attn", flash_attn_func),
        ("flashinfer", "flashinfer", single_prefill_with_kv_cache),
    ],
)
def test_layouts_and_bases_of_the_packages_are_converted(
    monkeypatch, kernel, package, function, is_causal
):
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(**{function.__name__: function}))
    q, k, v = problem(is_causal)
    out, lse = attend_flash(q, k, v, SCALE, is_causal, kernel=kernel)
    expected = whole(q, k, v, is_causal)
    assert_near(out, expected[0])
    assert_near(lse, expected[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", sorted({*KERNELS, "dense"} - {"torch-cpu"}))
def test_the_kernels_on_a_gpu_are_the_definition(kernel, is_causal):
    package = {"flash-attn": "flash_attn", "flashinfer": "flashinfer"}.get(kernel, "torch")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    q, k, v = problem(is_causal, torch.bfloat16)
    out, lse = attend_flash(*(x.cuda() for x in (q, k, v)), SCALE, is_causal, kernel=kernel)
    expected = whole(q, k, v, is_causal)
    assert_near(out.cpu(), expected[0], atol=0.02, rtol=0.02)
    assert_near(lse.cpu(), expected[1], atol=0.01)
