"""What becomes of a shared prefix that nobody uses, and its copies in DDR: cases done by hand.

On the toy machine a byte takes a microsecond everywhere; `SLOW` computes a million FLOPs a second.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.core.errors import UsageError
from arborsim.machine.machine import ServingOptions
from arborsim.machine.prefixes import Shelf
from arborsim.machine.program import Op
from arborsim.machine.report import PrefixTokens, ServingReport
from arborsim.machine.scheduler import Timed
from tests.serving.make import chain, demand, piece, with_prefix
from tests.serving.test_textbook import WEIGHTS, play
from tests.simulator.bench import GEOMETRY, KV, PROFILE

SLOW = replace(PROFILE, flops_per_s=1e6)
KEYED = with_prefix(chain(40, 5), 36)  # blocks of 16, 16 and 4 tokens
#: The prefix, then somebody else who may need its place, then the prefix again.
AGAIN = Timed(((0.0, 0), (10.0, 1), (20.0, 0)))


def again(tokens: int, arrivals: Timed = AGAIN, **options: int) -> ServingReport:
    """Serve with room for so many tokens."""
    return play([KEYED, chain(10, 10)], arrivals, tokens, SLOW, **options)


def saved_s(tokens: int) -> float:
    """What the slow machine computes less if the first tokens of a prompt are there."""
    return (2.0 * GEOMETRY.parameters * tokens + 4 * 2 * 2 * 16 * tokens * (tokens + 1) / 2) / 1e6


@pytest.mark.parametrize(("block", "kept"), [(1, 30), (7, 28), (16, 16), (36, 0), (1000, 0)])
def test_an_unused_prefix_loses_its_last_blocks(block: int, kept: int) -> None:
    """14 tokens are free beside the prefix, and the other search comes to hold 20."""
    report = again(50, prefix_block_tokens=block)
    assert report.prefixes == PrefixTokens(hbm=kept, ddr=0, computed=36 + 36 - kept)
    first, _, last = report.searches
    assert first.latency_s - last.latency_s == pytest.approx(saved_s(kept))
    assert report.peak_hbm_bytes <= 50 * KV
    assert report.preemptions == 0


def test_the_prefix_unused_for_longest_goes_first_and_goes_whole() -> None:
    """Room for 44 tokens holds two prefixes of 20, until somebody comes to hold 40."""
    older, newer = (with_prefix(chain(22, 2), 20, key) for key in "ab")
    demands = [older, newer, chain(30, 10)]

    def found(*order: int) -> int:
        arrivals = Timed(tuple((10.0 * time, number) for time, number in enumerate(order)))
        return play(demands, arrivals, 44, SLOW, prefix_block_tokens=4).prefixes.hbm

    assert found(0, 1, 2, 0) == 0
    assert found(0, 1, 2, 1) == 4
    assert found(0, 1, 0, 2, 0) == 20 + 4, "using a prefix makes it the younger one"
    assert found(0, 1, 0, 2, 1) == 20


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    need=st.integers(1, 5000), block=st.integers(1, 20), per_token=st.integers(1, 40),
)  # fmt: skip
def test_no_more_blocks_go_than_are_needed(
    sizes: list[int], need: int, block: int, per_token: int
) -> None:
    shelf = Shelf(block)
    for key, tokens in enumerate(sizes):
        assert shelf.grow(str(key), tokens, tokens * per_token) == tokens * per_token
    held = shelf.bytes
    freed = shelf.evict(need, spared="0")
    lost = {str(key): tokens - (shelf[str(key)].held if str(key) in shelf else 0)
            for key, tokens in enumerate(sizes)}  # fmt: skip
    assert lost["0"] == 0
    assert freed == per_token * sum(lost.values()) == held - shelf.bytes
    if freed < need:
        assert freed == per_token * sum(sizes[1:]), "all that could go"
    else:
        assert freed - need < per_token * block
    touched = [key for key in lost if lost[key]]
    assert all(lost[key] == sizes[int(key)] for key in touched[:-1]), "one after the other"
    assert all((sizes[int(key)] - lost[key]) % block == 0 for key in touched)


def test_what_hbm_lost_is_copied_back() -> None:
    """16 tokens stay in HBM; the other 20 come from DDR before the pass over the last 4."""
    report = again(50, prefix_host_bytes=100 * KV)
    assert report.prefixes == PrefixTokens(hbm=16, ddr=20, computed=36)
    assert (report.to_host_bytes, report.from_host_bytes) == (36 * KV, 20 * KV)
    assert report.peak_host_bytes == 36 * KV
    first, _, last = report.searches
    assert first.latency_s - last.latency_s == pytest.approx(saved_s(36) - 20 * KV / 1e6)


def test_few_tokens_are_not_worth_a_copy_back() -> None:
    taken = again(50, prefix_host_bytes=100 * KV, prefix_load_tokens=20)
    assert taken.prefixes.ddr == 20
    left = again(50, prefix_host_bytes=100 * KV, prefix_load_tokens=21)
    assert left.prefixes == PrefixTokens(hbm=16, ddr=0, computed=36 + 20)
    assert left.from_host_bytes == 0


def test_searches_wait_for_the_same_copy_while_others_decode() -> None:
    """The engine waits for 36 x 128 us only if there is nobody else to serve."""
    demands = [KEYED, chain(30, 170), chain(4, 100)]  # the second one takes all of HBM

    def after_100_s(*arrivals: tuple[float, int]) -> tuple[ServingReport, float]:
        """Serve, and how long the engine waited from then on."""
        before = ((0.0, 0), (10.0, 1))
        busy_s = []
        for chosen in (before, (*before, *arrivals)):
            report = play(demands, Timed(chosen), 200, SLOW, prefix_host_bytes=100 * KV)
            busy_s.append(report.busy.total_s)
        return report, report.total_s - 100 - (busy_s[1] - busy_s[0])

    both, waited_s = after_100_s((100.0, 0), (100.0, 0))
    assert both.prefixes == PrefixTokens(hbm=0, ddr=2 * 36, computed=36)
    assert both.from_host_bytes == 36 * KV, "one copy for both"
    assert waited_s == pytest.approx(36 * KV / 1e6)
    beside, waited_s = after_100_s((100.0, 2), (100.0, 0), (100.0, 0))
    assert beside.prefixes == both.prefixes
    assert waited_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("filled", "grown", "kept"), [(150, 144, 0), (130, 132, 16)])
def test_a_search_that_loses_its_place_while_it_waits_begins_again(
    filled: int, grown: int, kept: int
) -> None:
    """The link takes 30 s for all 36 tokens; another search needs the place long before that."""
    machine = replace(SLOW, h2d_bytes_per_s=36 * KV / 30.0)
    demands = [KEYED, chain(30, filled - 30), chain(4, grown - 4)]
    arrivals = Timed(((0.0, 0), (10.0, 1), (100.0, 2), (100.0, 0)))
    report = play(demands, arrivals, 150, machine, prefix_host_bytes=100 * KV)
    *_, other, last = report.searches
    assert (other.preemptions, last.preemptions) == (0, 1)
    assert other.finish_s < 110
    assert report.from_host_bytes == 2 * (36 - kept) * KV
    assert report.prefixes == PrefixTokens(hbm=kept, ddr=36 - kept, computed=36), "counted once"
    both_s = 2 * 30 * (36 - kept) / 36
    assert 100 + both_s < last.first_token_s < 100 + both_s + 1


def test_what_lost_its_place_is_computed_again_behind_the_prefix() -> None:
    """Room for a prefix of 6 and 20 others: two of 4 + 10 decode six iterations together."""
    keyed = with_prefix(chain(10, 10), 6)
    report = play([keyed, keyed], Timed(((0.0, 0), (0.0, 1))), 26, preemption="recompute")
    assert report.preemptions == 1
    assert report.busy.recompute_s == pytest.approx((WEIGHTS + (10 + 6) * KV) / 1e6)
    assert report.prefixes == PrefixTokens(hbm=6 + 6, ddr=0, computed=6)


def test_searches_come_before_copies() -> None:
    """DDR for 40 tokens holds the prefix of 36, until a search wants 8 there."""
    offloader = demand(
        [
            (Op.LEVEL, 9 * KV), (Op.PREFILL, 9), (Op.LEVEL, KV, 0, 8 * KV), (Op.HOLD, 8 * KV),
            (Op.SEND, 0), (Op.WAIT, 0), (Op.DECODE, 0),
        ],
        [piece(5, read_bytes=2 * KV, hbm_bytes=2 * KV)],
        [(0, 0, 8 * KV, 0, -8 * KV)],
    )  # fmt: skip
    machine = replace(SLOW, ddr_bytes=40 * KV)
    filler = chain(10, 40)  # takes all of HBM, so that what is left is in DDR alone
    arrivals = Timed(((0.0, 0), (10.0, 1), (20.0, 2), (40.0, 0)))
    report = play([KEYED, offloader, filler], arrivals, 50, machine, prefix_host_bytes=100 * KV)
    assert not any(search.refused for search in report.searches)
    assert report.peak_host_bytes == 40 * KV
    assert report.prefixes == PrefixTokens(hbm=0, ddr=32, computed=36 + 4)


def pair(room: int, **options: int) -> ServingReport:
    """Two prefixes of 16 tokens, HBM for one of them, and each once more, the second one first."""
    both = [with_prefix(chain(18, 2), 16, key) for key in "ab"]
    arrivals = Timed(((0.0, 0), (10.0, 1), (20.0, 1), (30.0, 0)))
    return play(both, arrivals, 20, SLOW, prefix_host_bytes=room * KV, **options)


def test_copies_give_way_to_later_ones() -> None:
    assert pair(32).prefixes == PrefixTokens(hbm=16, ddr=16, computed=32)
    assert pair(31).prefixes == PrefixTokens(hbm=16, ddr=0, computed=48)
    assert pair(28, prefix_block_tokens=4).prefixes == PrefixTokens(hbm=16, ddr=12, computed=36)
    # Of a prefix that does not fit by itself, the head is copied.
    assert pair(13, prefix_block_tokens=4).peak_host_bytes == 12 * KV


def test_copies_unused_for_longest_give_way_first() -> None:
    """DDR for two of three prefixes; the first one is used again before the third one comes."""
    demands = [*(with_prefix(chain(18, 2), 16, key) for key in "abc"), chain(10, 190)]
    order = (0, 1, 0, 2, 3, 0, 1)  # the fourth demand takes all of HBM
    arrivals = Timed(tuple((10.0 * time, number) for time, number in enumerate(order)))
    report = play(demands, arrivals, 200, SLOW, prefix_host_bytes=32 * KV)
    assert report.prefixes == PrefixTokens(hbm=16, ddr=16, computed=3 * 16 + 16)


def test_what_has_gone_before_it_was_copied_is_lost() -> None:
    """A slow link is still copying when somebody else takes the place of the last 20 tokens."""
    machine = replace(SLOW, d2h_bytes_per_s=36 * KV / 30.0)  # 30 s
    soon = Timed(((0.0, 0), (10.0, 1), (70.0, 0)))
    report = play([KEYED, chain(10, 10)], soon, 50, machine, prefix_host_bytes=100 * KV)
    assert report.prefixes == PrefixTokens(hbm=16, ddr=0, computed=36 + 20)
    late = Timed(((0.0, 0), (50.0, 1), (70.0, 0)))
    report = play([KEYED, chain(10, 10)], late, 50, machine, prefix_host_bytes=100 * KV)
    assert report.prefixes == PrefixTokens(hbm=16, ddr=20, computed=36)


def test_a_copy_can_be_read_once_its_last_part_is_there() -> None:
    """6 tokens arrive in DDR after 6 s, the other 4 after 10, and HBM is taken in between."""
    machine = replace(SLOW, d2h_bytes_per_s=KV)  # a token per second
    demands = [*(with_prefix(chain(20, 2), tokens) for tokens in (6, 10)), chain(10, 90)]

    def found(taken_s: float) -> PrefixTokens:
        arrivals = Timed(((0.0, 0), (1.0, 1), (taken_s, 2), (50.0, 1)))
        options = {"prefix_host_bytes": 100 * KV, "prefix_load_tokens": 1}
        return play(demands, arrivals, 100, machine, **options).prefixes

    assert found(8.0) == PrefixTokens(hbm=6, ddr=0, computed=6 + 4 + 10)
    assert found(20.0) == PrefixTokens(hbm=6, ddr=10, computed=6 + 4)


def test_a_shorter_prefix_is_the_head_of_a_longer_one() -> None:
    short, long = (with_prefix(chain(20, 2), tokens) for tokens in (6, 10))
    report = play([short, long], Timed(((0.0, 0), (1.0, 1), (2.0, 0))), tokens=100)
    assert report.prefixes == PrefixTokens(hbm=6 + 6, ddr=0, computed=6 + 4)


def test_options_of_prefixes_are_checked() -> None:
    for name, value in (
        ("prefix_block_tokens", -1), ("prefix_host_bytes", -1), ("prefix_load_tokens", 0),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"serving: {name} must be at least .*, not {value}"):
            ServingOptions(**{name: value})
