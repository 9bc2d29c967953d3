"""`play` against a literal row-by-row reading of its definition."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.events import Answer, Boundary, Decode, Prefill, Prune, TokenRun, Transition
from arborsim.core.observations import DenseRows, Signal
from arborsim.core.tree import ThoughtTree
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from tests.helpers.plain_executor import in_steps
from tests.helpers.traces import make_info, make_trace

NEEDS = [Signal.ATTENTION, Signal.HIDDEN_CHANGE]


def slow_events(episode: Episode) -> list[tuple]:
    """The definition, one row at a time; runs become (kind, leaves, token numbers)."""
    events: list[tuple] = []
    opened: set[int] = set()
    batch: list[tuple[int, int]] = []  # (node, token number) of the current iteration
    token = 0

    def end_batch() -> None:
        if not batch:
            return
        leaves = tuple(node for node, _ in batch)
        numbers = [number for _, number in batch]
        last = events[-1]
        if last[0] == "decode" and last[1] == leaves:
            last[2].extend(numbers)
        else:
            events.append(("decode", leaves, numbers))
        batch.clear()

    before = None
    for row in range(episode.num_rows):
        kind, node = Kind(episode.kind[row]), int(episode.node[row])
        iteration = int(episode.iteration[row])
        if kind != Kind.TOKEN or (before is not None and before != iteration):
            end_batch()
        before = iteration if kind == Kind.TOKEN else None
        if kind == Kind.PREFILL:
            if not events:
                events.append(("prefill", (0,), []))
                opened.add(0)
            events[0][2].append(token)
        elif kind == Kind.TOKEN:
            batch.append((node, token))
        elif kind == Kind.TRANSITION:
            if events[-1][0] != "transition":
                events.append(("transition", [], []))
            events[-1][1].append(node)
            if node not in opened:
                events[-1][2].append((node, int(episode.parent[row])))
                opened.add(node)
        elif kind == Kind.BOUNDARY:
            events.append(("boundary", node, episode.reward[row], episode.entropy[row]))
        elif kind == Kind.PRUNE:
            events.append(("prune", node))
        else:
            verdict = {-1: None, 0: False, 1: True}[int(episode.correct[row])]
            events.append(("answer", verdict))
        token += kind in (Kind.PREFILL, Kind.TOKEN)
    end_batch()
    return events


def check_run(run: TokenRun, numbers: list[int], episode: Episode) -> None:
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    start, stop = numbers[0], numbers[-1] + 1
    assert run.num_tokens == len(numbers) == run.observed.num_tokens
    np.testing.assert_array_equal(run.token, episode.token[start:stop])
    np.testing.assert_array_equal(
        run.observed.per_layer[Signal.HIDDEN_CHANGE],
        episode.per_layer[Signal.HIDDEN_CHANGE][start:stop],
    )
    attention = run.observed.attention
    assert len(attention) == len(numbers)
    for i, number in enumerate(numbers):
        np.testing.assert_array_equal(attention.row(i), episode.attention.row(number))


def check_play(episode: Episode) -> None:
    events = list(play(episode))
    expected = slow_events(episode)
    assert len(events) == len(expected)
    for event, want in zip(events, expected, strict=True):
        match event:
            case Prefill(run) | Decode(run):
                assert want[0] == ("prefill" if isinstance(event, Prefill) else "decode")
                assert run.leaves == want[1]
                check_run(run, want[2], episode)
            case Transition(leaves, opened):
                assert want == ("transition", list(leaves), list(opened))
            case Boundary(node, reward, entropy):
                np.testing.assert_array_equal([node, reward, entropy], want[1:])
            case Prune(node):
                assert want == ("prune", node)
            case Answer(correct):
                assert want == ("answer", correct)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["tree", "linear"]),
    attention=st.sampled_from(["dense", "sparse"]),
    nodes=st.integers(0, 12),
    block=st.sampled_from([(0, 2), (1, 1), (2, 9)]),
    width=st.integers(1, 5),
)
def test_events_equal_those_of_the_definition(seed, kind, attention, nodes, block, width):
    info = make_info(layers=2, attention=attention, attention_top=3)
    with tempfile.TemporaryDirectory() as directory:
        path = make_trace(
            Path(directory) / "t.parquet", seed, 1, kind, prompt=3, nodes=nodes, block=block,
            width=width, info=info,
        )  # fmt: skip
        check_play(next(TraceReader(path).episodes(NEEDS)))


@st.composite
def loose_rows(draw) -> Episode:
    """Rows that no search would make, but in which every rule about runs comes into play."""
    rows = [(int(Kind.PREFILL), 0, 0)] * draw(st.integers(1, 3))
    nodes, iteration = 1, 0
    for kind in draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 2, 3, 4]), max_size=40)):
        iteration += draw(st.integers(0, 1)) if kind == Kind.TOKEN else 0
        node = draw(st.integers(0, min(nodes, 4) if kind == Kind.TRANSITION else nodes - 1))
        nodes = max(nodes, node + 1)
        if kind != Kind.TRANSITION or (kind, node, iteration) not in rows[-5:]:
            rows.append((kind, node, iteration))  # a batch of leaves names each once
    rows += [(int(Kind.ANSWER), 0, iteration)] * draw(st.integers(0, 1))
    kind, node, iterations = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    tokens = np.flatnonzero(kind <= Kind.TOKEN)
    sizes = np.arange(1, len(tokens) + 1)
    count, some = len(rows), np.linspace(0, 1, len(rows), dtype=np.float32)
    return Episode(
        len(tokens),
        index=0, info=make_info(layers=2), kind=kind.astype(np.int8), iteration=iterations,
        node=node, parent=node - 1, depth=node, time_s=np.arange(count) * 0.5, entropy=some,
        reward=some, correct=np.full(count, 1, np.int8), token_rows=tokens, token=tokens % 7,
        position=tokens, per_layer={Signal.HIDDEN_CHANGE: np.outer(tokens, [1, 2])},
        attention=DenseRows(np.arange(sizes.sum()) % 9, np.append(0, np.cumsum(sizes))),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(episode=loose_rows())
def test_runs_follow_their_definition_on_any_rows(episode):
    check_play(episode)


def test_a_tree_built_from_the_events_agrees_with_the_positions(tmp_path):
    path = make_trace(tmp_path / "t.parquet", seed=5, episodes=3, nodes=20)
    for episode in TraceReader(path).episodes(NEEDS):
        tree = ThoughtTree()
        for event in play(episode):
            match event:
                case Prefill(run):
                    tree.open(0, -1)
                    tree.append(run.leaves, run.steps)
                case Transition(_, opened):
                    for node, parent in opened:
                        tree.open(node, parent)
                case Decode(run):
                    tree.append(run.leaves, run.steps)
        assert tree.num_tokens == episode.num_tokens
        rows = episode.token_rows
        np.testing.assert_array_equal(tree.node_of_token.values, episode.node[rows])
        for node in range(len(tree)):
            path_ids = tree.path(node)
            np.testing.assert_array_equal(episode.position[path_ids], np.arange(len(path_ids)))


def test_long_chains_are_one_run_per_block(tmp_path):
    path = make_trace(
        tmp_path / "t.parquet", kind="linear", episodes=1, nodes=3, block=(50, 50), attention="none"
    )
    episode = next(TraceReader(path).episodes())
    runs = [event.run for event in play(episode) if isinstance(event, Decode)]
    assert [run.steps for run in runs] == [50, 50, 50]
    split = [event.run.steps for event in in_steps(play(episode), 20) if isinstance(event, Decode)]
    assert split == [20, 20, 10] * 3
