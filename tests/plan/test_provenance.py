"""Notes and appendix of a plan: what to know about its figures, in values as people write them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_engine
from arborsim.products.generate.lengths import generate_search, generated_info, write_generated
from arborsim.products.plan.demands import recorded_facts, solved_by_entry
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.provenance import (
    assumed_numbers,
    cautions,
    rests_on_assumed,
    settings_of,
    short_prompts,
)
from arborsim.products.plan.results import CandidateResult
from arborsim.products.plan.statistics import Estimate, Solved
from arborsim.products.plan.workload import MixEntry, Workload
from arborsim.products.plan.workload_file import example_workload, parse_workload
from arborsim.trace.importers.request_logs import read_requests
from arborsim.trace.importers.sources import Contents, write_trace
from tests.plan.make import small_plan, small_workload
from tests.trace.import_helpers import imported

_REPR = re.compile(r"\w+\(\w+=|\bTrue\b|\bFalse\b|\bNone\b|\d{9,}|\de[-+]\d|\d\.0\b")


def test_no_value_is_a_repr_of_python() -> None:
    workload = parse_workload(example_workload(), Path())
    settings = settings_of(workload)
    del settings["versions"]
    texts = [text.replace("10.0 µs", "10 µs") for text in settings.values()]
    assert [text for text in (*texts, *assumed_numbers(workload)) if _REPR.search(text)] == []


def test_serving_options_have_units() -> None:
    text = settings_of(small_workload(("max_searches = 24\n", "")))["serving"]
    for words in ("max_searches as many as fit", "prefix_sharing on", "watermark 0.01",
                  "nvme_bytes_per_s 6.00 GB/s"):  # fmt: skip
        assert words in text


def test_distributions_are_written_as_the_workload_states_them() -> None:
    text = settings_of(small_workload())["mix: trees"]
    assert "4 searches generated from seed 0: prompt_tokens uniform:low=100,high=900" in text
    assert "branching 2, first 4, pruned [0.5], solved 0.5; 50 prompt tokens in common" in text


def test_every_assumed_number_has_its_unit() -> None:
    workload = small_workload()
    found = assumed_numbers(workload)
    profiles = {each.profile.name: each.profile for each in workload.hardware}
    assert len(found) == sum(len(profile.assumed()) for profile in profiles.values())
    assert "rtx4090: PCIe to the GPU: large pinned blocks (h2d_bytes_per_s): 25 GB/s" in found
    assert "rtx4090: latency of each transfer (pcie_latency_s): 10 µs" in found
    assert any(each.startswith("rtx4090: share of the ") for each in found)
    assert all(re.fullmatch(r"\w+: [^()]* \(\w+\): .*", each) for each in found), "in words"


def _serving(workload: Workload, **changes: object) -> Workload:
    return replace(workload, serving=replace(workload.serving, **changes))  # type: ignore[arg-type]


def _shared(workload: Workload, tokens: int) -> Workload:
    mix = tuple(replace(entry, shared_prompt_tokens=tokens) for entry in workload.mix)
    return replace(workload, mix=mix)


@pytest.mark.parametrize(
    ("shared", "serving", "said"),
    [
        (50, {}, ()),
        (50, {"prefix_host_bytes": 10**9}, ()),
        (0, {}, ()),
        (0, {"prefix_sharing": False}, ()),
        (0, {"prefix_host_bytes": 10**9},
         ("prefix_host_bytes has no effect: no searches share a prefix, because no entry of the "
          "mix states shared_prompt_tokens or has prefix blocks.",)),
        (50, {"prefix_sharing": False},
         ("shared_prompt_tokens has no effect: prefix_sharing is off.",)),
        (50, {"prefix_sharing": False, "prefix_host_bytes": 10**9},
         ("shared_prompt_tokens has no effect: prefix_sharing is off.",
          "prefix_host_bytes has no effect: prefix_sharing is off.")),
        (50, {"prefix_load_tokens": 20},
         ("prefix_load_tokens has no effect: prefix_host_bytes is 0.",)),
        (50, {"expert_parallel": 2},
         ("expert_parallel has no effect: llama-3.1-8b has no experts.",)),
        (50, {"watermark": 0.02}, ()),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named(
    shared: int, serving: dict[str, object], said: tuple[str, ...]
) -> None:
    workload = _serving(_shared(small_workload(), shared), **serving)
    assert cautions(workload, []) == said


def test_budgets_and_recalls_that_no_policy_uses_are_named() -> None:
    workload = small_workload()
    full = [each for each in workload.policies if not each.policy.uses_budget][:1]
    told = replace(
        workload, policies=tuple(full), budgets=(Budget.parse("0.3"),), recalls=("near",)
    )
    assert cautions(told, []) == (
        "budgets has no effect: no policy uses one.",
        "recalls has no effect: no policy places tokens in DDR.",
    )


def test_assumed_numbers_that_move_the_answer_are_named_with_their_range() -> None:
    """Two GPUs that share a model over links that are assumed: a search takes longer by them."""
    text = ("[candidates]\n", "[candidates]\ntensor_parallel = [2]\n")
    planner = Planner(small_workload(text))
    number = next(n for n, each in enumerate(planner.candidates) if "rtx4090" in each.hardware.name)
    candidate, found = planner.candidates[number], planner.demands_of(number)
    said = rests_on_assumed(planner.workload, candidate, found)
    assert "on 2x rtx4090 rest on assumed numbers of its profile: " in said
    assert re.search(r"all_reduce_latency_s \(\+\d+% where it costs twice as much\)", said)
    assert "hbm_bytes_per_s" not in said, "that is published"
    low, high, middle = re.findall(r"(\d[\d.]*) s\b", said)
    assert float(low) < float(middle) < float(high)
    sources = dict.fromkeys(candidate.hardware.profile.numbers(), "measured 2026")
    measured = replace(candidate.hardware.profile, sources=sources)
    sure = replace(candidate, hardware=replace(candidate.hardware, profile=measured))
    assert rests_on_assumed(planner.workload, sure, found) == ""


_ORDER = "Requests of log arrive in recorded order and share their blocks of 512 tokens"
_STATED = "instead of these, prompts share the first 1,000 tokens, as stated"


@pytest.mark.parametrize(
    ("block", "shared", "sharing", "said"),
    [
        (512, 0, True, [_ORDER]),
        (512, 0, False, []),
        (512, 1000, True, [_STATED]),
        (512, 1000, False, [_STATED, "shared_prompt_tokens has no effect: prefix_sharing is off."]),
        (0, 0, True, []),  # a source without prefixes
    ],
)
def test_what_requests_of_a_log_share_is_said(
    tmp_path: Path, block: int, shared: int, sharing: bool, said: list[str]
) -> None:
    log, trace = tmp_path / "log.jsonl", tmp_path / "log.parquet"
    request = {"timestamp": 1, "input_length": 1030, "output_length": 3, "hash_ids": [7, 8, 9]}
    log.write_text(2 * (json.dumps(request) + "\n"))
    imported(log, read_requests(log, "mooncake"), trace, prefix_block_tokens=block)
    workload = _serving(small_workload(), prefix_sharing=sharing)
    in_order = bool(block) and not shared
    workload = replace(workload, mix=(MixEntry("log", 1.0, trace, shared, in_order),))
    found = cautions(workload, [])
    assert all(words in each for words, each in zip(said, found, strict=True)), found


def test_prompts_shorter_than_what_is_shared_are_counted() -> None:
    """Four drawn prompts of 100 to 900 tokens; the count is checked against their demands."""
    planner = Planner(small_workload())
    prompts = sorted(each.prompt_tokens for each in planner.demands_of(0).demands)
    assert len(prompts) == 4
    assert prompts[0] < prompts[1]
    for shared, short in ((prompts[0], 0), (prompts[0] + 1, 1), (prompts[3] + 1, 4)):
        workload = _shared(planner.workload, shared)
        with Planner(workload)._traces() as traces:
            facts = recorded_facts(workload, traces)
        found = tuple(short_prompts(workload, facts))
        assert len(found) == (short > 0)
        assert all(
            f"trees: {short} of 4 distinct searches have prompts shorter than" in f for f in found
        )
        assert not list(short_prompts(_serving(workload, prefix_sharing=False), facts))


def _rests_on(notes: tuple[str, ...]) -> list[str]:
    return [note for note in notes if note.startswith("Costs per solved search rest on")]


def test_a_stated_solve_rate_enters_costs_exactly() -> None:
    """0.6 of 4 drawn searches would be 2 or 3 of them."""
    workload = small_workload(("solved = 0.5", "solved = 0.6"))
    plan = Planner(workload.with_run_length(40, 4, 1)).run()
    assert plan.solved == Estimate(0.6, 0.6, 0.6, 0)
    assert plan.solved_origin == "stated"
    known = [
        each for each in plan.candidates if each.at_largest and each.at_largest.cost_per_solved
    ]
    assert {each.policy for each in known} == {"full"}, "what dropping tokens does is not known"
    for each in known:
        assert each.at_largest is not None
        assert each.at_largest.cost_per_solved is not None
        assert each.price_per_hour is not None
        for found, price in zip(each.at_largest.cost_per_solved, each.price_per_hour, strict=True):
            assert found.value == pytest.approx(price / 3600 / each.at_largest.load / 0.6)
            assert found.low == found.value == found.high
    assert _rests_on(plan.notes) == [
        "Costs per solved search rest on a solve rate of 60.0% that is stated, not measured."
    ]
    unpriced = [replace(each, at_largest=None) for each in plan.candidates]
    assert not cautions(small_workload(), unpriced, [Solved(stated=0.6)])


def test_a_generated_trace_counts_with_what_was_stated_for_it(tmp_path: Path) -> None:
    """Its verdicts are draws with that share; a recorded trace has only its verdicts."""
    made, recorded = tmp_path / "made.parquet", tmp_path / "recorded.parquet"
    workload = small_workload(("solved = 0.5", "solved = 0.6"))
    (entry,) = workload.mix
    assert not isinstance(entry.source, Path)
    write_generated(entry.source.spec, 5, 1, workload.geometry, made)
    drawn = [generate_search(entry.source.spec, 1, number) for number in range(5)]
    info = generated_info(entry.source.spec.parameters(), 1, workload.geometry)
    info = replace(info, extra={key: v for key, v in info.extra.items() if key != "generated"})
    write_trace(Contents(tuple(drawn), (), 5), info, recorded, False, lambda what, units: None)
    workload = replace(workload, mix=(MixEntry("made", 3.0, made), MixEntry("told", 1.0, recorded)))
    planner = Planner(workload.with_run_length(40, 4, 1), finished=_nothing_met())
    with planner._traces() as traces:
        facts = recorded_facts(planner.workload, traces)
    kinds = solved_by_entry(workload, ((each.entry, each.solved) for each in facts))
    right = sum(each.solved for each in facts if each.entry == 1)
    assert kinds == [Solved(stated=0.6), Solved(right, 5)]
    plan = planner.run()
    assert plan.solved is not None
    assert plan.solved.value == pytest.approx((3 * 0.6 + right / 5) / 4)
    assert (plan.solved.n, plan.solved_origin) == (5, "stated and recorded")
    (said,) = _rests_on(cautions(workload, small_plan().candidates, kinds))
    assert f"60.0% stated (made), {right} of 5 recorded (told); what is stated was not" in said
    (told,) = _rests_on(cautions(workload, small_plan().candidates, [Solved(3, 4), Solved(1, 4)]))
    assert told.endswith("of 8 distinct searches of the mix having a correct answer.")


def _nothing_met() -> dict[int, CandidateResult]:
    """The small plan's candidates, as if nothing had to be served."""
    return {
        each.number: replace(each, status="missed", at_largest=None, largest=None)
        for each in small_plan().candidates
    }


def test_shares_of_live_runs_are_named_with_theirs() -> None:
    planner = Planner(
        small_workload(),
        accuracies={("streaming-llm", "0.5"): Estimate(0.6, 0.5, 0.7, 100)},
        finished={each.number: each for each in small_plan().candidates},
    )
    notes = planner.run().notes
    assert (
        "Costs per solved search rest on right answers of live runs: streaming-llm at 0.5 60.0% "
        "(50.0% to 70.0% at 95% confidence) of 100."
    ) in notes
    planner.answers_of = "chain by a-model"
    told = planner.result().notes
    assert any("live runs of chain by a-model, not of this workload's searches:" in n for n in told)
    (full,) = [note for note in notes if note.startswith("Costs per solved search rest on a solve")]
    assert "stated, not measured" in full


def test_short_runs_say_how_uncertain_largest_loads_are() -> None:
    plan = small_plan()
    workload = replace(small_workload().with_run_length(200, 20, 2), resolution=0.06)
    rows = [replace(plan.candidates[0], largest_by_seed=(0.5, 0.6))]
    (note,) = [each for each in cautions(workload, rows, []) if each.startswith("Largest loads")]
    # 90% of 180 searches are a binomial count: 162, with a standard deviation of 4.02.
    assert note.startswith(
        "Largest loads were tried 6% apart, in 2 runs of 200 searches (180 measured): 90% of so "
        "few may be 86% to 94% of many, and the runs' own largest loads lie up to 20% apart."
    )
    assert not any(each.startswith("Largest loads") for each in plan.notes)


def test_a_plan_says_how_far_off_it_was_at_an_endpoint() -> None:
    workload = small_workload()
    said = "On 6 requests at 2 loads, predictions of h100 with vllm were off by TTFT 5%, TPOT 3%."
    hardware = []
    for each in workload.hardware:
        engine = replace(load_engine("vllm"), observed=said)
        hardware.append(replace(each, profile=each.profile.served_by(engine)))
    assert said not in cautions(workload, [])
    assert cautions(replace(workload, hardware=tuple(hardware)), []).count(said) == 1
