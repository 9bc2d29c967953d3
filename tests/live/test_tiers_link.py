"""Copies in the background: right data, in order, in time, with errors told and a clean end.

Everything runs on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from tests.live.tiny import torch

from arborsim_torch.tiers.copies import Ticket, CopyTotals  # isort: skip
from arborsim_torch.tiers.link import HostLink, host_empty  # isort: skip

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
PATIENCE_S = 600.0  # only reached where something hangs


@pytest.fixture(params=DEVICES)
def link(request: Any) -> Iterator[HostLink]:
    with HostLink(request.param) as made:
        yield made


class GatedTensor(torch.Tensor):  # type: ignore[misc, name-defined]
    """A real tensor whose copies begin once its gate is open."""

    gate: threading.Event

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            assert args[1].gate.wait(PATIENCE_S), "the gate stayed shut"
        return super().__torch_function__(func, types, args, kwargs or {})


def gated(x: Any) -> Any:
    tensor = x.as_subclass(GatedTensor)
    tensor.gate = threading.Event()
    return tensor


def numbers(*shape: int, seed: int = 0, dtype: Any = torch.float32, device: Any = "cpu") -> Any:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (x * 20).to(dtype).to(device)


def same(a: Any, b: Any) -> bool:
    return bool(torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_down_and_up_again(link: HostLink, dtype: Any) -> None:
    x = numbers(2, 3, 50, 16, dtype=dtype, device=link.device)
    host = link.host_empty(x.shape, dtype)
    back = torch.empty_like(x)
    link.down(x, host).wait()
    link.up(host, back).wait()
    assert same(host, x)
    assert same(back, x)
    size = x.numel() * x.element_size()
    for traffic in (link.downward, link.upward):
        assert (traffic.copies, traffic.carried_bytes) == (1, size)
        assert traffic.busy_s > 0


def test_the_device_side_may_be_strided_and_the_host_side_not(link: HostLink) -> None:
    x = numbers(4, 60, 8, device=link.device)
    host = link.host_empty((4, 20, 8), x.dtype)
    link.down(x[:, 10:30], host).wait()
    assert same(host, x[:, 10:30].contiguous())
    link.up(host, x[:, 40:60]).wait()
    assert same(x[:, 40:60].contiguous(), host)
    with pytest.raises(ValueError, match="contiguous"):
        link.down(x[:, :5], host[:, :5])
    with pytest.raises(ValueError, match="contiguous"):
        link.up(host[:, :5], x[:, :5])


def test_computing_goes_on_while_copies_are_on_their_way(link: HostLink) -> None:
    a, b = (numbers(300, 300, seed=s, device=link.device) for s in (1, 2))
    expected = a @ b @ a
    kept = numbers(1 << 20, seed=3, device=link.device)
    host = link.host_empty((8, *kept.shape), kept.dtype)
    tickets = [link.down(kept, out) for out in host]
    found = a @ b @ a  # while they are carried
    fresh = torch.empty_like(kept)
    tickets.append(link.up(host[0].clone(), fresh))
    for ticket in tickets:
        ticket.wait()
        assert ticket.done()
    assert torch.equal(found, expected)
    assert all(same(out, kept) for out in host)


def test_a_copy_to_the_host_sees_what_was_computed_before_it_was_ordered(link: HostLink) -> None:
    x = torch.zeros(1 << 18, device=link.device)
    outs = [link.host_empty(x.shape, x.dtype) for _ in range(6)]
    for i, out in enumerate(outs):
        x += 1
        link.down(x, out).wait()
        assert (out == i + 1).all()


def test_ordering_returns_before_the_copy_has_begun() -> None:
    x = gated(numbers(100))
    out = torch.zeros(100)
    with HostLink("cpu") as link:
        ticket = link.down(x, out)
        assert not ticket.done()
        assert not out.any()  # a computation in between
        x.gate.set()
        ticket.wait()
        assert ticket.done()
    assert same(out, x.as_subclass(torch.Tensor))


def test_a_direction_keeps_order_and_leaves_the_other_alone() -> None:
    first, second = gated(numbers(64, seed=1)), numbers(64, seed=2)
    out = torch.zeros(64)
    returned = torch.zeros(64)
    with HostLink("cpu") as link:
        early, late = link.down(first, out), link.down(second, out)
        link.up(second, returned).wait()  # though the way down is blocked
        assert same(returned, second)
        assert not early.done()
        assert not late.done()
        first.gate.set()
        late.wait()
        assert early.done()
    assert same(out, second)  # the later copy came later


def test_a_copy_up_can_follow_what_is_on_its_way_down() -> None:
    """Its source may be what the others write."""
    first, host = gated(numbers(64, seed=1)), torch.zeros(64)
    returned = torch.zeros(64)
    with HostLink("cpu") as link:
        link.down(first, host)
        ticket = link.up_blocks([(host, returned)], after_down=True)
        assert not ticket.done()
        first.gate.set()
        ticket.wait()
    assert same(returned, first.as_subclass(torch.Tensor))


def test_tensors_live_until_their_copy_is_done() -> None:
    x = gated(numbers(1000))
    gate, expected = x.gate, numbers(1000)
    out = torch.zeros(1000)
    with HostLink("cpu") as link:
        link.down(x, out)
        del x
        gate.set()
        link.wait_all()
    assert same(out, expected)


def test_tensors_are_let_go_once_their_copy_is_booked(link: HostLink) -> None:
    """A ticket that is kept does not keep memory."""
    x, out = numbers(1000, device=link.device), link.host_empty((1000,), torch.float32)
    ticket = link.down(x, out)
    ticket.wait()
    alive = weakref.ref(x)
    del x
    deadline = time.monotonic() + PATIENCE_S
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the thread lets go a moment after it has told
    assert alive() is None
    assert ticket.wait() == 0.0


@settings(max_examples=40, deadline=None)
@given(
    orders=st.lists(
        st.tuples(st.booleans(), st.integers(0, 3000), st.booleans(), st.booleans()), max_size=30
    )
)
def test_any_sizes_in_any_order(orders: list[tuple[bool, int, bool, bool]]) -> None:
    """Every copy arrives, and the accounts hold, whichever tickets are waited for."""
    with HostLink("cpu") as link:
        results = []
        moved = {True: 0, False: 0}
        for seed, (down, size, wait, asks) in enumerate(orders):
            x, out = numbers(size, seed=seed), torch.zeros(size)
            ticket: Ticket = link.down(x, out) if down else link.up(x, out)
            moved[down] += 4 * size
            results.append((x, out))
            if wait:
                assert ticket.wait() >= 0.0
                assert ticket.done()
                assert ticket.wait() == 0.0
                assert same(out, x)
            if asks:
                assert link.downward.carried_bytes <= moved[True]
        assert link.wait_all() >= 0.0
        assert link.wait_all() == 0.0
        assert all(same(out, x) for x, out in results)
        assert (link.downward.carried_bytes, link.upward.carried_bytes) == (
            moved[True], moved[False],
        )  # fmt: skip
        assert link.downward.copies + link.upward.copies == len(orders)


def test_waiting_for_what_has_arrived_exposes_nothing(link: HostLink) -> None:
    x = numbers(1 << 16, device=link.device)
    ticket = link.down(x, link.host_empty(x.shape, x.dtype))
    while not ticket.done():
        pass
    assert ticket.wait() == 0.0
    assert link.downward.busy_s > 0.0


def test_a_wait_is_exposed_time() -> None:
    """The gate opens only after the wait has begun: a thread waits in our place."""
    x, out = gated(numbers(10)), torch.zeros(10)
    held_up_s: list[float] = []
    about_to_wait = threading.Event()

    def wait() -> None:
        about_to_wait.set()
        held_up_s.append(ticket.wait())

    with HostLink("cpu") as link:
        ticket = link.down(x, out)
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert about_to_wait.wait(PATIENCE_S)
        waiter.join(0.05)
        assert waiter.is_alive()
        x.gate.set()
        waiter.join(PATIENCE_S)
        assert held_up_s[0] > 0.0
        assert link.downward.busy_s > 0.0


def failing(link: HostLink) -> Ticket:
    """PyTorch refuses to write one place several times, once it tries."""
    return link.up(torch.arange(4.0), torch.zeros(1).expand(4))


def test_an_error_in_the_background_is_told_by_its_ticket() -> None:
    x, out = numbers(8), torch.zeros(8)
    with HostLink("cpu") as link:
        bad, good = failing(link), link.up(x, out)
        with pytest.raises(RuntimeError, match="single memory location"):
            bad.wait()
        with pytest.raises(RuntimeError, match="single memory location"):
            bad.wait()  # and it stays told
        good.wait()
        link.wait_all()  # nothing new to tell
        assert same(out, x)
        assert (link.upward.copies, link.upward.carried_bytes) == (1, 32)


def test_an_error_whose_ticket_was_not_waited_for_is_raised_by_wait_all() -> None:
    with HostLink("cpu") as link:
        failing(link)
        link.up(numbers(8), torch.zeros(8)).wait()  # notices the failure before it
        with pytest.raises(RuntimeError, match="single memory location"):
            link.wait_all()
        link.wait_all()
        failing(link)  # closing after it raises nothing


def test_tensors_made_for_inference_are_carried(link: HostLink) -> None:
    """They may only be written in inference mode, in which a background thread does not start."""
    with torch.inference_mode():
        x = numbers(20, device=link.device)
        host, back = torch.zeros(20), torch.zeros(20, device=link.device)
    link.down(x, host).wait()
    link.up(host, back).wait()
    assert same(back, x)
    plain = torch.zeros(20)
    link.down(x, plain).wait()
    assert not plain.is_inference()
    plain += 1  # still an ordinary tensor


def test_what_does_not_fit_is_refused_at_once(link: HostLink) -> None:
    x = numbers(4, 6, device=link.device)
    cases = [
        (torch.zeros(4, 5), r"float32 \(4, 6\) on the device and .*float32 \(4, 5\) on the host"),
        (torch.zeros(1), r"\(1,\) on the host"),  # would broadcast
        (torch.zeros(4, 6, dtype=torch.bfloat16), r"float32 .*bfloat16"),
        (torch.zeros(6, 4).t(), "contiguous"),
        (torch.zeros(4, 6, device="meta"), "and meta on a link of"),
    ]
    for host, message in cases:
        with pytest.raises(ValueError, match=message):
            link.down(x, host)
        if host.device.type != "meta" and host.numel() > 1:
            with pytest.raises(ValueError, match=message):
                link.up(host, x)
    assert link.downward == link.upward == CopyTotals()


def test_closing_finishes_the_copies_and_may_be_repeated(link: HostLink) -> None:
    x = numbers(1 << 18, device=link.device)
    outs = [link.host_empty(x.shape, x.dtype) for _ in range(8)]
    tickets = [link.down(x, out) for out in outs]
    link.close()
    assert all(ticket.done() for ticket in tickets)
    assert all(same(out, x) for out in outs)
    assert link.downward.copies == 8
    link.close()
    with pytest.raises(ValueError, match="the link is closed"):
        link.down(x, outs[0])
    link.wait_all()


def test_a_link_that_is_forgotten_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    link = HostLink("cpu")
    link.down(numbers(10), torch.zeros(10)).wait()
    link.up(numbers(10), torch.zeros(10)).wait()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del link
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)"])
def test_the_interpreter_ends_cleanly_with_copies_on_their_way(ending: str) -> None:
    code = f"""
import torch
from arborsim_torch.tiers.link import HostLink
link = HostLink("cpu")
x, out = torch.ones(1 << 22), torch.zeros(1 << 22)
tickets = [link.down(x, out) for _ in range(40)]
print("copies ordered")
{ending}
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "copies ordered\n", "")


def test_other_devices_are_refused() -> None:
    with pytest.raises(UsageError, match="no copies to device 'meta': choose cpu or cuda"):
        HostLink("meta")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="PyTorch sees no GPU here"):
            HostLink("cuda")


def test_memory_of_the_host_is_pinned_where_there_is_a_gpu(link: HostLink) -> None:
    x = link.host_empty((3, 0, 4), torch.bfloat16)
    assert (tuple(x.shape), x.dtype, x.device.type) == ((3, 0, 4), torch.bfloat16, "cpu")
    on_gpu = link.device.type == "cuda"
    assert link.host_empty((8,), torch.float32).is_pinned() == link.pinned == on_gpu
    with HostLink(link.device, pinned=False) as pageable, suppress(RuntimeError):
        assert not pageable.host_empty((8,), torch.float32).is_pinned()


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_where_pinning_fails_memory_is_ordinary_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(RuntimeWarning, match="no page-locked memory, copies will be slower") as told:
        x = host_empty((5, 2), torch.int8)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert tuple(x.shape) == (5, 2)
    x.fill_(3)
    assert (x == 3).all()
