"""Policies made of blocks: the papers' as blocks, files, errors, and what a decision does."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import dataclass, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import BudgetInfeasible, UnknownName, UsageError
from arborsim.core.observations import Signal
from arborsim.core.tiers import Tier
from arborsim.policies.base import Policy
from arborsim.policies.blocks import AfterPrefill, Fetch, Interval, Protect, Recompute, TreeEvents
from arborsim.policies.composition import SCORES, Composition
from arborsim.policies.methods.arborkv import ArborKV
from arborsim.policies.methods.attention import H2O
from arborsim.policies.methods.baselines import Random, StreamingLLM
from arborsim.policies.methods.epikv import EpiKV
from arborsim.policies.methods.hierarchy import Hierarchy
from arborsim.policies.methods.keys import LagKV
from arborsim.policies.placement import Ladder, Pool
from arborsim.policies.registry import available, build, find, parameters, values_of
from arborsim.policies.tree import Tree
from arborsim.signals.attention import CumulativeAttention
from arborsim.signals.rolling import HiddenChangeContrast
from arborsim.signals.scores import Position, Score, SeededUniform
from arborsim.signals.vectors import LagVariance
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import decide_all
from tests.helpers.traces import make_trace, trace_for

READ = (Signal.ATTENTION, Signal.HIDDEN_CHANGE, Signal.LAG_KEY, Signal.LAG_VALUE)
SHIPPED = Path(__file__).parents[2] / "arborsim" / "policies" / "compositions"
ANY = 1 << 40

TWINS: dict[str, tuple[Policy, Composition]] = {
    "h2o": (
        H2O(per="shared"),
        Composition(protect=Protect(pin_prompt=False, recent=ANY, recent_share=0.5)),
    ),
    "h2o, whole tree": (
        H2O(per="shared", adaptation="flat", sinks=2),
        Composition(
            allocate=Pool("flat"),
            protect=Protect(pin_prompt=False, sinks=2, recent=ANY, recent_share=0.5),
        ),
    ),
    "streaming-llm": (
        StreamingLLM(),
        Composition(
            score=Position(), protect=Protect(pin_prompt=False, sinks=4, recent=1, recent_share=1.0)
        ),
    ),
    "epikv": (EpiKV(), Composition(score=HiddenChangeContrast())),
    "lag-kv": (LagKV(), Composition(score=LagVariance())),
    "random": (Random(seed=3), Composition(score=SeededUniform(3))),
    "hierarchy without destruction": (
        Hierarchy(hbm_ratio=1.0, evict_ratio=0.0, interval=4, recent=6),
        Composition(
            place=Ladder(ddr=np.inf),
            schedule=Interval(4, wait=False),
            protect=Protect(sinks=4, recent=6, recent_share=1.0),
            recover=Fetch(),
        ),
    ),
    "arborkv": (
        ArborKV(margin=4),
        Composition(
            score=CumulativeAttention(from_later_blocks=True),
            allocate=Tree(),
            schedule=TreeEvents(4, wait=False),
            protect=Protect(recent=1, recent_share=1.0),
            recover=Recompute(),
        ),
    ),
    "arborkv, sinks only, lambda": (
        ArborKV(margin=4, pin_prompt=False, sinks=3, relief="lambda", rehydrate=False),
        Composition(
            score=CumulativeAttention(from_later_blocks=True),
            allocate=Tree(relief="lambda"),
            schedule=TreeEvents(4, wait=False),
            protect=Protect(pin_prompt=False, sinks=3, recent=0),
        ),
    ),
}


def an_episode(folder: Path, kind: str = "tree", seed: int = 3) -> Episode:
    path = make_trace(
        folder / f"{seed}.parquet", seed=seed, episodes=1, kind=kind, prompt=12, nodes=14,
        block=(2, 14),
    )  # fmt: skip
    return next(iter(TraceReader(path).episodes(READ)))


@pytest.mark.parametrize("name", TWINS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_papers_are_made_of_these_blocks(
    name: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    named, composed = TWINS[name]
    kind = data.draw(st.sampled_from(["linear", "tree"]))
    episode = an_episode(tmp_path_factory.mktemp("t"), kind, data.draw(st.integers(0, 9999)))
    budget = max(8, int(data.draw(st.floats(0.35, 1.0)) * episode.num_tokens))
    outcomes = []
    for policy in (named, composed):
        try:
            outcomes.append(decide_all(policy, episode, budget, max_steps=1)[0])
        except BudgetInfeasible:
            outcomes.append("infeasible")
    assert outcomes[0] == outcomes[1]
    assert named.reads() == composed.reads()
    assert named.fused == composed.fused


@pytest.mark.parametrize("name", SCORES)
def test_every_score_of_the_catalogue_can_be_composed(name: str, tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text(f"name = 'one'\n[score]\nuse = '{name}'\n[protect]\nrecent = 4\n")
    policy = build(str(file))
    path = trace_for(policy, tmp_path / "x.parquet", seed=2, episodes=1, kind="tree", prompt=12)
    episode = next(iter(TraceReader(path).episodes(sorted(policy.reads()))))
    tiers, _ = decide_all(policy, episode, int(0.6 * episode.num_tokens), max_steps=1)
    assert Tier.EVICTED in tiers[-1]
    assert policy.method.score == SCORES[name]().about


def test_every_parameter_of_a_composition_says_what_it_is() -> None:
    for score in SCORES.values():
        made = make_dataclass(
            "Made", [("score", Score, score())], bases=(Composition,), frozen=True
        )
        for parameter in parameters(made).values():
            assert parameter.setting.about, (score, parameter.name)


def test_shipped_compositions_are_found_by_name() -> None:
    assert {"arbor-epi", "staircase"} <= set(available())
    assert build("arbor-epi").fused
    of_two_memories = [tier for tier in Tier if tier <= Tier.EVICTED]
    assert build("staircase").tiers == tuple(t for t in of_two_memories if t.rung < 2)
    assert Tier.EVICTED not in build("arbor-epi").tiers
    for name in ("arbor-epi", "staircase"):
        assert find(name).summary
        assert build(name).reads() == {Signal.HIDDEN_CHANGE}


def test_a_file_of_ones_own_is_a_policy(tmp_path: Path) -> None:
    path = shutil.copy(SHIPPED / "staircase.toml", tmp_path / "mine.toml")
    made = build(str(path), {"place.ddr": "2.5", "score.window": "16", "pin_prompt": "false"})
    assert isinstance(made, Composition)
    assert (made.place.ddr, made.protect.pin_prompt) == (2.5, False)
    assert values_of(made)["score.window"] == 16
    assert values_of(made).keys() == parameters(type(made)).keys()
    assert parameters(find(str(path)))["place.hbm_quantised"].default == 0.5
    assert build(str(path)) == build(str(path))
    assert pickle.loads(pickle.dumps(made)) == made


def test_settings_change_what_a_composition_reads() -> None:
    assert build("arbor-epi", {"allocate.use_attention": "true"}).reads() == {
        Signal.HIDDEN_CHANGE,
        Signal.ATTENTION,
    }
    assert not build("arbor-epi", {"allocate.use_attention": "true"}).fused
    assert build("arbor-epi").fused


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = 'x'\n[scores]\n", "unknown section or key 'scores': did you mean score"),
        ("name = 'x'\n[score]\nuse = 'hiden-contrast'", "did you mean hidden-contrast"),
        ("name = 'x'\n[allocate]\nuse = 'tree'\nalfa = 1", "'alfa': did you mean alpha"),
        (
            "name = 'x'\n[allocate]\nuse = 'tree'\nalpha = 'big'",
            "alpha must be a number, not 'big'",
        ),
        ("name = 'x'\n[allocate]\nuse = 'tree'\nk_min = 1.5", "k_min must be a whole number"),
        ("name = 'x'\n[protect]\npin_prompt = 1", "pin_prompt must be true or false, not 1"),
        ("name = 'x'\n[place]\nddr = -1", r"\[place\]: ddr must be at least 0, not -1"),
        ("name = 'x'\n[place]\nddr = nan", "ddr must be at least 0, not nan"),
        ("name = 'x'\n[schedule]\nuse = 7", "use must be a text, not 7"),
        ("name = 'x'\nplace = 'ddr'", r"\[place\] must be a section"),
        ("[score]\n", "a name is missing"),
        ("name = 3", "name must be a text, not 3"),
        ("name = 'x'\ndeviations = 'none'", "deviations must be a list"),
        ("name = 'x'\n[score", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says) as caught:
        find(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such policy file"):
        find(str(tmp_path / "none.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read: it is not UTF-8 text"):
        find(str(tmp_path / "binary.toml"))


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"allocate.alfa": "2"}, "did you mean allocate.alpha"),
        ({"allocate.alpha": "two"}, "allocate.alpha must be a number"),
        ({"allocate.r_min": "2"}, r"\[allocate\]: r_min must be in \[0, 1\]"),
    ],
)
def test_wrong_settings_of_a_composition(settings_: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build("arbor-epi", settings_)
    assert issubclass(UnknownName, UsageError)


@dataclass(frozen=True)
class InPython(Composition):
    """What the module's docstring shows."""

    allocate: Pool | Tree = Tree(use_attention=False)  # noqa: RUF009
    score: Position = Position()  # noqa: RUF009

    name: ClassVar[str] = "in-python"


def test_a_subclass_is_described_by_its_blocks() -> None:
    assert InPython().reads() == frozenset()
    assert InPython().fused
    assert not InPython().recovers
    assert InPython(recover=Recompute()).recovers
    assert InPython().method.score == "position"


def test_precision_that_was_lost_does_not_come_back(tmp_path: Path) -> None:
    policy = Composition(
        score=HiddenChangeContrast(),
        place=Ladder(hbm_quantised=0.5, ddr=np.inf, ddr_quantised=0.3),
        schedule=Interval(3),
        protect=Protect(recent=6),
        recover=Fetch(),
    )
    seen = set()
    for seed in range(3):
        episode = an_episode(tmp_path, "tree", seed)
        tiers, _ = decide_all(policy, episode, int(0.6 * episode.num_tokens), max_steps=1)
        for before, after in pairwise(tiers):
            seen |= set(zip(before, after, strict=False))
    hbm, small, ddr, small_ddr = Tier.HBM, Tier.HBM_QUANTISED, Tier.DDR, Tier.DDR_QUANTISED
    narrow, full = {small, small_ddr}, {hbm, ddr}
    assert {(small, small_ddr), (hbm, small), (hbm, ddr), (ddr, hbm)} <= seen
    assert not {(a, b) for a, b in seen if a in narrow and b in full}


def test_ddr_holds_no_more_than_its_size(tmp_path: Path) -> None:
    episode = an_episode(tmp_path, "linear")
    budget = int(0.4 * episode.num_tokens)
    policy = build("staircase", {"place.ddr": "0.25", "schedule.iterations": "4"})
    tiers, _ = decide_all(policy, episode, budget, max_steps=1)
    in_ddr = [sum(t in (Tier.DDR, Tier.DDR_QUANTISED) for t in now) for now in tiers]
    assert max(in_ddr) == budget // 4
    assert Tier.EVICTED in tiers[-1]


def test_after_the_prompt_nothing_more_is_decided(tmp_path: Path) -> None:
    policy = Composition(
        score=Position(), schedule=AfterPrefill(), protect=Protect(pin_prompt=False, recent=1)
    )
    assert not policy.bounded
    episode = an_episode(tmp_path, "linear")
    tiers, _ = decide_all(policy, episode, 8, max_steps=1)
    assert tiers[0] == [Tier.EVICTED] * 4 + [Tier.HBM] * 8
    assert tiers[-1] == tiers[0] + [Tier.HBM] * (episode.num_tokens - 12)


def test_a_composition_ranks_per_head_as_the_method_does(tmp_path: Path) -> None:
    file = tmp_path / "heads.toml"
    file.write_text(
        "name = 'heads'\n[score]\ngrouping = 'head'\n"
        f"[protect]\npin_prompt = false\nrecent = {ANY}\nrecent_share = 0.5\n"
    )
    composed, named = build(str(file)), H2O(per="head")
    assert composed.grouping == named.grouping == "head"
    path = trace_for(named, tmp_path / "x.parquet", seed=4, episodes=1, kind="tree", prompt=12)
    episode = next(iter(TraceReader(path).episodes(sorted(named.reads()))))
    budget = int(0.6 * episode.num_tokens)
    one, other = (decide_all(policy, episode, budget)[0] for policy in (composed, named))
    assert one == other


def test_a_tree_has_one_plan_for_the_whole_model(tmp_path: Path) -> None:
    file = tmp_path / "heads.toml"
    file.write_text("name = 'x'\n[score]\ngrouping = 'head'\n[allocate]\nuse = 'tree'\n")
    with pytest.raises(UsageError, match=r"\[allocate\] tree has one plan") as caught:
        find(str(file))
    assert str(caught.value).startswith(f"{file}: ")
