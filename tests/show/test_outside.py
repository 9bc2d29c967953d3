"""Right answers that others counted, beside replays of the same policies."""

from __future__ import annotations

from arborsim.products.replay.outside import counted_by_others, outside_answers


def test_every_arm_has_full_retention_of_its_own_run_and_a_source() -> None:
    arms = outside_answers()
    assert len(arms) == 33
    assert {arm.policy for arm in arms} == {"rkv"}
    assert all("Zefan-Cai/R-KV@" in arm.source for arm in arms)
    assert all(0 < arm.full_percent <= 100 and arm.full_output_tokens > 0 for arm in arms)
    aime = [a for a in arms if (a.model, a.dataset) == ("deepseek-r1-distill-qwen-7b", "aime24")]
    assert [(a.budget_tokens, a.right_percent) for a in aime] == [
        (512, 6.7), (1024, 16.7), (2048, 40.0),
    ]  # fmt: skip
    assert {a.full_percent for a in aime} == {53.3}


def test_lines_say_n_source_and_intervals() -> None:
    (line,) = (
        each
        for each in counted_by_others({"rkv", "h2o"})
        if "deepseek-r1-distill-qwen-7b, aime24" in each
    )
    assert "n 30: full retention 53.3% (95% interval 34.3 to 71.7)" in line
    assert "512 tokens: 6.7% (95% interval 0.8 to 22.1), answers 1.47 times as long" in line
    assert "From Zefan-Cai/R-KV@8e1c06cd" in line
    assert not list(counted_by_others({"h2o"}))
