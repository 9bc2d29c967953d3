"""Relations between runs: what a change of the input may change in the result, and what not.

Each relation draws its case from a seed, runs the product twice, and asserts.  They need no right
answer, so they hold on inputs for which nobody knows one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import arborsim
from arborsim.core.shape import Rope
from arborsim.play.results import EpisodeResult, ReplayResult
from arborsim.policies.registry import names
from arborsim.searches import ROOT, SHIPPED, Expansion, Leaf, Search, make_search, search_options
from arborsim.trace.schema import TraceInfo
from arborsim.trace.writer import TraceWriter
from tests.helpers.traces import make_info, random_trace_columns
from tests.search.bank import Bank, Run, drive

Relation = Callable[[np.random.Generator, Path], None]
RELATIONS: dict[str, Relation] = {}

#: Searches that rank thoughts by their rewards and use nothing else of them.
RANKING = ("beam-4", "beam-sqrt", "best-of-n", "dvts-4", "dvts-sqrt", "tot-bfs")
#: They know the future of their own trace, or need what random traces do not hold.
_NEED_MORE = ("full", "needed", "oracle")


def relation(function: Relation) -> Relation:
    RELATIONS[function.__name__] = function
    return function


def info() -> TraceInfo:
    """A model whose traces nearly every policy can be replayed on."""
    return make_info(
        3,
        "qkv",
        qkv_layers=(0, 1, 2),
        hidden_layers=(0, 1, 2),
        attention_layer_ids=(0, 1, 2),
        rope=Rope((1.0, 0.3, 0.1, 0.03), 1.1),
    )


_LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000,
    "num_attention_heads": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 4096,
}  # fmt: skip


def write(path: Path, seeds: Sequence[int]) -> Path:
    """A trace with one episode for each of `seeds`, which alone decides what it holds."""
    about = info()
    with TraceWriter(path, about) as writer:
        for seed in seeds:
            rng = np.random.default_rng(seed)
            kind, nodes = ("tree", 8) if seed % 2 else ("linear", 5)
            writer.write_episode(
                random_trace_columns(rng, about, kind, prompt=16, nodes=nodes, block=(3, 9))
            )
    return path


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """Policies, budgets and a mode of the machine, as `arborsim.replay` takes them."""
    known = [name for name in names() if name not in _NEED_MORE]
    budgets = rng.choice([0.3, 0.5, 0.62, 0.8, 0.95], size=2, replace=False)
    return {
        "policies": rng.choice(known, size=4, replace=False).tolist(),
        "budgets": [float(each) for each in budgets],
        "recall": str(rng.choice(["stage", "near", "ondemand"])),
        "page_size": int(rng.choice([1, 4, 16])),
    }


def replay(trace: Path | list[Path], options: Mapping[str, Any]) -> ReplayResult:
    return arborsim.replay(trace, oracle=False, **options).raw


def found(result: ReplayResult) -> dict[tuple[str, str, int], EpisodeResult]:
    """Results by policy, budget and episode, without the name of their file."""
    return {
        (each.policy, each.budget, each.episode): replace(each, trace="", episode=0)
        for each in result.episodes
    }


def same(first: ReplayResult, second: ReplayResult, twin: Mapping[int, int]) -> None:
    """Episode ``twin[i]`` of the second is episode `i` of the first."""
    ours, theirs = found(first), found(second)
    assert ours
    for (policy, budget, episode), result in ours.items():
        if episode in twin:
            other = theirs[policy, budget, twin[episode]]
            assert repr(other) == repr(result), (policy, budget, episode)


@relation
def episodes_in_another_order(rng: np.random.Generator, folder: Path) -> None:
    seeds, options = rng.integers(2**31, size=3).tolist(), draw(rng)
    order = rng.permutation(3).tolist()
    first = replay(write(folder / "a.parquet", seeds), options)
    second = replay(write(folder / "b.parquet", [seeds[i] for i in order]), options)
    same(first, second, {i: order.index(i) for i in range(3)})


@relation
def an_episode_twice(rng: np.random.Generator, folder: Path) -> None:
    seeds, options = rng.integers(2**31, size=2).tolist(), draw(rng)
    first = replay(write(folder / "a.parquet", seeds), options)
    second = replay(write(folder / "b.parquet", [*seeds, *seeds]), options)
    same(first, second, {0: 0, 1: 1})
    same(first, second, {0: 2, 1: 3})
    rows = {(row.policy, row.budget): row for row in second.rows()}
    for row in first.rows():
        twice = rows[row.policy, row.budget]
        assert twice.generated_tokens == 2 * row.generated_tokens
        assert twice.to_ddr_bytes == 2 * row.to_ddr_bytes
        assert np.isclose(twice.total_s, 2 * row.total_s, rtol=1e-12)
        assert np.isclose(twice.attention_kept, row.attention_kept, rtol=1e-12, equal_nan=True)


@relation
def a_file_split_in_two(rng: np.random.Generator, folder: Path) -> None:
    seeds, options = rng.integers(2**31, size=3).tolist(), draw(rng)
    whole = replay(write(folder / "a.parquet", seeds), options)
    same(whole, replay(write(folder / "b.parquet", seeds[:1]), options), {0: 0})
    same(whole, replay(write(folder / "c.parquet", seeds[1:]), options), {1: 0, 2: 1})


@relation
def policies_and_budgets_in_another_order(rng: np.random.Generator, folder: Path) -> None:
    trace, options = write(folder / "a.parquet", rng.integers(2**31, size=2).tolist()), draw(rng)
    turned = {name: options[name][::-1] for name in ("policies", "budgets")}
    first, second = replay(trace, options), replay(trace, options | turned)
    same(first, second, {0: 0, 1: 1})
    assert len(first.episodes) == len(second.episodes)


@relation
def a_budget_of_everything_is_full_retention(rng: np.random.Generator, folder: Path) -> None:
    """Of policies that only evict, and by the budget alone."""
    trace = write(folder / "a.parquet", rng.integers(2**31, size=2).tolist())
    chosen = ("streaming-llm", "h2o", "tova", "epikv", "keydiff", "rkv", "random", "adakv")
    options = draw(rng) | {"budgets": [1.0], "policies": rng.choice(chosen, 3).tolist()}
    by_cell = found(replay(trace, options))
    for (policy, _, episode), result in by_cell.items():
        full = next(r for (p, _, e), r in by_cell.items() if p == "full" and e == episode)
        ours, theirs = result.measured, full.measured
        assert ours.evicted_tokens == 0, policy
        assert result.attention_kept == 1, policy
        for name in ("peak_hbm_kv_bytes", "peak_hbm_kv_tokens", "kv_read_bytes"):
            assert getattr(ours, name) == getattr(theirs, name), (policy, name)


@relation
def a_model_of_twice_the_layers(rng: np.random.Generator, folder: Path) -> None:
    """Bytes double and decisions stay: a policy never sees the geometry that is charged."""
    trace, options = write(folder / "a.parquet", rng.integers(2**31, size=2).tolist()), draw(rng)
    layers, heads = (int(rng.choice(each)) for each in ((8, 12, 32), (2, 4, 8)))
    for name, count in (("one", layers), ("two", 2 * layers)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(_LLAMA | {
            "num_hidden_layers": count, "num_key_value_heads": heads,
        }))  # fmt: skip
    one, two = (
        found(replay(trace, options | {"model": str(folder / each)})) for each in ("one", "two")
    )
    for key, result in one.items():
        ours, theirs = result.measured, two[key].measured
        for name in ("peak_hbm_kv_bytes", "peak_ddr_bytes", "to_ddr_bytes", "from_ddr_bytes"):
            pair = getattr(theirs, name), getattr(ours, name)
            # A group's bytes per token are whole: six groups do not divide every model's.
            within = 0 if result.per == "shared" else 1e-3 * pair[0]
            assert abs(pair[0] - 2 * pair[1]) <= within, (key, name, pair)
        for name in ("decisions", "evicted_tokens", "offloaded_tokens", "peak_hbm_kv_tokens"):
            assert getattr(theirs, name) == getattr(ours, name), (key, name)
        kept = two[key].attention_kept, result.attention_kept
        assert np.isclose(*kept, rtol=0, equal_nan=True), key
        assert theirs.time.total_s > ours.time.total_s, key


def same_search(first: Run, second: Run, name: str) -> None:
    assert second.path == first.path, name
    assert second.order == first.order, name
    assert second.dropped == first.dropped, name
    assert second.answer == first.answer, name


@dataclass
class Renumbered(Search):
    """A search that is shown other numbers of nodes, in the same order."""

    inner: Search
    add: int
    name = "renumbered"

    @property
    def synchronous(self) -> bool:  # type: ignore[override]
        return self.inner.synchronous

    @property
    def slots(self) -> int:
        return self.inner.slots

    def expand(self, frontier: Sequence[Leaf], width: int) -> Expansion:
        wish = self.inner.expand([self._shown(leaf) for leaf in frontier], width)
        children = {self._own(node): count for node, count in wish.children.items()}
        return replace(wish, children=children, dropped=tuple(map(self._own, wish.dropped)))

    def answers(self, frontier: Sequence[Leaf]) -> tuple[int, ...]:
        return tuple(map(self._own, self.inner.answers([self._shown(leaf) for leaf in frontier])))

    def _shown(self, leaf: Leaf) -> Leaf:
        twin = None if leaf.twin is None else self._number(leaf.twin)
        node, parent = self._number(leaf.node), self._number(leaf.parent)
        return replace(leaf, node=node, parent=parent, twin=twin)

    def _number(self, node: int) -> int:
        return node if node <= ROOT else node * 3 + self.add

    def _own(self, shown: int) -> int:
        return shown if shown <= ROOT else (shown - self.add) // 3


@relation
def nodes_with_other_numbers(rng: np.random.Generator, folder: Path) -> None:
    name, bank = str(rng.choice(SHIPPED)), Bank(int(rng.integers(2**31)), missing=0.1)
    first = drive(make_search(name), bank)
    second = drive(Renumbered(make_search(name), int(rng.integers(1, 1000))), bank)
    same_search(first, second, name)


@dataclass
class Curved(Bank):
    """Rewards through a function that only rises."""

    def _draw(self, path: tuple[int, ...]) -> tuple[float, bool, bool]:
        reward, finished, dead = super()._draw(path)
        return float(np.tanh(2 * reward)) - 0.3, finished, dead


@relation
def rewards_on_another_scale(rng: np.random.Generator, folder: Path) -> None:
    """A search that ranks decides the same; those that weigh (rebase, ets, mcts) do not.

    Nor do elections in which chains weigh as much as they score, hence ``answer=best``.
    """
    name, seed = str(rng.choice(RANKING)), int(rng.integers(2**31))
    digits = int(rng.choice([1, 2, 9]))  # few digits: many are equal
    best = {"answer": "best"} if "answer" in search_options(name) else {}
    first, second = (
        drive(make_search(name, **best), kind(seed, digits=digits)) for kind in (Bank, Curved)
    )
    same_search(first, second, name)
