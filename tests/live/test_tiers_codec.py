"""Quantised tokens: round trips, bounds, and the same numbers as the simulator's NumPy version."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from arborsim.core.formats import FP8, round_e4m3
from tests.live.tiny import torch

from arborsim_torch.tiers.codec import Codec, Fp8, Plain  # isort: skip

finite = st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=True)
vectors = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=4, max_side=6),
    elements=st.one_of(finite, st.floats(-10, 10, width=32)),
)


def round_trip(codec: Codec, x: Any, dtype: Any = torch.float32) -> Any:
    data, scale = codec.encode(x)
    return codec.decode(data, scale, dtype)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


@given(vectors)
def test_fp8_is_what_the_simulator_computes(x: np.ndarray) -> None:
    assert (
        bits(round_trip(Fp8(), torch.from_numpy(x)).numpy()) == bits(FP8.rounded(x, keys=True))
    ).all()


def test_fp8_is_what_the_simulator_computes_on_many_vectors() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 4, 500, 64)) * np.exp(rng.standard_normal((2, 4, 500, 1)))
    x[..., 0] *= 50  # outlier channels, as keys have them
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = torch.from_numpy(x).to(dtype)
        expected = FP8.rounded(stored.float().numpy(), keys=False)
        assert (bits(round_trip(Fp8(), stored).numpy()) == bits(expected)).all()


def test_fp8_is_torchs_own_rounding() -> None:
    """With 448 in a vector its scale is 1, and the bytes are those of ``Tensor.to``."""
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()]
    middles = (exact[:-1] + exact[1:]) / 2
    rng = np.random.default_rng(1)
    drawn = torch.from_numpy(rng.uniform(-448, 448, 4000).astype(np.float32))
    x = torch.cat([exact, middles, drawn, drawn / 1e3, torch.tensor([448.0])])[None]
    data, scale = Fp8().encode(x)
    assert scale.item() == 1
    assert torch.equal(data.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert (bits(data.float().numpy()) == bits(round_e4m3(x.numpy()))).all()


@given(x=vectors)
@settings(max_examples=50)
def test_errors_stay_within_half_a_step(x: np.ndarray) -> None:
    error = np.abs(round_trip(Fp8(), torch.from_numpy(x)).double().numpy() - x.astype(np.float64))
    amax = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    # Three bits of mantissa, and subnormals in steps of 2^-9.
    bound = np.maximum(np.abs(x) / 16, amax / 448 * 2.0**-10)
    # The scale itself is rounded: by 2^-24 of itself, or, when it is subnormal, by half of 2^-149.
    assert (error <= bound * (1 + 1e-5) + 448 * 2.0**-149).all()


def test_zeros_stay_zeros_and_the_largest_stays() -> None:
    codec = Fp8()
    x = torch.zeros(3, 2, 8)
    x[1, 1, 3] = -7.5
    data, scale = codec.encode(x)
    assert data.dtype == codec.storage
    assert (scale.shape, scale.dtype) == ((3, 2, 1), torch.float32)
    assert torch.equal(codec.decode(data, scale, torch.float32), x)


def test_what_passes_the_range_saturates() -> None:
    """A subnormal scale is rounded so far that the quotient leaves the range."""
    codec = Fp8()
    least = 2.0**-149
    x = torch.tensor([[codec.largest * 1.4 * least, -codec.largest * 1.4 * least, 0.0]])
    data, scale = codec.encode(x)
    assert scale.item() == least
    assert data.float().tolist() == [[codec.largest, -codec.largest, 0.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_hidden(bad: float) -> None:
    codec = Fp8()
    x = torch.ones(2, 4)
    x[0, 1] = bad
    y = round_trip(codec, x)
    assert not y[0, 1].isfinite()
    assert torch.allclose(y[1], x[1])


def test_scales_belong_to_one_token_of_one_head() -> None:
    """Tokens encoded together or apart, in any layout: the same bytes."""
    codec = Fp8()
    x = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(2))
    data, scale = codec.encode(x)
    for kind, head, token in np.ndindex(2, 3, 5):
        one, own = codec.encode(x[kind, head, token : token + 1])
        assert torch.equal(data[kind, head, token : token + 1].float(), one.float())
        assert torch.equal(scale[kind, head, token : token + 1], own)
    turned, its_scale = codec.encode(x.transpose(1, 2))
    assert torch.equal(turned.float(), data.transpose(1, 2).float())
    assert torch.equal(its_scale, scale.transpose(1, 2))


def test_no_tokens() -> None:
    codec = Fp8()
    data, scale = codec.encode(torch.empty(2, 0, 16))
    assert codec.decode(data, scale, torch.bfloat16).shape == (2, 0, 16)


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(Fp8(), torch.bfloat16), (Plain(torch.bfloat16), torch.bfloat16),
     (Plain(torch.float32), torch.float32)],
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_bytes_per_token_are_those_of_the_tensors(codec: Codec, dtype: Any) -> None:
    x = torch.randn(2, 3, 7, 24).to(dtype)
    data, scale = codec.encode(x)
    stored = data.numel() * data.element_size()
    stored += 0 if scale is None else scale.numel() * scale.element_size()
    assert codec.scaled == (scale is not None)
    assert stored == 3 * 7 * codec.bytes_per_token(24)
    assert codec.decode(data, scale, torch.float16).dtype == torch.float16
    if scale is not None:
        assert codec.bytes_per_token(24) == 2 * FP8.vector_bytes(24, keys=True)


def test_plain_changes_nothing_and_refuses_to() -> None:
    x = torch.randn(2, 3, 4).to(torch.bfloat16)
    data, scale = Plain(torch.bfloat16).encode(x)
    assert data.data_ptr() == x.data_ptr()
    assert torch.equal(Plain(torch.bfloat16).decode(data, scale, torch.bfloat16), x)
    with pytest.raises(TypeError, match=r"torch.float32.*plain store of torch.bfloat16"):
        Plain(torch.bfloat16).encode(x.float())


def test_scales_must_not_be_forgotten() -> None:
    data, _ = Fp8().encode(torch.ones(1, 4))
    with pytest.raises(TypeError, match="fp8 data needs its scales"):
        Fp8().decode(data, None, torch.float32)
