"""Plans that say what is read: checked, logged, measured, and priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from arborsim.core.errors import PlanError
from arborsim.core.events import Event
from arborsim.core.observations import Signal
from arborsim.core.tiers import Budget, Tier
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.machine import Machine
from arborsim.memory.moves import Moves, Plan
from arborsim.play.controller import Controller
from arborsim.play.episode import Cell, Played, play_episode
from arborsim.play.meters import Quality
from arborsim.play.move_log import READ, UNREAD, MoveLog
from arborsim.policies.base import CacheView, Policy
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor
from tests.helpers.traces import make_trace
from tests.simulator.bench import KV, PROFILE, Bench, moves, profile


@dataclass(frozen=True)
class Forgets(Policy):
    """After every iteration a tenth of the older tokens is never read again; or evicted."""

    evicts: bool = False
    name: ClassVar[str] = "forgets"
    bounded: ClassVar[bool] = False
    grouping: ClassVar[str] = "head"

    def next_decision(self, view: CacheView) -> int:
        return 1

    def decide(self, view: CacheView, event: Event) -> Plan:
        gone = np.zeros(view.tier.shape, dtype=bool)
        for born in range(5, view.num_tokens):
            drawn = np.random.default_rng(born).random((len(gone), born)) < 0.1
            gone[:, :born] |= drawn
        tiers = np.where(gone, Tier.EVICTED, view.tier).astype(np.int8)
        return Plan(tiers) if self.evicts else Plan(view.tier.copy(), reads=~gone)


@pytest.fixture(params=["linear", "tree"])
def episode(request: pytest.FixtureRequest, tmp_path: Path) -> Episode:
    path = make_trace(
        tmp_path / "x.parquet", seed=1, episodes=1, kind=request.param, prompt=9, nodes=6,
        block=(2, 6), capture="qkv", qkv_layers=(1, 2),
    )  # fmt: skip
    signals = (Signal.ATTENTION, Signal.HEAD_ATTENTION, Signal.KEYS, Signal.VALUES)
    return next(iter(TraceReader(path).episodes(signals)))


def played(policy: Policy, episode: Episode, log: MoveLog, page_tokens: int = 1) -> Played:
    executor = SimulatedExecutor.of(Machine(PROFILE, page_tokens=page_tokens), policy, episode.info)
    quality = Quality(frozenset({Signal.HEAD_ATTENTION}), output_error=True)
    return play_episode(
        episode, Cell(policy, Budget.parse("1")), executor, quality=quality, meters=[log]
    )


def test_to_attention_not_reading_is_evicting(episode: Episode) -> None:
    """Quality and seconds are the same; only what HBM holds differs."""
    logs = MoveLog(), MoveLog()
    kept = played(Forgets(), episode, logs[0])
    evicted = played(Forgets(evicts=True), episode, logs[1])
    assert kept.attention_kept == evicted.attention_kept < 1
    assert kept.output_error == evicted.output_error > 0
    assert kept.measured.time.decode_s == pytest.approx(evicted.measured.time.decode_s, rel=1e-12)
    assert kept.measured.kv_read_bytes == evicted.measured.kv_read_bytes
    groups = episode.info.geometry.kv_heads * 2
    token_bytes = kept.controller.executor.ledger.bytes_by_tier[Tier.HBM]  # type: ignore[attr-defined]
    assert kept.measured.peak_hbm_kv_bytes == episode.num_tokens * groups * token_bytes
    assert evicted.measured.peak_hbm_kv_bytes < kept.measured.peak_hbm_kv_bytes
    assert (logs[0].rows[:, 3] == UNREAD).all()
    assert (logs[0].rows[:, :3] == logs[1].rows[:, :3]).all()


def test_the_log_says_what_is_read_again() -> None:
    log, tier = MoveLog(), np.zeros((2, 4), dtype=np.int8)
    reads = np.array([[True, True, False], [False, True, True]])
    log.moved(Moves.none(), tier[:, :3], reads)
    log.moved(Moves.none(), tier, np.array([[True] * 4, [False, True, True, False]]))
    log.moved(Moves.none(), tier)
    assert log.rows.tolist() == [
        [0, 0, 2, UNREAD], [0, 0, 2, READ], [0, 1, 0, UNREAD], [0, 1, 0, READ],
        [0, 1, 3, UNREAD], [0, 1, 3, READ],
    ]  # fmt: skip


class Once(Policy):
    """Answers every event with the plan that a function makes."""

    name: ClassVar[str] = "once"
    bounded: ClassVar[bool] = False

    def decide(self, view: CacheView, event: Event) -> Plan:
        return self.plan(view)

    plan: ClassVar[staticmethod[[CacheView], Plan]]


def ask(episode: Episode, plan: staticmethod[[CacheView], Plan]) -> PlainExecutor:
    executor = PlainExecutor()
    policy = type("Made", (Once,), {"plan": plan})()
    controller = Controller(policy, executor, budget_tokens=99, layers=6, vocabulary=128)
    controller.handle(next(iter(play(episode))))
    return executor


def test_a_plan_without_moves_is_applied(episode: Episode) -> None:
    reads = np.arange(9)[None] % 2 == 0
    executor = ask(episode, staticmethod(lambda view: Plan(view.tier, reads=reads)))
    assert executor.reads is reads
    assert not executor.tier.any()


def test_reads_fit_the_cache_and_what_is_kept(episode: Episode) -> None:
    def evicts_what_it_reads(view: CacheView) -> Plan:
        tiers = view.tier.copy()
        tiers[0, 3] = Tier.EVICTED
        return Plan(tiers, reads=np.ones(tiers.shape, dtype=bool))

    with pytest.raises(PlanError, match="reads token 3, which it evicts"):
        ask(episode, staticmethod(evicts_what_it_reads))
    with pytest.raises(PlanError, match="reads of shape"):
        ask(episode, staticmethod(lambda view: Plan(view.tier, reads=view.tier[:, 1:] == 0)))


def selecting(recall: str) -> tuple[Bench, Callable[[int, int], None]]:
    """100 tokens of which 80 are in DDR and not read, over a link of a tenth of HBM's speed."""
    bench = Bench(profile(h2d_bytes_per_s=1e5), recall=recall, bounds_page=16)
    bench.prefill(100)
    bench.turn(1)

    def select(first: int, last: int, moved: Moves | None = None) -> None:
        reads = np.ones((1, bench.tree.num_tokens), dtype=bool)
        reads[:, :80] = False
        reads[:, first:last] = True
        moved = Moves.none() if moved is None else moved
        bench.executor.apply(moved, bench.tree.num_tokens, reads)

    select(0, 0, moves(np.arange(80), Tier.DDR))
    bench.decode(30)  # until the copy to DDR has ended
    assert bench.executor.staging_bytes == 0
    return bench, select


def test_stream_fetches_what_is_newly_selected_behind_computing() -> None:
    bench, select = selecting("stream")
    came = bench.us("exposed_transfer_s")
    select(0, 40)
    bench.decode(1)
    # 2,000 us for the weights; 20 + 31 tokens that stayed, and the 40, at 128 us each.
    model_us, link_us = 2000 + 91 * KV, 10 * 40 * KV
    assert bench.us("exposed_transfer_s") - came == pytest.approx(link_us - model_us)
    assert bench.executor.measurements().from_ddr_bytes == 40 * KV
    came = bench.us("exposed_transfer_s")
    bench.decode(2)  # all is there
    assert bench.us("exposed_transfer_s") == pytest.approx(came)
    select(38, 42)
    bench.decode(1)
    # Two tokens come, 2,560 us, behind an iteration that takes longer; 38 buffers are given up.
    assert bench.us("exposed_transfer_s") == pytest.approx(came)
    assert bench.executor.measurements().from_ddr_bytes == 42 * KV
    select(0, 0)
    bench.decode(1)
    measured = bench.executor.measurements()
    assert (measured.from_ddr_bytes, measured.to_ddr_bytes) == (42 * KV, 80 * KV)
    assert bench.executor.ledger.ddr_bytes == 80 * KV  # its copies never left
    assert bench.executor.staging_bytes == 0
    assert measured.peak_staging_bytes == 2 * 40 * KV  # on the way through two layers' buffers


def test_stage_waits_for_what_is_newly_selected() -> None:
    bench, select = selecting("stage")
    came = bench.us("exposed_transfer_s")
    select(0, 40)
    select(10, 50)
    assert bench.us("exposed_transfer_s") - came == pytest.approx(10 * 50 * KV)
    assert bench.executor.staging_bytes == 40 * KV
    measured = bench.executor.measurements()
    assert (measured.from_ddr_bytes, measured.to_ddr_bytes) == (50 * KV, 80 * KV)
    assert bench.executor.ledger.ddr_bytes == 80 * KV


def test_bounds_are_read_at_every_choice() -> None:
    """Two vectors of 16 x 2 bytes for each page of the path, in both layers."""
    bench, select = selecting("stream")
    before, read = bench.us("policy_s"), bench.executor.measurements().bounds_read_bytes
    select(0, 40)
    pages = 9  # 130 tokens
    added = bench.executor.measurements().bounds_read_bytes - read
    assert added == 2 * 32 * pages * 2
    assert bench.us("policy_s") - before == pytest.approx(added)
    bench.executor.apply(Moves.none(), bench.tree.num_tokens, None)  # everything: nothing to choose
    assert bench.executor.measurements().bounds_read_bytes - read == added
