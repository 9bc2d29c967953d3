"""Textbook queueing on the two directions of the link."""

from __future__ import annotations

import pytest

from arborsim.machine.clock import Clock, Link
from arborsim.machine.cost import CostModel
from arborsim.machine.price import Price
from tests.simulator.bench import GEOMETRY, profile


class Ends:
    """A clock, and when transfers on it have ended."""

    def __init__(self, **changes: float) -> None:
        self.price = Price(CostModel(profile(**changes), GEOMETRY))
        self.clock = Clock()
        self.ended: list[float] = []

    def send(self, link: Link, size: int) -> None:
        seconds = self.price.transfer_s(size, up=link is self.clock.up)
        link.send(size, seconds, lambda: self.ended.append(self.clock.now))

    def wait(self) -> float:
        before = self.clock.now
        self.clock.env.run()
        return self.clock.now - before


def test_two_equal_transfers_on_one_link_take_twice_as_long() -> None:
    sim = Ends()
    sim.send(sim.clock.up, 1000)
    sim.send(sim.clock.up, 1000)
    assert sim.wait() == pytest.approx(2000e-6)
    assert sim.clock.up.busy_s == pytest.approx(2000e-6)
    assert sim.clock.up.carried_bytes == 2000
    assert sim.ended == pytest.approx([1000e-6, 2000e-6])


def test_opposite_directions_overlap() -> None:
    sim = Ends()
    sim.send(sim.clock.up, 1000)
    sim.send(sim.clock.down, 1000)
    assert sim.wait() == pytest.approx(1000e-6)


def test_latency_is_paid_per_transfer() -> None:
    sim = Ends(pcie_latency_s=5e-6)
    for _ in range(3):
        sim.send(sim.clock.down, 100)
    assert sim.wait() == pytest.approx(3 * 105e-6)


def test_transfers_run_behind_computation() -> None:
    sim = Ends()
    sim.send(sim.clock.down, 1000)
    computed = sim.clock.env.process(sim.clock.spend(400e-6))
    sim.clock.env.run(until=computed)
    assert not sim.ended
    sim.clock.env.run()
    assert sim.clock.now == pytest.approx(1000e-6)
    assert sim.ended == [sim.clock.now]


def test_a_link_that_was_idle_starts_at_once() -> None:
    sim = Ends()
    sim.send(sim.clock.up, 1000)
    sim.wait()
    sim.clock.env.run(until=5e-3)
    sim.send(sim.clock.up, 1000)
    assert sim.wait() == pytest.approx(1000e-6)


def test_nothing_to_send_takes_no_time() -> None:
    sim = Ends(pcie_latency_s=5e-6)
    sim.send(sim.clock.up, 0)
    assert sim.wait() == 0
