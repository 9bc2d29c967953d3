"""Layers that stream through two buffers hold the right data while the next ones arrive."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.live.test_tiers_link import DEVICES, gated, numbers, same
from tests.live.tiny import torch

from arborsim_torch.tiers.codec import Fp8  # isort: skip
from arborsim_torch.tiers.link import HostLink  # isort: skip
from arborsim_torch.tiers.stream import LayerStream  # isort: skip


def host_layers(tokens: list[int], seed: int = 0) -> list[list[Any]]:
    """Per layer: quantised data and scales of some tokens, and others in bfloat16, each a part."""
    layers = []
    for i, count in enumerate(tokens):
        data, scale = Fp8().encode(numbers(2, 3, count, 16, seed=seed + i))
        plain = numbers(2, 3, count // 2, 16, seed=seed + i + 100, dtype=torch.bfloat16)
        layers.append([data, scale, plain] if count else [])
    return layers


def blocks_of(parts: list[Any]) -> list[list[Any]]:
    """Each part as blocks that follow one another."""
    return [list(part.split(1 + i % 2)) for i, part in enumerate(parts)]


def round_of(stream: LayerStream, parts: list[list[Any]], after: list[list[Any]]) -> None:
    """One iteration as the model drives it; `after` is what its last layer prefetches from."""
    for layer in range(len(parts)):
        held = stream.take(layer)
        following = stream.after(layer)
        stream.prefetch(following, blocks_of(after[0] if following == 0 else parts[following]))
        assert len(held) == len(parts[layer])
        for on_device, on_host in zip(held, parts[layer], strict=True):
            assert (on_device.shape, on_device.dtype) == (on_host.shape, on_host.dtype)
            assert same(on_device, on_host)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [1, 2, 3, 8])
def test_every_layer_of_every_iteration(device: str, layers: int) -> None:
    """An odd number of layers turns the buffers round from one iteration to the next."""
    iterations = [host_layers([20 + 9 * i] * layers, seed=1000 * i) for i in range(5)]
    with HostLink(device) as link:
        stream = LayerStream(link, layers)
        stream.prefetch(0, blocks_of(iterations[0][0]))
        for now, following in zip(iterations, [*iterations[1:], iterations[0]], strict=True):
            round_of(stream, now, following)
        stream.discard()
        expected = sum(
            part.numel() * part.element_size() for i in iterations for parts in i for part in parts
        ) + sum(part.numel() * part.element_size() for part in iterations[0][0])
        assert link.upward.carried_bytes == expected


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.lists(st.integers(0, 70), min_size=3, max_size=3), min_size=1, max_size=5)
)
def test_any_sizes(tokens: list[list[int]]) -> None:
    iterations = [host_layers(row, seed=10 * i) for i, row in enumerate(tokens)]
    with HostLink("cpu") as link:
        stream = LayerStream(link, 3)
        stream.prefetch(0, blocks_of(iterations[0][0]))
        grown = 0
        for now, following in zip(iterations, [*iterations[1:], iterations[0]], strict=True):
            round_of(stream, now, following)
            assert stream.buffer_bytes >= grown
            grown = stream.buffer_bytes
        largest = max(_aligned_bytes(parts) for layers in iterations for parts in layers)
        assert grown <= 2 * 1.25 * largest


def _aligned_bytes(parts: list[Any]) -> int:
    return sum(-(-part.numel() * part.element_size() // 256) * 256 for part in parts)


def test_buffers_are_used_again_and_counted() -> None:
    parts = [[numbers(64, 8, seed=i)] for i in range(4)]  # 2048 bytes each
    with HostLink("cpu") as link:
        stream = LayerStream(link, 4)
        assert stream.buffer_bytes == 0
        stream.prefetch(0, blocks_of(parts[0]))
        assert stream.buffer_bytes == 2048
        places = []
        for layer in [*range(4), *range(4)]:
            places.append(stream.take(layer)[0].data_ptr())
            stream.prefetch(stream.after(layer), blocks_of(parts[stream.after(layer)]))
            assert stream.buffer_bytes == 2 * 2048
        assert places == places[:2] * 4
        assert places[0] != places[1]
        stream.discard()
        stream.prefetch(0, [[numbers(65, 8)]])  # 2080 bytes: a quarter more than before
        assert stream.buffer_bytes == 2048 + 2560


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_iterations_that_restart_have_every_layer_where_it_was(layers: int) -> None:
    """Also with an odd number of layers, and after one that something else computed."""
    parts = [blocks_of(own) for own in host_layers([20] * layers)]
    with HostLink("cpu") as link:
        stream = LayerStream(link, layers)
        places = stream.places(parts)
        made = stream.allocations
        for computed in (True, False, True):
            stream.restart()
            stream.prefetch(0, parts[0])
            stream.await_next()
            for layer in range(layers if computed else 0):
                held = stream.take(layer)
                if layer + 1 < layers:
                    stream.prefetch(layer + 1, parts[layer + 1])
                for found, place, part in zip(held, places[layer], parts[layer], strict=True):
                    assert found.data_ptr() == place.data_ptr()
                    assert same(place, torch.cat(part))
        assert stream.allocations == made <= 2


def test_the_layer_in_use_stays_while_the_next_arrives() -> None:
    first, second = numbers(50, seed=1), gated(numbers(50, seed=2))
    with HostLink("cpu") as link:
        stream = LayerStream(link, 2)
        stream.prefetch(0, [[first]])
        (held,) = stream.take(0)
        stream.prefetch(1, [[second]])
        assert same(held, first)  # the copy of the next one is still under way
        second.gate.set()
        (arrived,) = stream.take(1)
        assert same(held, first)
        assert same(arrived, second.as_subclass(torch.Tensor))


def test_parts_start_where_the_hardware_likes_it() -> None:
    with HostLink("cpu") as link:
        stream = LayerStream(link, 1)
        ones = [torch.ones(3, dtype=torch.int8), torch.ones(5), torch.ones(0, 4)]
        stream.prefetch(0, blocks_of(ones))
        a, b, c = stream.take(0)
        assert b.storage_offset() * 4 == 256
        assert (a.tolist(), b.tolist(), c.shape) == ([1] * 3, [1.0] * 5, (0, 4))
        assert stream.buffer_bytes == 512


def test_a_layer_without_tokens_in_ddr_costs_nothing() -> None:
    with HostLink("cpu") as link:
        stream = LayerStream(link, 2)
        stream.prefetch(0, [])
        assert stream.take(0) == []
        assert stream.buffer_bytes == link.upward.copies == 0


def test_discarding_starts_anew() -> None:
    old, new = numbers(40, seed=1), numbers(40, seed=2)
    with HostLink("cpu") as link:
        stream = LayerStream(link, 3)
        stream.prefetch(0, [[old]])
        stream.prefetch(1, [[old]])
        stream.discard()
        stream.prefetch(2, [[new]])
        assert same(stream.take(2)[0], new)
        stream.discard()
        stream.prefetch(1, [[new]])
        assert same(stream.take(1)[0], new)


def test_errors_of_order_are_told() -> None:
    part = [[numbers(4)]]
    with HostLink("cpu") as link:
        stream = LayerStream(link, 3)
        with pytest.raises(ValueError, match="layer 0 taken, but the next one prefetched is none"):
            stream.take(0)
        with pytest.raises(ValueError, match="layer 3 of 3"):
            stream.prefetch(3, part)
        stream.prefetch(0, part)
        with pytest.raises(ValueError, match="layer 2 prefetched after layer 0"):
            stream.prefetch(2, part)
        with pytest.raises(ValueError, match="layer 1 taken, but the next one prefetched is 0"):
            stream.take(1)
        stream.take(0)
        stream.prefetch(1, part)
        with pytest.raises(ValueError, match="no buffer for layer 2: take 1 first"):
            stream.prefetch(2, part)
        stream.take(1)
        stream.prefetch(2, part)  # the buffer of layer 0 is free now
        with pytest.raises(ValueError, match="contiguous"):
            LayerStream(link, 1).prefetch(0, [[numbers(4, 6).t()]])
