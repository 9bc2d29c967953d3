"""Generated searches: valid traces, whose lengths and trees are distributed as stated."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.machine.lookup import load_geometry
from arborsim.products.generate.lengths import (
    Empirical,
    LogNormal,
    TreeSpec,
    Uniform,
    fixed,
    generate_search,
    write_generated,
)
from arborsim.products.traces.describe import accuracy, describe
from arborsim.trace.importers.searches import WrittenSearch
from arborsim.trace.reader import TraceReader

GEOMETRY = load_geometry("llama-3.1-8b")
SIGNIFICANCE = 1e-3
SMALL = TreeSpec(fixed(5), Uniform(1, 9), depth=fixed(4), branching=fixed(2))


def searches(spec: TreeSpec, count: int, seed: int = 0) -> list[WrittenSearch]:
    return [generate_search(spec, seed, number) for number in range(count)]


def level_sizes(search: WrittenSearch) -> list[int]:
    """Thoughts per level, from the parents alone."""
    depth = [0]
    for batch in search.batches:
        depth += [depth[thought.parent] + 1 for thought in batch.thoughts]
    return np.bincount(depth)[1:].tolist()


def expanded(search: WrittenSearch) -> set[int]:
    return {thought.parent for batch in search.batches for thought in batch.thoughts}


def test_a_beam_of_4_of_16() -> None:
    spec = replace(SMALL, first=fixed(16), branching=fixed(4), pruned=(0.75,))
    for search in searches(spec, 20):
        assert level_sizes(search) == [16, 16, 16, 16]
        assert [len(batch.pruned) for batch in search.batches] == [12, 12, 12, 0]
        assert len(expanded(search)) == 1 + 3 * 4
        assert search.answer is not None
        assert search.answer.node > 48


def test_best_of_n_and_a_chain() -> None:
    best = generate_search(replace(SMALL, first=fixed(8), branching=fixed(1)), 0, 0)
    assert level_sizes(best) == [8, 8, 8, 8]
    assert [thought.parent for thought in best.batches[1].thoughts] == list(range(1, 9))
    chain = generate_search(replace(SMALL, branching=fixed(1)), 0, 0)
    assert [thought.parent for b in chain.batches for thought in b.thoughts] == [0, 1, 2, 3]


def test_levels_are_pruned_and_finish_as_stated_for_each() -> None:
    spec = replace(SMALL, first=fixed(8), branching=fixed(2), pruned=(0.5, 0.0), finished=(0, 0.5))
    for search in searches(spec, 20):
        # 8, half given up; 4 x 2, half finished; 4 x 2, half finished; 4 x 2, the last.
        assert level_sizes(search) == [8, 8, 8, 8]
        assert [len(batch.pruned) for batch in search.batches] == [4, 0, 0, 0]
        given_up = set(search.batches[0].pruned)
        assert not given_up & expanded(search)


def test_one_thought_always_stays_unless_all_have_finished() -> None:
    pruned = generate_search(replace(SMALL, pruned=(1.0,)), 0, 0)
    assert level_sizes(pruned) == [2, 2, 2, 2]
    finished = generate_search(replace(SMALL, finished=(1.0,)), 0, 0)
    assert level_sizes(finished) == [2]


def test_shares_hold_on_average_where_they_make_no_whole_number() -> None:
    # 3 thoughts, 0.4 of them given up: 1 with probability 0.8, 2 with 0.2.
    spec = replace(SMALL, first=fixed(3), depth=fixed(2), pruned=(0.4,))
    counts = [len(search.batches[0].pruned) for search in searches(spec, 2000)]
    assert set(counts) == {1, 2}
    low, high = stats.binom(2000, 0.2).ppf([0.0005, 0.9995])
    assert low <= counts.count(2) <= high


def test_parallel_splits_levels_but_changes_no_tree() -> None:
    spec = replace(SMALL, first=fixed(7), branching=fixed(1), pruned=(0.5,), rewards=True)
    whole, split = generate_search(spec, 3, 1), generate_search(replace(spec, parallel=3), 3, 1)
    assert [len(batch.thoughts) for batch in split.batches][:3] == [3, 3, 1]
    assert [bool(batch.pruned) for batch in split.batches][:3] == [False, False, True]
    for one, other in ((whole, split), (split, whole)):
        thoughts = [thought for batch in one.batches for thought in batch.thoughts]
        assert thoughts == [thought for batch in other.batches for thought in batch.thoughts]
        assert one.answer == other.answer


def test_rewards_decide_who_is_given_up_and_who_answers() -> None:
    spec = replace(SMALL, first=fixed(12), branching=fixed(3), pruned=(0.6,), rewards=True)
    for search in searches(spec, 20):
        rewards = {}
        for batch in search.batches:
            first = len(rewards) + 1
            rewards |= {first + i: thought.reward for i, thought in enumerate(batch.thoughts)}
            kept = [rewards[n] for n in range(first, len(rewards) + 1) if n not in batch.pruned]
            assert all(rewards[n] < min(kept) for n in batch.pruned)
        assert search.answer is not None
        assert rewards[search.answer.node] == max(kept)
    plain = searches(replace(spec, rewards=False), 3)
    assert all(math.isnan(t.reward) for s in plain for b in s.batches for t in b.thoughts)


def test_lengths_and_depths_are_distributed_as_stated() -> None:
    spec = TreeSpec(
        LogNormal(50_000, 0.4, 400_000), LogNormal(10_000, 0.3), Uniform(2, 4), fixed(3), None,
        pruned=(2 / 3,),
    )  # fmt: skip
    found = searches(spec, 600)
    prompts = [search.prompt_tokens for search in found]
    assert stats.kstest(prompts, stats.lognorm(s=0.4, scale=50_000).cdf).pvalue > SIGNIFICANCE
    thoughts = [t.tokens for search in found for batch in search.batches for t in batch.thoughts]
    assert stats.kstest(thoughts, stats.lognorm(s=0.3, scale=10_000).cdf).pvalue > SIGNIFICANCE
    depths = np.bincount([len(level_sizes(search)) for search in found], minlength=5)
    assert depths[:2].tolist() == [0, 0]
    assert stats.chisquare(depths[2:]).pvalue > SIGNIFICANCE


def test_branching_is_drawn_for_each_block() -> None:
    spec = replace(SMALL, branching=Empirical((1, 3)), first=fixed(40), depth=fixed(2))
    children = []
    for search in searches(spec, 30):
        parents = [thought.parent for thought in search.batches[1].thoughts]
        children += np.bincount(parents, minlength=41)[1:].tolist()
    counts = np.bincount(children)
    assert counts.sum() == 1200
    assert set(np.flatnonzero(counts)) == {1, 3}
    assert stats.binomtest(int(counts[3]), 1200).pvalue > SIGNIFICANCE


def test_solved_is_a_share_of_searches_and_unknown_by_default() -> None:
    verdicts = [
        search.answer.correct for search in searches(replace(SMALL, solved=0.3), 2000)
        if search.answer
    ]  # fmt: skip
    assert stats.binomtest(sum(verdicts), 2000, 0.3).pvalue > SIGNIFICANCE
    assert all(s.answer is not None and s.answer.correct == -1 for s in searches(SMALL, 5))


def test_search_i_is_the_same_however_many_are_drawn_and_other_seeds_differ() -> None:
    few, many, others = (
        [str(search) for search in found]  # as text, because no reward equals no reward there
        for found in (searches(SMALL, 3), searches(SMALL, 9), searches(SMALL, 9, seed=1))
    )
    assert few == many[:3]
    assert len({*many, *others}) == 18


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"branching": fixed(0)}, r"^branching must be in \[1, 65536\], not 0$"),
        ({"first": Uniform(0, 2)}, r"^first must be in \[1, 65536\], not 0 to 2$"),
        ({"depth": LogNormal(4, 1)}, r"^depth must be in \[1, 4096\], not 1 to \d+: set most$"),
        ({"prompt_tokens": fixed(0)}, "^prompt_tokens must be in"),
        ({"thought_tokens": Uniform(0, 3)}, "^thought_tokens must be in"),
        ({"pruned": (0.5, 1.5)}, r"^pruned must be shares in \[0, 1\], not \[0.5, 1.5\]$"),
        ({"finished": ()}, "^finished must be shares"),
        ({"pruned": (math.nan,)}, "^pruned must be shares"),
        ({"parallel": -1}, "^parallel must not be negative"),
        ({"solved": 1.1}, "^solved must be a share"),
    ],
)
def test_what_cannot_be_drawn(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(SMALL, **changes)  # type: ignore[arg-type]


def test_trees_that_explode_are_refused_by_level() -> None:
    with pytest.raises(UsageError, match="level 3 of a tree has 1000000 thoughts, more than 65536"):
        generate_search(replace(SMALL, branching=fixed(100)), 0, 0)
    with pytest.raises(UsageError, match="level 2 of a tree has 24000005 tokens down to it"):
        generate_search(replace(SMALL, thought_tokens=fixed(4_000_000)), 0, 0)


specs = st.builds(
    TreeSpec,
    prompt_tokens=st.builds(fixed, st.integers(1, 20)),
    thought_tokens=st.sampled_from([fixed(1), Uniform(1, 12), LogNormal(4, 1.0, 30)]),
    depth=st.sampled_from([fixed(1), Uniform(1, 5)]),
    branching=st.sampled_from([fixed(1), fixed(2), Uniform(1, 3)]),
    first=st.sampled_from([None, fixed(4), Uniform(1, 6)]),
    pruned=st.lists(st.floats(0, 1), min_size=1, max_size=3).map(tuple),
    finished=st.lists(st.floats(0, 1), min_size=1, max_size=3).map(tuple),
    parallel=st.integers(0, 5),
    rewards=st.booleans(),
    solved=st.sampled_from([None, 0.0, 1.0]),
)


@settings(max_examples=40, deadline=None)
@given(spec=specs, seed=st.integers(0, 2**40))
def test_every_specification_gives_valid_traces(
    tmp_path_factory: pytest.TempPathFactory, spec: TreeSpec, seed: int
) -> None:
    out = tmp_path_factory.mktemp("generated") / "t.parquet"
    tokens = write_generated(spec, 2, seed, GEOMETRY, out)
    reader = TraceReader(out)  # reading checks every rule of the format
    found = describe(reader)
    assert sum(e.prompt_tokens + e.generated_tokens for e in found.episodes) == tokens
    for number, facts in enumerate(found.episodes):
        search = generate_search(spec, seed, number)
        assert facts.answered
        assert facts.depth == len(level_sizes(search))
        assert facts.nodes == 1 + sum(level_sizes(search))
        assert facts.prunes == sum(len(batch.pruned) for batch in search.batches)
        assert facts.correct == (None if spec.solved is None else spec.solved == 1.0)
    assert reader.info.seed == seed
    assert not reader.info.knows_token_ids


def test_command_makes_what_other_commands_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = (
        "--searches 3 --prompt-tokens 40 --thought-tokens uniform:low=5,high=9 --depth 3 "
        "--first 4 --branching 2 --pruned 0.5,0.75 --solved 0.5 --seed 7"
    )
    assert main(shlex.split(f"generate --out a.parquet {options}")) == 0
    assert "wrote a.parquet: 3 searches, " in capsys.readouterr().out
    found = describe(TraceReader(tmp_path / "a.parquet"))
    assert found.info.search_parameters["pruned"] == [0.5, 0.75]
    assert found.accuracy == accuracy([episode.correct for episode in found.episodes])
    assert main(["inspect", "a.parquet"]) == 0
    assert "none: lengths are drawn; charged as llama-3.1-8b" in capsys.readouterr().out
    assert main(shlex.split("replay a.parquet --policy all --budget 32 --json")) == 0
    shown = capsys.readouterr().out
    assert {"full", "streaming-llm", "random"} <= set(shown.replace('"', " ").split())
    assert main(shlex.split("replay a.parquet --policy raas")) == 2
    error = capsys.readouterr().err
    assert "policy raas reads attention" in error
    assert "--capture signals" in error


def test_generated_trees_move_tokens_between_tiers_and_bring_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree.toml").write_text(
        'name = "tree-ddr"\n[score]\nuse = "position"\n[allocate]\nuse = "tree"\n'
        'use_attention = false\n[place]\nddr = inf\n[schedule]\nuse = "tree-events"\n'
        '[recover]\nuse = "fetch"\n'
    )
    spec = replace(SMALL, prompt_tokens=fixed(20), thought_tokens=fixed(30), first=fixed(6),
                   pruned=(0.5,), parallel=2, rewards=True)  # fmt: skip
    write_generated(spec, 2, 0, GEOMETRY, tmp_path / "t.parquet")
    # A level of six in batches of two: the search turns away from branches and comes back.
    assert all(e.revisits > 0 for e in describe(TraceReader(tmp_path / "t.parquet")).episodes)
    command = (
        "replay t.parquet --policy arborkv,tree.toml --set arborkv.use_attention=false "
        "--set arborkv.retain=sinks+tail --budget 0.6 --recall near --json"
    )
    assert main(shlex.split(command)) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["episodes"]}
    assert rows["arborkv"]["rehydrated_tokens"] > 0
    assert rows["tree-ddr"]["peak_ddr_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--depth 0", "depth must be in [1, 4096], not 0"),
        ("--thought-tokens short", "--thought-tokens: 'short' is no distribution"),
        ("--pruned half", "--pruned half: expected a share (0.5), or one per level"),
        ("--pruned 1.2", "pruned must be shares in [0, 1]"),
        ("--first file:none.txt", "--first: none.txt: cannot be read"),
        ("--model llama", "unknown model 'llama'"),
        ("--branching 300", "level 2 of a tree has 90000 thoughts"),
        ("--searches 0", "--searches"),
        ("--rewards some", "'some' is not one of"),
        ("--solved 2", "solved must be a share in [0, 1], not 2"),
    ],
)
def test_command_refuses_in_one_line_and_leaves_nothing(
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(f"generate --out a.parquet {options}")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
