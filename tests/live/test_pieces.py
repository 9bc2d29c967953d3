"""What decode steps read in place: as the tokens gathered in order, and as looked up anew."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import BudgetInfeasible
from arborsim.core.tiers import Tier
from arborsim.policies.base import CacheView
from arborsim.policies.registry import available, build
from arborsim.searches import make_search
from arborsim_torch.batches import Ended, run_batched
from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.models import load_model
from arborsim_torch.sources import TaskSource
from arborsim_torch.tiers.codec import Fp8
from arborsim_torch.tiers.link import HostLink
from tests.live.tiny import VOCAB, tiny_model, torch

NAMES = sorted(set(available()) - {"oracle"})
#: Settings for short searches, by policy.
SMALL = {"rkv": {"interval": "8", "window": "4"}, "snapkv": {"window": "4"},
         "random-attention": {"interval": "8", "window": "4"},
         "lag-kv-official": {"lag": "8", "sinks": "4"},
         "freekv": {"page": "4", "sinks": "4", "recent": "8"}, "quest": {"page": "4"}}  # fmt: skip


class Twins:
    """Two searches under a policy, and their decisions, compared as they are taken.

    Decisions are the same; one may turn only where what it saw differs by rounding: from there on
    the caches hold other tokens, and nothing is compared.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._ahead: tuple[deque[Any], deque[Any]] = (deque(), deque())  # decisions of one alone
        self.same, self.compared = True, 0
        self.columns: dict[int, Any] = {}

    def watch(self, policy: Any, own: int) -> Any:
        """A policy whose decisions are those of the search `own`."""
        for name in ("decide", "decide_run"):
            decide = getattr(policy, name)
            object.__setattr__(policy, name, partial(self._decide, own, decide))
        return policy

    def _decide(
        self, own: int, decide: Callable[..., Any], view: CacheView, *event: Any
    ) -> Any:  # scores are known before a decision, not before a run of them
        if len(event) != 1 or not self.same:
            return decide(view, *event)
        saw = [np.array(values, copy=True) for values in view.scores.values()]
        made = decide(view, *event)
        plans = () if made is None else (made.tiers, made.reads)
        said = [np.array(each) for each in plans if each is not None]
        self._ahead[own].append((saw, said))
        if all(self._ahead):
            self._compare(*(ahead.popleft() for ahead in self._ahead))
        return made

    def _compare(self, one: Any, other: Any) -> None:
        (saw, said), (know, say) = one, other
        for seen, known in zip(saw, know, strict=True):
            if np.array_equal(seen, known):
                continue
            largest = np.abs(known[np.isfinite(known)]).max(initial=0.0)
            np.testing.assert_allclose(seen, known, 1e-3, 1e-4 * largest, err_msg=self._name)
        self.same = len(said) == len(say) and all(map(np.array_equal, said, say))
        self.compared += 1
        if not self.same:
            for ahead in self._ahead:
                ahead.clear()

    def end(self) -> None:
        """Both are over."""
        if not self.same:
            return
        assert not any(self._ahead), self._name
        own, expected = self.columns[False], self.columns[True]
        for column in ("token", "node"):
            np.testing.assert_array_equal(own[column], expected[column], self._name)
        np.testing.assert_allclose(
            own["logprob"], expected["logprob"], 1e-4, 1e-4, err_msg=self._name
        )


#: Policies for trees: of every grouping, place and way of reading, alone and together.
ON_TREES = ["adakv", "arborkv", "duoattention", "freekv", "h2o", "hierarchy", "kivi", "pyramidkv",
            "quest", "rkv", "staircase", "thinkv-paper"]  # fmt: skip
#: Thoughts of a search that goes back: enough to do so a few times.
STEPS = {"tot-dfs": {"steps": 12}}


@pytest.mark.parametrize(
    ("kind", "budget", "most"), [("linear", 48, 40), ("tot-dfs", 130, 30), ("beam-4", 110, 16)]
)
def test_policies_read_in_place_what_they_would_read_in_order(
    kind: str, budget: int, most: int
) -> None:
    """All searches that the budget holds are computed together, so that twins go side by side."""
    trees = kind != "linear"
    names = ON_TREES if trees else NAMES
    options = {"lines": 4} | ({"lines_per_thought": 1} if trees else {})
    loaded = load_model("chain", task_options=options)
    source = TaskSource(loaded.task)
    make = partial(make_search, kind, **STEPS.get(kind, {}))
    setup = SearchSetup(loaded.model, source, make, 0.0, 0, most)
    twins, searches = {name: Twins(name) for name in names}, {}
    for name, ordered in product(names, (False, True)):
        recent = {"recent": "8"} if hasattr(build(name), "recent") else {}
        policy = twins[name].watch(build(name, SMALL.get(name, recent)), ordered)
        machine = CacheOptions(overlap=False, ordered=ordered)
        one = PolicySearch(setup, source.problem(3), policy, budget, machine)
        searches[one] = name, ordered

    def done(search: PolicySearch, ended: Ended) -> None:
        name, ordered = searches.pop(search)
        if not isinstance(ended, BudgetInfeasible):
            twins[name].columns[ordered] = ended.columns

    run_batched(list(searches), len(searches), done)
    both = [pair for pair in twins.values() if len(pair.columns) == 2]
    assert sum(len(pair.columns) for pair in twins.values()) == 2 * len(both) > 1.6 * len(names)
    for pair in both:
        pair.end()


class Wanderer:
    """A tree whose tokens are moved, lost and selected at random."""

    def __init__(self, grouping: str, seed: int, link: HostLink) -> None:
        self.rng = np.random.default_rng(seed)
        model = tiny_model("qwen2-window" if seed % 2 else "llama")
        self.cache = TieredCache(
            Layout.of(model, grouping), quantised=(Fp8(),), page_tokens=4, link=link
        )
        self.mover = Mover(self.cache, link)
        self.decoder = TreeDecoder(model, prefill_block=16, cache=self.cache)
        self.decoder.prefill(self._ids(24))
        self._nodes = 1
        self.turn()

    def _ids(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, VOCAB, count)]

    def turn(self) -> None:
        parent, leaves = int(self.rng.integers(self._nodes)), int(self.rng.integers(1, 4))
        for _ in range(leaves):
            self.decoder.open(self._nodes, parent)
            self._nodes += 1
        self.decoder.activate(range(self._nodes - leaves, self._nodes))
        self.mover.activate()

    def move(self) -> None:
        held = np.argwhere(self.cache.place.values[:, :-4] != Place.LOST)
        count = int(self.rng.choice([1, 4, len(held) // 2]))
        chosen = held[self.rng.choice(len(held), min(count, len(held)), replace=False)]
        tiers = self.rng.choice(
            [Tier.EVICTED, Tier.HBM, Tier.HBM_QUANTISED, Tier.DDR, Tier.DDR_QUANTISED], len(chosen)
        )
        self.mover.move(GroupTokenPairs(*chosen.T), tiers.astype(np.int8))
        self.mover.settle(wait=True)

    def select(self) -> None:
        shape = (self.cache.layout.groups, self.cache.num_tokens)
        share = self.rng.choice([0.1, 0.9, 1.0])
        self.cache.select(self.rng.random(shape) < share)
        self.mover.activate()

    def step(self) -> None:
        self.decoder.step(self._ids(len(self.cache.leaves)))

    def drop(self) -> None:
        """A node that is on no active path."""
        unused = np.flatnonzero(~self.cache.tree.on_path(self.cache.leaves))
        if len(unused):
            self.decoder.drop(int(unused[-1]))


@torch.inference_mode()
def read(cache: TieredCache, layer: int, rounded: Any = None) -> list[set[tuple[int, ...]]]:
    """Of each sequence: place, slot and position of what each KV head reads."""
    heads, seqs = cache.layout.kv_heads, len(cache.leaves)
    found: list[set[tuple[int, ...]]] = [set() for _ in range(seqs)]
    reader = cache._pieces
    for place, table in reader._tables.items():
        if not table.reads(layer):
            continue
        placed = table.piece(layer, None if rounded is None else table.room(rounded))
        piece, room = placed.piece, placed.piece.room
        index = torch.arange(room) if piece.index is None else piece.index
        index = index.expand(heads, room)
        mask = torch.ones(1, 1, 1, dtype=torch.bool) if piece.mask is None else piece.mask
        mask = mask.expand(seqs, heads, room) & (index >= 0)
        position = placed.position().expand(heads, room)
        groups = cache.layout.groups_of_layer(layer)
        ragged = table.pool.ragged(cache.layout.slab_of_layer(layer)[0])
        first = table.pool.first_row[groups] * ragged
        for seq, head, entry in mask.nonzero().tolist():
            slot = int(index[head, entry]) - int(first[head if len(first) > 1 else 0])
            spot = (int(place), head, slot, int(position[head, entry]))
            assert spot not in found[seq], "read twice"
            found[seq].add(spot)
    return found


def expected(cache: TieredCache, layer: int) -> list[set[tuple[int, ...]]]:
    """The same, from what is known of each token."""
    groups = cache.layout.groups_of_layer(layer)
    found = []
    for leaf in cache.leaves:
        own = set()
        path = cache.tree.path(leaf)
        wanted = cache.selected(path)
        for head in range(cache.layout.kv_heads):
            group = groups.start + (head if groups.stop - groups.start > 1 else 0)
            for position, token in enumerate(path.tolist()):
                place = Place(int(cache.place.values[group, token]))
                if place is not Place.LOST and wanted[group, position]:
                    slot = int(cache.pools[place].slots.of[group, token])
                    own.add((int(place), head, slot, position))
        found.append(own)
    return found


OPERATIONS = ("step", "step", "move", "move", "select", "turn", "drop")


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(GROUPINGS), st.integers(0, 10_000),
    st.lists(st.sampled_from(OPERATIONS), max_size=14),
)  # fmt: skip
def test_tables_say_what_looking_up_would(grouping: str, seed: int, operations: list[str]) -> None:
    """Whatever moves, and in memory that stays where it is while the pool does."""
    with HostLink("cpu") as link:
        wanderer = Wanderer(grouping, seed, link)
        cache, known = wanderer.cache, {}
        for name in ("step", *operations, "step"):
            getattr(wanderer, name)()
            cache._pieces.plan()
            for layer in range(cache.layout.layers):
                wanted = expected(cache, layer)
                assert read(cache, layer) == wanted
                assert read(cache, layer, lambda n: -(-n // 16) * 16) == wanted
            for place, table in cache._pieces._tables.items():
                for kind in table._current:
                    tensor, _ = table._tensors[table._bucket(kind)]
                    seqs = tensor.shape[0] if kind == "mask" else 0
                    key = (place, kind, table.pool.allocations, seqs)
                    assert known.setdefault(key, tensor.data_ptr()) == tensor.data_ptr()
