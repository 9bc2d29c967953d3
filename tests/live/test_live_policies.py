"""Live searches in which tokens really are removed, under every policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.core.errors import BudgetInfeasible, UsageError
from arborsim.core.events import TokenRun
from arborsim.core.tiers import RECALLS, Tier
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import Moves
from arborsim.policies.registry import available, build
from arborsim.searches import make_search
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache import host_pool
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import PendingCopy
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import LiveOutcome, PolicySearch
from arborsim_torch.live.run import tokens_that_fit
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.models import load_model
from arborsim_torch.sources import RandomSource, TaskSource

NAMES = sorted(set(available()) - {"oracle"})
OFFLOAD = str(Path(__file__).parents[2] / "benchmarks" / "gpu" / "offload.toml")
KEPT = ("token", "node", "logprob", "entropy", "reward")


@pytest.fixture(scope="module")
def chain() -> SearchSetup:
    loaded = load_model("chain", task_options={"lines": 12})
    source = TaskSource(loaded.task)
    return SearchSetup(loaded.model, source, lambda: make_search("linear"), 0.0, 0, 130)


@pytest.fixture(scope="module")
def tree() -> SearchSetup:
    loaded = load_model("chain", task_options={"lines": 12, "lines_per_thought": 3})
    source = TaskSource(loaded.task, noise=0.1, floor=0.3)
    make = lambda: make_search("tot-dfs", steps=20)  # noqa: E731
    return SearchSetup(loaded.model, source, make, 0.7, 0, 130)


def search(
    setup: SearchSetup, name: str, budget: int, machine: CacheOptions | None = None, **settings: str
) -> LiveOutcome | BudgetInfeasible:
    (found,) = together(setup, [(name, settings)], budget, machine)
    return found


def together(
    setup: SearchSetup,
    policies: Iterable[tuple[str, dict[str, str]]],
    budget: int,
    machine: CacheOptions | None = None,
) -> list[LiveOutcome | BudgetInfeasible]:
    """Searches of one problem, an iteration of all in one pass: much faster than one by one."""
    problem = setup.source.problem(3)
    ended: dict[PolicySearch, LiveOutcome | BudgetInfeasible] = {}

    def done(one: PolicySearch, found: Ended) -> None:
        ended[one] = found if isinstance(found, BudgetInfeasible) else one.outcome(found)

    searches = [
        PolicySearch(setup, problem, build(name, settings), budget, machine or CacheOptions())
        for name, settings in policies
    ]
    run_batched(searches, len(searches), done)
    return [ended[one] for one in searches]


def short(name: str) -> tuple[str, dict[str, str]]:
    """A policy with a window that leaves it something to do in a short search."""
    return name, {"recent": "8"} if hasattr(build(name), "recent") else {}


def same(one: LiveOutcome, other: LiveOutcome) -> bool:
    """Every token and every bit of its probability."""
    return all(
        np.array_equal(one.episode.columns[name], other.episode.columns[name], equal_nan=True)
        for name in KEPT
    )


@pytest.fixture(scope="module")
def on_a_chain(chain: SearchSetup) -> dict[str, Any]:
    return dict(zip(NAMES, together(chain, map(short, NAMES), 120), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_runs_on_a_chain(on_a_chain: dict[str, Any], name: str) -> None:
    outcome = on_a_chain[name]
    assert isinstance(outcome, LiveOutcome)
    m = outcome.measured
    total = m.prompt_tokens + m.generated_tokens
    assert m.generated_tokens == outcome.episode.tokens > 0
    if build(name).bounded and name not in ("lag-kv-official",):
        assert m.peak_hbm_kv_tokens <= max(120, m.prompt_tokens) + 64 < total + 64
        assert m.evicted_tokens + m.offloaded_tokens + m.quantised_tokens > 0
    assert m.time.decode_s > 0
    assert outcome.allocated_bytes >= m.peak_hbm_kv_bytes > 0


def test_a_rope_that_changes_with_length_is_refused(chain: SearchSetup) -> None:
    rotary = chain.model.model.rotary_emb
    rotary.rope_type = "dynamic"
    try:
        with pytest.raises(UsageError, match="expected-attention needs to know how keys are rota"):
            search(chain, "expected-attention", 120)
    finally:
        rotary.rope_type = "default"


ON_TREES = [
    "arborkv", "h2o", "epikv", "hierarchy", "staircase", "random", "pyramidkv", "adakv",
    "duoattention",
]  # fmt: skip


@pytest.fixture(scope="module")
def on_a_tree(tree: SearchSetup) -> tuple[int, dict[str, Any]]:
    """A budget of 60% of what the tree takes under full retention, and what was done with it."""
    full = search(tree, "full", 10_000)
    assert isinstance(full, LiveOutcome)
    budget = int(0.6 * full.measured.peak_hbm_kv_tokens)
    found = together(tree, map(short, ON_TREES), budget)
    return budget, dict(zip(ON_TREES, found, strict=True))


@pytest.mark.parametrize("name", ON_TREES)
def test_policies_on_a_tree(
    tree: SearchSetup, on_a_tree: tuple[int, dict[str, Any]], name: str
) -> None:
    budget, outcomes = on_a_tree
    outcome = outcomes[name]
    assert isinstance(outcome, LiveOutcome)
    seqs = tree.make_search().slots
    assert outcome.measured.peak_hbm_kv_tokens <= budget + seqs
    if name == "arborkv":
        assert outcome.measured.evicted_tokens > 0


class WithLedger:
    """A live executor next to a ledger that is told the same; both must hold the same bytes."""

    def __init__(self, live: LiveExecutor, mover: Mover) -> None:
        self._live, self._cache = live, mover.cache
        layout = mover.cache.layout
        elements = layout.elements_per_group * layout.groups
        self.ledger = Ledger(layout.groups, elements * layout.dtype.itemsize, (elements, elements))
        self.uneven = 0
        self.allocated: list[float] = []  # for every byte that is used

    def __getattr__(self, name: str) -> Any:
        return getattr(self._live, name)

    def prefill(self, run: TokenRun) -> None:
        self._live.prefill(run)
        self.ledger.append(run.leaves, run.steps)

    def advance(self, run: TokenRun, moves: Moves) -> None:
        self._live.advance(run, moves)
        self.ledger.advance(run.leaves, run.steps, moves)

    def apply(self, moves: Moves, examined_tokens: int, reads: Any = None) -> None:
        self._live.apply(moves, examined_tokens, reads)
        self.ledger.record(self.ledger.resolve(moves))
        used = self._cache.used_bytes(Place.HBM)
        assert used == self.ledger.hbm_bytes
        held = self.ledger.counts[:, Tier.HBM]
        self.uneven += held.max() > 1.5 * held.min()
        self.allocated.append(self._cache.capacity_bytes(Place.HBM) / used)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("chain", "pyramidkv"), ("chain", "adakv"), ("chain", "duoattention"), ("tree", "adakv")],
)
def test_uneven_heads_use_the_bytes_of_the_ledger(
    kind: str, name: str, request: pytest.FixtureRequest
) -> None:
    """Invariant 19: after every decision."""
    setup = request.getfixturevalue(kind)
    small = {"recent": "20", "sinks": "2"} if name == "duoattention" else {"window": "8"}
    beside: list[WithLedger] = []

    def wrap(live: LiveExecutor, mover: Mover) -> Any:
        beside.append(WithLedger(live, mover))
        return beside[0]

    problem, done = setup.source.problem(3), lambda search, ended: None
    policy, machine = build(name, small), CacheOptions(page_tokens=4)
    run_batched([PolicySearch(setup, problem, policy, 100, machine, wrap=wrap)], 1, done)
    assert beside[0].uneven
    assert beside[0].allocated[-1] < 1.35  # pools shrink when 85 % are used, but for a page


def test_a_budget_for_everything_changes_no_bit(chain: SearchSetup) -> None:
    names = ("full", "h2o", "epikv", "arborkv", "rkv")
    full, *others = together(chain, [(name, {}) for name in names], 10_000)
    assert isinstance(full, LiveOutcome)
    expected = full.episode.columns
    for name, roomy in zip(names[1:], others, strict=True):
        assert isinstance(roomy, LiveOutcome)
        columns = roomy.episode.columns
        np.testing.assert_array_equal(expected["token"], columns["token"], name)
        np.testing.assert_allclose(expected["logprob"], columns["logprob"], atol=1e-4, err_msg=name)
        assert roomy.measured.evicted_tokens == 0


@pytest.mark.parametrize(
    ("name", "recall"),
    [*(("hierarchy", recall) for recall in RECALLS), ("freekv", "ondemand"), ("offload", "stage")],
)
def test_the_host_has_its_memory_before_the_search(
    chain: SearchSetup, name: str, recall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is allocated while tokens move, and what is read and carried stays the same."""
    settings = {"sinks": "2", "recent": "8"} | ({"page": "4"} if name == "freekv" else {})
    policy = build(OFFLOAD) if name == "offload" else build(name, settings)
    problem, machine = chain.source.problem(3), CacheOptions(recall=recall)
    real, made = host_pool.host_empty, []

    def counted(*args: Any) -> Any:
        made.append(args)
        return real(*args)

    monkeypatch.setattr(host_pool, "host_empty", counted)
    # Slots are free once copies have landed, and sums over slots round by their order.
    monkeypatch.setattr(PendingCopy, "done", lambda copy: copy.ticket.wait() >= 0)

    def run() -> tuple[LiveOutcome, int, int]:
        found: list[LiveOutcome] = []

        def done(one: PolicySearch, ended: Ended) -> None:
            assert not isinstance(ended, BudgetInfeasible)
            found.append(one.outcome(ended))

        made.clear()
        one = PolicySearch(chain, problem, policy, 100, machine)
        before = len(made)
        run_batched([one], 1, done)
        return found[0], before, len(made) - before

    reserved, before, later = run()
    assert (before > 0, later) == (True, 0)
    monkeypatch.setattr(HostPool, "reserve_up_to", lambda *args: 0)
    grown, before, later = run()
    assert (before, later > 0) == (0, True)
    assert same(reserved, grown)
    for what in ("to_ddr_bytes", "from_ddr_bytes", "peak_hbm_kv_bytes", "peak_ddr_bytes",
                 "peak_staging_bytes"):  # fmt: skip
        assert getattr(reserved.measured, what) == getattr(grown.measured, what), what
    assert reserved.allocated_bytes == grown.allocated_bytes


@pytest.mark.parametrize(("recall", "kind"), [("stage", "chain"), ("stream", "tree")])
def test_hierarchy_is_bitwise_independent_of_the_share_in_hbm(
    chain: SearchSetup, tree: SearchSetup, recall: str, kind: str
) -> None:
    """Proposition 1 of the memory-hierarchy paper, to the last bit, with evictions going on."""
    setup = chain if kind == "chain" else tree
    options = {"recent": "8", "interval": "8", "evict_ratio": "0.05"}
    machine = CacheOptions(recall=recall, ordered=True)
    runs = [
        search(setup, "hierarchy", 10_000, machine, hbm_ratio=beta, **options)
        for beta in ("1", "0.5", "0")
    ]
    first = runs[0]
    assert isinstance(first, LiveOutcome)
    assert first.measured.evicted_tokens > 0
    for run in runs[1:]:
        assert isinstance(run, LiveOutcome)
        assert run.measured.offloaded_tokens > 0
        assert same(first, run)


def test_other_recall_modes_differ_by_rounding_alone(chain: SearchSetup) -> None:
    options = {"recent": "8", "interval": "8", "evict_ratio": "0.02", "quantised_ratio": "0.5"}
    runs = {
        recall: search(chain, "hierarchy", 10_000, CacheOptions(recall=recall), **options)
        for recall in RECALLS
    }
    stage = runs.pop("stage")
    assert isinstance(stage, LiveOutcome)
    assert stage.measured.quantised_tokens > 0
    assert stage.measured.peak_staging_bytes > 0
    for recall, run in runs.items():
        assert isinstance(run, LiveOutcome)
        columns = run.episode.columns
        np.testing.assert_array_equal(columns["token"], stage.episode.columns["token"])
        if recall == "ondemand":  # more pages than it fetches would make it approximate
            assert run.measured.offloaded_tokens < 16 * 16
        np.testing.assert_allclose(
            columns["logprob"], stage.episode.columns["logprob"], atol=2e-4, err_msg=recall
        )


def test_searches_computed_together_are_those_computed_alone(chain: SearchSetup) -> None:
    problems = [chain.source.problem(i) for i in range(2)]
    names = ("h2o", "epikv")
    found: dict[tuple[int, int, str], Any] = {}
    for width in (1, 3):
        searches = {}
        for problem in problems:
            for name in names:
                policy = build(name, {"recent": "8"} if name == "epikv" else {})
                one = PolicySearch(chain, problem, policy, 120, CacheOptions())
                searches[one] = (width, problem.index, name)
        run_batched(searches, width, lambda one, ended: found.update({searches[one]: ended}))  # noqa: B023
    for problem in problems:
        for name in names:
            alone, together = found[1, problem.index, name], found[3, problem.index, name]
            np.testing.assert_array_equal(alone.columns["token"], together.columns["token"])
            np.testing.assert_allclose(
                alone.columns["logprob"], together.columns["logprob"], atol=1e-4
            )


def test_what_cannot_run_is_told(chain: SearchSetup) -> None:
    with pytest.raises(UsageError, match="future"):
        search(chain, "oracle", 100)
    ended = search(chain, "epikv", 20)
    assert isinstance(ended, BudgetInfeasible)
    assert "20" in str(ended)


def test_needed_is_refused_where_no_task_says_what_is_read(chain: SearchSetup) -> None:
    model = chain.model
    source = RandomSource(model.config.vocab_size, 40, 8, 8)
    setup = replace(chain, source=source, max_tokens=8)
    with pytest.raises(UsageError, match="needed keeps what the task will read, which random"):
        search(setup, "needed", 30)


def test_needed_tokens_alone_answer_as_often_as_all(chain: SearchSetup) -> None:
    """Clairvoyance by the task is a bound for answers: half of the tokens are enough."""
    full, alone = (search(chain, name, 10_000, **settings) for name, settings in (
        ("full", {}), ("needed", {"fill": "false"})))  # fmt: skip
    assert isinstance(full, LiveOutcome)
    assert isinstance(alone, LiveOutcome)
    assert full.episode.correct
    assert alone.episode.correct
    assert alone.episode.steps == full.episode.steps
    assert alone.measured.peak_hbm_kv_tokens < 0.6 * full.measured.peak_hbm_kv_tokens


def test_a_budget_that_would_fit_is_named() -> None:
    """With weights of 16 GB on a card of 80 GB, at 131,072 bytes a token."""
    assert tokens_that_fit(80_000_000_000, 16_000_000_000, 131_072) == 162_760
    assert tokens_that_fit(20_000_000_000, 16_000_000_000, 131_072) == 0
