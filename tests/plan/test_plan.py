"""Plans of small workloads: what must hold for any, and what has a known answer."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from arborsim.core.errors import UsageError
from arborsim.machine.lookup import load_profile
from arborsim.products.generate.arrivals import Recorded
from arborsim.products.plan.costs import cost_per_million, fleet_for, paid, ranked
from arborsim.products.plan.demands import record
from arborsim.products.plan.evaluate import evaluate
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.recommend import Demanded, recommend
from arborsim.products.plan.results import INFEASIBLE, MET, MISSED, TOO_FEW, UNFIT, CandidateResult
from arborsim.products.plan.runs import Bench
from arborsim.products.plan.statistics import Estimate, cost_per_solved
from arborsim.products.plan.tables import candidates
from arborsim.products.plan.target import Target
from arborsim.products.plan.workload import Workload
from tests.plan.make import small_plan, small_workload


def test_the_largest_load_is_met_by_every_run_and_the_next_one_is_not() -> None:
    plan = small_plan()
    assert [each.status for each in plan.candidates] == [MET] * 4
    for each in plan.candidates:
        point = each.at_largest
        assert point is not None
        assert each.largest == min(each.largest_by_seed) == point.load
        assert point.meets
        assert point.at_percentile.value <= 20.0
        assert each.refuted is not None
        assert each.refuted / each.largest == pytest.approx(1.02)
        assert 0 < point.used.memory <= 1
        assert point.search_s.p50 <= point.search_s.p95 <= point.search_s.p99
        assert point.preemptions_per_1000 >= 0
        assert (each.limited_by, each.searches) == ("throughput", 320), "longer ones than 40"


def test_what_a_search_costs_is_its_share_of_an_hour() -> None:
    plan = small_plan()
    h100 = plan.candidates[2]
    assert h100.at_largest is not None
    assert h100.largest is not None
    low, high = h100.at_largest.cost_per_1000 or (0, 0)
    assert (low, high) == pytest.approx(
        (1000 * 2.0 / 3600 / h100.largest, 1000 * 3.5 / 3600 / h100.largest)
    )
    assert h100.fleet is not None
    assert h100.fleet.machines == np.ceil(20 / h100.largest)
    assert h100.fleet.price_per_hour == (2.0 * h100.fleet.machines, 3.5 * h100.fleet.machines)
    assert h100.fleet.cost_per_1000 == pytest.approx(
        tuple(1000 * price / 3600 / 20 for price in h100.fleet.price_per_hour)
    )
    solved = h100.at_largest.cost_per_solved
    assert solved is not None
    assert plan.solved is not None
    assert solved[0].value == pytest.approx(low / 1000 / plan.solved.value)
    dropping = plan.candidates[3].at_largest
    assert dropping is not None
    assert dropping.cost_per_solved is None, "it is not known what it solves"


def test_one_machine_of_the_fleet_has_its_part() -> None:
    for each in small_plan().candidates:
        assert each.fleet is not None
        assert each.at_stated is not None
        assert each.at_stated.load == pytest.approx(20 / each.fleet.machines)
        assert each.at_stated.meets


def test_terms_of_a_search_alone_add_up() -> None:
    for each in small_plan().candidates:
        assert each.alone is not None
        assert sum(each.alone.terms_s.values()) == pytest.approx(each.alone.seconds)
        weights = "decode: matrix products", "decode: reading weights"
        weights_s = sum(each.alone.terms_s.get(name, 0.0) for name in weights)
        assert weights_s > 0.5 * each.alone.seconds


@pytest.mark.parametrize("jobs", [2])
def test_the_number_of_processes_changes_nothing(jobs: int) -> None:
    """Invariant 6: a plan."""
    assert Planner(small_workload(), jobs=jobs).run() == small_plan()


def test_a_plan_goes_on_with_what_is_finished() -> None:
    planner = Planner(small_workload())
    planner.finished.update({each.number: each for each in small_plan().candidates[1:]})
    assert [each.number for each in planner.missing] == [0]
    assert planner.run().candidates == small_plan().candidates


def _bare(workload: Workload) -> Workload:
    """Priced by the numbers of the profile alone: prompts are passes of their own."""
    hardware = [
        replace(each, profile=replace(each.profile, engine=None)) for each in workload.hardware
    ]
    return replace(workload, hardware=tuple(hardware))


def _with_hbm(workload: Workload, gigabytes: float) -> Workload:
    hardware = workload.hardware[0]
    profile = replace(hardware.profile, hbm_bytes=int(gigabytes * 1e9))
    return replace(workload, hardware=(replace(hardware, profile=profile),))


def test_more_memory_never_serves_less() -> None:
    """Invariant 16: the largest load on five sizes of HBM."""
    workload = small_workload(
        ('thought_tokens = "uniform:low=20,high=80"', 'thought_tokens = "uniform:low=80,high=160"'),
        ('search = "20 s"\ntoken = "60 ms"', 'search = "40 s"'),
    )
    workload = replace(workload, policies=workload.policies[:1])
    loads = []
    for gigabytes in (18.6, 19.2, 20.0, 24.0, 32.0):
        found = Planner(_with_hbm(workload, gigabytes)).run().candidates[0]
        loads.append(found.largest or 0.0)
    assert loads == sorted(loads)
    assert loads[-1] > 2 * loads[0], "memory made no difference here"


def test_searches_that_wait_for_one_server_wait_as_in_the_textbook() -> None:
    """M/D/1: Poisson arrivals, one search at a time, all alike: rho S / 2 (1 - rho)."""
    workload = small_workload(
        ('prompt_tokens = "uniform:low=100,high=900"', "prompt_tokens = 300"),
        ('thought_tokens = "uniform:low=20,high=80"', "thought_tokens = 40"),
        ("searches = 4\n", "searches = 1\n"),
        ("shared_prompt_tokens = 50", ""),
        ("pruned = 0.5", ""),
    )
    workload = _bare(workload.with_run_length(2000, 200, 3))
    workload = replace(workload, serving=replace(workload.serving, max_searches=1))
    planner = Planner(workload)
    bench = Bench(workload, workload.hardware[0], planner.demands_of(0))
    service_s = bench.engine.alone[0].seconds
    for rho in (0.4, 0.75):
        means = []
        for seed in range(3):
            run = bench.run(rho / service_s, seed)
            assert run is not None
            means.append(float(np.mean([search.waiting_s for search in run.measured])))
        expected = rho * service_s / (2 * (1 - rho))
        error = np.std(means, ddof=1) / np.sqrt(3)
        assert abs(np.mean(means) - expected) < max(4 * error, 0.1 * expected)
    assert bench.keeps_up_with(0)[0] == pytest.approx(1 / service_s, rel=0.01)


def test_a_closed_loop_searches_over_clients() -> None:
    workload = small_workload(
        ('kind = "poisson"\nrate_per_s = 20.0', 'kind = "closed-loop"\nclients = 30'),
        ('search = "20 s"', 'search = "6 s"'),
    )
    plan = Planner(_bare(replace(workload, hardware=workload.hardware[:1]))).run()
    assert plan.unit == "clients"
    for each in plan.met():
        assert each.largest == int(each.largest or 0.5)
        assert each.at_largest is not None
        assert each.at_largest.concurrency == pytest.approx(each.largest, rel=0.05)
        assert each.limited_by == "target"
        assert each.fleet is not None
        assert each.fleet.machines == np.ceil(30 / (each.largest or 1))


def test_a_target_that_none_meets_says_by_how_much() -> None:
    plan = Planner(small_workload(('search = "20 s"', 'search = "500 ms"'))).run()
    assert {each.status for each in plan.candidates} == {MISSED}
    assert plan.recommendation.candidate is None
    best = min(each.alone.at_percentile_s for each in plan.candidates if each.alone)
    text = plan.recommendation.text
    assert text.startswith("No candidate meets the target: answer within 0.5 s and TPOT")
    times = f"alone {best:.3g} s per search ({best / 0.5:.3g}x)"
    assert re.search(rf"Nearest: .* on H100, {re.escape(times)}\. Relax to search = ", text)
    assert "ms per token (" not in text, "that limit is met"
    assert not any("answers" in each for each in plan.recommendation.unknown)
    assert len(text) <= 3 * 80


def test_a_model_that_does_not_fit_is_named_with_its_bytes() -> None:
    workload = _with_hbm(small_workload(), 17.9)  # the weights, but nothing else
    plan = Planner(workload).run()
    assert {each.status for each in plan.candidates} == {UNFIT}
    reason = plan.candidates[0].reason
    assert "llama-3.1-8b does not fit: 16.06 GB of weights + 0." in reason
    assert "leave nothing for keys and values on 1 x " in reason
    assert "and 16.11 GB are usable; take larger or more GPUs" in reason
    assert "No candidate can serve" in plan.recommendation.text


_NO_ROOM = (
    "llama-3.1-8b does not fit: its weights take 16.06 GB, and 14.40 GB are usable; --tp 2 shares "
    "it among 2 GPUs or --weights fp8 takes 9 GB"
)


def test_a_model_that_fits_no_machine_is_refused_before_any_work() -> None:
    with pytest.raises(UsageError) as refused:
        Planner(_with_hbm(small_workload(), 16.0))
    assert str(refused.value) == (
        f"no machine of the workload can hold the model; the largest is rtx4090: {_NO_ROOM}"
    )


def test_where_a_model_does_not_fit_nothing_is_recorded() -> None:
    workload = small_workload(("searches = 4\n", "searches = 1\n")).with_run_length(20, 4, 1)
    small = _with_hbm(workload, 16.0).hardware[0]
    planner = Planner(replace(workload, hardware=(small, workload.hardware[1])))
    assert [each.number for each in planner.missing] == [2, 3]
    assert [each.reason for each in planner.finished.values()] == [_NO_ROOM] * 2, "one reason"
    assert planner.work() == Planner(replace(workload, hardware=workload.hardware[1:])).work()
    assert [each.status for each in planner.run().candidates] == [UNFIT, UNFIT, MET, MET]


def test_searches_that_never_fit_are_counted() -> None:
    plan = Planner(_with_hbm(small_workload(), 18.03)).run()
    assert plan.candidates[0].status == UNFIT
    assert "of the searches never fit: the largest needs 0." in plan.candidates[0].reason


def test_a_budget_that_is_too_small_is_left_out_and_said() -> None:
    plan = Planner(small_workload(("budgets = [0.5]", "budgets = [3, 0.5]"))).run()
    assert [each.status for each in plan.candidates] == [MET, INFEASIBLE, MET] * 2
    assert "budget infeasible for streaming-llm" in plan.candidates[1].reason
    assert any("2 of 6 candidates" in note for note in plan.notes)


def test_only_known_quality_is_recommended() -> None:
    plan = small_plan()
    assert plan.recommendation.candidate is not None
    assert plan.candidates[plan.recommendation.candidate].policy == "full"
    with_kept = []
    for each in plan.candidates:
        assert each.quality is not None
        kept = each.quality.attention_kept if each.policy == "full" else 0.97
        with_kept.append(replace(each, quality=replace(each.quality, attention_kept=kept)))
    kept_plan = replace(plan, candidates=tuple(with_kept))
    cheap = replace(
        with_kept[1],
        price_per_hour=(0.01, 0.01),
        fleet=replace(with_kept[1].fleet, cost_per_1000=(0.001, 0.001)),  # type: ignore[type-var]
    )
    cheapest = replace(kept_plan, candidates=(with_kept[0], cheap, *with_kept[2:]))
    assert recommend(cheapest, Demanded()).candidate == 0
    assert "quality is not known to suffice" in recommend(cheapest, Demanded()).text
    assert recommend(cheapest, Demanded(attention_kept=0.9)).candidate == 1
    assert recommend(cheapest, Demanded(attention_kept=0.98)).candidate == 0


@pytest.mark.parametrize("load", [0.7, 2.4, 20.0, 61.3])
def test_costs_at_the_stated_load_are_those_of_whole_machines(load: float) -> None:
    """Literally: their hourly price, by how many of the hour's searches are solved."""
    workload = small_workload(("solved = 0.5", "solved = 0.6")).with_load(load)
    finished = {each.number: replace(each, at_stated=None) for each in small_plan().candidates}
    plan = Planner(workload, finished=finished).run()
    for row in plan.met():
        machines = 1
        while machines * (row.largest or 0.0) < load - 1e-9:
            machines += 1
        assert row.fleet is not None
        assert row.price_per_hour is not None
        hourly = [machines * price for price in row.price_per_hour]
        assert row.fleet.price_per_hour == pytest.approx(hourly)
        assert row.fleet.cost_per_1000 == pytest.approx([1000 * x / (3600 * load) for x in hourly])
    text = " ".join(plan.recommendation.answer)
    assert "(stated) are solved" in text


def test_the_stated_load_of_clients_is_costed_by_what_they_get_done() -> None:
    """Searches that machines finish with their part of the clients, from the same runs."""
    loop = 'kind = "closed-loop"\nclients = 30\nthink_s = 0.5'
    limit = ('search = "20 s"', 'search = "5 s"')
    plan = Planner(small_workload(('kind = "poisson"\nrate_per_s = 20.0', loop), limit)).run()
    assert not any(row.is_open for row in plan.met())
    assert any(row.fleet and row.fleet.machines > 1 for row in plan.met())
    for row in plan.met():
        fleet, part = row.fleet, row.at_stated
        assert fleet is not None
        assert part is not None
        assert row.price_per_hour is not None
        assert part.load == max(1, round(30 / fleet.machines))
        per_client = part.served_per_s.value / part.load
        hourly = [fleet.machines * price for price in row.price_per_hour]
        expected = [1000 * price / 3600 / (30 * per_client) for price in hourly]
        assert fleet.cost_per_1000 == pytest.approx(expected)
        if row.policy == "full":
            assert fleet.cost_per_solved is not None
            assert [1000 * each.value for each in fleet.cost_per_solved] == pytest.approx(
                [each / 0.5 for each in expected]
            )
        else:
            assert fleet.cost_per_solved is None
    assert "at 30 clients" in plan.recommendation.answer[0]


def test_answers_that_are_wrong_are_paid_for_in_the_choice() -> None:
    """Cheaper by the search, but right half as often: not the cheapest by the solved one."""
    plan = small_plan()
    rows = []
    for row, right, cost in zip(plan.candidates[:2], (0.8, 0.4), (0.1, 0.08), strict=True):
        assert row.quality is not None
        assert row.fleet is not None
        share = Estimate(right, right - 0.1, right + 0.1, 100)
        solved = cost_per_solved(cost / 1000, share)
        fleet = replace(row.fleet, cost_per_1000=(cost, cost), cost_per_solved=(solved, solved))
        rows.append(replace(row, quality=replace(row.quality, accuracy=share), fleet=fleet))
    wanted = Demanded(accuracy=0.3)
    both = replace(plan, candidates=tuple(rows))
    assert recommend(both, wanted).candidate == 0
    unknown = [replace(r, fleet=replace(r.fleet, cost_per_solved=None)) for r in rows if r.fleet]
    assert recommend(replace(both, candidates=tuple(unknown)), wanted).candidate == 1
    found = replace(both, recommendation=recommend(both, wanted))
    assert [row.number for row in ranked(found)] == [0, 1]
    assert "80.0% (70% to 90%, 100 live runs) are solved" in found.recommendation.answer[1]
    told = replace(both, answers_of="chain by a-model")
    said = recommend(told, wanted).answer[1]
    assert "(70% to 90%, 100 live runs of chain by a-model) are solved" in said


def test_the_answer_is_three_lines_and_says_where_no_load_is_stated() -> None:
    plan = small_plan()
    rent, speed, limit = plan.recommendation.answer
    assert re.fullmatch(r"Rent 6 RTX 4090, full retention: [\d.]+ to [\d.]+ USD per 1,000 solved "
                        r"searches at 20/s; [\d.]+ to [\d.]+ USD an hour\.", rent)  # fmt: skip
    assert re.fullmatch(r"p95 TTFT [\d.]+ m?s, p90 TPOT [\d.]+ ms, p90 answer [\d.]+ s: the target "
                        r"is met( \([\d.]+% of the searches meet all of it\))?; 50\.0% "
                        r"\(stated\) are solved\.",
                        speed)  # fmt: skip
    assert limit.startswith("Allowed searches runs out first, at 23.1/s; full on H100 is cheaper ")
    assert "once RTX 4090 costs" in limit
    free = replace(
        plan, stated_load=None, candidates=tuple(replace(c, fleet=None) for c in plan.candidates)
    )
    rent, *_ = recommend(free, Demanded()).answer
    assert rent.startswith("Rent 1 RTX 4090, full retention: ")
    assert "/s, the largest load it carries (none is stated); " in rent
    unsolved = [
        replace(row, at_largest=replace(row.at_largest, cost_per_solved=None))
        for row in free.candidates
        if row.at_largest
    ]
    (rent, *_) = recommend(replace(free, candidates=tuple(unsolved)), Demanded()).answer
    assert "per 1,000 searches at" in rent
    bare = [replace(row, price_per_hour=None, at_largest=replace(row.at_largest,
            cost_per_1000=None)) for row in unsolved if row.at_largest]  # fmt: skip
    rent, *_ = recommend(replace(free, candidates=tuple(bare)), Demanded()).answer
    assert "its price is not known; it serves 12.4 searches/s" in rent
    assert "USD" not in rent


def _compared(best: tuple[float, ...], other: tuple[float, ...], stated: float | None) -> str:
    """What is said of an alternative; each has these limits run by run, and costs 1 USD an hour."""
    plan = replace(small_plan(), stated_load=stated, runs=len(best))
    rows = []
    for number, loads in ((0, best), (2, other)):
        row = replace(
            plan.candidates[number], largest=min(loads), largest_by_seed=loads,
            price_per_hour=(1.0, 1.0), at_stated=None,
        )  # fmt: skip
        assert row.at_largest is not None
        cost = 1000 / 3600 / min(loads)
        solved = Estimate.stated(cost / 1000 / 0.5)
        point = replace(
            row.at_largest, load=min(loads), cost_per_1000=(cost, cost),
            cost_per_solved=(solved, solved),
        )  # fmt: skip
        row = replace(row, at_largest=point)
        rows.append(replace(row, fleet=fleet_for(row, stated)))
    return recommend(replace(plan, candidates=tuple(rows)), Demanded()).text


@pytest.mark.parametrize(
    ("best", "other", "stated", "tied"),
    [
        ((1.0, 1.0), (0.9, 1.2), None, False),  # two runs tell nothing about their spread
        ((1.0, 1.0, 1.0), (0.9, 1.2, 1.1), None, True),
        ((1.0, 1.0, 1.0), (0.5, 0.52, 0.51), None, False),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), None, False),  # the runs agree
    ],
)
def test_the_spread_of_runs_is_named_where_it_leaves_the_order_open(
    best: tuple[float, ...], other: tuple[float, ...], stated: float | None, tied: bool
) -> None:
    text = _compared(best, other, stated)
    assert text.startswith("full on RTX 4090 is the cheapest of the 2 candidates (of 2) that meet")
    assert "The nearest alternative is full on H100 at" in text
    assert ("within the spread of the runs: more of them would tell which" in text) == tied
    assert f" searches at {stated or min(other):.3g}/s" in text


@pytest.mark.parametrize(
    ("best", "other", "said"),
    [
        ((1.0, 1.1), (0.5, 0.52), ""),  # 2 machines, or 4
        ((1.0, 1.1), (1.0, 1.2), ""),  # 2 in every run
        ((1.0, 1.1), (0.9, 1.0), "it takes 2 or 3 machines, and the recommended 2 machines"),
        ((0.7, 1.1), (0.6, 2.0), "it takes 1 or 4 machines, and the recommended 2 or 3 machines"),
        ((0.7, 2.0, 1.0), (0.6, 1.0, 2.0),
         "it takes 1 to 4 machines, and the recommended 1 to 3 machines"),
    ],
)  # fmt: skip
def test_runs_that_ask_for_other_numbers_of_machines_are_named(
    best: tuple[float, ...], other: tuple[float, ...], said: str
) -> None:
    text = _compared(best, other, 2.0)
    assert "within the spread" not in text
    assert ("but the runs leave that open: by their own limits " in text) == bool(said)
    assert said in text


@pytest.mark.parametrize(("times", "said"), [(100.0, False), (400.0, True)])
def test_many_preemptions_are_in_the_recommendation(times: float, said: bool) -> None:
    plan = small_plan()
    rows = [
        replace(each, at_largest=replace(each.at_largest, preemptions_per_1000=times))  # type: ignore[type-var]
        for each in plan.candidates
    ]
    text = recommend(replace(plan, candidates=tuple(rows)), Demanded()).text
    assert ("Places are lost there 400 times per 1,000 searches (preemption)" in text) == said


def test_what_a_short_run_knows_of_the_machines_rate() -> None:
    """A third of 300 searches is 100: 10% if their sizes scatter as much as their mean, or less."""
    workload = small_workload()
    found = Planner(workload).demands_of(0)
    for searches, known in ((40, False), (299, False), (300, True), (1000, True)):
        longer = workload.with_run_length(searches, 8, 1)
        assert Bench(longer, workload.hardware[0], found).knows_rate(0) == known


def test_machines_that_are_full_early_are_limited_by_runs_that_are_short() -> None:
    """The same machine: only 300 searches say that it finishes no more; 60 become as many."""
    workload = small_workload(
        ('policies = ["full", "streaming-llm"]', 'policies = ["full"]'),
        ('search = "20 s"\ntoken = "60 ms"', 'search = "100 s"'),
    )
    workload = replace(_with_hbm(workload, 18.6), runs=1)
    limits = []
    for searches in (60, 300):
        planner = Planner(workload.with_run_length(searches, 8, 1))
        candidate, found = planner.candidates[0], planner.demands_of(0)
        short = evaluate(planner.workload, candidate, found, longer=False)
        (only,) = planner.run().candidates
        limits.append((short.limited_by, short.searches, only.limited_by, only.searches))
    assert limits == [("run length", 60, "throughput", 480), ("throughput", 300) * 2]


def test_accuracies_of_live_runs_count() -> None:
    planner = Planner(
        small_workload(),
        Demanded(accuracy=0.5),
        {("streaming-llm", "0.5"): Estimate(0.6, 0.5, 0.7, 100)},
    )
    planner.finished.update({each.number: each for each in small_plan().candidates})
    plan = planner.result()
    allowed = [each.policy for each in plan.candidates if planner.demanded.allows(each)]
    assert allowed == ["full", "streaming-llm"] * 2
    planner.demanded = Demanded(accuracy=0.61)
    assert [each.policy for each in plan.candidates if planner.demanded.allows(each)] == [
        "full", "full",
    ]  # fmt: skip
    planner.accuracies["full", "-"] = Estimate(0.6, 0.5, 0.7, 100)
    assert not any(planner.demanded.allows(each) for each in planner.result().candidates)
    dropping = plan.candidates[1]
    assert dropping.quality is not None
    assert dropping.quality.accuracy == Estimate(0.6, 0.5, 0.7, 100)
    assert dropping.at_largest is not None
    assert dropping.at_largest.cost_per_1000 is not None
    assert dropping.at_largest.cost_per_solved is not None
    assert dropping.at_largest.cost_per_solved[0].value == pytest.approx(
        dropping.at_largest.cost_per_1000[0] / 1000 / 0.6
    )


def test_demands_serve_machines_that_the_workload_does_not_name() -> None:
    planner = Planner(small_workload())
    found = planner.demands_of(0)
    hardware = replace(planner.workload.hardware[0], profile=load_profile("a100-80"), name="other")
    elsewhere = replace(planner.candidates[0], hardware=hardware)
    result = evaluate(planner.workload, elsewhere, found)
    assert result.status == MET
    assert result.hardware == "other"


def test_shared_prefixes_are_counted_by_where_they_were_found() -> None:
    point = small_plan().candidates[0].at_largest
    assert point is not None
    found = point.prefixes
    assert found.computed > 0, "the first search finds nothing"
    assert found.hbm > found.computed, "the others do"
    assert found.ddr == 0, "nothing was copied there"
    assert candidates(small_plan()).iloc[0]["prefixes_hbm"] == found.hbm


def test_recall_modes_of_policies_without_ddr_are_one_candidate() -> None:
    workload = small_workload(
        ('policies = ["full", "streaming-llm"]', 'policies = ["full"]\nrecalls = ["stage", "near"]')
    )
    (only,) = Planner(workload).candidates[:1]
    assert len(Planner(workload).candidates) == len(workload.hardware)
    assert only.shown_recall == "-"
    assert not only.offloads


def test_prompts_shorter_than_what_is_shared_share_among_themselves(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workload = small_workload(("shared_prompt_tokens = 50", "shared_prompt_tokens = 500"))
    traces = workload.write_traces(tmp_path_factory.mktemp("t"))
    found = record(workload, workload.candidates()[0], traces)
    for demand in found.demands:
        assert demand.info.prefix_tokens == min(500, demand.prompt_tokens)
    keys = {demand.info.prefix: demand.info.prefix_tokens for demand in found.demands}
    assert len(keys) == len(set(keys.values())) > 1


def test_a_resumed_plan_knows_what_was_solved() -> None:
    planner = Planner(small_workload())
    planner.finished.update({each.number: each for each in small_plan().candidates})
    assert planner.run() == small_plan()


def test_two_gpus_that_share_a_model_serve_more_for_twice_the_price() -> None:
    workload = small_workload(
        ('gpus = ["rtx4090", "h100"]', 'gpus = ["rtx4090"]\ntensor_parallel = [1, 2]'),
        ('policies = ["full", "streaming-llm"]', 'policies = ["full"]'),
    )
    one, two = Planner(workload.with_run_length(60, 10, 1)).run().candidates
    assert (one.gpus, two.gpus) == (1, 2)
    assert two.hardware == "2x rtx4090"
    assert one.price_per_hour is not None
    assert two.price_per_hour == tuple(2 * price for price in one.price_per_hour)
    assert one.largest is not None
    assert two.largest is not None
    assert 1.1 * one.largest < two.largest < 2.5 * one.largest
    assert one.pool is not None
    assert two.pool is not None
    assert two.pool.kv_bytes > 2 * one.pool.kv_bytes, "the weights are there once"


def test_bursts_of_a_log_cost_load() -> None:
    """The same searches at the same rate, but eight at a time."""
    workload = small_workload(
        ('policies = ["full", "streaming-llm"]', 'policies = ["full"]'),
        ('search = "20 s"\ntoken = "60 ms"', 'search = "7 s"'),
    ).with_run_length(90, 10, 1)
    workload = _bare(replace(workload, hardware=workload.hardware[:1]))
    loads = []
    for moments in (np.arange(64.0), np.repeat(np.arange(8.0) * 8, 8)):
        log = replace(workload, arrivals=Recorded(tuple(moments.tolist())))
        (only,) = Planner(log).run().candidates
        assert only.largest is not None
        assert only.limited_by == "target"
        loads.append(only.largest)
    assert loads[1] < 0.9 * loads[0]


def test_what_a_machine_finishes_counts_prompts_of_searches_under_way_once() -> None:
    """Prompts are computed one by one and take nearly all the time: they set the pace."""
    workload = small_workload(
        ('prompt_tokens = "uniform:low=100,high=900"', "prompt_tokens = 2000"),
        ('thought_tokens = "uniform:low=20,high=80"', "thought_tokens = 3"),
        ("depth = 3", "depth = 1"),
        ("searches = 4\n", "searches = 1\n"),
        ("shared_prompt_tokens = 50", ""),
    ).with_run_length(90, 9, 1)
    workload = _bare(workload)
    bench = Bench(workload, workload.hardware[0], Planner(workload).demands_of(0))
    prefill_s = bench.engine.price.prefill_s(2000, 0)
    rate, _ = bench.keeps_up_with(0)
    assert 0.8 < rate * prefill_s < 1.02


def _first(**changes: object) -> CandidateResult:
    """The first candidate of the small plan, under a changed workload."""
    base = small_workload()
    alone = replace(base, hardware=base.hardware[:1], policies=base.policies[:1])
    return Planner(replace(alone, **changes)).run().candidates[0]


def test_stated_replicas_share_the_load_or_are_too_few() -> None:
    """What one machine carries does not depend on how many there are."""
    whole = small_plan().candidates[0]
    assert whole.fleet is not None
    needed = whole.fleet.machines
    more = _first(replicas=needed + 1)
    assert (more.status, more.largest) == (MET, whole.largest)
    assert more.fleet is not None
    assert more.fleet.machines == needed + 1
    assert more.at_stated is not None
    assert more.at_stated.load == pytest.approx(20 / (needed + 1))
    few = _first(replicas=1)
    assert few.status == TOO_FEW
    assert f"--dp {needed} would" in few.reason


def test_a_first_token_has_a_limit_of_its_own() -> None:
    """A limit on the first token is met by every run, and lowers the load that is carried."""
    base = small_plan().candidates[0]
    assert base.alone is not None
    assert base.at_largest is not None
    limit_s = (base.alone.first_token_at_percentile_s + base.at_largest.first_token_s.p99) / 2
    target = Target(90, 20, 0.06, limit_s, {"ttft": 80})
    found = _first(target=target)
    assert found.at_largest is not None
    assert found.at_largest.reached_s["ttft"] <= limit_s
    assert found.largest is not None
    assert base.largest is not None
    assert found.largest <= base.largest
    assert 0.8 <= found.at_largest.goodput <= 1
    never = replace(target, first_token_s=1e-6)
    assert "ms to the first token, not 0.001 ms" in _first(target=never).reason


def test_tokens_are_paid_for_by_the_time_that_they_take() -> None:
    row = small_plan().candidates[0]
    point = row.at_largest
    assert point is not None
    assert point.tokens is not None
    assert row.alone is not None
    assert point.tokens.output_per_s == pytest.approx(
        point.load * row.alone.generated_tokens, rel=0.2
    )  # the mix is drawn with weights
    costs = [cost_per_million(row, point, "searches/s", output) for output in (False, True)]
    whole = paid(row, point, "searches/s")
    assert whole is not None
    for end in (0, 1):
        tokens = (point.tokens.prompt, point.tokens.generated)
        parts = [each[end] * n / 1e3 for each, n in zip(costs, tokens, strict=True) if each]
        assert sum(parts) == pytest.approx(whole[end])
