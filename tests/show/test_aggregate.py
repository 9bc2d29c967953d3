"""Rows: sums, peaks, weights and ratios, checked against hand-made searches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from arborsim.core.errors import ResultError
from arborsim.core.measurements import Measurements, TimeSplit
from arborsim.core.units import quantity, scale_for
from arborsim.play.results import EpisodeResult, aggregate
from tests.show.synthetic import POLICIES, result


def search(
    policy: str, episode: int, peak: int, tokens: int, seconds: float, kept: float, budget="0.5"
) -> EpisodeResult:
    measured = Measurements(
        prompt_tokens=10,
        generated_tokens=tokens,
        peak_hbm_kv_bytes=peak,
        to_ddr_bytes=3,
        from_ddr_bytes=4,
        time=TimeSplit(prefill_s=0.25 * seconds, decode_s=0.5 * seconds, policy_s=0.25 * seconds),
    )
    return EpisodeResult("a.parquet", episode, policy, budget, 100, measured, kept)


@pytest.fixture
def rows():
    return aggregate(
        [
            search("h2o", 0, 40, 100, 2.0, 0.9),
            search("full", 0, 80, 100, 1.0, 1.0, "any"),
            search("h2o", 1, 60, 300, 6.0, 0.5),
            search("full", 1, 120, 300, 3.0, 1.0, "any"),
        ]
    )


def test_peaks_are_the_largest_and_the_rest_is_summed(rows):
    row = rows[1]
    assert (row.policy, row.searches, row.prompt_tokens, row.generated_tokens) == (
        "h2o",
        2,
        20,
        400,
    )
    assert (row.peak_hbm_kv_bytes, row.mean_peak_hbm_kv_bytes, row.moved_bytes) == (60, 50.0, 14)
    assert row.time.total_s == pytest.approx(8.0)
    assert row.model_s == pytest.approx(6.0)
    assert row.tokens_per_s == pytest.approx(50.0)


def test_attention_is_weighted_by_generated_tokens(rows):
    assert rows[1].attention_kept == pytest.approx((100 * 0.9 + 300 * 0.5) / 400)


def test_unknown_attention_of_one_search_leaves_the_others_to_speak():
    row = aggregate([search("h2o", 0, 1, 100, 1.0, math.nan), search("h2o", 1, 1, 50, 1.0, 0.7)])[0]
    assert row.attention_kept == pytest.approx(0.7)


def test_ratios_are_against_full_on_the_same_trace(rows):
    full, row = rows
    assert full.is_baseline
    assert (full.relative.peak_hbm, full.relative.time) == (1.0, 1.0)
    assert row.relative.peak_hbm == 0.5
    assert row.relative.time == pytest.approx(2.0)
    assert row.relative.tokens_per_s == pytest.approx(0.5)


def test_without_full_there_are_no_ratios():
    (row,) = aggregate([search("h2o", 0, 40, 100, 2.0, 0.9)])
    assert math.isnan(row.relative.peak_hbm)
    assert math.isnan(row.relative.time)


def test_full_leads_then_budgets_then_policies_as_given():
    rows = aggregate(result(traces=("b", "a")).episodes)
    names = [name for name in POLICIES if name != "full"]
    of_b = [(row.policy, row.budget) for row in rows if row.trace == "b"]
    assert [row.trace for row in rows] == ["b"] * 15 + ["a"] * 15
    assert of_b == [("full", "any"), *((n, "0.25") for n in names), *((n, "0.5") for n in names)]


@pytest.mark.parametrize(
    ("kind", "values", "unit", "shown"),
    [
        ("bytes", [600.7e6, 1.5e6], "MB", ["600.7", "1.5"]),
        ("bytes", [2.5e9, 1e6], "GB", ["2.50", "<0.01"]),
        ("bytes", [999, 0], "B", ["999", "-"]),
        ("tokens", [4252, 12], "tok", ["4,252", "12"]),
        ("tokens", [34_567, 120], "k tok", ["34.57", "0.12"]),
        ("seconds", [0.0123, 0.004], "ms", ["12.30", "4.00"]),
        ("percent", [0.25, 1.0, 0.9999], "%", ["25.0", "100.0", ">99.9"]),
        ("factor", [1.6975, math.nan], "x", ["1.70", "n/a"]),
    ],
)
def test_a_column_has_one_decimal_unit(kind, values, unit, shown):
    scale = scale_for(kind, values)
    assert scale.unit == unit
    assert [scale.show(value) for value in values] == shown


def test_quantities_in_sentences():
    assert quantity("bytes", 1.234e9) == "1.23 GB"
    assert quantity("seconds", 95.42) == "95.4 s"
    assert quantity("bytes", 0) == "0 B"
    assert quantity("rate", math.nan) == "unknown"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attention_kept": -203.26}, "attention kept is -203.26, not between 0 and 1"),
        ({"attention_kept": 1.00001}, "attention kept is 1.00001, not between 0 and 1"),
        ({"peak_ddr_bytes": -1}, "peak_ddr_bytes is -1, below 0"),
        ({"hbm_byte_seconds": -2.5}, "hbm_byte_seconds is -2.5, below 0"),
        ({"time": TimeSplit(decode_s=-0.5)}, "decode_s is -0.5, below 0"),
        ({"time": TimeSplit(prefill_s=math.inf)}, "prefill_s is inf"),
        ({"hbm_byte_seconds": math.nan}, "hbm_byte_seconds is nan"),
        ({"iterations": 101}, "iterations is 101, above 100"),
        ({"peak_hbm_kv_tokens": 10**6}, "peak_hbm_kv_tokens is 1e+06, above "),
        ({"evicted_tokens": 1e6}, "evicted_tokens less rehydrated_tokens is 1e+06, above "),
        # 100 tokens in 80 iterations: at most 21 in one of them
        ({"peak_hbm_kv_tokens": 122}, "122 tokens in HBM, although the policy keeps to 100"),
    ],
)
def test_figures_that_no_search_can_have_are_refused(changed, said):
    good = search("h2o", 3, 40, 100, 2.0, 0.9)
    figures = {"prompt_tokens": 40, "iterations": 80, "peak_hbm_kv_tokens": 121}
    good = replace(good, measured=replace(good.measured, **figures))
    own = {name: value for name, value in changed.items() if name != "attention_kept"}
    kept = changed.get("attention_kept", 0.9)
    with pytest.raises(ResultError) as caught:
        replace(good, measured=replace(good.measured, **own), attention_kept=kept).simulated()
    assert str(caught.value).startswith(f"a.parquet, episode 3, h2o at budget 0.5: {said}")
    assert "\n" not in str(caught.value)


def test_rounding_unknown_figures_and_policies_without_bounds_are_not_refused():
    good = search("h2o", 3, 40, 100, 2.0, 1 + 1e-9)
    replace(good, attention_kept=math.nan)
    replace(good, measured=replace(good.measured, time=TimeSplit(hidden_transfer_s=-1e-12)))
    peak = replace(good.measured, prompt_tokens=50, iterations=100, peak_hbm_kv_tokens=130)
    replace(good, bounded=False, measured=peak).simulated()
    replace(good, measured=replace(peak, prompt_tokens=130)).simulated()
    live = replace(good, measured=peak)  # tokens on their way out count as well
    with pytest.raises(ResultError):
        live.simulated()


def test_a_new_counter_is_a_figure_of_rows_without_a_field_of_its_own():
    """A column reads it by ``counters.NAME``: the largest of peaks, the sum of all others."""
    first, second, *_ = result(policies=("full",)).episodes
    pair = [
        replace(each, measured=replace(each.measured, peak_staging_bytes=bytes_))
        for each, bytes_ in ((first, 3), (second, 5))
    ]
    (row,) = aggregate(pair)
    assert row.counters["peak_staging_bytes"] == 5
    assert not set(row.counters) & set(vars(row))
