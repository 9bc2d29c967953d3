"""The attention-output error, against a literal computation in float64, and FP8 against torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.events import Event
from arborsim.core.formats import FP8, Format, round_e4m3
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.memory.moves import Plan
from arborsim.play.controller import Controller
from arborsim.play.meters import OutputError
from arborsim.policies.base import CacheView, Policy
from arborsim.policies.methods.baselines import StreamingLLM
from arborsim.policies.methods.kivi import KIVI
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import VECTORS
from tests.helpers.plain_executor import PlainExecutor
from tests.helpers.traces import make_trace

LAYERS, KV_HEADS = (0, 2), 2


@dataclass(frozen=True)
class Scatter(Policy):
    """Puts tokens into random tiers after every event, whatever they are."""

    seed: int = 0
    per: str = "shared"
    name: ClassVar[str] = "scatter"
    bounded: ClassVar[bool] = False

    @property
    def grouping(self) -> str:
        return self.per

    @property
    def formats(self) -> tuple[Format, ...]:
        return FP8, Format(2, 4, "token", 2, 2, 0.1)

    def next_decision(self, view: CacheView) -> int:
        return 1

    def decide(self, view: CacheView, event: Event) -> Plan:
        rng = np.random.default_rng([self.seed, view.num_tokens])
        tiers = view.tier.copy()
        tiers[rng.random(tiers.shape) < 0.05] = Tier.HBM_QUANTISED
        tiers[rng.random(tiers.shape) < 0.05] = Tier.HBM_COARSE
        tiers[rng.random(tiers.shape) < 0.05] = Tier.EVICTED
        return Plan(np.where(view.tier == Tier.EVICTED, Tier.EVICTED, tiers).astype(np.int8))


class Watch(OutputError):
    """Also notes the tiers that each generated token saw."""

    def __init__(self, executor: PlainExecutor, formats: tuple[Format, ...]) -> None:
        super().__init__(formats)
        self.seen: list[np.ndarray] = []
        self._executor = executor

    def ran(self, run, tree, tier, moves) -> None:  # type: ignore[no-untyped-def]
        for step in range(run.steps):
            for _ in run.leaves:
                now = np.zeros((len(tier), 10_000), dtype=np.int8)
                now[:, : tier.shape[1]] = tier
                for s, group, token, to in zip(
                    moves.step, moves.group, moves.token, moves.target, strict=True
                ):
                    if s < step:
                        now[slice(None) if group < 0 else group, token] = to
                self.seen.append(now)
        super().ran(run, tree, tier, moves)


def measured(policy: Policy, episode: Episode, budget: int, groups: int) -> Watch:
    executor = PlainExecutor(groups)
    watch = Watch(executor, policy.formats)
    controller = Controller(
        policy, executor, budget_tokens=budget, layers=6, vocabulary=128, meters=[watch]
    )
    controller.run(play(episode))
    return watch


def literal(
    episode: Episode,
    seen: list[np.ndarray],
    queries: np.ndarray,
    formats: tuple[Format, ...] = Scatter().formats,
) -> float:
    """Token by token, layer by layer, head by head; groups of keys begin with the first token."""
    node, parent = episode.node[episode.token_rows], {}
    for child, up in zip(episode.node, episode.parent, strict=True):
        parent[int(child)] = int(up)
    own: dict[int, list[int]] = {}
    errors, generated = [], iter(seen)
    assert episode.keys is not None
    assert episode.values is not None
    for t in range(episode.num_tokens):
        own.setdefault(int(node[t]), []).append(t)
        if node[t] == 0:
            continue
        tier = next(generated)
        chain, up = [], int(node[t])
        while up >= 0:
            chain, up = own.get(up, []) + chain, parent[up]
        path = [i for i in chain if i <= t]
        per_layer = []
        for layer in range(len(LAYERS)):
            exact, approximate = [], []
            for head in range(queries.shape[2]):
                kv = head // (queries.shape[2] // KV_HEADS)
                q = queries[t, layer, head].astype(np.float64)
                k = episode.keys[path, layer, kv].astype(np.float64)
                v = episode.values[path, layer, kv].astype(np.float64)
                group = {1: 0, len(LAYERS): layer}.get(len(tier), layer * KV_HEADS + kv)
                where = tier[group, path]
                exact.append(softmax(k @ q / np.sqrt(len(q))) @ v)
                for i, tier_of in enumerate(where.tolist()):
                    if not Tier(tier_of).quantised:
                        continue
                    each = formats[Tier(tier_of).rung - 1]
                    first = path[i] - path[i] % each.scale_tokens
                    block = episode.keys[first : first + each.scale_tokens, layer, kv]
                    k[i] = each.rounded(block, keys=True)[path[i] - first]
                    v[i] = each.rounded(v[None, i], keys=False)[0]
                held = where != Tier.EVICTED
                if held.any():
                    approximate.append(softmax((k @ q / np.sqrt(len(q)))[held]) @ v[held])
                else:
                    approximate.append(np.zeros_like(q))
            difference = np.concatenate(exact) - np.concatenate(approximate)
            per_layer.append(np.linalg.norm(difference) / np.linalg.norm(np.concatenate(exact)))
        errors.append(np.mean(per_layer))
    return float(np.mean(errors))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def vector_episode(folder: Path, seed: int, kind: str) -> tuple[Episode, np.ndarray]:
    path = make_trace(
        folder / "q.parquet", seed=seed, episodes=1, kind=kind, prompt=5, nodes=6, block=(2, 5),
        capture="qkv", qkv_layers=LAYERS,
    )  # fmt: skip
    reader = TraceReader(path)
    episode = next(iter(reader.episodes([*VECTORS, Signal.ATTENTION])))
    raw = reader.table(0, ["queries"])["queries"].to_pylist()
    queries = np.array([row for row in raw if row is not None], dtype=np.float16)
    return episode, queries.reshape(len(queries), len(LAYERS), -1, 8)


@pytest.mark.parametrize("per", ["shared", "layer", "head"])
@settings(max_examples=6)
@given(seed=st.integers(0, 1000), kind=st.sampled_from(["linear", "tree"]))
def test_error_equals_the_literal_one(
    per: str, tmp_path_factory: pytest.TempPathFactory, seed: int, kind: str
) -> None:
    episode, queries = vector_episode(tmp_path_factory.mktemp("q"), seed, kind)
    groups = {"shared": 1, "layer": 2, "head": 4}[per]
    watch = measured(Scatter(seed, per), episode, 10**6, groups)
    assert watch.error > 0
    assert watch.error == pytest.approx(literal(episode, watch.seen, queries), rel=1e-4)


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_keys_in_groups_of_tokens_are_rounded_together(tmp_path: Path, outliers: float) -> None:
    episode, queries = vector_episode(tmp_path, 5, "linear")
    policy = KIVI(bits=2, group=8, residual=3, outliers=outliers)
    watch = measured(policy, episode, 1, 1)
    assert (watch.seen[-1] == Tier.HBM_QUANTISED).sum() in (16, 24)
    assert watch.error > 0.01
    expected = literal(episode, watch.seen, queries, policy.formats)
    assert watch.error == pytest.approx(expected, rel=1e-4)


def test_moves_inside_a_run_count_from_the_next_token_on(tmp_path: Path) -> None:
    episode, queries = vector_episode(tmp_path, 3, "linear")
    watch = measured(StreamingLLM(), episode, 9, 1)
    assert watch.error == pytest.approx(literal(episode, watch.seen, queries), rel=1e-4)
    assert measured(StreamingLLM(), episode, 10**6, 1).error == 0


@dataclass(frozen=True)
class ToDDR(Scatter):
    """Moves everything to DDR, where nothing is lost."""

    name: ClassVar[str] = "to-ddr"

    def decide(self, view: CacheView, event: Event) -> Plan:
        return Plan(np.full_like(view.tier, Tier.DDR))


def test_full_precision_in_ddr_is_no_error_at_all(tmp_path: Path) -> None:
    episode, _ = vector_episode(tmp_path, 3, "tree")
    assert measured(ToDDR(), episode, 10**6, 1).error == 0


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=20))
def test_fp8_rounds_as_torch_does(values: list[float]) -> None:
    torch = pytest.importorskip("torch")
    x = np.clip(np.array(values, dtype=np.float32), -448, 448)
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(round_e4m3(x), expected)


def test_every_fp8_number_is_itself() -> None:
    torch = pytest.importorskip("torch")
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    every = every[np.isfinite(every)]
    np.testing.assert_array_equal(round_e4m3(every), every)
