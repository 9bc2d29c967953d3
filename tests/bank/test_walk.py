"""Walking a bank: what searches get, what it costs, and what is never done."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import TraceError
from arborsim.core.observations import Signal
from arborsim.searches import ROOT, make_search, search_names
from arborsim.searches.bank import Bank
from arborsim.searches.visited import visited
from arborsim.searches.walk import Walk, walk
from arborsim.trace.schema import End, Kind
from tests.bank.banks import (
    bank_columns,
    bank_info,
    check_valid,
    episode_of,
    made_bank,
    random_bank,
)
from tests.helpers.traces import make_info, random_trace_columns

NAMES = [name for name in search_names() if name != "linear"]


def oracle_kv(done: Walk) -> tuple[int, int]:
    """KV size without and with the prompt, by sets of (node, token) on whole paths."""
    without = with_prompt = 0
    for step in done.steps:
        cells: set[tuple[int, int]] = set()
        for leaf in step.candidates:
            node = leaf
            while node != -1:
                cells |= {(node, i) for i in range(done.tokens[node])}
                node = done.parent[node]
        with_prompt += len(cells)
        without += len({cell for cell in cells if cell[0] != ROOT})
    return without, with_prompt


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_invariants(name: str, seed: int, complete: bool, dedupe: bool) -> None:
    bank = made_bank(seed, width=3, depth=3) if complete else random_bank(seed, nodes=14)
    done = walk(make_search(name), bank, dedupe)
    visits = Counter(done.bank_node)
    assert max(visits.values()) == 1, "a child was handed out twice"
    for node in range(1, len(done.bank_node)):
        assert bank.parent[done.bank_node[node]] == done.bank_node[done.parent[node]]
        assert done.tokens[node] <= bank.tokens[done.bank_node[node]]
    for node in range(len(done.bank_node)):  # children come in the recorded order, from the first
        below = [done.bank_node[n] for n, up in enumerate(done.parent) if up == node]
        assert tuple(below) == bank.children[done.bank_node[node]][: len(below)]
    ended = [n for step in done.steps for n in step.completed]
    assert len(ended) == len(set(ended))
    dropped = [n for step in done.steps for n in step.dropped]
    assert len(dropped) == len(set(dropped))
    assert sum(len(step.opened) for step in done.steps) == done.model_calls
    decoded = sum(s.iterations * len(s.leaves) for step in done.steps for s in step.runs)
    assert decoded == done.generated_tokens
    assert (done.kv_tokens, done.kv_tokens_with_prompt) == oracle_kv(done)
    candidates = {n for step in done.steps for n in step.candidates}
    assert done.kv_tokens >= sum(done.tokens[n] for n in candidates)
    assert done.bank_misses >= sum(step.misses for step in done.steps)
    if complete:  # no thought was broken off
        assert done.bank_misses == sum(step.misses for step in done.steps)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 10**6), st.booleans())
def test_the_visited_episode_is_a_valid_trace(name: str, seed: int, complete: bool) -> None:
    bank = made_bank(seed, width=3, depth=3) if complete else random_bank(seed, nodes=14)
    done = walk(make_search(name), bank)
    episode = visited(done, bank.episode)
    check_valid(episode)
    assert np.count_nonzero(episode.kind == Kind.TOKEN) == done.generated_tokens
    again = walk(make_search(name), Bank.of(episode))
    assert again.bank_misses == done.bank_misses
    assert again.bank_node == tuple(range(len(done.bank_node)))
    assert again.candidates == done.candidates
    assert again.steps == done.steps
    assert again.correct == done.correct


def test_signals_are_carried_along_token_by_token() -> None:
    bank = random_bank(3, nodes=20)
    episode = visited(walk(make_search("rebase"), bank), bank.episode)
    old = {  # (node, position) -> number of the token
        (int(bank.episode.node[row]), int(bank.episode.position[i])): i
        for i, row in enumerate(bank.episode.token_rows)
    }
    done = walk(make_search("rebase"), bank)
    assert episode.attention is not None
    assert bank.episode.attention is not None
    for i, row in enumerate(episode.token_rows):
        j = old[done.bank_node[episode.node[row]], int(episode.position[i])]
        assert np.array_equal(episode.attention.row(i), bank.episode.attention.row(j))
        for signal in (Signal.HIDDEN_CHANGE, Signal.KEY_SKETCH):
            assert np.array_equal(episode.per_layer[signal][i], bank.episode.per_layer[signal][j])


def tiny(ends: list[str | None], thoughts: list[list[int]], rewards: list[float]) -> Bank:
    """One level of thoughts below a prompt of two tokens."""
    columns = bank_columns(0, width=len(thoughts), depth=1, prompt=2, embeddings=False)
    from tests.helpers.traces import Rows

    rows = Rows()
    rows.open(-1)
    for token in (1, 2):
        rows.token(Kind.PREFILL, 0, token=token)
    nodes = [rows.open(0) for _ in thoughts]
    for node in nodes:
        rows.add(Kind.TRANSITION, node)
    for step in range(max(map(len, thoughts))):
        rows.iteration += 1
        running = [n for n in nodes if len(thoughts[n - 1]) > step]
        for n in running:
            rows.token(Kind.TOKEN, n, token=thoughts[n - 1][step])
        for n in running:
            if len(thoughts[n - 1]) == step + 1:
                end = ends[n - 1]
                answer = "x" if end == "finished" else None
                rows.add(Kind.BOUNDARY, n, reward=rewards[n - 1], end=end, answer=answer,
                         correct=None if answer is None else n == 1)  # fmt: skip
    rows.add(Kind.ANSWER, 1, correct=True)
    columns = dict(rows.columns)
    return Bank.of(episode_of(columns, bank_info(embeddings=False)))


def test_a_small_walk_by_hand() -> None:
    bank = tiny([None, "finished", None], [[5, 5, 5], [6], [7, 7]], [0.5, 0.75, 0.25])
    done = walk(make_search("rebase", width=4), bank)
    first, second = done.steps[0], done.steps[1]
    assert first.opened == (1, 2, 3)
    assert first.misses == 1
    assert [(s.leaves, s.iterations, s.ended) for s in first.runs] == [
        ((1, 2, 3), 1, (2,)), ((1, 3), 1, (3,)), ((1,), 1, (1,)),
    ]  # fmt: skip
    assert second.iteration == 3
    assert second.completed == (2, 3, 1)
    assert second.candidates == (3, 1)
    assert second.kv_tokens == 5
    assert done.kv_tokens_with_prompt == 5 + 2
    assert second.misses == 3  # the width that is left, and nothing below 1 and 3
    assert done.bank_misses == 4
    assert done.model_calls == 3
    assert done.generated_tokens == 6
    assert done.candidates == (2,)
    assert done.correct is False


def test_repeats_of_a_complete_sibling_are_dead() -> None:
    bank = tiny([None, None, "finished"], [[5, 5], [5, 5], [5, 6]], [0.5, 0.5, 0.25])
    done = walk(make_search("beam-4", width=3), bank)
    assert done.dead[2]
    assert not done.dead[3]
    assert done.steps[1].candidates == (1,)
    kept = walk(make_search("beam-4", width=3), bank, dedupe=False)
    assert kept.steps[1].candidates == (1, 2)
    assert bank.end[2] == End.NONE  # what was recorded stays as it was


def test_verdicts() -> None:
    wrong = tiny(["finished", "finished"], [[5], [6]], [0.25, 0.5])
    assert walk(make_search("best-of-n", n=2), wrong).correct is False
    any_of = walk(make_search("tot-bfs", any_of=2), wrong)
    assert any_of.candidates == (2, 1)
    assert any_of.answer == 1
    assert any_of.correct is True
    none = tiny([None, None], [[5], [6]], [0.25, 0.5])
    assert walk(make_search("rebase"), none).correct is False  # no answer is no right one


def test_a_trace_without_ends_is_no_bank() -> None:
    columns = bank_columns(0)
    columns.pop("end"), columns.pop("answer")
    info = bank_info(extra={"ends": "unknown"})
    with pytest.raises(TraceError, match="arborsim record --bank"):
        Bank.of(episode_of(columns, info))


def test_a_depth_first_search_goes_back_where_the_bank_runs_out() -> None:
    """Two recorded children per state, three allowed: all of the tree is visited all the same."""
    bank = made_bank(5, width=2, depth=3, duplicates=0.0)
    settings_ = {"threshold": 0, "relative": 0, "accept": 2}
    done = walk(make_search("tot-dfs", **settings_), bank)
    assert sorted(done.bank_node) == list(range(len(bank.parent)))
    can_go_on = [n for n, below in enumerate(bank.children) if below]
    assert done.bank_misses == len(can_go_on)  # one at each, when its third child is asked for


def test_vectors_and_rows_of_layers_are_carried_along() -> None:
    info = make_info(
        3, capture="qkv", attention="sparse", qkv_layers=(0, 2), attention_layer_ids=(1,)
    )
    columns = random_trace_columns(np.random.default_rng(8), info, nodes=16)
    needs = {
        Signal.ATTENTION, Signal.LAYER_ATTENTION, Signal.HEAD_ATTENTION, Signal.KEYS, Signal.VALUES
    }  # fmt: skip
    wanted = {"needs": frozenset(needs), "embedding": True}
    old = episode_of(columns, info, **wanted)
    done = walk(make_search("tot-bfs", keep=2, children=2), Bank.of(old))
    new = visited(done, old)
    number = {(int(old.node[row]), int(old.position[i])): i for i, row in enumerate(old.token_rows)}
    assert new.num_tokens < old.num_tokens
    for i, row in enumerate(new.token_rows.tolist()):
        j = number[done.bank_node[new.node[row]], int(new.position[i])]
        for name in ("attention", "head_attention"):
            mine, theirs = getattr(new, name), getattr(old, name)
            np.testing.assert_array_equal(mine.row(i), theirs.row(j))
        assert new.layer_attention is not None
        assert old.layer_attention is not None
        np.testing.assert_array_equal(new.layer_attention.of(i), old.layer_attention.of(j))
        for name in ("keys", "values"):
            np.testing.assert_array_equal(getattr(new, name)[i], getattr(old, name)[j])
    closed = {int(old.node[row]): i for i, row in enumerate(old.embedding_rows)}
    for i, row in enumerate(new.embedding_rows):
        np.testing.assert_array_equal(
            new.embedding[i], old.embedding[closed[done.bank_node[new.node[row]]]]
        )
