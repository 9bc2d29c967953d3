"""Textbook queueing on the two directions of the link."""

from __future__ import annotations

import pytest

from arborsim.machine.cost import CostModel
from arborsim.machine.replay_engine import Engine
from tests.simulator.bench import GEOMETRY, profile


def engine(**changes: float) -> Engine:
    return Engine(CostModel(profile(**changes), GEOMETRY))


def test_two_equal_transfers_on_one_link_take_twice_as_long() -> None:
    sim = engine()
    sim.start(sim.up.send(1000))
    sim.start(sim.up.send(1000))
    assert sim.wait() == pytest.approx(2000e-6)
    assert sim.up.busy_s == pytest.approx(2000e-6)
    assert sim.up.carried_bytes == 2000


def test_opposite_directions_overlap() -> None:
    sim = engine()
    sim.start(sim.up.send(1000))
    sim.start(sim.down.send(1000))
    assert sim.wait() == pytest.approx(1000e-6)


def test_latency_is_paid_per_transfer() -> None:
    sim = engine(pcie_latency_s=5e-6)
    for _ in range(3):
        sim.start(sim.down.send(100))
    assert sim.wait() == pytest.approx(3 * 105e-6)


def test_transfers_run_behind_computation() -> None:
    sim = engine()
    sim.start(sim.down.send(1000))
    sim.spend(400e-6)
    assert sim.busy
    assert sim.wait() == pytest.approx(600e-6)
    assert not sim.busy
    assert sim.wait() == 0


def test_streaming_waits_for_the_link() -> None:
    sim = engine()
    sim.start(sim.up.send(1000))
    assert sim.spend_streaming(300e-6) == pytest.approx(1000e-6)
    assert sim.now_s == pytest.approx(1300e-6)
    assert sim.spend_streaming(300e-6) == 0


def test_nothing_to_send_takes_no_time() -> None:
    sim = engine(pcie_latency_s=5e-6)
    sim.start(sim.up.send(0))
    assert sim.wait() == 0
