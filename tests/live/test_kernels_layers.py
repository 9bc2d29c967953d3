"""Fused kernels of a decode step's layers, against transformers' own modules."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from arborsim_torch import fused_layers
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import Pass, TreeDecoder, run_together
from arborsim_torch.static import StaticStep, kind_of_steps

from .oracle_attention import numbers
from .pretended.arming import pretend
from .test_kernels_pieces import ROOT, interpreter_works, needs_triton
from .test_static import on_a_tree
from .tiny import FAMILIES, LAYERS, VOCAB, tiny_model

interpreted_alone = pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter fails: 3.6 with NumPy 2.4"
)
#: Type, rows, query and KV heads, dimension of a head, size of a row.
CASES = (
    (torch.float32, 1, 4, 2, 16, 64), (torch.float32, 5, 6, 2, 24, 48),
    (torch.float16, 3, 8, 2, 128, 1000), (torch.bfloat16, 3, 4, 4, 64, 300),
)  # fmt: skip
POOL = 40  # slots
GROUPINGS = ("shared", "head")


def problem(case):
    """Rows, and a residual; what to turn, and how; a pool, and slots."""
    dtype, rows, heads, kv_heads, dim, size = case
    x, residual, weight = (numbers(i, *shape, dtype=dtype) for i, shape in
                           enumerate(((rows, 1, size), (rows, 1, size), (size,))))  # fmt: skip
    widths = (heads * dim, kv_heads * dim, kv_heads * dim)
    projected = [numbers(3 + i, rows, width, dtype=dtype) for i, width in enumerate(widths)]
    angle = torch.arange(rows)[:, None] * torch.arange(1, dim // 2 + 1)
    turn = [f(angle.repeat(1, 2).float()).to(dtype) for f in (torch.cos, torch.sin)]
    slots = torch.randperm(POOL, generator=torch.Generator().manual_seed(0))[: kv_heads * rows]
    return x, residual, weight, projected, turn, slots.view(kv_heads, rows)


def target(case, by_head, slots, device="cpu"):
    """A pool of zeros: slots of each head in its own strip, or all rows in one."""
    dtype, _, _, kv_heads, dim, _ = case
    pool = torch.zeros((2, 1 if by_head else kv_heads, POOL, dim), dtype=dtype, device=device)
    return pool, (*pool, slots.to(device) if by_head else slots[:1].to(device))


def by_kernels(case, device="cpu"):
    """What the kernels make of it."""
    from arborsim_torch.kernels.layers_triton import add_norm, rotate_and_store, silu_times

    *first, projected, turn, slots = problem(case)
    x, residual, weight = (part.to(device) for part in first)
    projected, turn = ([part.to(device) for part in parts] for parts in (projected, turn))
    found = [add_norm(x, None, weight, 1e-5)[1], *add_norm(x, residual, weight, 1e-5)]
    for by_head in (False, True):
        out = projected[0].new_empty((len(x), case[2], case[4]))
        pool, where = target(case, by_head, slots, device)
        split = len(x) // 2  # as rows of two searches
        for begin, end in ((0, split), (split, len(x))):
            own = (*where[:2], where[2][:, begin:end])
            if end > begin:
                rotate_and_store(projected, turn, out, begin, own)
        found += [out, pool]
    return [part.cpu() for part in (*found, silu_times(x, residual))]


def by_modules(case):
    """The same as transformers' modules have it."""
    dtype, rows, _, kv_heads, dim, size = case
    x, residual, weight, projected, turn, slots = problem(case)
    norm = LlamaRMSNorm(size, 1e-5).to(dtype)
    norm.weight.data = weight
    found = [norm(x), x + residual, norm(x + residual)]
    q, k = (part.view(rows, 1, -1, dim).transpose(1, 2) for part in projected[:2])
    q, k = apply_rotary_pos_emb(q, k, *(part[:, None] for part in turn))
    for by_head in (False, True):
        pool, (keys, values, where) = target(case, by_head, slots)
        for head, own in enumerate(where.expand(kv_heads, -1)):
            strip = 0 if by_head else head
            keys[strip, own] = k[:, head, 0]
            values[strip, own] = projected[2].view(rows, kv_heads, dim)[:, head]
        found += [q[:, :, 0], pool]
    return [part.detach() for part in (*found, torch.nn.functional.silu(x) * residual)]


def assert_alike(case, found, exact):
    """But for the last bits: a sum of squares may round otherwise, and an exponential.

    `exact`: numbers are rounded to the nearest, so a product of two rounded ones is at most
    two units in the last place off.
    """
    names = ("norm", "sum", "norm of sum", "queries", "pool", "queries", "pool by head", "silu")
    unit = torch.finfo(case[0]).eps
    for name, own, other in zip(names, found, by_modules(case), strict=True):
        assert own.dtype == other.dtype == case[0]
        if exact and name in ("sum", "queries", "pool", "pool by head"):
            assert torch.equal(own, other), name
        else:
            size = 2 if exact and case[0].itemsize == 2 else 4
            torch.testing.assert_close(own, other, rtol=size * unit, atol=size * unit)


def solve(path):
    """In Triton's interpreter."""
    from arborsim_torch.kernels import layers_triton

    found = {str(case): by_kernels(case) for case in CASES}
    kernel, calls = layers_triton.silu_times, []
    layers_triton.silu_times = lambda *parts: calls.append(1) or kernel(*parts)
    for grouping in GROUPINGS:
        step, decoder = one_of(grouping)
        step.fused = True
        found[grouping] = on_a_tree(decoder, 2)
    assert len(calls) == len(GROUPINGS) * LAYERS * (len(found[GROUPINGS[0]]) - 1)  # the prompt
    torch.save(found, path)


def one_of(grouping):
    """A decoder with static steps on the CPU."""
    model = tiny_model()
    cache = TieredCache(Layout.of(model, grouping), page_tokens=4)
    decoder = TreeDecoder(model, cache=cache)
    decoder.static = StaticStep(model, cache, graphs=False)
    assert not decoder.static.fused
    return decoder.static, decoder


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    path = tmp_path_factory.mktemp("triton") / "found.pt"
    call = f"from tests.live.test_kernels_layers import solve; solve({str(path)!r})"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", call], check=True, cwd=ROOT, env=environment)
    return torch.load(path)


@needs_triton
@interpreted_alone
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernels_are_the_modules(interpreted, case):
    # The interpreter cuts bfloat16 off instead of rounding it.
    assert_alike(case, interpreted[str(case)], case[0] != torch.bfloat16)


@needs_triton
@interpreted_alone
@pytest.mark.parametrize("grouping", GROUPINGS)
def test_fused_steps_are_the_models_own(interpreted, grouping):
    _, decoder = one_of(grouping)
    for one, other in zip(interpreted[grouping], on_a_tree(decoder, 2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def launched(monkeypatch, switch):
    """Logits of two searches together on the pretended device, and launches of an eager step."""
    monkeypatch.setenv(fused_layers.SWITCH, switch)
    with pretend() as gpu:
        model = tiny_model().to("cuda")
        decoders = [TreeDecoder(model) for _ in range(2)]
        rng, found = np.random.default_rng(3), []
        for decoder in decoders:
            decoder.prefill(rng.integers(0, VOCAB, 40).tolist())
            for node in (1, 2, 3):
                decoder.open(node, 0)
        for leaves in ([1], [1, 2, 3]):
            decoders[0].activate(leaves)
            decoders[1].activate([2])
            for _ in range(4):
                before = gpu.launches.copy()
                ids = [rng.integers(0, VOCAB, (len(own), 1)) for own in (leaves, [2])]
                passes = [Pass(one, own, None, 1, False) for one, own in
                          zip(decoders, ids, strict=True)]  # fmt: skip
                found += [x.cpu() for x in run_together(passes)]
                if len(found) == 2:
                    launches = gpu.launches - before
                    del launches["empty"], launches["empty_like"]  # memory that no kernel fills
        assert gpu.launches["graph replay"] >= 4
        words = kind_of_steps(model, True)
    return found, launches, words


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is pretended on a GPU")
def test_searches_together_are_fused_and_captured(monkeypatch):
    found, launches, words = launched(monkeypatch, "0")
    wanted, others, plain = launched(monkeypatch, "1")
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (launches["silu_product"], launches["add_norm_rows"]) == (LAYERS, 2 * LAYERS + 1)
    assert launches["rotate_rows"] == 2 * LAYERS  # each search's own
    assert not any("_rows" in name for name in others)
    assert others.total() - launches.total() >= 25 * LAYERS
    assert words == "CUDA graphs"
    assert plain == f"CUDA graphs, small operations apart: {fused_layers.SWITCH} is set"


@pytest.mark.parametrize("family", FAMILIES)
def test_only_layers_that_are_known_are_fused(family):
    assert bool(fused_layers.unknown(tiny_model(family))) == (family != "llama")


def spoiled(how):
    model = tiny_model()
    layer = model.model.layers[2]
    if how == "hook":
        layer.mlp.register_forward_hook(lambda *_: None)
    elif how == "forward":
        layer.input_layernorm.forward = lambda x: x
    elif how == "activation":
        layer.mlp.act_fn = torch.nn.GELU()
    elif how == "subclass":
        layer.mlp.__class__ = type("LlamaMLP", (type(layer.mlp),), {})
    elif how == "norm in float32":
        model = model.to(torch.bfloat16)
        model.model.layers[2].input_layernorm.float()
    return model


@pytest.mark.parametrize("how", ["hook", "forward", "activation", "subclass", "norm in float32"])
def test_what_would_be_passed_over_is_a_reason_not_to_fuse(how):
    assert "layer 2" in fused_layers.unknown(spoiled(how))
    assert fused_layers.refusal(tiny_model()) == "the kernels need Triton and a GPU"


@needs_triton
def test_a_model_is_as_before_when_a_step_fails():
    model = tiny_model()
    before = [dict(vars(module)) for module in model.modules()]

    def step():
        with fused_layers.fused(model, []):
            assert "forward" in vars(model.model.norm)
            raise ValueError("a step")

    with pytest.raises(ValueError, match="a step"):
        step()
    for module, was in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == was.keys()


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gpu_computes_the_same(case):
    assert_alike(case, by_kernels(case, "cuda"), True)
