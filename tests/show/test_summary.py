"""The answer in words."""

from __future__ import annotations

import math
from dataclasses import replace

from arborsim.run.results import aggregate
from arborsim.show.replay_words import headline, summarise
from tests.show.synthetic import result


def rows(**changes):
    return aggregate(result(**changes).episodes)


def test_the_answer_names_policy_saving_attention_and_time():
    sentences = summarise(rows())
    assert sentences[0] == (
        "Of the settings that keep at least 99% of the attention, hierarchy at budget 0.25 needs "
        "the least HBM: 150 MB of KV cache at the peak instead of 601 MB (75% less), with all of "
        "the attention kept; it takes 16.3% more time than full retention, mostly for waiting for "
        "transfers."
    )
    assert sentences[-1].startswith("Slowest is h2o at budget 0.25: 95.4 s (1.70 times full")
    assert "model computation (1.35 times that of full retention)" in sentences[-1]
    assert headline(rows()).policy == "hierarchy"


def test_a_lossy_best_is_set_against_the_lossless_and_the_smallest():
    replay = result(policies=("full", "hierarchy", "arborkv", "random"), budgets=("0.5",))
    peaks = {"arborkv": 0.5, "random": 0.25}
    episodes = tuple(
        replace(e, measured=replace(e.measured, peak_hbm_kv_bytes=int(
            e.measured.peak_hbm_kv_bytes * peaks.get(e.policy, 1.0))))
        for e in replay.episodes
    )  # fmt: skip
    best, lossless, smallest = summarise(aggregate(episodes))
    assert "arborkv" in best
    assert "99.0% of the attention" in best
    assert lossless.startswith("Without losing any attention, the least is hierarchy")
    assert smallest.startswith("Smallest of all is random")


def test_without_attention_memory_decides_and_the_gap_is_said():
    unknown = [replace(e, attention_kept=math.nan) for e in result().episodes]
    assert "was not measured" in summarise(aggregate(unknown))[0]


def test_nothing_keeps_enough():
    sentences = summarise(rows(policies=("full", "random"), budgets=("0.25",)))
    assert sentences[0].startswith("No setting keeps 80% of the attention. random at budget 0.25")


def test_only_full():
    sentences = summarise(rows(policies=("full",)))
    assert sentences[0].startswith("Only full retention was replayed")
    assert headline(rows(policies=("full",))) is None


def test_no_baseline():
    sentences = summarise(rows(policies=("h2o", "arborkv")))
    assert "instead of" not in " ".join(sentences)
    assert all("nan" not in sentence for sentence in sentences)


def test_only_what_keeps_its_budget_and_saves_memory_is_recommended():
    replay = result(policies=("full", "hierarchy", "arborkv", "random"), budgets=("0.5",))
    broken = [replace(e, bounded=e.policy != "hierarchy") for e in replay.episodes]
    assert summarise(aggregate(broken))[0].startswith(
        "Of the settings that keep at least 99% of the attention, arborkv at budget 0.5"
    )
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
    assert "hierarchy at budget 0.5" in summarise(short_of_memory())[0]
    assert "arborkv at budget 0.5" in summarise(short_of_memory("hierarchy"))[0]
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


def test_the_oracle_is_set_against_the_sentence_before():
    sentences = summarise(rows(policies=("full", "oracle", "arborkv", "random"), budgets=("0.25",)))
    assert "arborkv at budget 0.25" in sentences[0]
    assert sentences[1] == (
        "At budget 0.25, the oracle, which knows the future and only evicts, keeps 97.00%: "
        "1.50 percentage points less than arborkv."
    )


def test_a_policy_per_head_is_set_against_its_own_oracle():
    """`oracle` keeps other tokens than `oracle-head`; almost all is not all."""
    replay = result(policies=("full", "oracle", "arborkv", "random"), budgets=("0.25",))
    episodes = []
    for e in replay.episodes:
        if e.policy == "oracle":
            episodes.append(replace(e, attention_kept=0.9))
            episodes.append(replace(e, policy="oracle-head", per="head", attention_kept=0.99998))
        else:
            episodes.append(replace(e, per="head") if e.policy == "arborkv" else e)
    assert summarise(aggregate(episodes))[1] == (
        "At budget 0.25, oracle-head, which knows the future and only evicts, keeps more than "
        "99.99%: 1.50 percentage points more than arborkv."
    )


def test_ties_are_not_one_winner():
    replay = result(policies=("full", "random", "h2o"), budgets=("0.25",))
    same = [replace(e, attention_kept=0.5) for e in replay.episodes if e.policy != "full"]
    assert (
        "random at budget 0.25, like 1 more, comes nearest with 50.0%"
        in summarise(aggregate(same))[0]
    )
