"""Prompts that share blocks: which parts they have in common, and what is found of them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.machine.report import PrefixTokens
from arborsim.machine.scheduler import Timed
from arborsim.machine.serving import ServingEngine
from arborsim.trace.importers.requests import Request, shared_prefix_tokens
from tests.serving.make import chain, with_blocks
from tests.serving.test_prefixes import SLOW
from tests.serving.test_textbook import play
from tests.simulator.bench import GEOMETRY, KV
from tests.trace.import_helpers import recording

Prompts = Sequence[tuple[int, ...]]
BLOCK = 4
#: Requests whose blocks come from a small tree, so that they often have some in common.
PROMPTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12
)


def engine(prompts: Prompts, tail: int = 1) -> ServingEngine:
    """Prompts of whole blocks, and `tail` tokens behind them."""
    made = [with_blocks(chain(BLOCK * len(p) + tail, 1), p, BLOCK) for p in prompts]
    return ServingEngine(made, SLOW, GEOMETRY)


def one_by_one(prompts: Prompts) -> Timed:
    return Timed(tuple((1e4 * number, number) for number in range(len(prompts))))


@given(PROMPTS)
def test_parts_are_what_prompts_have_in_common(prompts: Prompts) -> None:
    found = [each.parts for each in engine(prompts).demands]
    for mine, blocks in zip(found, prompts, strict=True):
        assert sum(part.tokens for part in mine) == BLOCK * len(blocks)
        assert sum(part.bytes for part in mine) == BLOCK * len(blocks) * KV
    for one, here in zip(found, prompts, strict=True):
        for other, there in zip(found, prompts, strict=True):
            pairs = zip(here, there, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            keys = {part.key for part in other}
            shared = [part.tokens for part in one if part.key in keys]
            assert sum(shared) == BLOCK * same
    assert len({key for mine in found for key, *_ in mine}) <= 2 * len(prompts), "few parts"


def test_the_same_block_behind_others_is_another() -> None:
    one, two = (each.parts for each in engine([(1, 2, 3), (4, 2, 3)]).demands)
    assert not {part.key for part in one} & {part.key for part in two}


def test_other_logs_have_other_blocks() -> None:
    demands = [with_blocks(chain(9, 1), (1, 2), BLOCK, key) for key in ("mix 0", "mix 1")]
    one, two = (each.parts for each in ServingEngine(demands, SLOW, GEOMETRY).demands)
    assert not {part.key for part in one} & {part.key for part in two}


@given(PROMPTS)
@settings(deadline=None, max_examples=40)
def test_an_endless_cache_finds_all_that_came_before(prompts: Prompts) -> None:
    report = engine(prompts).run(one_by_one(prompts))
    requests = [Request(0.0, BLOCK * len(p) + 1, 1, _chained(p)) for p in prompts]
    total = sum(BLOCK * len(p) for p in prompts)
    saved = shared_prefix_tokens(requests, BLOCK)
    assert report.prefixes == PrefixTokens(hbm=saved, ddr=0, computed=total - saved)


def _chained(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that stand for all blocks up to them, as the logs have them."""
    return tuple(hash(blocks[: i + 1]) for i in range(len(blocks)))


class LiteralCache:
    """Every block by itself, the one unused for longest first, as engines with pages keep them."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.unused: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def serve(self, blocks: tuple[int, ...], tail: int) -> int:
        """Compute a prompt with `tail` tokens of its own, and one more; blocks that were found."""
        path = [blocks[: i + 1] for i in range(len(blocks))]
        found = 0
        while found < len(path) and path[found] in self.unused:
            found += 1
        for block in path[:found]:
            del self.unused[block]
        own = BLOCK * len(path) + tail
        for more in (0, 1):  # the prompt, then the token
            while BLOCK * len(self.unused) + own + more > self.room:
                self.unused.popitem(last=False)
        for block in reversed(path):
            self.unused[block] = None
        return found


@given(PROMPTS, st.integers(30, 60), st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_what_fits_is_found_block_by_block(prompts: Prompts, room: int, tail: int) -> None:
    cache = LiteralCache(room)
    found = sum(cache.serve(blocks, tail) for blocks in prompts)
    made = [with_blocks(chain(BLOCK * len(p) + tail, 1), p, BLOCK) for p in prompts]
    report = play(made, one_by_one(prompts), room, SLOW, prefix_block_tokens=BLOCK)
    total = sum(len(blocks) for blocks in prompts)
    assert report.prefixes == PrefixTokens(
        hbm=BLOCK * found, ddr=0, computed=BLOCK * (total - found)
    )
    assert report.peak_hbm_bytes <= room * KV
    assert not any(search.refused for search in report.searches)


def test_what_hbm_lost_comes_back_from_ddr_part_by_part() -> None:
    """Two parts of 8 and 4 tokens; a search that takes all of HBM comes between."""
    prompts = [(1, 2, 3), (1, 2, 4)]
    made = [with_blocks(chain(13, 1), p, BLOCK) for p in prompts]
    arrivals = Timed(((0.0, 0), (1e4, 2), (2e4, 1), (3e4, 0)))
    options = {"prefix_block_tokens": BLOCK, "prefix_host_bytes": 100 * KV, "prefix_load_tokens": 1}
    report = play([*made, chain(10, 40)], arrivals, 50, SLOW, **options)
    assert report.prefixes == PrefixTokens(hbm=8, ddr=8 + 4, computed=12 + 4)
    assert report.from_host_bytes == 12 * KV


def test_the_last_token_of_a_prompt_that_is_all_there_is_computed() -> None:
    """The next one comes from it."""
    made = [with_blocks(chain(2 * BLOCK, 1), (1, 2), BLOCK) for _ in range(2)]
    report = play(made, one_by_one([(1, 2)] * 2), 100, SLOW, prefix_block_tokens=BLOCK)
    found = 2 * BLOCK - 1
    assert report.prefixes == PrefixTokens(hbm=found, ddr=0, computed=4 * BLOCK - found)


def test_without_sharing_nothing_is_found() -> None:
    prompts = [(1, 2, 3)] * 3
    made = [with_blocks(chain(13, 1), p, BLOCK) for p in prompts]
    report = play(made, one_by_one(prompts), 100, SLOW, prefix_sharing=False)
    assert report.prefixes == PrefixTokens()


def test_mooncakes_recording_in_an_endless_cache() -> None:
    """37.4% of the prompt tokens; but the last token of a prompt is always computed."""
    lines = [
        json.loads(line)
        for line in recording("mooncake-conversation.jsonl").read_text().splitlines()
    ]
    made = [with_blocks(chain(e["input_length"], 1), e["hash_ids"], 512) for e in lines]
    requests = [Request(0.0, e["input_length"], 1, tuple(e["hash_ids"])) for e in lines]
    saved = shared_prefix_tokens(requests, 512)
    seen: set[int] = set()
    whole = 0
    for each in lines:
        whole += seen.issuperset(each["hash_ids"])
        seen.update(each["hash_ids"])
    total = sum(each["input_length"] for each in lines)
    endless = replace(SLOW, hbm_bytes=10**15)
    arrivals = Timed(tuple((1e12 * number, number) for number in range(len(made))))
    report = ServingEngine(made, endless, GEOMETRY).run(arrivals)
    assert saved / total == pytest.approx(0.3736, abs=1e-4)
    assert report.prefixes.hbm == saved - whole
    assert report.prefixes.computed == total - saved + whole


def test_a_partial_block_is_shared_as_far_as_it_goes() -> None:
    """Lengths and ids as in two logs of Mooncake's: the shorter prompt first, and last."""
    for first, second in (((655, (0, 1)), (1200, (0, 1, 2))), ((1100, (7, 8, 9)), (700, (7, 8)))):
        made = [with_blocks(chain(tokens, 1), ids, 512) for tokens, ids in (first, second)]
        requests = [Request(0.0, tokens, 1, ids) for tokens, ids in (first, second)]
        saved = shared_prefix_tokens(requests, 512)
        assert saved == min(first[0], second[0])
        endless = replace(SLOW, hbm_bytes=10**15)
        report = ServingEngine(made, endless, GEOMETRY).run(Timed(((0.0, 0), (1e12, 1))))
        whole = int(saved == second[0])  # the last token of a prompt is always computed
        assert report.prefixes.hbm == saved - whole
