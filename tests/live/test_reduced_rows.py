"""Rows that are reduced on the device lead to the scores that the rows themselves lead to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.events import TokenRun
from arborsim.core.head_rows import VectorRows
from arborsim.core.observations import Observations, Signal
from arborsim.core.row_uses import ALL_QUERIES, ReducedRows, RowUse
from arborsim.core.tree import ThoughtTree
from arborsim.play.controller import Controller
from arborsim.play.move_log import MoveLog
from arborsim.policies.base import Policy, read_as_norms, row_uses
from arborsim.policies.methods.thinkv_paper import EXECUTION, REASON, TRANSITION, ThinKVPaper
from arborsim.policies.registry import available, build
from arborsim.searches import make_search
from arborsim.signals.last_attended import fresh_pages, median
from arborsim.signals.spread import HeavyHitters, LayerSensitivity
from arborsim.signals.vectors import ValueSize
from arborsim_torch import window_rows
from arborsim_torch.batches import run_batched
from arborsim_torch.cache.forward import LayerView
from arborsim_torch.context import PassContext
from arborsim_torch.live import policy_search
from arborsim_torch.live.feed import LiveHeadRows
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.models import load_model
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.row_reducer import RowReducer
from arborsim_torch.sources import TaskSource
from arborsim_torch.window_rows import WindowRows

POLICIES = {name: build(name) for name in sorted(set(available()) - {"oracle"})}
REDUCED = {
    name: {use.grouping for use in row_uses(policy) if use.reduced}
    for name, policy in POLICIES.items()
}
SUM, NEWEST = RowUse("shared", "sum"), RowUse("shared", "newest", prompt=1)


def a_pass(first: int, rows: np.ndarray) -> PassContext:
    """One layer with one head pays these rows, float32 ``[seqs, queries, positions]``."""
    seqs, queries, positions = rows.shape
    metadata: Any = SimpleNamespace(first=[first] * seqs, queries=queries)
    state = PassContext(metadata, first_row=0)
    view = LayerView(torch.empty(1, positions, 1), torch.empty(1, positions, 1), None, None, 0)
    state.add(0, (view, torch.from_numpy(rows)[None, :, None]))
    return state


@given(st.data())
def test_sums_have_the_bits_of_rows_added_one_by_one(data: st.DataObject) -> None:
    """Float64 adds up multiples of float16's smallest step exactly: in blocks, in any order."""
    seqs = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    reducer, first = RowReducer([SUM, NEWEST]), 0
    wanted = np.zeros((seqs, 0))
    for queries in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6)):
        rows = rng.random((seqs, queries, first + queries), dtype=np.float32)
        rows **= rng.integers(1, 12)  # most weights are tiny, some below the smallest step
        rows *= np.tril(np.ones((queries, first + queries), np.float32), first)
        state = a_pass(first, rows)
        reducer.take(state, state.attention().half(), prompt=first + queries)
        first += queries
        wanted = np.pad(wanted, ((0, 0), (0, queries)))
        for q in range(queries)[::-1]:
            wanted += rows[:, q].astype(np.float16)
    found = reducer.finish()
    np.testing.assert_array_equal(found[SUM][:, 0].double().numpy(), wanted)
    np.testing.assert_array_equal(found[NEWEST][:, 0].numpy(), rows[:, -1].astype(np.float16))
    assert reducer.finish() == {}


@given(st.data())
def test_last_uses_are_those_of_rows_looked_at_one_by_one(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([None, 1, 3]))
    use = RowUse("shared", "last", data.draw(st.sampled_from([0, ALL_QUERIES])), page=page,
                 threshold=float(np.float16(0.1)))  # fmt: skip
    seqs, prompt = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    begin = 0 if use.prompt else prompt
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    reducer = RowReducer([use])
    # The paths of the others are as much longer.
    longer = [*rng.integers(0, 4, seqs - 1).tolist(), 0]
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    first, step, wanted = prompt, 0, np.zeros((seqs, 40), dtype=np.int64)
    if use.prompt:
        first, counts, longer = 0, [prompt, *counts], [0] * seqs
    for queries in counts:
        at = [first + more for more in longer]
        rows = np.zeros((seqs, queries, max(at) + queries), dtype=np.float16)
        readable: list[np.ndarray | None] = [None] * seqs
        for q in range(queries):
            step += 1
            for seq, start in enumerate(at):
                paid = rng.integers(0, 5, start + q + 1) * 0.05  # ties, and the threshold itself
                held = np.ones(len(paid), dtype=bool)
                if queries == 1:  # evicted ones are paid nothing
                    held[:-1] = rng.random(len(paid) - 1) < rng.choice([1.0, 0.5])
                    paid[~held] = 0.0
                    readable[seq] = None if held.all() else np.flatnonzero(held)
                rows[seq, q, : len(paid)] = paid
                own, held = rows[seq, q, begin : len(paid)].astype(np.float64), held[begin:]
                used = held & (own >= median(own[held]))
                if page is not None:
                    used = fresh_pages(own, page, use.threshold)
                wanted[seq, begin : len(paid)][used] = step
        metadata: Any = SimpleNamespace(first=at, queries=queries)
        state = PassContext(metadata, first_row=0)
        reducer.take(state, torch.from_numpy(rows), prompt, readable)
        first += queries
    found = reducer.finish()[use][:, 0]
    np.testing.assert_array_equal(found, wanted[:, : found.shape[1]])
    assert not wanted[:, found.shape[1] :].any()
    assert found.dtype == torch.uint8
    assert reducer.finish() == {}


def test_a_prompt_counts_from_its_last_queries_on() -> None:
    rows = np.eye(6, dtype=np.float32)[None]
    for count in range(8):
        use = RowUse("shared", "sum", prompt=count, generated=False)
        reducer = RowReducer([use])
        for first, stop in ((0, 4), (4, 6), (6, 7)):
            own = rows[:, first:stop, :stop] if stop < 7 else np.ones((1, 1, 7), np.float32)
            state = a_pass(first, own)
            counted = [at for at in range(first, stop) if 6 - count <= at < 6]
            assert reducer.first("rows", state.metadata, 6) == stop - first - len(counted)
            reducer.take(state, state.attention().half(), prompt=6)
        found = reducer.finish()
        assert (use in found) == (count > 0)
        if found:
            received = np.pad(found[use][0, 0].numpy(), (0, 6 - found[use].shape[2]))
            np.testing.assert_array_equal(received, np.arange(6) >= 6 - count)


@pytest.fixture(scope="module")
def chain() -> SearchSetup:
    loaded = load_model("chain", task_options={"lines": 4})
    return SearchSetup(loaded.model, TaskSource(loaded.task), linear, 0.0, 0, 130, prefill_block=16)


@pytest.fixture(scope="module")
def tree() -> SearchSetup:
    loaded = load_model("chain", task_options={"lines": 4, "lines_per_thought": 1})
    source = TaskSource(loaded.task, noise=0.1, floor=0.3)
    wide = lambda: make_search("tot-bfs", keep=2, children=2)  # noqa: E731
    return SearchSetup(loaded.model, source, wide, 0.7, 0, 24, prefill_block=16)


def linear() -> Any:
    return make_search("linear")


def search(
    setup: SearchSetup, policy: Policy, budget: int, controllers: list[Controller]
) -> MoveLog:
    """Run it; the moves, and the controller in `controllers`."""
    log, ended = MoveLog(), []
    one = PolicySearch(
        setup, setup.source.problem(3), policy, budget, CacheOptions(overlap=False), meters=(log,)
    )
    controllers += one._feed._controllers  # type: ignore[arg-type]
    run_batched([one], 1, lambda _, end: ended.append(end))
    assert isinstance(ended[0], EpisodeResult), ended
    return log


def with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand all rows to the host."""
    plain = policy_search.capture_of_signals

    def whole(*args: Any, uses: Any = None, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    monkeypatch.setattr(policy_search, "capture_of_signals", whole)


SMALL: dict[str, dict[str, str]] = {
    "snapkv": {"window": "4"}, "adakv": {"window": "4"}, "pyramidkv": {"window": "4"},
    "arkv": {"window": "8"}, "arkv-quant": {"window": "8"}, "arkv-origin": {"window": "8"},
    "hierarchy": {"recent": "8", "interval": "4"},
    "attn-val-redundancy": {"recent": "8", "interval": "4"},
    "redundancy": {"recent": "8", "interval": "4"},
}  # fmt: skip


def small(name: str) -> Policy:
    default = {"recent": "8"} if hasattr(POLICIES[name], "recent") else {}
    return build(name, SMALL.get(name, default))


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("name", [name for name, of in REDUCED.items() if of == {"shared"}])
def test_sums_decide_as_rows(
    name: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same moves and scores, while tokens leave.

    With the same bits, unless a prompt whose rows do not count is computed by fused attention.
    """
    setup: SearchSetup = request.getfixturevalue(kind)
    runs: list[MoveLog] = []
    controllers: list[Controller] = []
    for prepare in (lambda _: None, with_rows):
        prepare(monkeypatch)
        runs.append(search(setup, small(name), 60, controllers))
    log, expected = runs
    np.testing.assert_array_equal(log.rows, expected.rows)
    assert len(log.rows)
    whole = any(use.prompt == ALL_QUERIES for use in row_uses(small(name)))
    step = 0 if whole else 4e-3 if name == "thinkv-paper" else 1e-4  # it counts entries of a row
    compare(controllers, partial(np.testing.assert_allclose, rtol=0, atol=step))


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("per", ["head", "layer"])
def test_sizes_of_values_are_those_of_whole_vectors(
    per: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with the same moves."""
    setup: SearchSetup = request.getfixturevalue(kind)
    policy, controllers = build("vatp", {"per": per}), list[Controller]()
    assert read_as_norms(policy) == {Signal.VALUES}
    reduced = search(setup, policy, 60, controllers)
    monkeypatch.setattr(ValueSize, "sizes", frozenset())
    assert not read_as_norms(policy)
    expected = search(setup, policy, 60, controllers)
    np.testing.assert_array_equal(reduced.rows, expected.rows)
    assert len(expected.rows)
    compare(controllers, np.testing.assert_array_equal)


@pytest.mark.parametrize("settings", [{"variant": "median", "pin_prompt": "false"}, {"page": "4"}])
def test_last_uses_decide_as_rows(
    settings: dict[str, str], tree: SearchSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all tokens, the prompt's included, and of pages."""
    controllers: list[Controller] = []
    reduced = search(tree, build("raas", settings), 60, controllers)
    with_rows(monkeypatch)
    expected = search(tree, build("raas", settings), 60, controllers)
    np.testing.assert_array_equal(reduced.rows, expected.rows)
    assert len(expected.rows)
    compare(controllers, np.testing.assert_array_equal)


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("name", [name for name, of in REDUCED.items() if of - {"shared"}])
def test_groups_score_as_from_queries_and_keys(
    name: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys that cross are rounded to float16: what attention gives is closer."""
    setup: SearchSetup = request.getfixturevalue(kind)
    controllers: list[Controller] = []
    for prepare in (lambda _: None, with_rows):
        prepare(monkeypatch)
        search(setup, small(name), 10_000, controllers)

    compare(controllers, partial(np.testing.assert_allclose, rtol=1e-2, atol=5e-3))
    assert controllers[0].view().scores["score"].any()


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_sensitivities_are_those_of_queries_and_keys(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same queries and keys in float16, and rows in float32, on either side."""
    setup: SearchSetup = request.getfixturevalue(kind)
    controllers: list[Controller] = []
    for prepare in (lambda _: None, with_rows):
        prepare(monkeypatch)
        search(setup, small("arkv"), 60, controllers)
    one, other = (each.view().scores["sensitivity"][:, 0] for each in controllers)
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert one.all()


@pytest.mark.parametrize("pinned", ["true", "false"])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_sparsity_is_that_of_queries_and_keys(
    kind: str, pinned: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing is rounded or removed: two entries of a row may differ, and no class."""
    setup: SearchSetup = request.getfixturevalue(kind)
    policy = build("thinkv-paper", {"segment": "1000", "pin_prompt": pinned})
    controllers: list[Controller] = []
    for prepare in (lambda _: None, with_rows):
        prepare(monkeypatch)
        search(setup, policy, 10_000, controllers)
    first = len(setup.source.problem(3).prompt) if pinned == "true" else 0
    one, other = (each.view().scores["sparsity"][0] for each in controllers)
    assert not one[:first].any()
    assert other[first + 2 :].all()
    tree, config = controllers[0].tree, setup.model.config
    paths = [tree.path(int(node)) for node in tree.node_of_token.values]
    lengths = [np.searchsorted(path, token) + 1 for token, path in enumerate(paths)]
    entries = config.num_hidden_layers * config.num_attention_heads * np.array(lengths)
    assert (np.abs(one - other) * entries).max() < 2.001
    segments = np.arange(first, len(one) - (len(one) - first) % 8).reshape(-1, 8)
    small = build("thinkv-paper", {"segment": "8", "low": "0.745", "high": "0.758"})
    assert isinstance(small, ThinKVPaper)
    kinds = small.kinds(one[segments])
    assert set(kinds) == {TRANSITION, EXECUTION, REASON}
    np.testing.assert_array_equal(kinds, small.kinds(other[segments]))


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("name", ["arkv", "arkv-origin", "arkv-quant"])
def test_prompts_are_cut_as_from_queries_and_keys(
    name: str, per: str, chain: SearchSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision after a prompt larger than the budget rests on its window alone."""
    policy = build(name, {"window": "4", "pin_prompt": "false", "per": per})
    runs: list[np.ndarray] = []
    for prepare in (lambda _: None, with_rows):
        prepare(monkeypatch)
        rows = search(chain, policy, 16, []).rows
        runs.append(rows[rows[:, 0] == rows[0, 0]])
    np.testing.assert_array_equal(*runs)
    assert (runs[0][:, 2] < len(chain.source.problem(3).prompt)).all()


@given(st.data())
def test_windows_spread_as_rows_of_single_heads(data: st.DataObject) -> None:
    """Block by block of a prompt, with rows that are no numbers, against the host's rows."""
    kv_heads, members, layers = (data.draw(st.integers(1, 3)) for _ in range(3))
    window, prompt = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 20))
    grouping, dim = data.draw(st.sampled_from(["layer", "head"])), 8
    heavy, sensitive = HeavyHitters(grouping, window, 2.0), LayerSensitivity(grouping, window)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    queries, keys = (
        rng.normal(size=(prompt, layers, heads, dim)).astype(np.float16) * np.float16(2)
        for heads in (kv_heads * members, kv_heads)
    )
    if data.draw(st.booleans()):  # of one head
        queries[rng.integers(prompt), 0, 0] = np.nan
    found = WindowRows([heavy.use_of_prompt, sensitive.use])
    at = 0
    while at < prompt:
        stop = min(prompt, at + data.draw(st.integers(1, prompt)))
        metadata: Any = SimpleNamespace(first=[at], queries=stop - at)
        if (first := found.first(metadata, prompt)) < stop - at:
            block = torch.from_numpy(queries[at:stop]).permute(1, 2, 0, 3)[:, None].float()
            found.add(list(block), first)
        at = stop
    decoding: Any = SimpleNamespace(first=[prompt], queries=1)
    assert found.first(decoding, prompt) == 1
    by_layer = torch.from_numpy(keys).permute(1, 2, 0, 3).float()
    with mock.patch.object(
        window_rows, "TILE_BYTES", data.draw(st.sampled_from([1, 512, 1 << 23]))
    ):
        reduced = found.finish(kv_heads, lambda layer, head: by_layer[layer][head])
    assert not found.waits
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append([0], prompt)
    node = np.zeros(prompt, dtype=np.int32)
    rows = VectorRows(queries, keys, np.arange(prompt), np.arange(prompt), node, node[:1] - 1)
    leaves = {use: ReducedRows((each[0].numpy(),)) for use, each in reduced.items()}
    leaves[heavy.use] = ReducedRows((np.empty((len(reduced[sensitive.use][0]), 0)),))
    values = []
    for observed in (
        Observations(prompt, reduced=leaves), Observations(prompt, head_attention=rows)
    ):  # fmt: skip
        run = TokenRun((0,), prompt, np.zeros(prompt, np.int32), observed)
        for score in (heavy, sensitive):
            state = score.start(layers)
            state.begin(run, tree, generated=False)
            state.observe_all(0, prompt)
            values.append(state.values)
    np.testing.assert_allclose(values[0], values[2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values[1], values[3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "crossed"),
    [
        ("arkv", {}, 0),
        ("arkv", {"cumulative": "true"}, 8),
        ("duoattention", {}, 0),
        ("thinkv-paper", {}, 0),
    ],
)
def test_of_a_prompt_the_queries_that_count_cross(
    name: str, settings: dict[str, str], crossed: int, chain: SearchSetup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    append, seen = LiveHeadRows.append, list[tuple[int, int]]()

    def watched(self: LiveHeadRows, queries: Any, keys: Any, count: int) -> Any:
        seen.append((len(queries), count))
        return append(self, queries, keys, count)

    monkeypatch.setattr(LiveHeadRows, "append", watched)
    search(chain, build(name, {**SMALL.get(name, {}), **settings}), 60, [])
    assert seen[:1] == [(crossed, len(chain.source.problem(3).prompt))][: len(seen)]
    assert bool(seen) == bool(crossed)
    assert all(queries == count for queries, count in seen[1:])


@pytest.mark.parametrize(
    ("name", "window", "settings"),
    [
        ("rkv", 3, {"interval": "8", "window": "3"}),
        ("rkv", 3, {"interval": "8", "window": "3", "pin_prompt": "false"}),
        ("rkv", 3, {"interval": "8", "window": "3", "adaptation": "flat"}),
        ("quest", 1, {"page": "4"}),
        ("freekv", 1, {"page": "4", "sinks": "4", "recent": "8"}),
    ],
)
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_of_a_run_the_queries_of_the_window_cross(
    name: str, window: int, settings: dict[str, str], kind: str, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """R-KV rates keys by its window alone, and pages are chosen by the newest query of each path.

    The same moves as with the queries of all tokens.
    """
    setup: SearchSetup = request.getfixturevalue(kind)
    append, seen = LiveHeadRows.append, list[tuple[int, int]]()

    def watched(self: LiveHeadRows, queries: Any, keys: Any, count: int) -> Any:
        seen.append((len(queries), count))
        return append(self, queries, keys, count)

    monkeypatch.setattr(LiveHeadRows, "append", watched)
    policy = build(name, settings)
    reduced = search(setup, policy, 50, [])
    taken, seen[:] = list(seen), []
    with_rows(monkeypatch)
    expected = search(setup, policy, 50, [])
    np.testing.assert_array_equal(reduced.rows, expected.rows)
    assert len(expected.rows)
    assert taken[0] == (window, len(setup.source.problem(3).prompt))
    widths = 1 if kind == "chain" else setup.make_search().slots
    assert all(queries <= window * widths for queries, _ in taken)
    assert sum(queries for queries, _ in taken) < sum(queries for queries, _ in seen)
    assert all(queries == count for queries, count in seen)


def test_heads_that_are_not_numbers_are_left_out_of_the_sparsity() -> None:
    """Of rows in two parts, as of tokens in two places, and of positions that are held nowhere."""
    nan = np.nan
    rows = [  # two sequences, two heads; a query's weights
        [[0.5, 0.005, 0.495, 0.0], [nan, nan, nan, nan]],
        [[0.9, 0.0085, 0.009, 0.0825], [0.25, 0.25, 0.25, 0.25]],
    ]
    by_head = torch.tensor(rows, dtype=torch.float32)[None, :, :, None]
    metadata: Any = SimpleNamespace(at=torch.tensor([[5], [3]]), queries=1)
    state = PassContext(metadata, part=0.01)
    for layer, parts in enumerate(((by_head,), (by_head[..., :3], by_head[..., 3:]))):
        views = [LayerView(torch.empty(0), torch.empty(0), None, None, 0)] * len(parts)
        state.add(layer, *zip(views, parts, strict=True))
    assert state.collect
    assert not state.wants_rows
    found = state.sparsity()
    # By layer: of the first, three large entries of one row; of the second, three and four.
    assert found.tolist() == [[[2, 6]], [[4, 14]]]
    assert found.dtype == torch.float64
    state.settle()
    assert state.within(SimpleNamespace(num_seqs=1, positions=4)).sparsity().tolist() == [[[2, 6]]]  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt_counts", [0, ALL_QUERIES])
def test_sparsity_of_a_run_is_that_of_its_passes(prompt_counts: int) -> None:
    """A block of the prompt and two steps, whose numbers the next pass overwrites."""
    reducer = RowReducer([RowUse("shared", "sparsity", prompt_counts, part=0.5)])
    memory = torch.zeros((2, 1, 1), dtype=torch.float64)
    for first, queries, numbers in ((0, 3, None), (3, 1, [1.0, 2.0]), (4, 1, [3.0, 4.0])):
        metadata: Any = SimpleNamespace(first=[first] * 2, queries=queries)
        wanted = 0 if prompt_counts or first else queries
        assert reducer.first("counts", metadata, prompt=3) == wanted
        assert reducer.first("rows", metadata, prompt=3) == queries  # nothing but counts
        fresh = torch.full((2, queries, 1), 9.0, dtype=torch.float64)
        if numbers is not None:
            fresh = memory.copy_(torch.tensor(numbers)[:, None, None])
        reducer.take(PassContext(metadata, part=0.5, _sparsity=fresh), None, prompt=3)
    (found,) = reducer.finish().values()
    before = [9.0] * 3 if prompt_counts else []
    assert found.tolist() == [[[*before, 1.0, 3.0]], [[*before, 2.0, 4.0]]]
    assert reducer.finish() == {}


def test_sparsity_has_one_meaning_in_a_search() -> None:
    with pytest.raises(ValueError, match="different parts"):
        RowReducer(RowUse("shared", "sparsity", part=part) for part in (0.01, 0.02))


@given(st.data())
def test_the_reach_of_groups_is_that_of_their_rows(data: st.DataObject) -> None:
    """What queries pay between sinks and newest positions, block by block of a prompt."""
    heads, members, prompt = (data.draw(st.integers(1, most)) for most in (2, 2, 40))
    use = RowUse("head", "reach", generated=False, sinks=data.draw(st.integers(0, 6)),
                 recent=data.draw(st.integers(0, 12)))  # fmt: skip
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows = np.tril(rng.random((heads, members, prompt, prompt), dtype=np.float32))
    sinks, recent = use.excluded(prompt)
    wanted = sum(
        rows[:, :, q, sinks : q + 1 - recent].mean(1, dtype=np.float64).sum(-1)
        for q in range(sinks + recent, prompt)
    )
    reducer, at = RowReducer([use]), 0
    while at < prompt:
        stop = min(prompt, at + data.draw(st.integers(1, prompt)))
        metadata: Any = SimpleNamespace(first=[at], queries=stop - at)
        assert reducer.first("groups", metadata, prompt) == 0
        state = PassContext(metadata, groups="head", recent=reducer.recent(prompt))
        view = LayerView(torch.empty(heads, stop, 1), torch.empty(heads, stop, 1), None, None, 0)
        state.add(0, (view, torch.from_numpy(rows[:, None, :, at:stop, :stop])))
        reducer.take(state, None, prompt)
        at = stop
    found = reducer.finish()[use]
    assert found.shape == (1, heads, 1)
    np.testing.assert_allclose(found[0, :, 0], np.broadcast_to(wanted, heads), rtol=1e-6)
    decoding: Any = SimpleNamespace(first=[prompt], queries=1)
    assert reducer.first("groups", decoding, prompt) == 1  # no row of generated tokens counts


def compare(controllers: list[Controller], check: Callable[..., None]) -> None:
    one, other = (controller.view().scores for controller in controllers)
    assert one.keys() == other.keys()
    for name, values in one.items():
        check(values, other[name], err_msg=name)
