"""Attention over scattered slots: plain and in Triton, against the definition in float64."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from packaging.version import Version

from arborsim_torch.kernels.scattered import attend_scattered, attend_scattered_torch, runs_on

from .oracle_attention import assert_near, by_group, literal
from .scattered_cases import CASES, FP8, Case

ROOT = Path(__file__).parents[2]
# The result is rounded once to the queries' type; weights of 16 bits are rounded before they are
# multiplied with the values.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
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


each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def wanted(case):
    """Literal attention over the slots, decoded one by one."""
    (q, k, v, index, scale, mask), scales = case.build()
    slots = index.expand(len(k), -1).tolist()
    rows = torch.zeros((2, len(k), case.n, case.dim), dtype=torch.float64)
    readable = torch.zeros((case.seqs, len(k), 1, case.n), dtype=torch.bool)
    for head, row in enumerate(slots):
        for spot, slot in enumerate(row):
            if slot < 0:
                continue
            for part, (pool, by) in enumerate(((k, "k_scale"), (v, "v_scale"))):
                factor = scales[by][head, slot].double() if scales else 1.0
                rows[part, head, spot] = pool[head, slot].double() * factor
            for seq in range(case.seqs):
                if mask is None:
                    readable[seq, head, 0, spot] = True
                else:
                    of_head = mask[seq] if mask.ndim == 2 else mask[seq, head]
                    readable[seq, head, 0, spot] = of_head[spot]
    out, lse, weights = literal(q[:, :, None], rows[0], rows[1], scale, readable)
    return out[:, :, 0], lse[:, :, 0], by_group(weights, len(k))[:, :, 0]


def compare(case, found):
    out, lse, mass = wanted(case)
    assert found[0].dtype == case.dtype
    assert found[1].dtype == found[2].dtype == torch.float32
    assert_near(found[0], out, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    assert_near(found[1], lse, atol=5e-6)
    assert_near(found[2], mass)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    """What the kernels give in Triton's interpreter, by the name of the case."""
    path = tmp_path_factory.mktemp("triton") / "found.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.live.scattered_cases", str(path)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    return torch.load(path)


@needs_triton
@pytest.mark.skipif(
    not interpreter_works(), reason="Triton's interpreter fails: 3.6 with NumPy 2.4"
)
@each_case
def test_the_triton_kernels_are_the_definition(interpreted, case):
    compare(case, interpreted[case.name])


@each_case
def test_the_plain_form_is_the_definition(case):
    arguments, scales = case.build()
    found = attend_scattered(*arguments, **scales)
    compare(case, found)
    bare = attend_scattered_torch(*arguments, **scales, want_mass=False)
    assert bare[2] is None
    assert torch.equal(bare[0], found[0])


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_case
def test_the_kernels_on_a_gpu_are_the_definition(case):
    arguments, scales = case.build()
    arguments = [part.cuda() if isinstance(part, torch.Tensor) else part for part in arguments]
    found = attend_scattered(*arguments, **{name: part.cuda() for name, part in scales.items()})
    compare(case, [part.cpu() for part in found])


def test_padding_reads_no_slot_even_if_slot_0_is_broken():
    case = Case(n=12, padding=4)
    (q, k, v, index, scale, _), _ = case.build()
    index[index == 0] = 299
    k[:, 0], v[:, 0] = math.nan, math.inf
    out, lse, mass = attend_scattered(q, k, v, index, scale)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()
    assert torch.all(mass[..., index < 0] == 0)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 2))


def refused(match, **changes):
    (q, k, v, index, scale, mask), _ = Case(n=5).build()
    arguments = {"q": q, "k": k, "v": v, "index": index, "scale": scale, "mask": mask}
    with pytest.raises(ValueError, match=re.escape(match)):
        attend_scattered(**{**arguments, **changes})


def test_what_does_not_fit_is_refused():
    eight = torch.zeros(2, 300, 64, dtype=FP8)
    refused("7 query heads", q=torch.zeros(2, 7, 64))
    refused("queries of 32", q=torch.zeros(2, 8, 32))
    refused("values [2, 9, 64]", v=torch.zeros(2, 9, 64))
    refused("index of shape [3, 5]", index=torch.zeros(3, 5, dtype=torch.int32))
    refused("mask of shape [2, 4]", mask=torch.ones(2, 4, dtype=torch.bool))
    refused("keys of torch.float16", k=torch.zeros(2, 300, 64, dtype=torch.float16))
    refused("need scales", k=eight, v=eight)
    refused("need scales", k_scale=torch.ones(2, 300))
    refused("scales [2, 9]", k=eight, v=eight, k_scale=torch.ones(2, 9))


@pytest.mark.parametrize(
    ("capability", "dtype", "stored", "runs"),
    [
        ((9, 0), torch.bfloat16, FP8, True),
        ((8, 0), torch.bfloat16, FP8, False),
        ((8, 0), torch.bfloat16, torch.int8, True),
        ((7, 5), torch.float16, torch.float16, False),
        ((9, 0), torch.float64, torch.float64, False),
    ],
)
@needs_triton
def test_the_kernels_are_used_where_they_can_run(monkeypatch, capability, dtype, stored, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert runs_on.__wrapped__(torch.device("cuda"), dtype, stored) is runs


@needs_triton
@given(
    st.integers(1, 200_000), st.integers(1, 300), st.integers(1, 16),
    st.sampled_from([64, 80, 128, 256]), st.sampled_from([2, 4]), st.integers(1, 160),
)  # fmt: skip
def test_a_plan_covers_all_tokens_and_rows_and_fills_the_gpu(
    n, rows, kv_heads, dim, itemsize, processors
):
    from arborsim_torch.kernels.scattered_triton import launch_shape

    cut = launch_shape(n, rows, kv_heads, dim, itemsize, processors)
    assert (cut.splits - 1) * cut.per_split < n <= cut.splits * cut.per_split
    assert cut.per_split % cut.block == 0
    assert (cut.row_blocks - 1) * cut.block_rows < rows <= cut.row_blocks * cut.block_rows
    assert cut.splits <= 128
    programs = cut.splits * kv_heads * cut.row_blocks
    # Rounding splits up to whole blocks costs at most half of them.
    assert programs >= processors or cut.per_split == cut.block or cut.splits > 64


@needs_triton
@pytest.mark.parametrize("stored", ["bf16", "u8"])
@pytest.mark.parametrize("rows", [16, 64])
def test_the_kernel_compiles_for_an_h200_within_its_shared_memory(
    monkeypatch, tmp_path, stored, rows
):
    """No GPU is needed to compile; what it takes at run time is what the compiler reports."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from .compile_scattered import compile_attend

    found = compile_attend(stored, rows)
    assert found.metadata.shared <= 227 * 1024 // 2  # two programs on a multiprocessor
    # Rows of slots are read 16 bytes at a time, while the block before is computed with.
    assert "cp.async.cg.shared.global [" in found.asm["ptx"]
    assert "mma" in found.asm["ptx"]


@needs_triton
def test_what_merges_and_spreads_compiles_for_an_h200(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from .compile_scattered import compile_mass, compile_merge

    for found in (compile_merge(), compile_mass()):
        assert found.asm["cubin"]
        assert found.metadata.shared <= 227 * 1024 // 2
