"""One setting says of every policy whether the prompt is protected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from arborsim.core.errors import BudgetInfeasible, UnknownName, UsageError
from arborsim.core.observations import Signal
from arborsim.play.controller import Controller
from arborsim.policies import registry
from arborsim.policies.base import Policy
from arborsim.policies.registry import build
from arborsim.signals.last_attended import LastAttended
from arborsim.signals.rolling import Band, RollingBands
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, decide_all
from tests.helpers.traces import trace_for

PROMPT = 40
PINNED = {
    "arborkv", "arbor-epi", "attn-hs", "attn-val-redundancy", "band-adaptive", "epikv",
    "hierarchy", "hs-variance", "kv-key", "kv-value", "lag-kv", "raas", "random", "redundancy",
    "segment-hs", "staircase", "thinkv-paper",
}  # fmt: skip
NOT_PINNED = {
    "arkv", "arkv-origin", "arkv-quant", "h2o", "key-norm", "keydiff", "lag-kv-official", "needed",
    "oracle", "rkv", "snapkv", "streaming-llm", "thinkv", "tova", "vatp",
}  # fmt: skip
FLOORS = {"path_floor": "0.05", "k_min": "1", "tail": "1"}
# Windows that small budgets have room for.
SMALL = {
    "arkv": {"window": "4"}, "arkv-origin": {"window": "4"}, "arkv-quant": {"window": "4"},
    "hierarchy": {"recent": "4"}, "redundancy": {"recent": "4"},
    "attn-val-redundancy": {"recent": "4"},
    "arborkv": {"margin": "2", **FLOORS}, "arbor-epi": {"slack": "2", **FLOORS},
    "h2o": {"recent_share": "0.1"}, "vatp": {"recent_share": "0.1", "sinks": "2"},
    "duoattention": {"sinks": "2", "recent": "4"},
    "freekv": {"page": "3", "sinks": "4", "recent": "4"},
}  # fmt: skip
POLICIES = [name for name in registry.names() if name != "full"]


def small(name: str, **settings: str) -> Policy:
    return build(name, SMALL.get(name, {}) | settings)


def episode_for(policy: Policy, folder: Path) -> Episode:
    # ArborKV does not trim open blocks, which are one in a linear search.
    kind, block = ("tree", (3, 4)) if policy.name.startswith("arbor") else ("linear", (8, 12))
    path = trace_for(
        policy, folder / "x.parquet", seed=1, episodes=1, kind=kind, prompt=PROMPT, nodes=8,
        block=block,
    )  # fmt: skip
    return next(iter(TraceReader(path).episodes(sorted(policy.reads()))))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_whether_it_pins_the_prompt(name: str) -> None:
    made = build(name)
    key = registry.parameter_name(type(made), "pin_prompt")
    assert key is not None
    assert made.protection(100).pin_prompt == registry.values_of(made)[key]
    if name in (*PINNED, *NOT_PINNED):
        assert made.protection(100).pin_prompt == (name in PINNED)
    assert not build(name, {"pin_prompt": "false"}).protection(100).pin_prompt
    if name != "snapkv":
        assert build(name, {"pin_prompt": "true"}).protection(100).pin_prompt


@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_below_the_prompt_works_if_it_is_not_pinned(name: str, tmp_path: Path) -> None:
    policy = small(name, pin_prompt="false")
    _, moves = decide_all(policy, episode_for(policy, tmp_path), PROMPT - 4)
    if policy.bounded:
        assert (moves[:, 2] < PROMPT).any()


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "snapkv"])
def test_a_pinned_prompt_stays(name: str, tmp_path: Path) -> None:
    policy = small(name, pin_prompt="true")
    episode = episode_for(policy, tmp_path)
    _, moves = decide_all(policy, episode, PROMPT + 40)
    assert not (moves[:, 2] < PROMPT).any()
    if policy.bounded:
        with pytest.raises(BudgetInfeasible, match=f"prompt {PROMPT}"):
            decide_all(policy, episode, PROMPT - 4)


@pytest.mark.parametrize(
    "name",
    ["epikv", "hs-variance", "band-adaptive", "kv-key", "kv-value", "segment-hs", "raas",
     "arbor-epi", "staircase"],
)  # fmt: skip
def test_prompt_tokens_have_scores_if_they_need_them(name: str, tmp_path: Path) -> None:
    episode = episode_for(build(name), tmp_path)

    def of_prompt(pin: str) -> np.ndarray:
        # These rows are even: every page of RaaS is used all the time, and has the same score.
        own = {"variant": "median"} if name == "raas" else {}
        policy = build(name, own | {"pin_prompt": pin})
        controller = Controller(
            policy, PlainExecutor(1), budget_tokens=1 << 20,
            layers=episode.info.geometry.layers, vocabulary=episode.info.geometry.vocab,
        )  # fmt: skip
        controller.run(play(episode))
        return controller.view().scores["score"][0, : PROMPT - 1]

    assert len(np.unique(of_prompt("false"))) > 1
    assert len(np.unique(of_prompt("true"))) == 1


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("snapkv", {"pin_prompt": "true"}, "snapkv: compresses the prompt alone: pin_prompt must"),
        (
            "arkv", {"pin_prompt": "true", "as_published": "true"},
            "arkv: the public code cuts the prompt: as_published needs pin_prompt=false",
        ),
    ],
)  # fmt: skip
def test_where_a_pinned_prompt_makes_no_sense(
    name: str, settings: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        build(name, settings)


def test_the_old_names_are_gone() -> None:
    for name, key in (("h2o", "keep_prompt"), ("staircase", "protect.prompt")):
        with pytest.raises(UnknownName, match="pin_prompt"):
            build(name, {key: "true"})


def test_a_block_may_be_left_out_where_one_alone_has_the_setting() -> None:
    made = build("staircase", {"pin_prompt": "false", "ddr": "2.0"})
    assert (made.protect.pin_prompt, made.place.ddr) == (False, 2.0)  # type: ignore[attr-defined]
    with pytest.raises(UnknownName):  # of [allocate] and [schedule]: none of them is meant
        build("arbor-epi", {"alpha ": "1"})


def test_scores_of_a_prompt_that_is_not_pinned_do_not_change_those_of_others_by_default() -> None:
    bands = RollingBands(Signal.HIDDEN_CHANGE, (Band(0, 0),))
    assert bands != bands.with_prompt() == bands.with_prompt().with_prompt()
    assert LastAttended().with_prompt() == LastAttended(prompt=True)
