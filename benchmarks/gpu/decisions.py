"""Whether policies decide on a device what they decide on the CPU, over the same tokens.

All policies run in shadow mode over a search of a reference model on the CPU; the same tokens and
rewards are then forced upon the device.  Signals are rounded to float16 from float32 logits,
attention and hidden states, so their last bits may differ, and where two tokens rank alike a
decision may, too: both are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from arborsim.core.observations import Signal
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.play.move_log import MoveLog
from arborsim.policies.base import Policy
from arborsim.policies.registry import available, build
from arborsim.searches import make_search
from arborsim_torch.cache.layout import Layout
from arborsim_torch.capture import ALL_SIGNALS
from arborsim_torch.live.feed import Feed
from arborsim_torch.live.setup import SearchSetup, capture_of_signals, make_controller
from arborsim_torch.live.shadow import ShadowController
from arborsim_torch.models import LoadedModel, cache_shape, geometry, load_model
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.sources import TaskSource
from benchmarks.gpu.forced import Tape, TapedSetup
from benchmarks.gpu.journal import Facts

_NO_SIGNAL = frozenset({"time_s"})


@dataclass(frozen=True)
class Task:
    """A search of a reference model, and the budget that makes policies decide."""

    model: str
    search: str
    options: dict[str, int]
    task_options: dict[str, int]
    budget_tokens: int


TASKS = {
    "chain": Task("chain", "linear", {}, {"lines": 24}, 260),
    "game24": Task("game24", "tot-bfs", {"keep": 3, "children": 4}, {}, 130),
    # Less than some policies protect; the others must choose inside the active paths, too.
    "game24, tight": Task("game24", "tot-bfs", {"keep": 3, "children": 4}, {}, 90),
}


@dataclass(frozen=True)
class Shadow:
    """What one search showed, and what each policy decided over it."""

    episode: EpisodeResult
    moves: dict[str, np.ndarray]
    infeasible: dict[str, str]


def all_policies() -> list[str]:
    """Every policy that a live search can run."""
    return sorted(name for name in available() if name != "oracle")


def compare_decisions(task: Task, device: str, names: Sequence[str], problem: int) -> Facts:
    """Search on the CPU, then again on `device` with the same tokens, and compare."""
    policies = [build(name) for name in names]
    tape = Tape()
    host = _search(task, "cpu", policies, problem, tape, forced=False)
    there = _search(task, device, policies, problem, tape, forced=True)
    alike = {name: np.array_equal(host.moves[name], there.moves[name]) for name in names}
    unlike = [name for name in names if not alike[name]]
    one, other = host.episode.columns, there.episode.columns
    return {
        "ok": _same_tree(one, other),
        "tokens": host.episode.prompt_tokens + host.episode.tokens,
        "policies": len(names),
        "equal_policies": sum(alike.values()),
        "equal_share": sum(alike.values()) / len(names),
        "infeasible": [sorted(host.infeasible), sorted(there.infeasible)],
        "moves": int(sum(len(rows) for rows in host.moves.values())),
        "different": {name: _apart(host.moves[name], there.moves[name]) for name in unlike},
        "signals": _signal_differences(one, other),
    }


def _search(
    task: Task, device: str, policies: Sequence[Policy], problem: int, tape: Tape, forced: bool
) -> Shadow:
    loaded = load_model(task.model, "", device, "float32", task.task_options)
    layers = tuple(range(loaded.model.config.num_hidden_layers))
    needs = frozenset[Signal]().union(*(policy.reads() for policy in policies))
    setup = _setup(task, loaded, tape, forced)
    logs = [MoveLog() for _ in policies]
    shadows = [
        _shadow_controller(policy, loaded, task.budget_tokens, log)
        for policy, log in zip(policies, logs, strict=True)
    ]
    capture = capture_of_signals(needs | ALL_SIGNALS, layers, 0, setup.make_search(), keep=True)
    feed = Feed(shadows, capture, needs, layers)  # type: ignore[arg-type]
    asked = setup.source.problem(problem)
    episode = setup.recorder(asked, capture, feed, None).run(asked)
    names = [policy.name for policy in policies]
    said = {name: one.infeasible for name, one in zip(names, shadows, strict=True)}
    return Shadow(
        episode,
        {name: log.rows for name, log in zip(names, logs, strict=True)},
        {name: why for name, why in said.items() if why},
    )


def _setup(task: Task, loaded: LoadedModel, tape: Tape, forced: bool) -> TapedSetup:
    assert loaded.task is not None
    source = TaskSource(loaded.task, noise=0.1, floor=0.3)
    plain = SearchSetup(
        model=loaded.model,
        source=source,
        make_search=lambda: make_search(task.search, **task.options),
        temperature=0.7,
        seed=0,
        max_tokens=source.max_tokens,
    )
    values = {entry.name: getattr(plain, entry.name) for entry in fields(plain)}
    return TapedSetup(**values, tape=tape, forced=forced)


def _shadow_controller(
    policy: Policy, loaded: LoadedModel, budget_tokens: int, log: MoveLog
) -> ShadowController:
    machine = SimulatedExecutor(
        Machine(load_profile("h200")),
        geometry(loaded),
        groups=Layout.of(loaded.model, policy.grouping).groups,
        policy=policy.name,
        fused=policy.fused,
    )
    shape = cache_shape(loaded.model)
    controller = make_controller(policy, machine, budget_tokens, loaded.model, shape, [log])
    return ShadowController(controller)


def _same_tree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    names = ("iteration", "node", "parent", "position", "token", "correct")
    return all(np.array_equal(one[name], other[name]) for name in names)


def _apart(one: np.ndarray, other: np.ndarray) -> Facts:
    """Where two lists of moves part, and how many moves they share."""
    shorter = min(len(one), len(other))
    same = (one[:shorter] == other[:shorter]).all(axis=1)
    first = int(np.argmin(same)) if not same.all() else shorter
    mine, theirs = ({tuple(row) for row in rows.tolist()} for rows in (one, other))
    return {"moves": [len(one), len(other)], "equal_until": first, "shared": len(mine & theirs)}


def _signal_differences(one: dict[str, Any], other: dict[str, Any]) -> Facts:
    """Per column of floats: values, how many differ, and the largest difference."""
    found: Facts = {}
    for name in sorted(one.keys() - _NO_SIGNAL):
        mine, theirs = (_floats(columns[name]) for columns in (one, other))
        if mine is None or theirs is None:
            continue
        if mine.shape != theirs.shape:
            found[name] = {"values": [mine.size, theirs.size]}
            continue
        known = ~(np.isnan(mine) & np.isnan(theirs))
        apart = np.abs(mine[known] - theirs[known])
        found[name] = {
            "values": int(apart.size),
            "differ": int(np.count_nonzero(apart)),
            "largest": float(apart.max(initial=0.0)),
            "largest_value": float(np.abs(mine[known]).max(initial=0.0)),
        }
    return found


def _floats(column: Any) -> np.ndarray | None:
    """All numbers of a column in float64; None if it holds none, or whole ones."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.Array):
        while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            column = column.flatten()
        column = column.to_numpy(zero_copy_only=False)
    if not isinstance(column, np.ndarray) or column.dtype.kind != "f":
        return None
    return column.astype(np.float64).reshape(-1)
