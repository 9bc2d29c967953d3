"""Serving cases whose answers are known: queueing theory, sums by hand, and full memories.

On the toy machine a byte takes a microsecond everywhere and computing takes no time: weights are
2,000 us per pass, and a token's keys and values 128 us.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from arborsim.core.errors import ResultError, UnknownName, UsageError
from arborsim.machine.machine import KvPool, ServingOptions
from arborsim.machine.profile import HardwareProfile
from arborsim.machine.program import Op, SearchDemand
from arborsim.machine.report import ServingReport
from arborsim.machine.scheduler import ClosedLoop, Timed
from arborsim.machine.serving import ServingEngine
from tests.serving.make import chain, demand, piece, with_prefix
from tests.simulator.bench import GEOMETRY, KV, PROFILE, Bench, executor, profile

WEIGHTS = 2000
AT_ONCE = Timed(((0.0, 0), (0.0, 1)))


def play(
    demands: list[SearchDemand], arrivals: Any = AT_ONCE, tokens: int = 1000,
    machine: HardwareProfile = PROFILE, **options: Any,
) -> ServingReport:  # fmt: skip
    """Serve with room for so many tokens, without a watermark."""
    chosen = ServingOptions(**{"watermark": 0.0, **options})
    return ServingEngine(demands, machine, GEOMETRY, chosen, kv_bytes=tokens * KV).run(arrivals)


def us(report: ServingReport, name: str = "finish_s") -> list[float]:
    return [1e6 * getattr(search, name) for search in report.searches]


def decode(prompt: int, iterations: range, searches: int = 1) -> int:
    """Microseconds of iterations in which identical chains decode together."""
    return sum(WEIGHTS + searches * KV * (prompt + 1 + i) for i in iterations)


def test_m_d_1_waiting_time() -> None:
    """One server, Poisson arrivals, deterministic service: rho / (2 mu (1 - rho)) on average."""
    one = chain(3, 2)
    service_s = (WEIGHTS + 3 * KV + decode(3, range(2))) / 1e6
    for rho in (0.5, 0.8):
        means = []
        for seed in range(10):
            gaps = np.random.default_rng([seed, int(100 * rho)]).exponential(service_s / rho, 1600)
            arrivals = Timed(tuple((time, 0) for time in np.cumsum(gaps).tolist()))
            report = play([one], arrivals, max_searches=1)
            means.append(np.mean([search.waiting_s for search in report.searches[400:]]))
            assert report.used.engine == pytest.approx(rho, rel=0.1)
        expected = rho * service_s / (2 * (1 - rho))
        error = np.std(means, ddof=1) / np.sqrt(len(means))
        assert abs(np.mean(means) - expected) < 2.82 * error  # Student's t, 9 degrees, 98%
        assert error < 0.1 * expected


def sender(direction: int, size: int) -> SearchDemand:
    """A search that waits for one transfer."""
    ops = [(Op.LEVEL, KV), (Op.PREFILL, 1), (Op.SEND, 0), (Op.WAIT, 0)]
    return demand(ops, [], [(0, direction, size, 0, 0)])


def test_two_equal_transfers_share_a_link() -> None:
    """First come, first served; both prompts take a pass of their own first."""
    passes = WEIGHTS + KV
    both_down = play([sender(0, 50_000), sender(0, 50_000)])
    assert us(both_down) == pytest.approx([passes + 50_000, passes + 100_000])
    assert both_down.used.pcie_down == pytest.approx(100_000 / (passes + 100_000))
    assert both_down.to_host_bytes == 100_000
    two_ways = play([sender(0, 50_000), sender(1, 50_000)])
    assert us(two_ways) == pytest.approx([passes + 50_000, 2 * passes + 50_000])
    assert two_ways.saturated == "pcie_down"


@pytest.mark.parametrize("searches", [1, 2, 7])
def test_identical_searches_decode_together(searches: int) -> None:
    prompt, generated = 5, 40
    report = play([chain(prompt, generated)], Timed(((0.0, 0),) * searches))
    prefill = searches * (WEIGHTS + prompt * KV)
    together = decode(prompt, range(generated), searches)
    assert us(report) == pytest.approx([prefill + together] * searches)
    first = prefill + decode(prompt, range(1), searches)
    assert us(report, "first_token_s") == pytest.approx([first] * searches)
    assert report.peak_hbm_bytes == searches * (prompt + generated) * KV
    assert report.tokens == searches * generated
    assert report.iterations == generated
    for search in report.searches:
        assert search.per_token_s == pytest.approx((together + prefill - first) / 39 / 1e6)
    memory = generated * WEIGHTS + searches * KV * sum(prompt + 1 + i for i in range(generated))
    assert report.used.memory == pytest.approx(memory / (prefill + together))


def test_a_tree_holds_and_reads_its_unique_tokens() -> None:
    """Ten tokens of prompt, then two branches of five: 20 unique ones, not 30."""
    bench = Bench()
    bench.executor = executor(record=True)
    bench.executor.bind(bench.tree)
    bench.prefill(10)
    bench.turn(1, 2)
    bench.decode(5)
    bench.executor.finish()
    report = play([bench.executor.demand()], Timed(((0.0, 0),)))
    assert report.peak_hbm_bytes == 20 * KV
    assert report.tokens == 10
    reads = sum(WEIGHTS + KV * (10 + 2 * i) for i in range(1, 6))
    assert us(report) == pytest.approx([WEIGHTS + 10 * KV + reads])


def test_hbm_full_swaps_the_search_admitted_last() -> None:
    """Room for 20 tokens: two chains of 4 + 10 decode six iterations together, not seven."""
    report = play([chain(4, 10), chain(4, 10)], tokens=20)
    prefill = 2 * (WEIGHTS + 4 * KV)
    swapped = 10 * KV
    first = prefill + decode(4, range(6), 2) + swapped + decode(4, range(6, 10))
    second = first + swapped + decode(4, range(6, 10))
    assert us(report) == pytest.approx([first, second])
    assert [search.preemptions for search in report.searches] == [0, 1]
    assert report.to_host_bytes == report.from_host_bytes == swapped == report.peak_host_bytes
    assert report.peak_hbm_bytes == 20 * KV
    assert report.saturated == "hbm"
    assert report.first_s["hbm"] == pytest.approx((prefill + decode(4, range(6), 2)) / 1e6)


def test_hbm_full_recomputes_the_search_admitted_last() -> None:
    report = play([chain(4, 10), chain(4, 10)], tokens=20, preemption="recompute")
    prefill = 2 * (WEIGHTS + 4 * KV)
    first = prefill + decode(4, range(6), 2) + decode(4, range(6, 10))
    second = first + (WEIGHTS + 10 * KV) + decode(4, range(6, 10))
    assert us(report) == pytest.approx([first, second])
    assert report.to_host_bytes == 0
    assert report.busy.recompute_s == pytest.approx((WEIGHTS + 10 * KV) / 1e6)


def test_a_search_waits_until_hbm_has_room() -> None:
    """Room for one: the second is admitted when the first has ended."""
    report = play([chain(10, 10), chain(10, 10)], tokens=20)
    alone = WEIGHTS + 10 * KV + decode(10, range(10))
    assert us(report, "admitted_s") == pytest.approx([0, alone])
    assert us(report) == pytest.approx([alone, 2 * alone])
    assert report.preemptions == 0


def test_a_search_that_can_never_fit_is_refused() -> None:
    report = play([chain(10, 11), chain(10, 10)], tokens=20)
    refused, served = report.searches
    assert refused.refused == f"needs {21 * KV} bytes of HBM, of {20 * KV} for KV"
    assert (refused.admitted_s, refused.finish_s) == (-1, -1)
    assert not served.refused
    assert 1e6 * served.finish_s == pytest.approx(WEIGHTS + 10 * KV + decode(10, range(10)))


def offloader(tokens: int) -> SearchDemand:
    """Computes a prompt, moves most of it to DDR, waits for that, and decodes with the rest."""
    ops = [
        (Op.LEVEL, (tokens + 1) * KV), (Op.PREFILL, tokens + 1), (Op.LEVEL, KV, 0, tokens * KV),
        (Op.HOLD, tokens * KV), (Op.SEND, 0), (Op.WAIT, 0), (Op.DECODE, 0),
    ]  # fmt: skip
    row = piece(5, read_bytes=2 * KV, hbm_bytes=2 * KV)
    return demand(ops, [row], [(0, 0, tokens * KV, 0, -tokens * KV)])


def test_ddr_full_takes_the_place_of_the_search_admitted_last() -> None:
    """DDR for 12 tokens, and two searches that want 8 there: the second starts over."""
    report = play([offloader(8), offloader(8)], machine=profile(ddr_bytes=12 * KV))
    prefill, moved, decoded = WEIGHTS + 9 * KV, 8 * KV, 5 * (WEIGHTS + 2 * KV)
    first, second = report.searches
    assert (first.preemptions, second.preemptions) == (0, 1)
    # The second has computed its prompt when it finds no room, while the first one is moving.
    assert 1e6 * first.finish_s == pytest.approx(2 * prefill + decoded)
    recomputed = 1e6 * first.finish_s + WEIGHTS + 9 * KV
    assert 1e6 * second.finish_s == pytest.approx(recomputed + moved + decoded)
    assert report.peak_host_bytes == 8 * KV
    assert report.saturated == "host"


def test_nvme_takes_what_ddr_cannot_hold() -> None:
    """Half of 8 tokens lies below DDR, and is written ten times more slowly."""
    slow = {"nvme_bytes": 100 * KV, "nvme_bytes_per_s": 1e5}
    single = Timed(((0.0, 0),))
    report = play([offloader(8)], single, machine=profile(ddr_bytes=4 * KV), **slow)
    expected = WEIGHTS + 9 * KV + 4 * KV * 10 + 5 * (WEIGHTS + 2 * KV)
    assert us(report) == pytest.approx([expected])
    refused = play([offloader(8)], single, machine=profile(ddr_bytes=4 * KV))
    assert refused.searches[0].refused == f"needs {8 * KV} bytes of DDR"


def test_a_shared_prefix_is_held_and_computed_once() -> None:
    """Prompts of 10 tokens share 6: the second computes 4 beside the 6 that are there."""
    keyed = with_prefix(chain(10, 5), 6)
    report = play([keyed, keyed])
    prefill = 2 * WEIGHTS + 10 * KV + (4 + 6) * KV
    assert us(report) == pytest.approx([prefill + decode(10, range(5), 2)] * 2)
    assert report.peak_hbm_bytes == (6 + 2 * (15 - 6)) * KV
    alone = play([keyed, keyed], prefix_sharing=False)
    assert alone.peak_hbm_bytes == 2 * 15 * KV


def test_an_unused_prefix_stays_until_its_place_is_needed() -> None:
    keyed, other = with_prefix(chain(10, 5), 6), chain(10, 10)
    late = Timed(((0.0, 0), (1.0, 1), (2.0, 0)))
    full = play([keyed, other], late, tokens=20, max_searches=1)
    computed = WEIGHTS + 10 * KV + decode(10, range(5))
    assert 1e6 * full.searches[2].latency_s == pytest.approx(computed)
    # With its prefix there the pass reads the same keys and values, so the memory-bound pass of
    # this machine takes as long; on one that computes slowly it is shorter.
    slow = replace(PROFILE, flops_per_s=1e6)
    again = play([keyed, other], late, tokens=40, machine=slow, max_searches=1)
    fresh = play([keyed, other], late, tokens=20, machine=slow, max_searches=1)
    saved_s = 2.0 * GEOMETRY.parameters * 6 / 1e6
    gained_s = fresh.searches[2].latency_s - again.searches[2].latency_s
    assert gained_s == pytest.approx(saved_s + 4 * 2 * 2 * 16 * 21 / 1e6)


def test_a_prompt_in_parts_joins_the_iterations_of_others() -> None:
    """The second prompt of 6 tokens comes in two parts of 3 while the first search decodes."""
    arrivals = Timed(((0.0, 0), (0.005, 1)))
    report = play([chain(4, 10), chain(6, 3)], arrivals, prefill_chunk=4)
    # Prompt of the first: 4 tokens at once.  The second arrives during iteration 1.
    prompt = WEIGHTS + 4 * KV
    alone = decode(4, range(1))
    parts = 2 * WEIGHTS + KV * (6 + 7) + KV * (3 + 6)  # iterations 1 and 2
    both = sum(WEIGHTS + KV * (5 + 3 + i) + KV * (7 + i) for i in range(3))
    rest = decode(4, range(6, 10))
    assert 1e6 * report.searches[1].finish_s == pytest.approx(prompt + alone + parts + both)
    assert 1e6 * report.searches[0].finish_s == pytest.approx(prompt + alone + parts + both + rest)


def test_gpus_in_parallel_share_and_add_up() -> None:
    links = {"all_reduce_gpus": (2,), "all_reduce_bytes_per_s": (1e6,)}
    machine = replace(PROFILE, **links, all_reduce_latency_s=(7e-6,))
    arrivals = Timed(((0.0, 0),) * 3)
    report = play([chain(5, 8)], arrivals, machine=machine, tensor_parallel=2)
    reduced = 2 * 2 * 7, 2 * 2 * 8 * 2  # latency; a ring of 2 sends each activation's bytes once
    prefill = 3 * ((WEIGHTS + 5 * KV) / 2 + reduced[0] + 5 * reduced[1])
    decoded = sum((WEIGHTS + 3 * KV * (6 + i)) / 2 + reduced[0] + 3 * reduced[1] for i in range(8))
    assert us(report) == pytest.approx([prefill + decoded] * 3)


@pytest.mark.parametrize(("searches", "steps"), [(1, 7), (2, 7), (3, 5)])
def test_streams_add_up_and_hide_behind_the_batch(searches: int, steps: int) -> None:
    """Each streams 4,000 us per iteration and reads 100 us: the link is the slower one."""
    row = piece(steps, read_bytes=100, hbm_bytes=KV, streamed_bytes=4000)
    one = demand([(Op.LEVEL, KV), (Op.PREFILL, 1), (Op.DECODE, 0)], [row], recall="stream")
    report = play([one], Timed(((0.0, 0),) * searches))
    prefill = searches * (WEIGHTS + KV)
    iteration = max(WEIGHTS + searches * 100, searches * 4000)
    assert us(report) == pytest.approx([prefill + steps * iteration] * searches)
    exposed = iteration - (WEIGHTS + searches * 100)
    assert report.busy.exposed_s == pytest.approx(steps * exposed / 1e6)
    assert report.from_host_bytes == searches * steps * 4000
    assert report.used.pcie_up == pytest.approx(
        searches * steps * 4000 / (prefill + steps * iteration)
    )


def test_streaming_hides_behind_iterations_from_the_one_on_that_takes_longer() -> None:
    """Reads grow by 100 us; 2,850 us of streaming are exposed up to the eighth iteration."""
    row = piece(20, read_bytes=100, read_bytes_growth=100, hbm_bytes=KV, streamed_bytes=2850)
    one = demand([(Op.LEVEL, KV), (Op.PREFILL, 1), (Op.DECODE, 0)], [row], recall="stream")
    report = play([one], Timed(((0.0, 0),)))
    iterations = [max(2850, WEIGHTS + 100 * (i + 1)) for i in range(20)]
    assert us(report) == pytest.approx([WEIGHTS + KV + sum(iterations)])
    assert report.busy.exposed_s == pytest.approx(sum(850 - 100 * i for i in range(1, 9)) / 1e6)


def test_the_cpu_attends_beside_the_gpu() -> None:
    """2,000 us on the CPU, with messages of 2 x 64 and 2 x 136 us, beside 1,500 us on the GPU."""
    row = piece(6, read_bytes=1500, hbm_bytes=KV, remote_bytes=2000)
    one = demand([(Op.LEVEL, KV), (Op.PREFILL, 1), (Op.DECODE, 0)], [row], recall="near")
    report = play([one], Timed(((0.0, 0),)))
    exposed = 2000 + 2 * (2 * 16 * 2) + 2 * (2 * (16 * 4 + 4)) - 1500
    assert us(report) == pytest.approx([WEIGHTS + KV + 6 * (WEIGHTS + 1500 + exposed)])


def test_the_watermark_keeps_searches_out() -> None:
    """Half of 40 tokens must stay free: the second is admitted when the first has ended."""
    report = play([chain(10, 5), chain(10, 5)], tokens=40, watermark=0.5)
    alone = WEIGHTS + 10 * KV + decode(10, range(5))
    assert us(report, "admitted_s") == pytest.approx([0, alone])
    beside = play([chain(10, 5), chain(10, 5)], tokens=40, watermark=0.4)
    assert us(beside, "admitted_s") == [0, 0]


def test_clients_wait_think_and_come_back() -> None:
    report = play([chain(5, 8)], ClosedLoop(1, (0, 0, 0), think_s=0.5))
    service = WEIGHTS + 5 * KV + decode(5, range(8))
    assert us(report, "arrival_s") == pytest.approx([0, service + 5e5, 2 * (service + 5e5)])
    assert us(report)[-1] == pytest.approx(3 * service + 1e6)
    assert play([chain(5, 8)], ClosedLoop(4, (0,) * 8)).tokens == 64


def test_the_kv_pool_is_what_the_others_leave() -> None:
    engine = ServingEngine([chain(5, 8)], PROFILE, GEOMETRY, ServingOptions(tensor_parallel=2))
    workspace = 5 * (2 * 8 + 2 * 3 * 16 + 3 * 16) * 2 + 10 * 4
    # Both GPUs keep the one KV head.
    assert engine.pool == KvPool(2_000_000, 200_000, 2000, 2 * (workspace // 2), copies=2.0)
    assert engine.pool.kv_bytes == (2_000_000 - 200_000 - 2000 - workspace) // 2
    with pytest.raises(UsageError, match="leave nothing for keys and values on 1 x toy, and "):
        ServingEngine([chain(5, 8)], profile(hbm_bytes=2000), GEOMETRY)


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean swap"):
        ServingOptions(preemption="swop")
    for name, value in (("max_searches", 0), ("watermark", 1.0), ("nvme_bytes", -1),
                        ("prefill_chunk", -1), ("tensor_parallel", 0)):  # fmt: skip
        with pytest.raises(UsageError, match=name):
            ServingOptions(**{name: value})
    with pytest.raises(UsageError, match="use 1 or more"):
        ClosedLoop(0, (0,))
    for arrivals in (Timed(((0.0, 0), (1.0, 2))), ClosedLoop(1, (0, -1))):
        with pytest.raises(UsageError, match=r"arrivals name demand .*, but there are 1"):
            play([chain(4, 4)], arrivals)
    with pytest.raises(UsageError, match="finite times"):
        Timed(((float("nan"), 0),))


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (lambda r: {"searches": (replace(r.searches[0], finish_s=0.0), *r.searches[1:])},
         "search 0 of a run: its times are out of order"),
        (lambda r: {"busy": replace(r.busy, decode_s=2 * r.total_s)}, "the engine was busy for"),
        (lambda r: {"used": replace(r.used, hbm=1.5)}, "use of hbm is 1.5, not between"),
        (lambda r: {"used": replace(r.used, memory=-0.5)}, "use of memory is -0.5, not between"),
        (lambda r: {"used": replace(r.used, links={"NVMe": -0.1})}, "use of links is -0.1"),
        (lambda r: {"peak_hbm_bytes": r.pool.kv_bytes + 1}, "peak_hbm_bytes is "),
        (lambda r: {"joined_s": r.busy.prefill_s + 1}, "joined_s is "),
    ],
)  # fmt: skip
def test_figures_that_no_run_can_have_are_refused(planted: Any, said: str) -> None:
    """Invariant 21: one line names record and figure."""
    report = play([chain(3, 4)], Timed(((0.0, 0),)))
    with pytest.raises(ResultError, match=said) as caught:
        replace(report, **planted(report))
    assert "\n" not in str(caught.value)
