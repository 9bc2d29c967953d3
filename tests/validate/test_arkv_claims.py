"""ARKV's simulated claims: the share in FP8 and what the public code prints, counted slowly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.core.events import Decode
from arborsim.core.tiers import Budget, Tier, hbm_mask
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.play.controller import Controller
from arborsim.play.episode import Cell, play_episode
from arborsim.policies.registry import build
from arborsim.signals.rows import head_rows
from arborsim.trace.episode import play
from arborsim.trace.reader import TraceReader

arkv = pytest.importorskip("benchmarks.claims.arkv")
VECTORS = Path(__file__).parents[2] / "traces" / "chain-vectors.parquet"


@pytest.mark.parametrize("settings", [{}, {"slack": "1"}, {"as_published": "true"}])
def test_the_share_in_fp8_is_that_of_every_iteration(settings: dict[str, str]) -> None:
    reader, machine = TraceReader(VECTORS), Machine(load_profile("a6000"))
    policy = build("arkv", settings)
    for episode in reader.episodes(policy.reads()):
        meter = arkv.Precision()
        cell = Cell(policy, Budget.parse("0.5"))
        play_episode(
            episode, cell, SimulatedExecutor.of(machine, policy, episode.info), meters=[meter]
        )

        executor = SimulatedExecutor.of(machine, policy, episode.info)
        controller = Controller(
            policy, executor, budget_tokens=cell.budget.in_tokens(episode.num_tokens),
            layers=episode.info.geometry.layers, vocabulary=episode.info.geometry.vocab,
            shape=episode.info.cache_shape,
        )  # fmt: skip
        shares = []
        for event in play(episode):
            if not isinstance(event, Decode):
                controller.handle(event)
                continue
            for step in range(event.run.steps):  # one iteration at a time
                controller.handle(Decode(event.run.part(step, step + 1)))
                tier = executor.tier
                of_group = [
                    sum(t == Tier.HBM_QUANTISED for t in row) / hbm_mask(row).sum() for row in tier
                ]
                shares.append(np.mean(of_group))
        assert 0 < meter.share < 1
        assert meter.share == pytest.approx(np.mean(shares), rel=1e-12)


def test_the_printed_share_is_a_statistic_of_the_prompt() -> None:
    """One layer after the other, as the public code computes it, and no cache in it."""
    reader = TraceReader(VECTORS)
    for episode, row in zip(
        reader.episodes(build("arkv", {}).reads()), arkv.sensitivity(reader), strict=True
    ):
        run = next(iter(play(episode))).run
        rows, keys, scores = head_rows(run.observed), run.steps - 32, []
        for layer in range(episode.info.geometry.layers):
            queries = [rows.row(i)[layer, :, :keys] for i in range(keys, run.steps)]
            a = np.stack(queries, axis=1).astype(np.float64)  # [heads, queries, keys]
            entropy = -(a * np.log(a + 1e-10)).sum()
            spread = a.var(axis=1, ddof=1).sum()
            m2 = np.maximum(a.var(axis=1), 1e-8)
            m4 = ((a - a.mean(axis=1, keepdims=True)) ** 4).mean(axis=1)
            tailed = (m4 / m2**2).sum()
            taus = 7.7744, 5.4070, 5.5277
            scores.append(
                entropy ** (1 / taus[0]) * spread ** (1 / taus[1]) * tailed ** (1 / taus[2])
            )
        shares = [1 - each / max(scores) for each in scores]
        assert row["logged"] == pytest.approx(np.mean([each for each in shares if each > 0]))
