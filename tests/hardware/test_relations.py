"""Relations that priced steps keep: more work takes longer, and no kernel beats its roofline.

Two relations may break where measured kernels break them: a newer GPU is not slower, and neither
are twice the GPUs.  Each such case is listed (`SLOWER`) with a kernel that takes longer as it was
measured, with constants of the engine left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from arborsim.core.errors import UsageError
from arborsim.core.sourced import Basis
from arborsim.machine.cost import CostModel
from arborsim.machine.forward import Forward
from arborsim.machine.grid import Grid
from arborsim.machine.kernels import load_tables, shipped_tables
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import ServingOptions
from arborsim.machine.price import Price
from arborsim.machine.weights import with_weights

ENGINES = ("vllm", "sglang", "trtllm")
GPUS = ("a100-80", "h100", "h200", "b200")  # by age
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "qwen3-30b-a3b")
PARALLEL = (1, 2, 4, 8)
CONTEXT = 2048
TOLERANCE = 1.01
PLAIN = {
    "step_s": 0.0, "sequence_s": 0.0, "layer_s": 0.0, "prefill_layer_s": 0.0, "product_share": 1.0,
    "quantised_share": 1.0, "attention_share": 1.0, "expert_share": 1.0, "all_reduce_share": 1.0,
    "all_reduce_bytes_share": 1.0, "mxfp4_prompt_share": 1.0,
    "prefill_share": 1.0,
}  # fmt: skip


@cache
def price(
    gpu: str, engine: str, model: str, weights: str, gpus: int, plain: bool = False
) -> Price | None:
    """None if the tables lack what the model needs; `plain` leaves out the engine's constants."""
    profile, geometry = load_profile(gpu, engine=engine), load_geometry(model)
    if plain:
        assert profile.engine is not None
        bare = replace(profile.engine, **PLAIN)  # type: ignore[arg-type]
        profile = replace(profile, engine=bare)
    try:
        geometry = geometry if weights == "bf16" else with_weights(geometry, weights)
        found = Price(CostModel(profile, geometry), ServingOptions(tensor_parallel=gpus))
        found.pass_s(1)
        return found
    except UsageError:
        return None


def step_s(priced: Price, sequences: int, context: int = CONTEXT) -> float:
    return priced.pass_s(sequences) + priced.attention_s(sequences, sequences * context)


def machines(engine: str, gpus: tuple[str, ...] = (*GPUS, "l40s")) -> Iterator[Price]:
    for gpu, model, weights, number in product(gpus, MODELS, ("bf16", "fp8"), PARALLEL):
        if found := price(gpu, engine, model, weights, number):
            yield found


@pytest.mark.parametrize("engine", ENGINES)
def test_more_work_takes_longer(engine: str) -> None:
    broken, checked = [], 0
    for made in machines(engine):
        steps = [step_s(made, 2**n) for n in range(9)]
        deeper = [step_s(made, 16, 4**n) for n in range(4, 9)]
        prompts = [made.prefill_s(2**n, 0) for n in range(7, 14)]
        for what, seconds in (("sequences", steps), ("context", deeper), ("prompt", prompts)):
            broken += [(made.cost.geometry.name, what) for a, b in pairwise(seconds) if b < a]
            checked += len(seconds) - 1
    assert checked > 1000
    assert not broken


@pytest.mark.parametrize("engine", ENGINES)
def test_fp8_is_not_slower_than_bf16(engine: str) -> None:
    checked = 0
    for gpu, model, number in product(("h100", "h200", "b200"), MODELS, PARALLEL):
        wide, narrow = (price(gpu, engine, model, each, number) for each in ("bf16", "fp8"))
        if wide is None or narrow is None:
            continue
        for sequences in (1, 16, 64, 256):
            assert step_s(narrow, sequences) <= TOLERANCE * step_s(wide, sequences)
        for tokens in (1024, 8192):
            assert narrow.prefill_s(tokens, 0) <= TOLERANCE * wide.prefill_s(tokens, 0)
        checked += 1
    assert checked > 40


def _pairs(engine: str) -> Iterator[tuple[str, tuple[str, int], tuple[str, int], str, str]]:
    """A relation, two machines (GPU and number) of which the second should not be slower, a model
    and its weights."""
    for model, weights in product(MODELS, ("bf16", "fp8")):
        for older, newer in pairwise(GPUS):
            for number in PARALLEL:
                yield "newer", (older, number), (newer, number), model, weights
        for gpu, (few, many) in product(GPUS, pairwise(PARALLEL)):
            yield "twice", (gpu, few), (gpu, many), model, weights


#: Every broken case of 2,952 decode steps and prompts: engine, relation and the kernel that
#: was measured to take longer; then both machines, model, weights, and what is computed
SLOWER = {
    ("vllm", "newer", "all-reduces"): """
        h200:8 b200:8 llama-3.1-8b bf16 step 64
        h200:8 b200:8 llama-3.1-8b fp8 step 64
        h200:8 b200:8 llama-3.1-70b bf16 step 16
        h200:8 b200:8 llama-3.1-70b fp8 step 16
        h200:8 b200:8 qwen3-32b fp8 step 64
    """,
    ("vllm", "twice", "all-reduces"): """
        b200:1 b200:2 llama-3.1-8b bf16 prompt 1024
        b200:1 b200:2 llama-3.1-8b fp8 prompt 1024
        b200:4 b200:8 llama-3.1-70b bf16 step 16
        b200:4 b200:8 llama-3.1-70b fp8 step 16
        h200:1 h200:2 qwen3-30b-a3b bf16 step 1
        b200:1 b200:2 qwen3-30b-a3b bf16 step 1
        b200:1 b200:2 qwen3-30b-a3b bf16 prompt 1024
        b200:4 b200:8 qwen3-30b-a3b bf16 step 1
        b200:4 b200:8 qwen3-30b-a3b bf16 step 64
        h200:1 h200:2 qwen3-30b-a3b fp8 step 1
        b200:1 b200:2 qwen3-30b-a3b fp8 step 1
        b200:1 b200:2 qwen3-30b-a3b fp8 step 16
        b200:1 b200:2 qwen3-30b-a3b fp8 prompt 1024
        b200:4 b200:8 qwen3-30b-a3b fp8 step 1
        b200:4 b200:8 qwen3-30b-a3b fp8 step 64
    """,
    ("vllm", "newer", "products"): """
        h100:1 h200:1 llama-3.1-70b bf16 prompt 1024
        h100:1 h200:1 qwen3-32b bf16 prompt 8192
        h100:4 h200:4 qwen3-30b-a3b bf16 step 1
    """,
    ("vllm", "newer", "experts"): """
        h100:2 h200:2 qwen3-30b-a3b bf16 step 1
        h100:2 h200:2 qwen3-30b-a3b fp8 step 1
    """,
    ("vllm", "twice", "attention"): """
        a100-80:4 a100-80:8 qwen3-30b-a3b bf16 step 1
    """,
    ("sglang", "newer", "products"): """
        h100:1 h200:1 llama-3.1-70b bf16 prompt 1024
        h100:1 h200:1 llama-3.1-70b bf16 prompt 8192
        h100:2 h200:2 llama-3.1-70b bf16 prompt 1024
        h100:1 h200:1 llama-3.1-70b fp8 prompt 8192
        h100:2 h200:2 llama-3.1-70b fp8 prompt 1024
        h100:2 h200:2 qwen3-32b bf16 prompt 1024
        h100:4 h200:4 qwen3-32b bf16 prompt 1024
        h100:2 h200:2 qwen3-32b fp8 prompt 1024
        h100:4 h200:4 qwen3-30b-a3b bf16 step 1
    """,
    ("sglang", "twice", "all-reduces"): """
        h100:4 h100:8 qwen3-30b-a3b bf16 step 1
        h100:4 h100:8 qwen3-30b-a3b fp8 step 1
    """,
    ("sglang", "newer", "all-reduces"): """
        h100:4 h200:4 qwen3-30b-a3b fp8 step 1
    """,
    ("trtllm", "twice", "all-reduces"): """
        b200:2 b200:4 llama-3.1-8b fp8 prompt 1024
        b200:1 b200:2 qwen3-30b-a3b bf16 step 1
        b200:4 b200:8 qwen3-30b-a3b bf16 prompt 1024
        b200:1 b200:2 qwen3-30b-a3b fp8 step 1
    """,
    ("trtllm", "newer", "experts"): """
        a100-80:8 h100:8 qwen3-30b-a3b bf16 step 1
    """,
    ("trtllm", "newer", "products"): """
        h100:4 h200:4 qwen3-30b-a3b bf16 step 1
        h100:8 h200:8 qwen3-30b-a3b bf16 step 1
        h100:4 h200:4 qwen3-30b-a3b fp8 step 1
        h100:8 h200:8 qwen3-30b-a3b fp8 step 1
    """,
}
KERNELS = ("products", "experts", "attention", "all-reduces")


@pytest.mark.parametrize("engine", ENGINES)
def test_only_measured_kernels_make_a_newer_or_a_second_gpu_slower(engine: str) -> None:
    """Each broken case is listed, and its kernel takes longer as it was measured.

    For fp8 that may be the kernel for bf16, which bounds it.
    """
    listed = {
        (relation, case.strip()): kernel
        for (each, relation, kernel), cases in SLOWER.items()
        for case in cases.strip().splitlines()
        if each == engine
    }
    found, checked = set(), 0
    for relation, first, second, model, weights in _pairs(engine):
        pair = [price(gpu, engine, model, weights, n) for gpu, n in (first, second)]
        if pair[0] is None or pair[1] is None:
            continue
        machines_ = " ".join(f"{gpu}:{n}" for gpu, n in (first, second))
        for kind, counts in (("step", (1, 16, 64, 256)), ("prompt", (1024, 8192))):
            for count in counts:
                prompt = kind == "prompt"
                a, b = (each.prefill_s(count, 0) if prompt else step_s(each, count)
                        for each in pair)  # fmt: skip
                checked += 1
                if b <= TOLERANCE * a:
                    continue
                case = relation, f"{machines_} {model} {weights} {kind} {count}"
                found.add(case)
                assert case in listed, case
                kernel = KERNELS.index(listed[case])
                assert any(
                    _longer(engine, model, each, (first, second), count, prompt)[kernel] > 0
                    for each in (weights, "bf16")
                ), case
    assert checked > 900
    assert found == listed.keys()


def _longer(
    engine: str, model: str, weights: str, pair: tuple[tuple[str, int], ...], tokens: int,
    prompt: bool,
) -> np.ndarray:  # fmt: skip
    """By how much each of `KERNELS` takes longer on the second machine, as it was measured."""
    bare = [price(gpu, engine, model, weights, n, True) for gpu, n in pair]
    first, second = (_kernels_s(each, tokens, prompt) for each in bare if each is not None)
    return second - first


def _kernels_s(priced: Price, tokens: int, prompt: bool = False) -> np.ndarray:
    """Products, experts, attention and all-reduces of a pass, as they were measured."""
    forward: Forward = priced.forward
    attention_s = forward.attention_s(tokens, tokens * CONTEXT)
    return np.array(
        [
            forward.products_s(tokens, 1 if prompt else tokens),
            forward.experts_s(tokens),
            forward.prefill_attention_s(tokens) if prompt else attention_s,
            forward.all_reduce_s(tokens, prompt),
        ]
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_takes_at_least_reading_what_it_reads_and_its_arithmetic(engine: str) -> None:
    checked = 0
    for made in machines(engine):
        profile, geometry, gpus = made.cost.profile, made.cost.geometry, made.gpus
        if geometry.experts:
            continue
        for sequences, context in product((1, 16, 64, 256), (512, 2048, 8192, 32768)):
            read = sequences * context * geometry.kv_bytes_per_token / gpus
            least_s = made.forward.least_s + read / profile.hbm_bytes_per_s
            flops = 2 * sequences * sum(each.size for each in made.forward.products)
            rate = profile.flops_per_s if not geometry.weights else profile.fp8_flops_per_s
            seconds = step_s(made, sequences, context)
            assert seconds >= least_s
            assert not rate or seconds >= flops / rate
            checked += 1
    assert checked > 500


@pytest.mark.parametrize(("gpu", "engine"), sorted(shipped_tables()))
def test_no_attention_of_a_shipped_table_beats_memory(gpu: str, engine: str) -> None:
    """At the points of the tables, worked out from bytes and the GPU's peak.  Those that did are
    the roofline, and count as extrapolated."""
    profile = load_profile(gpu, engine=engine)
    assert profile.engine is not None
    tables = load_tables(shipped_tables()[gpu, engine])
    window, size, kv_heads, heads, sequences, tokens, seconds = tables.columns("decode", "bf16")
    for model in ("llama-3.1-8b", "qwen3-32b"):
        geometry = load_geometry(model)
        own = (window == 0) & (size == geometry.head_dim)
        own &= (kv_heads == geometry.kv_heads) & (heads == geometry.heads)
        assert own.sum() > 100
        bare = replace(profile.engine, attention_share=1.0)
        forward = Forward(profile, bare, geometry)
        read = 4.0 * sequences * tokens * kv_heads * size
        for n, context, measured, least in zip(
            sequences[own], tokens[own], seconds[own], (read / profile.hbm_bytes_per_s)[own],
            strict=True,
        ):  # fmt: skip
            found = forward.attention_s(int(n), float(n * context)) / geometry.layers
            assert found >= least * (1 - 1e-9)
            if measured < least:
                assert forward.basis("attention", int(n), float(context)) is Basis.EXTRAPOLATED


def test_times_that_fall_become_the_mean_of_what_is_around_them() -> None:
    """Others stay as they were measured, and what was not measured lies between its neighbours."""
    axis = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    grid = Grid([axis], np.array([2.0, 8.0, 2.0, np.nan, 9.0]), lambda n: 1.0 + 0 * n, None, 1)
    np.testing.assert_allclose(grid.seconds(axis), [2.0, 4.0, 4.0, 4.0, 9.0])
    assert grid.basis(4.0) is Basis.MEASURED
    assert grid.basis(8.0) is Basis.EXTRAPOLATED


def test_a_time_below_the_roofline_is_the_roofline_and_extrapolated() -> None:
    axis = np.array([1.0, 4.0, 16.0])

    def roofline(n: np.ndarray) -> np.ndarray:
        return 0.5 * n

    grid = Grid([axis], np.array([1.0, 1.5, 9.0]), lambda n: 1.0 + n, roofline, 1)
    np.testing.assert_allclose(grid.seconds(axis), [1.0, 2.0, 9.0])
    assert [grid.basis(each) for each in axis] == [
        Basis.MEASURED, Basis.EXTRAPOLATED, Basis.MEASURED
    ]  # fmt: skip
    np.testing.assert_allclose(grid.shared(0.5).seconds(axis), [0.5, 2.0, 8.0])
    assert float(grid.seconds(64.0)) >= 32.0
