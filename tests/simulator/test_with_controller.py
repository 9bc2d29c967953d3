"""The executor under the real controller, with real policies, on recorded trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.measurements import Measurements
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.play.controller import Controller
from arborsim.policies.base import Policy
from arborsim.policies.methods.attention import H2O
from arborsim.policies.methods.baselines import Full, StreamingLLM
from arborsim.policies.methods.hierarchy import Hierarchy
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
