"""ArborKV's switches, its relief and its behaviour at the limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.events import Transition
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.core.tree import ThoughtTree
from arborsim.policies.base import CacheView
from arborsim.policies.methods.arborkv import ArborKV
from arborsim.policies.relief import tighten_distance
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from tests.helpers.ablations import ABLATIONS
from tests.helpers.plain_executor import decide_all
from tests.helpers.traces import make_trace
from tests.policies.arbor_oracle import SWITCHES


def trees(folder: Path, count: int) -> list[Episode]:
    path = make_trace(
        folder / "x.parquet",
        seed=4,
        episodes=count,
        kind="tree",
        prompt=20,
        nodes=20,
        block=(4, 24),
    )
    return list(TraceReader(path).episodes([Signal.ATTENTION]))


def outcome(settings: dict[str, Any], episode: Episode, share: float) -> Any:
    """Tiers after every event, or the error's message."""
    policy = ArborKV(**{"margin": 4, **settings})
    try:
        return decide_all(policy, episode, int(share * episode.num_tokens))[0]
    except BudgetInfeasible as error:
        return str(error)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_changes_decisions(name: str, tmp_path: Path) -> None:
    switched = SWITCHES[name]
    rest = dict(list(switched.items())[1:])  # compare with the same but for the first setting
    assert any(
        outcome(rest, episode, share) != outcome(switched, episode, share)
        for episode in trees(tmp_path, 4)
        for share in (0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7)
    )


def test_global_sinks_matter_only_if_the_prompt_can_shrink(tmp_path: Path) -> None:
    episodes = trees(tmp_path, 4)

    def decisions(retain: str, pin_prompt: bool) -> list[Any]:
        settings = {"retain": retain, "pin_prompt": pin_prompt}
        return [outcome(settings, episode, 0.5) for episode in episodes]

    assert decisions("tail", True) == decisions("sinks+tail", True)
    assert decisions("tail", False) != decisions("sinks+tail", False)


def test_signals_that_switches_do_not_read_are_not_asked_for() -> None:
    assert ArborKV().reads() == {Signal.ATTENTION}
    assert ArborKV(retain="tail").reads() == {Signal.ATTENTION}
    assert not ArborKV(retain="tail", use_attention=False).reads()
    assert not ArborKV(retain="tail", msve=False).reads()
    assert ArborKV(retain="tail", msve=False).fused
    assert not ArborKV().fused


def small_view(budget: int) -> CacheView:
    """A prompt of 10 tokens, three siblings of 20, the last of them active."""
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append([0], 10)
    for node in (1, 2, 3):
        tree.open(node, 0)
        tree.append([node], 20)
        tree.nodes[node].closed = node < 3
    tree.activate((3,))
    scores = {name: np.arange(70.0)[None] for name in ("score", "block-attention")}
    return CacheView(np.zeros((1, 70), np.int8), scores, tree, (3,), 10, budget, 60, 128)


def test_an_infeasible_budget_is_an_error_with_numbers() -> None:
    with pytest.raises(BudgetInfeasible, match=r"active path 30 \+ floors of other blocks 8") as e:
        ArborKV().decide(small_view(budget=37), Transition((3,), ()))
    assert (e.value.needed_tokens, e.value.budget_tokens) == (38, 37)
    plan = ArborKV().decide(small_view(budget=38), Transition((3,), ()))
    assert plan is not None
    assert int((plan.tiers == Tier.HBM).sum()) == 38


def test_pruned_blocks_give_up_their_floors_before_the_path_shrinks() -> None:
    view = small_view(budget=36)
    view.tree.nodes[1].pruned = True
    plan = ArborKV(margin=1).decide(view, Transition((3,), ()))
    assert plan is not None
    held = [int((plan.tiers[0, tokens] == Tier.HBM).sum()) for tokens in
            (slice(0, 10), slice(10, 30), slice(30, 50), slice(50, 70))]  # fmt: skip
    assert held == [10, 0, 4, 20]
    with pytest.raises(BudgetInfeasible, match="floors of other blocks 8"):
        ArborKV(margin=1, keep_pruned=True).decide(view, Transition((3,), ()))


def test_nothing_is_trimmed_while_there_is_room_if_asked_so() -> None:
    event, roomy = Transition((3,), ()), small_view(budget=100)
    assert ArborKV().decide(roomy, event) is not None
    assert ArborKV(only_under_pressure=True).decide(roomy, event) is None
    assert ArborKV(only_under_pressure=True).decide(small_view(budget=80), event) is not None


def test_the_help_names_the_settings_of_every_row_of_the_ablations() -> None:
    rows = [
        line.split("--set ") for line in (ArborKV.__doc__ or "").splitlines() if "--set" in line
    ]
    told = {row[0].strip().removesuffix(":"): [part.strip() for part in row[1:]] for row in rows}
    made = {
        name: [
            f"{key}={str(value).lower() if isinstance(value, bool | str) else f'{value:g}'}"
            for key, value in settings.items()
        ]
        for name, settings in ABLATIONS.items()
    }
    assert told == made


def test_blocks_shrink_to_their_tail_and_most_attended_tokens() -> None:
    view = small_view(budget=52)
    view.scores["score"][0, [12, 15]] = 99.0
    plan = ArborKV(margin=1, tail=2, k_min=4, lambda_distance=10).decide(view, Transition((3,), ()))
    assert plan is not None
    assert np.flatnonzero(plan.tiers[0, 10:30] == Tier.HBM).tolist() == [2, 5, 18, 19]


@given(data=st.data())
def test_lambda_is_raised_no_further_than_needed(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    keep = np.array(data.draw(st.lists(st.integers(0, 20), min_size=n, max_size=n)))
    scale = keep * np.array(
        data.draw(st.lists(st.sampled_from([1.0, 1.3, 2.0]), min_size=n, max_size=n))
    )
    distance = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    least = keep // 4
    goal = data.draw(st.integers(0, int(keep.sum())))
    kept = tighten_distance(keep, scale, distance, least, goal)
    assert (kept <= keep).all()
    assert (kept >= least).all()
    assert (kept[distance == 0] == keep[distance == 0]).all()
    movable = distance > 0
    if kept.sum() > goal:
        assert (kept[movable] == least[movable]).all()
        return
    # the increase at which each block lost the last token that it lost
    lost = movable & (kept < keep)
    if lost.any():
        when = np.log(scale[lost] / (kept[lost] + 1)) / distance[lost]
        last = when.max()
        before = kept.copy()
        before[lost] += (when > last - 1e-9).astype(np.int64)
        assert before.sum() > goal, "one step less would have been enough"


def test_ablation_names_are_settings_of_the_paper() -> None:
    for name, settings in SWITCHES.items():
        assert ArborKV(**settings) != ArborKV(), name
        assert re.match(r"\S", name)
