"""The executor under the real controller, with real policies, on recorded trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.events import TokenRun
from arborsim.core.measurements import Measurements
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.reading import ActivePaths
from arborsim.memory.moves import Moves
from arborsim.play.controller import Controller, Meter
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.methods.attention import H2O
from arborsim.policies.methods.baselines import Full, StreamingLLM
from arborsim.policies.methods.hierarchy import Hierarchy
from arborsim.policies.methods.kivi import KIVI
from arborsim.trace.episode import play
from arborsim.trace.reader import TraceReader
from tests.helpers.traces import make_trace
from tests.simulator.bench import GEOMETRY, executor

POLICIES: tuple[Policy, ...] = (
    Full(),
    StreamingLLM(),
    H2O(per="shared"),
    Hierarchy(interval=4, recent=2),
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(tmp_path_factory.mktemp("traces") / "t.parquet", seed=3, episodes=2)


def replay(trace: Path, policy: Policy, executor: SimulatedExecutor) -> Measurements:
    reader = TraceReader(trace)
    episode = next(iter(reader.episodes(sorted(policy.reads()))))
    controller = Controller(
        policy, executor, budget_tokens=70, layers=reader.info.geometry.layers, vocabulary=128
    )
    for event in play(episode):
        controller.handle(event)
        executor.ledger.check()
    return executor.measurements()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("recall", ["stage", "stream", "near"])
def test_policies_replay_alike_in_both_forms(trace: Path, policy: Policy, recall: str) -> None:
    results = [
        replay(
            trace,
            policy,
            executor(recall=recall, fused=policy.fused, event_by_event=single),
        )
        for single in (False, True)
    ]
    fast, slow = results
    assert fast.time.total_s == pytest.approx(slow.time.total_s, rel=1e-9)
    for name in ("peak_hbm_kv_bytes", "peak_hbm_kv_tokens", "peak_ddr_bytes", "to_ddr_bytes",
                 "from_ddr_bytes", "evicted_tokens", "offloaded_tokens", "decisions"):  # fmt: skip
        assert getattr(fast, name) == getattr(slow, name), name


def test_full_retention_is_all_tokens(trace: Path) -> None:
    measured = replay(trace, Full(), executor())
    tokens = measured.prompt_tokens + measured.generated_tokens
    assert measured.peak_hbm_kv_tokens == tokens
    assert measured.peak_hbm_kv_bytes == tokens * GEOMETRY.kv_bytes_per_token
    assert measured.evicted_tokens == 0


def test_transplant_to_a_large_model(trace: Path) -> None:
    simulated = executor(load_profile("h100"), load_geometry("llama-3.1-8b"))
    measured = replay(trace, Full(), simulated)
    assert measured.peak_hbm_kv_bytes == measured.peak_hbm_kv_tokens * 131_072
    per_iteration_s = measured.time.decode_s / measured.iterations
    assert 5e-3 < per_iteration_s < 10e-3
    assert measured.fits


def test_wrong_options_are_named() -> None:
    with pytest.raises(UnknownName, match=r"did you mean .*stream"):
        executor(recall="steam")
    with pytest.raises(UsageError, match="pages of 0"):
        executor(page_tokens=0)
    with pytest.raises(UsageError, match="0 groups"):
        executor(groups=0)


def test_the_memory_hierarchy_moves_tokens_to_ddr(trace: Path) -> None:
    policy = Hierarchy(interval=4, recent=2)
    model, machine = load_geometry("llama-3.1-8b"), load_profile("h100")
    results = {
        recall: replay(trace, policy, executor(machine, model, recall=recall))
        for recall in ("stage", "stream", "near")
    }
    assert {m.offloaded_tokens for m in results.values()} == {results["stage"].offloaded_tokens}
    assert results["stage"].offloaded_tokens > 0
    # Staging keeps recalled tokens in HBM: the other modes are the ones that save it.
    assert results["stage"].peak_staging_bytes > results["stream"].peak_staging_bytes
    assert results["near"].peak_staging_bytes == 0


class _AskedEveryIteration(KIVI):
    name = "asked"

    def next_decision(self, view: CacheView) -> int:
        return 1


def test_kivi_says_when_a_group_is_complete(trace: Path) -> None:
    """On trees, too, where a token is in the windows of several leaves."""
    for residual in (3, 11):
        options = {"group": 8, "residual": residual, "pin_prompt": False}
        asked, said = (
            replay(trace, kind(**options), executor(formats=kind(**options).formats))
            for kind in (_AskedEveryIteration, KIVI)
        )
        assert (asked.quantised_tokens, asked.decisions) == (said.quantised_tokens, said.decisions)
        assert asked.quantised_tokens > 0
        assert asked.time.total_s == pytest.approx(said.time.total_s, rel=1e-12)


class _Recounted(Meter):
    """Compares what paths hold with a count of every token."""

    def __init__(self, paths: ActivePaths) -> None:
        self.paths, self.compared = paths, 0

    def ran(self, run: TokenRun, tree: ThoughtTree, tier: np.ndarray, moves: Moves) -> None:
        if not self.paths.are_active(run.leaves) or run.leaves != self.paths.leaves:
            return  # they turn when the run is carried out
        held = [tree.path(leaf)[: -run.steps] for leaf in run.leaves]
        every, union = np.concatenate(held), np.unique(np.concatenate(held))
        width = len(self.paths.shared.now[0])
        for tokens, found in ((union, self.paths.shared), (every, self.paths.branches)):
            counted = np.bincount(tier[:, tokens].ravel(), minlength=width)
            if found.now.any():  # a path that is the whole tree is the ledger's to count
                assert found.now[0].tolist() == counted.tolist()
                self.compared += 1


@pytest.mark.parametrize("policy", [H2O(per="shared"), Hierarchy(interval=4, recent=2)])
def test_paths_hold_what_a_count_of_every_token_says(trace: Path, policy: Policy) -> None:
    reader = TraceReader(trace)
    for episode in reader.episodes(sorted(policy.reads())):
        machine = executor()
        controller = Controller(
            policy, machine, budget_tokens=70, layers=reader.info.geometry.layers, vocabulary=128
        )
        meter = _Recounted(machine._paths)
        controller._meters = (meter,)
        controller.run(play(episode))
        assert meter.compared
