"""The answer in words."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from arborsim.machine.serving import FullGpu
from arborsim.play.results import Answered, aggregate
from arborsim.products.replay.tables import no_result
from arborsim.products.replay.words import headline, near, summarise, telling
from tests.show.synthetic import result


def rows(**changes):
    return aggregate(result(**changes).episodes)


def test_without_answers_no_setting_is_called_best():
    sentences = summarise(rows())
    assert sentences == [
        "random at 0.25 needs the least HBM, like 6 other policies: 150 MB of KV cache at the peak "
        "(25.0% of full's), 56.2 s (1.00x full retention's), 47.5% of the attention kept.",
        "The most attention is kept by hierarchy at 0.25: 150 MB of KV cache at the peak (25.0% of "
        "full's), 65.4 s (1.16x full retention's), all attention kept.",
    ]
    said = telling(result(), rows())
    assert any(
        line.startswith("Whether answers stay right under 7 policies was not") for line in said
    )
    slow = next(line for line in said if line.startswith("A search by itself takes longer"))
    assert "under h2o at 0.25: 1.70x (policy and scoring" in slow


def test_the_trade_off_names_what_keeps_most_attention():
    replay = result(policies=("full", "hierarchy", "arborkv", "random"), budgets=("0.5",))
    peaks = {"arborkv": 0.5, "random": 0.25}
    episodes = tuple(
        replace(e, measured=replace(e.measured, peak_hbm_kv_bytes=int(
            e.measured.peak_hbm_kv_bytes * peaks.get(e.policy, 1.0))))
        for e in replay.episodes
    )  # fmt: skip
    smallest, lossless = summarise(aggregate(episodes))[:2]
    assert "random at 0.5 needs the least HBM" in smallest
    assert lossless.startswith("The most attention is kept by hierarchy at 0.5")
    assert lossless.endswith("all attention kept.")


def test_a_full_gpu_says_what_memory_buys():
    replay = result(policies=("full", "h2o", "arborkv"), budgets=("0.5",))
    full = {
        ("chain-tree.parquet", "full", "any"): FullGpu(20, 1000.0),
        ("chain-tree.parquet", "h2o", "0.5"): FullGpu(40, 1500.0),
        ("chain-tree.parquet", "arborkv", "0.5"): FullGpu(41, 700.0),
    }
    smallest, fastest = summarise(replace(replay, full=full).rows())
    assert "41 searches at once (2.05x full retention's), 700 tokens/s (0.70x)" in smallest
    assert fastest.startswith("The most tokens per second come with h2o at 0.5: 40 searches at")


def counted(right: int, n: int = 200, infeasible: int = 0, full: int | None = 144, **more):
    more = {"budget": "0.25", "problems": "chain", **more}
    return Answered(right, n, infeasible, full, "a run", **more)


def with_answers(found, **changes):
    return [replace(r, answers=found.get((r.policy, r.budget))) for r in rows(**changes)]


def test_counted_answers_lead():
    found = {("h2o", "0.25"): counted(140), ("random", "0.25"): counted(100)}
    sentences = summarise(with_answers(found))
    assert sentences[0].startswith(
        "h2o at 0.25 loses no answers visibly: 140 of 200, full retention 144."
    )
    assert sentences[1].startswith("It buys 150 MB of KV cache at the peak (25.0% of full's)")
    assert sentences[2] == (
        "Visibly fewer answers are right under random at 0.25: 100 of 200 (full retention 144)."
    )
    assert headline(with_answers(found)).policy == "h2o"
    said = telling(result(), with_answers(found))
    assert "With 200 problems, a loss shows only from 124 right down." in said


def test_a_setting_that_loses_answers_or_could_not_run_them_all_does_not_lead():
    for only in (counted(100), counted(140, infeasible=3), counted(140, full=None)):
        sentences = summarise(with_answers({("h2o", "0.25"): only}))
        assert sentences[0] == (
            "No setting whose answers were counted live keeps to its budget, saves memory and "
            "loses no answers visibly."
        )


def test_answers_at_another_budget_or_on_other_problems_are_said_but_do_not_lead():
    other = counted(140, differs=("budget 0.3",), own_budget=False)
    sentences = summarise(with_answers({("h2o", "0.25"): other}))
    assert "needs the least HBM" in sentences[0]
    assert near(with_answers({("h2o", "0.25"): other})) == [
        "Right answers counted near these settings: h2o at 0.25 140 of 200 (budget 0.3), "
        "full retention 144."
    ]


POLICY = st.sampled_from(["h2o", "random", "epikv", "streaming-llm"])


@given(st.dictionaries(st.tuples(POLICY, st.sampled_from(["0.25", "0.5"])), st.integers(0, 200)))
def test_what_leads_loses_no_answers_and_what_is_said_to_lose_does(found):
    answers = {key: counted(right) for key, right in found.items()}
    own = with_answers(answers)
    sentences = summarise(own)
    losing = {" at ".join(key) for key, each in answers.items() if each.loses}
    said = [s for s in sentences if s.startswith("Visibly fewer")]
    assert bool(said) == bool(losing)
    for text in said:
        assert losing >= {name for key in answers if f"{(name := ' at '.join(key))}:" in text}
    assert not any(name in sentences[0] for name in losing)
    best = headline(own)
    if any(not each.loses for each in answers.values()):
        assert not answers[best.policy, best.budget].loses
    words = ("better", "best", "worse", "most right", "beats")
    assert not any(word in sentence for sentence in sentences for word in words)


def test_without_attention_memory_decides():
    unknown = [replace(e, attention_kept=math.nan) for e in result().episodes]
    (only,) = summarise(aggregate(unknown))
    assert "needs the least HBM" in only
    assert "attention" not in only


def test_what_evicts_nothing_is_no_result():
    idle = [
        replace(e, measured=replace(
            e.measured, evicted_tokens=0.0, offloaded_tokens=0.0, rehydrated_tokens=0.0))
        for e in result().episodes
    ]  # fmt: skip
    assert summarise(aggregate(idle)) == ["Nothing was evicted: every search fits its budget."]
    assert all(no_result(row) for row in aggregate(idle) if not row.is_baseline)


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
    assert rest == []
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
        "random at 0.25 needs the least HBM, like h2o:" in summarise(aggregate(same))[0]
        or "h2o at 0.25 needs the least HBM, like random:" in summarise(aggregate(same))[0]
    )
