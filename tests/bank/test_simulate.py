"""Simulated searches: a search walked again on its own trace costs what the trace costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from arborsim.core.observations import Signal
from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell
from arborsim.play.meters import Quality
from arborsim.policies.registry import build
from arborsim.products.search.run import simulate
from arborsim.searches import make_search
from arborsim.searches.bank import Bank
from arborsim.searches.visited import visited
from arborsim.searches.walk import walk
from arborsim.trace.schema import Kind
from tests.bank.banks import made_bank, random_bank

MACHINE = Machine(load_profile("h200"), load_geometry("llama-3.1-8b"))
FULL = Cell(build("full"), Budget("any", share=1.0))


@pytest.mark.parametrize("policy", ["full", "arborkv", "epikv", "thinkv"])
def test_a_walk_repeated_on_what_it_visited_measures_the_same(policy: str) -> None:
    bank = random_bank(11, nodes=30, block=(4, 12))
    first = visited(walk(make_search("rebase"), bank), bank.episode)
    again = visited(walk(make_search("rebase"), Bank.of(first)), first)
    for name in ("kind", "iteration", "node", "parent", "depth", "reward", "correct", "token"):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))
    budget = FULL.budget if policy == "full" else Budget("0.75", share=0.75)
    cell = Cell(build(policy), budget)
    quality = Quality(frozenset({Signal.ATTENTION} if policy != "full" else ()))
    assert simulate(again, cell, MACHINE, quality=quality) == simulate(
        first, cell, MACHINE, quality=quality
    )


def test_byte_seconds_against_single_iterations() -> None:
    """The trapezoids of whole runs, against those of every iteration by itself."""
    bank = made_bank(4, width=4, depth=4, block=(5, 20))
    episode = visited(walk(make_search("rebase"), bank), bank.episode)
    whole = simulate(episode, FULL, MACHINE)
    assert whole.measured.generated_tokens == np.count_nonzero(episode.kind == Kind.TOKEN)
    # Full retention: after each iteration's end, everything computed so far is there.
    per_token = load_geometry("llama-3.1-8b").kv_bytes_per_token
    peak = (whole.measured.prompt_tokens + whole.measured.generated_tokens) * per_token
    assert whole.measured.peak_hbm_kv_bytes == peak
    time, total, at, held = 0.0, 0.0, whole.measured.time.prefill_s, 0
    total += at * whole.measured.prompt_tokens * per_token / 2
    widths = np.bincount(episode.iteration[episode.kind == Kind.TOKEN])[1:]
    seconds = (whole.measured.time.total_s - at) / len(widths)  # they differ little
    held = whole.measured.prompt_tokens
    for width in widths.tolist():
        total += seconds * (held + width / 2) * per_token
        held += width
        time += seconds
    assert whole.hbm_kv_byte_s == pytest.approx(total, rel=0.02)
    assert whole.held_kv_byte_s <= whole.hbm_kv_byte_s
    assert whole.peak_held_kv_bytes <= peak


def test_what_is_held_by_hand() -> None:
    """The largest sum of tokens of nodes that were not given up, walking along the rows."""
    bank = made_bank(9, width=4, depth=4)
    episode = visited(walk(make_search("beam-4", width=8), bank), bank.episode)
    own: dict[int, int] = {}
    most = 0
    for kind, node in zip(episode.kind.tolist(), episode.node.tolist(), strict=True):
        if kind in (Kind.PREFILL, Kind.TOKEN):
            own[node] = own.get(node, 0) + 1
        elif kind == Kind.PRUNE:
            own.pop(node, None)
        most = max(most, sum(own.values()))
    per_token = load_geometry("llama-3.1-8b").kv_bytes_per_token
    assert simulate(episode, FULL, MACHINE).peak_held_kv_bytes == most * per_token


def test_a_search_that_keeps_everything_holds_everything() -> None:
    bank = made_bank(2, width=4, depth=4)
    episode = visited(walk(make_search("best-of-n", n=4), bank), bank.episode)
    found = simulate(episode, FULL, MACHINE)
    assert found.hbm_kv_byte_s == pytest.approx(found.held_kv_byte_s)
    slower = replace(MACHINE, profile=load_profile("h100"))
    assert simulate(episode, FULL, slower).held_kv_byte_s > found.held_kv_byte_s
