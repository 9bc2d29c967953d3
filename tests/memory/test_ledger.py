"""The ledger against a literal, slow re-implementation, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import PlanError, UsageError
from arborsim.core.tiers import DDR, MOST_TIERS, Tier
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import ALL_GROUPS, Moves

FULL, SMALL, COARSE = 128, 80, 24


class SlowLedger:
    """Dictionaries and loops only."""

    def __init__(self, groups: int, page_tokens: int) -> None:
        self.groups, self.page_tokens = groups, page_tokens
        self.tier: list[list[Tier]] = [[] for _ in range(groups)]
        self.slot: list[tuple[int, int]] = []  # (node, number of the page within the node)
        self.used: dict[int, int] = {}
        self.appended = self.destroyed = self.restored = 0

    def size(self, tier: Tier) -> int:
        if tier == Tier.EVICTED:
            return 0
        return (FULL, SMALL, COARSE)[tier.rung] // self.groups

    def append(self, node: int) -> None:
        index = self.used.get(node, 0)
        self.used[node] = index + 1
        self.slot.append((node, index // self.page_tokens))
        for row in self.tier:
            row.append(Tier.HBM)
            self.appended += self.size(Tier.HBM)

    def move(self, group: int, token: int, target: Tier) -> None:
        for g in range(self.groups) if group == ALL_GROUPS else [group]:
            grown = self.size(target) - self.size(self.tier[g][token])
            self.restored += max(0, grown)
            self.destroyed += max(0, -grown)
            self.tier[g][token] = target

    def count(self, *tiers: Tier) -> int:
        return math.ceil(sum(t in tiers for row in self.tier for t in row) / self.groups)

    def page_bytes(self) -> int:
        pages = {
            (g, tier, self.slot[token])
            for g, row in enumerate(self.tier)
            for token, tier in enumerate(row)
            if tier.in_hbm
        }
        return sum(self.size(tier) * self.page_tokens for _, tier, _ in pages)

    def ddr_bytes(self) -> int:
        return sum(self.size(t) for row in self.tier for t in row if t.memory == DDR)

    def state(self) -> list[int]:
        return [
            self.count(*(tier for tier in Tier if tier.in_hbm)),
            self.count(*(tier for tier in Tier if tier.quantised)),
            self.count(*(tier for tier in Tier if tier.offloaded)),
            self.page_bytes(),
            self.ddr_bytes(),
        ]


def make(groups: int, page_tokens: int) -> Ledger:
    return Ledger(groups, FULL, (SMALL, COARSE), page_tokens=page_tokens, tiers=MOST_TIERS)


def random_moves(rng: np.random.Generator, groups: int, born: np.ndarray) -> Moves:
    """Each token moves at most once, and not before iteration ``born[token]``."""
    steps = int(born.max()) + 1
    chosen = np.flatnonzero(rng.random(len(born)) < rng.random())
    step = np.array([rng.integers(born[token], steps) for token in chosen], dtype=np.int64)
    group = rng.integers(ALL_GROUPS, groups, len(chosen)).astype(np.int32)
    target = rng.choice(np.array(list(Tier)), len(chosen)).astype(np.int8)
    order = np.argsort(step, kind="stable")
    return Moves(step[order], group[order], chosen[order], target[order])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.sampled_from([1, 2, 4]),
    page_tokens=st.sampled_from([1, 4, 16]),
)
def test_every_iteration_agrees_with_the_slow_ledger(
    seed: int, groups: int, page_tokens: int
) -> None:
    """Invariant 1: every byte and every count of every iteration."""
    rng = np.random.default_rng(seed)
    fast, slow = make(groups, page_tokens), SlowLedger(groups, page_tokens)
    for _ in range(4):
        leaves = tuple(rng.permutation(6)[: rng.integers(1, 4)].tolist())
        steps = int(rng.integers(1, 20))
        born = np.concatenate(
            [np.zeros(fast.num_tokens, np.int64), np.repeat(np.arange(steps), len(leaves))]
        )
        moves = random_moves(rng, groups, born)
        profile = fast.advance(leaves, steps, moves)
        for t in range(steps):
            for leaf in leaves:
                slow.append(leaf)
            before = slow.state()
            assert profile.hbm_tokens_before[t] == before[0]
            assert profile.hbm_page_bytes_before[t] == before[3]
            at = moves.between_steps(t, t + 1)
            for group, token, target in zip(at.group, at.token, at.target, strict=True):
                slow.move(int(group), int(token), Tier(target))
            after = [
                profile.hbm_tokens_after[t],
                profile.hbm_page_bytes_after[t],
                profile.ddr_bytes_after[t],
            ]
            assert after == [slow.state()[i] for i in (0, 3, 4)]
        outside = random_moves(rng, groups, np.zeros(fast.num_tokens, np.int64))
        fast.record(fast.resolve(outside))
        for group, token, target in zip(outside.group, outside.token, outside.target, strict=True):
            slow.move(int(group), int(token), Tier(target))
        assert np.array_equal(fast.tier, np.array(slow.tier, dtype=np.int8))
        assert [fast.hbm_tokens, fast.hbm_page_bytes, fast.ddr_bytes] == [
            slow.state()[i] for i in (0, 3, 4)
        ]
        assert fast.appended_bytes == slow.appended
        assert fast.destroyed_bytes == slow.destroyed
        assert fast.restored_bytes == slow.restored
        fast.check()


def evict(*tokens: int) -> Moves:
    count = len(tokens)
    return Moves(
        np.zeros(count, np.int64),
        np.full(count, ALL_GROUPS, np.int32),
        np.array(tokens, np.int64),
        np.full(count, Tier.EVICTED, np.int8),
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), groups=st.sampled_from([1, 2]))
def test_compaction_frees_pages_and_loses_nothing(seed: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    ledger = make(groups, page_tokens=4)
    for _ in range(3):
        ledger.append((0, 1), int(rng.integers(5, 40)))
        ledger.record(
            ledger.resolve(random_moves(rng, groups, np.zeros(ledger.num_tokens, np.int64)))
        )
        held, paged = ledger.hbm_bytes, ledger.hbm_page_bytes
        copied = ledger.compact()
        ledger.check()
        assert ledger.hbm_bytes == held
        assert ledger.hbm_page_bytes <= paged
        assert (copied == 0) == (ledger.hbm_page_bytes == paged)
        assert ledger.compact() == 0  # nothing is left to merge


def test_compaction_by_hand() -> None:
    ledger = make(1, page_tokens=4)
    ledger.append((0,), 13)  # three full pages, one just begun
    ledger.record(ledger.resolve(evict(0, 1, 4, 5, 8)))  # they hold 2, 2 and 3
    assert ledger.hbm_page_bytes == 4 * 4 * FULL
    assert ledger.compact() == 7 * FULL  # into two pages
    assert ledger.hbm_page_bytes == 3 * 4 * FULL


def test_nodes_do_not_share_pages() -> None:
    ledger = make(1, page_tokens=16)
    ledger.append((3, 7), 2)
    assert ledger.hbm_page_bytes == 2 * 16 * FULL
    ledger.append((3,), 14)
    assert ledger.hbm_page_bytes == 2 * 16 * FULL
    ledger.append((3,), 1)
    assert ledger.hbm_page_bytes == 3 * 16 * FULL


def test_a_group_holds_its_share() -> None:
    ledger = make(4, page_tokens=1)
    ledger.append((0,), 10)
    half = evict(0, 1)
    ledger.record(
        ledger.resolve(Moves(half.step, np.array([2, 3], np.int32), half.token, half.target))
    )
    assert ledger.hbm_bytes == 10 * FULL - 2 * FULL // 4
    assert ledger.hbm_tokens == 10  # 38 in 4 groups, rounded up


def test_impossible_moves_are_refused() -> None:
    ledger = make(1, page_tokens=1)
    ledger.append((0,), 5)
    with pytest.raises(PlanError, match=r"outside 0 .. 4"):
        ledger.record(ledger.resolve(evict(5)))
    with pytest.raises(PlanError, match="token 2 twice"):
        ledger.record(ledger.resolve(evict(2, 1, 2)))
    one = evict(1)
    with pytest.raises(PlanError, match="group"):
        ledger.record(
            ledger.resolve(Moves(one.step, np.array([1], np.int32), one.token, one.target))
        )


def test_bytes_that_do_not_divide_are_rounded_up_per_group() -> None:
    ledger, whole = make(3, page_tokens=1), make(1, page_tokens=1)
    for each in (ledger, whole):
        each.append((0,), 7)
        each.check()
    over = ledger.hbm_bytes - whole.hbm_bytes
    assert 0 < over < 3 * 7, "less than a byte per group and token"


@pytest.mark.parametrize("groups", [0, 10**9])
def test_groups_that_cannot_share_a_token_are_refused(groups: int) -> None:
    with pytest.raises(UsageError, match=f"{groups} groups"):
        make(groups, page_tokens=1)


def test_a_damaged_ledger_is_found_out() -> None:
    for page_tokens in (1, 4):
        ledger = make(1, page_tokens)
        ledger.append((0,), 5)
        ledger.check()
        ledger.tier[0, 2] = Tier.EVICTED
        with pytest.raises(PlanError, match="counts by tier"):
            ledger.check()
    ledger = make(1, 1)
    ledger.append((0,), 5)
    ledger.destroyed_bytes += 1
    with pytest.raises(PlanError, match="destroyed"):
        ledger.check()
