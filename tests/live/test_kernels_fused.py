"""The kernels that only a GPU runs: what can be held against them without one.

PyTorch's operators are called on its meta device, which checks their signature and gives shapes
and types.  For each package stands a module that computes what their documentation says, in
their layout and to their base: that tests the conversions around them, not the packages.  On a GPU
the real ones are held against the definition.
"""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from arborsim_torch.kernels.dense import attend
from arborsim_torch.kernels.flash import attend_flash
from arborsim_torch.kernels.fused import KERNELS, choose, choose_decode
from arborsim_torch.kernels.packages import PACKAGES, why_not

from .oracle_attention import assert_near, literal, numbers
from .pretended.arming import pretend

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


def of_batch(q, k, v, scale, is_causal):
    """Batch first, then tokens, then heads; log-sum-exp ``[batch, heads, queries]``, to base e."""
    found = [
        by_request(*(part.transpose(0, 1) for part in parts), scale, is_causal)
        for parts in zip(q, k, v, strict=True)
    ]
    outs, lses = zip(*found, strict=True)
    return torch.stack(outs).transpose(1, 2), torch.stack(lses)


def flash_attn_func(q, k, v, softmax_scale, causal, return_attn_probs):
    """Of generation 2, which returns probabilities, too."""
    assert return_attn_probs
    return *of_batch(q, k, v, softmax_scale, causal), None


def third(q, k, v, softmax_scale, causal, return_attn_probs):
    """``flash_attn_interface.flash_attn_func``."""
    assert return_attn_probs
    return of_batch(q, k, v, softmax_scale, causal)


def fourth(q, k, v, softmax_scale, causal, return_lse=False):
    """``flash_attn.cute.flash_attn_func``."""
    out, lse = of_batch(q, k, v, softmax_scale, causal)
    return out, lse if return_lse else None


def kvcache(q, k_cache, v_cache, cache_seqlens, softmax_scale, return_softmax_lse):
    """Of generations 2 and 3; the start of one cache."""
    assert return_softmax_lse
    keys, values = (x[0, : int(cache_seqlens)].transpose(0, 1) for x in (k_cache, v_cache))
    out, lse = attend(q.transpose(1, 2), keys, values, softmax_scale)
    return out.transpose(1, 2), lse


def raising(*_, **__):
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def only_outputs(q, k, v, softmax_scale, causal, **_):
    return of_batch(q, k, v, softmax_scale, causal)[0]


def to_base_2(q, k, v, softmax_scale, causal, **_):
    out, lse = of_batch(q, k, v, softmax_scale, causal)
    return out, lse / math.log(2)


def single_prefill_with_kv_cache(q, k, v, causal, sm_scale, return_lse):
    """Tokens first, then heads; log-sum-exp ``[queries, heads]``, to base 2."""
    assert return_lse
    out, lse = by_request(*(part.transpose(0, 1) for part in (q, k, v)), sm_scale, causal)
    return out.transpose(0, 1), lse.T / math.log(2)


def by_request(q, k, v, scale, is_causal):
    mask = causal(q[None], k)[None, None].to(q.device) if is_causal else None
    out, lse = attend(q[None], k, v, scale, mask)
    return out[0], lse[0]


def install(monkeypatch, modules):
    """These modules, with these functions, and no other packages of kernels."""
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package.module, None)
    for name, functions in modules.items():
        if "." in name and name.split(".")[0] not in modules:
            monkeypatch.setitem(sys.modules, name.split(".")[0], ModuleType("a namespace"))
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "package", "function"),
    [
        ("flash-attn", "flash_attn", flash_attn_func),
        ("flash-attn-3", "flash_attn_interface", third),
        ("flash-attn-4", "flash_attn.cute", fourth),
        ("flashinfer", "flashinfer", single_prefill_with_kv_cache),
    ],
)
def test_layouts_and_bases_of_the_packages_are_converted(
    monkeypatch, kernel, package, function, is_causal
):
    install(monkeypatch, {package: {PACKAGES[kernel].prefill: function}})
    q, k, v = problem(is_causal)
    out, lse = attend_flash(q, k, v, SCALE, is_causal, kernel=kernel)
    expected = whole(q, k, v, is_causal)
    assert_near(out, expected[0])
    assert_near(lse, expected[1])


BOTH = {"flash_attn_with_kvcache": kvcache}


@pytest.mark.parametrize(
    ("modules", "prefill", "decode", "why"),
    [
        ({}, "torch-flash", "triton", "no package of attention kernels is installed"),
        ({"flash_attn": {"flash_attn_func": flash_attn_func, **BOTH}},
         "flash-attn", "flash-attn", "flash_attn.flash_attn_func works here"),
        ({"flash_attn_interface": {"flash_attn_func": third, **BOTH}},
         "flash-attn-3", "flash-attn-3", "flash_attn_interface.flash_attn_func works here"),
        ({"flash_attn.cute": {"flash_attn_func": fourth}},
         "flash-attn-4", "triton", "flash_attn.cute.flash_attn_func works here"),
        ({"flash_attn": {}}, "torch-flash", "triton", "flash_attn has no flash_attn_func"),
        ({"flash_attn_interface": {"flash_attn_func": raising, **BOTH},
          "flash_attn": {"flash_attn_func": flash_attn_func}},
         "flash-attn", "flash-attn-3", "flash_attn.flash_attn_func works here"),
        ({"flash_attn": {"flash_attn_func": raising, "flash_attn_with_kvcache": raising}},
         "torch-flash", "triton", "flash_attn.flash_attn_func fails (RuntimeError: no kernel image "
         "is available for execution on the device)"),
        ({"flash_attn_interface": {"flash_attn_func": only_outputs}},
         "torch-flash", "triton", "flash_attn_interface.flash_attn_func"),
        ({"flash_attn_interface": {"flash_attn_func": to_base_2}},
         "torch-flash", "triton", "flash_attn_interface.flash_attn_func gives log-sum-exps that"),
    ],
)  # fmt: skip
def test_packages_are_used_by_what_they_offer(monkeypatch, modules, prefill, decode, why):
    pytest.importorskip("triton", reason="needs Triton")
    install(monkeypatch, modules)
    with pretend(), torch.inference_mode():
        where = torch.device("cuda", 0), torch.bfloat16, 64
        choice, of_decode = choose(*where), choose_decode(*where)
    assert (choice.name, of_decode.name) == (prefill, decode)
    assert why in choice.reason
    assert "\n" not in choice.reason + of_decode.reason
    if decode == "triton" and modules:
        assert of_decode.reason != choice.reason


def test_flash_attn_4_alone_leaves_an_empty_package(monkeypatch, tmp_path):
    """As it is installed: ``flash_attn`` has no ``__init__``."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    cute = tmp_path / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "__init__.py").write_text(f"from {__name__} import fourth as flash_attn_func\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pretend(), torch.inference_mode():
        where = torch.device("cuda", 0), torch.bfloat16, 64
        assert choose(*where).name == "flash-attn-4"
        assert why_not("flash-attn", "prefill", *where) == "flash_attn has no flash_attn_func"
        assert why_not("flash-attn-3", "prefill", *where) == "not installed"
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", sorted({*KERNELS, "dense"} - {"torch-cpu"}))
def test_the_kernels_on_a_gpu_are_the_definition(kernel, is_causal):
    q, k, v = problem(is_causal, torch.bfloat16)
    if kernel in PACKAGES:
        why = why_not(kernel, "prefill", torch.device("cuda", 0), q.dtype, q.shape[-1])
        if why:
            pytest.skip(why)
    out, lse = attend_flash(*(x.cuda() for x in (q, k, v)), SCALE, is_causal, kernel=kernel)
    expected = whole(q, k, v, is_causal)
    assert_near(out.cpu(), expected[0], atol=0.02, rtol=0.02)
    assert_near(lse.cpu(), expected[1], atol=0.01)
