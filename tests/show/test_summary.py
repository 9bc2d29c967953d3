"""The answer in words."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from arborsim.play.results import Answered, aggregate, at_budget
from arborsim.products.replay.words import headline, summarise
from tests.show.synthetic import result


def rows(**changes):
    return aggregate(result(**changes).episodes)


def test_without_answers_no_setting_is_called_best():
    sentences = summarise(rows(), "count them")
    assert sentences[0] == (
        "Which of these settings keeps answers right was not counted. random at budget 0.25 needs "
        "the least HBM, like 6 other policies: 150 MB (25.0% of full retention's) of KV cache at "
        "the peak, with 47.5% of the attention kept, in 56.2 s (1.00 times full retention's)."
    )
    assert sentences[1].startswith("All attention is kept by hierarchy at budget 0.25: 150 MB (25")
    assert "count them" in sentences
    assert sentences[-1].startswith("Slowest is h2o at budget 0.25: 95.4 s (1.70 times full")


def test_the_trade_off_names_what_keeps_most_attention():
    replay = result(policies=("full", "hierarchy", "arborkv", "random"), budgets=("0.5",))
    peaks = {"arborkv": 0.5, "random": 0.25}
    episodes = tuple(
        replace(e, measured=replace(e.measured, peak_hbm_kv_bytes=int(
            e.measured.peak_hbm_kv_bytes * peaks.get(e.policy, 1.0))))
        for e in replay.episodes
    )  # fmt: skip
    smallest, lossless = summarise(aggregate(episodes))[:2]
    assert "random at budget 0.5 needs the least HBM" in smallest
    assert lossless.startswith("All attention is kept by hierarchy at budget 0.5")


def counted(right: int, n: int = 200, infeasible: int = 0, full: int | None = 144, **more):
    more = {"budget": "0.25", "problems": "chain", **more}
    return Answered(right, n, infeasible, full, "a run", **more)


def with_answers(found, **changes):
    return [replace(r, answers=found.get((r.policy, r.budget))) for r in rows(**changes)]


def test_counted_answers_lead():
    found = {("h2o", "0.25"): counted(140), ("random", "0.25"): counted(100)}
    sentences = summarise(with_answers(found))
    assert sentences[0].startswith(
        "Of 2 settings whose answers were counted live, h2o at budget 0.25 needs the least HBM "
        "without a visible loss: 140 of 200 right (70.0%, 95% interval 63.1 to 76.3), 144 with "
        "full retention on the same problems (p = 0.74); 150 MB (25.0%"
    )
    assert sentences[1] == "With 200 problems, a loss shows only from 124 right down."
    assert sentences[2] == (
        "Visibly fewer are right than under full retention with random at budget 0.25 100 of 200, "
        "where it is 144."
    )
    assert headline(with_answers(found)).policy == "h2o"


def test_a_setting_that_loses_answers_or_could_not_run_them_all_does_not_lead():
    for only in (counted(100), counted(140, infeasible=3), counted(140, full=None)):
        sentences = summarise(with_answers({("h2o", "0.25"): only}))
        assert sentences[0] == (
            "No setting whose answers were counted live keeps to its budget, saves memory and "
            "loses no answers visibly."
        )


def test_answers_at_another_budget_or_on_other_problems_are_said_but_do_not_lead():
    near = counted(140, differs=("budget 0.3",), own_budget=False)
    sentences = summarise(with_answers({("h2o", "0.25"): near}))
    assert sentences[0].startswith("Which of these settings keeps answers right was not counted.")
    assert (
        "Right answers counted near these settings: h2o at budget 0.25 140 of 200 (budget 0.3), "
        "full retention 144."
    ) in sentences


POLICY = st.sampled_from(["h2o", "random", "epikv", "streaming-llm"])


@given(st.dictionaries(st.tuples(POLICY, st.sampled_from(["0.25", "0.5"])), st.integers(0, 200)))
def test_what_leads_loses_no_answers_and_what_is_said_to_lose_does(found):
    answers = {key: counted(right) for key, right in found.items()}
    own = with_answers(answers)
    sentences = summarise(own)
    losing = {at_budget(*key) for key, each in answers.items() if each.loses}
    said = [s for s in sentences if s.startswith("Visibly fewer")]
    assert bool(said) == bool(losing)
    for text in said:
        assert losing >= {at_budget(*key) for key in answers if f"{at_budget(*key)} " in text}
    first = sentences[0]
    assert not any(name in first for name in losing) or "was not counted" in first
    best = headline(own)
    if any(not each.loses for each in answers.values()):
        assert not answers[best.policy, best.budget].loses
    words = ("better", "best", "worse", "most right", "beats")
    assert not any(word in sentence for sentence in sentences for word in words)


def test_without_attention_memory_decides_and_the_gap_is_said():
    unknown = [replace(e, attention_kept=math.nan) for e in result().episodes]
    assert "was not measured" in summarise(aggregate(unknown))[0]


def test_only_full():
    sentences = summarise(rows(policies=("full",)))
    assert sentences[0].startswith("Only full retention was replayed")
    assert headline(rows(policies=("full",))) is None


def test_no_baseline():
    sentences = summarise(rows(policies=("h2o", "arborkv")))
    assert "full retention" not in " ".join(s for s in sentences if "attention" not in s)
    assert all("nan" not in sentence for sentence in sentences)


def test_only_what_keeps_its_budget_and_saves_memory_is_recommended():
    replay = result(policies=("full", "hierarchy", "arborkv", "random"), budgets=("0.5",))
    broken = [replace(e, bounded=e.policy != "hierarchy") for e in replay.episodes]
    assert "hierarchy" not in " ".join(summarise(aggregate(broken))[:2])
    peak = max(e.measured.peak_hbm_kv_bytes for e in replay.episodes)
    large = [
        replace(e, measured=replace(e.measured, peak_hbm_kv_bytes=peak)) for e in replay.episodes
    ]
    first, *rest = summarise(aggregate(large))
    assert first == "No setting keeps to its budget and needs less HBM than full retention."
    assert len(rest) == 1
    assert rest[0].startswith("Slowest is")
    assert headline(aggregate(large)) is not None


def test_what_does_not_fit_is_not_recommended_if_anything_fits():
    replay = result(policies=("full", "hierarchy", "arborkv", "random"), budgets=("0.5",))

    def short_of_memory(*policies):
        return aggregate(
            replace(e, measured=replace(e.measured, usable_ddr_bytes=1, peak_ddr_bytes=2))
            if e.policy in policies
            else e
            for e in replay.episodes
        )

    assert summarise(short_of_memory())[0] == summarise(aggregate(replay.episodes))[0]
    for missing in ("hierarchy", "arborkv"):
        assert missing in summarise(short_of_memory())[0]
        assert missing not in summarise(short_of_memory(missing))[0]
    assert "hierarchy" in summarise(short_of_memory("hierarchy", "arborkv", "random"))[0]
    large = [
        replace(e, measured=replace(e.measured, peak_hbm_kv_bytes=1 << 40))
        if e.policy != "hierarchy"
        else replace(e, measured=replace(e.measured, usable_ddr_bytes=1, peak_ddr_bytes=2))
        for e in replay.episodes
    ]
    assert summarise(aggregate(large))[0] == (
        "No setting keeps to its budget, fits the machine and needs less HBM than full retention."
    )


def test_ties_are_not_one_winner():
    replay = result(policies=("full", "random", "h2o"), budgets=("0.25",))
    same = [replace(e, attention_kept=0.5) for e in replay.episodes if e.policy != "full"]
    assert (
        "random at budget 0.25 needs the least HBM, like h2o:" in summarise(aggregate(same))[0]
        or "h2o at budget 0.25 needs the least HBM, like random:" in summarise(aggregate(same))[0]
    )
