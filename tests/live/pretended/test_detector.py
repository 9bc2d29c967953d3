"""The pretended device itself: planted faults are found, and correct programs pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from .arming import pretend
from .clocks import Gpu, Race

N = 64


def side_copy(
    gpu: Gpu, *, wait_before: bool = True, wait_after: bool = True, overwrite: bool = False,
    host: bool = False, reuse: bool = False, free: bool = False, record: bool = False,
) -> Any:  # fmt: skip
    """Copy a computed tensor to page-locked memory and back on a side stream."""
    side = torch.cuda.Stream()
    source = torch.arange(N, dtype=torch.float32, device="cuda") * 2
    there = torch.empty(N, pin_memory=True)
    back = torch.empty(N, device="cuda")
    if wait_before:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.copy_(source, non_blocking=True)
        down = side.record_event()
        back.copy_(there, non_blocking=True)
    if overwrite:
        source.zero_()
    if host:
        return there.numpy().copy()
    if reuse:
        there.fill_(1.0)
    if free:
        if record:
            source.record_stream(side)
        del source
    if wait_after:
        torch.cuda.current_stream().wait_stream(side)
    result = (back + 1).cpu().numpy()
    down.synchronize()
    return result


FAULTS: dict[str, dict[str, bool]] = {
    "no wait before": {"wait_before": False},
    "read before the end": {"wait_after": False},
    "source overwritten": {"overwrite": True},
    "host reads early": {"host": True},
    "page-locked memory used again": {"reuse": True},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_copy_out_of_order_is_found(fault: str) -> None:
    with pytest.raises(AssertionError, match="nothing puts them in order"), pretend() as gpu:
        side_copy(gpu, **FAULTS[fault])


def test_a_copy_in_order_passes_and_has_the_numbers() -> None:
    with pretend() as gpu:
        found = side_copy(gpu)
    np.testing.assert_array_equal(found, 2 * np.arange(N) + 1)


def test_memory_freed_under_a_copy_is_found() -> None:
    with pytest.raises(AssertionError, match="no record_stream"), pretend() as gpu:
        side_copy(gpu, free=True)
    with pretend() as gpu:
        side_copy(gpu, free=True, record=True)


def test_a_late_copy_shows_in_the_numbers() -> None:
    """Copies on side streams are carried out when something waits, so a missing wait is wrong."""
    with pretend():
        source = torch.ones(N, device="cuda")
        there = torch.zeros(N, pin_memory=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there.copy_(source, non_blocking=True)
        assert there.inner.sum() == 0  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        assert there.numpy().sum() == N


@pytest.mark.parametrize("patience", [0, 3])
def test_an_event_that_has_happened_puts_the_host_in_order(patience: int) -> None:
    with pretend(patience) as gpu:
        side = torch.cuda.Stream()
        source, there = torch.ones(N, device="cuda"), torch.empty(N, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there.copy_(source, non_blocking=True)
            event = side.record_event()
        asked = 0
        while not event.query():
            asked += 1
        assert asked == patience
        assert there.numpy().sum() == N
        del gpu


@pytest.mark.parametrize("first", [N, N - 1])
def test_different_bytes_of_a_block_do_not_conflict(first: int) -> None:
    expected = pytest.raises(Race) if first < N else contextlib.nullcontext()
    with expected, pretend():
        side = torch.cuda.Stream()
        block = torch.zeros(2 * N, device="cuda")
        there = torch.empty(N, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            there.copy_(block[:N], non_blocking=True)
        block[first:].fill_(1.0)
        torch.cuda.synchronize()


def device_pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(4, 4, device="cuda"), torch.ones(4, 4)


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda g, c: g + c,
    "mm": lambda g, c: g @ c,
    "cat": lambda g, c: torch.cat([g, c]),
    "index_select": lambda g, c: g.index_select(0, torch.tensor([1])),
    "where": lambda g, c: torch.where(g > 0, g, c),
    "masked_fill": lambda g, c: g.masked_fill(c > 0, 0.0),
    "gather on the host": lambda g, c: c[g[0].long()],
    "attention": lambda g, c: torch.nn.functional.scaled_dot_product_attention(
        g[None], g[None], c[None]
    ),
    "linear": lambda g, c: torch.nn.functional.linear(g, c),
    "generator": lambda g, c: g.normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    with pretend(), torch.inference_mode(), pytest.raises(RuntimeError):
        MIXED[name](*device_pair())


def test_what_cuda_allows_across_devices_works() -> None:
    with pretend() as gpu, torch.inference_mode():
        g, c = device_pair()
        assert (g * torch.tensor(2.0)).sum().item() == 32
        g[torch.tensor([0, 2])] = 5.0
        g[1] = c[1] * 3
        c.copy_(g)
        assert c.sum().item() == 2 * 20 + 12 + 4
        g.normal_(generator=torch.Generator("cuda").manual_seed(0))
        assert gpu.waits.total() == 4  # item, the host's index, two copies of ordinary memory


def test_the_host_may_not_look_into_device_memory() -> None:
    with pretend():
        g, _ = device_pair()
        for look in (g.numpy, lambda: np.asarray(g), g.data_ptr):
            with pytest.raises(TypeError):
                look()
        with pytest.raises(NotImplementedError):
            g.to(torch.float8_e4m3fn).index_select(0, torch.arange(2, device="cuda"))


def test_work_in_a_thread_is_ordered_by_its_result() -> None:
    with pretend(), ThreadPoolExecutor(1) as pool:
        there = torch.zeros(N, pin_memory=True)
        source = torch.ones(N, device="cuda")

        def work() -> torch.Tensor:
            there.copy_(source)
            return there.sum()

        assert pool.submit(work).result() == N
        there.zero_()


def test_memory_is_counted() -> None:
    with pretend() as gpu:
        block = torch.empty(1000, device="cuda")
        assert torch.cuda.memory_allocated() == gpu.allocated == 4000
        view = block[10:]
        del block
        assert torch.cuda.memory_allocated() == 4000
        del view
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.max_memory_allocated() == 4000
