"""Changed assumptions where runs are too short to tell, and the chart that shows them together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arborsim.products.plan.results import CandidateResult
from arborsim.products.plan.sensitivity import ASSUMPTIONS, LENGTH, Assumption, Sensitivity, Variant
from arborsim.products.plan.sensitivity_page import LoadRatio, choices, ends, overview
from arborsim.products.plan.words import short_names
from tests.show.plan_synthetic import plan, sensitivities

HBM = ASSUMPTIONS[0]


def served(load: float | None, limit: str) -> CandidateResult:
    return replace(plan().candidates[9], largest=load, limited_by=limit)


def changed(
    low: tuple[float | None, str],
    base: tuple[float, str],
    high: tuple[float | None, str],
    assumption: Assumption = HBM,
) -> Sensitivity:
    """The recommended candidate with a number halved, as it is, and doubled."""
    pairs = zip((0.5, 1.0, 2.0), (low, base, high), strict=True)
    variants = tuple(Variant(factor, served(*found)) for factor, found in pairs)
    return Sensitivity(9, assumption, 80e9, variants)


TARGET, SHORT = "target", "run length"


@pytest.mark.parametrize(
    ("low", "base", "high", "expected"),
    [
        # Everything known; even what goes the wrong way is what the runs found.
        ((0.5, TARGET), (1.0, TARGET), (1.5, "throughput"), (("", 0.5), ("", 1.5))),
        ((0.5, TARGET), (1.0, TARGET), (0.9, TARGET), (("", 0.5), ("", 0.9))),
        # A short run on the changed side, on the other side, on both.
        ((0.5, TARGET), (1.0, TARGET), (1.5, SHORT), (("", 0.5), ("at least", 1.5))),
        ((0.5, TARGET), (1.0, SHORT), (1.5, TARGET), (("at most", 0.5), ("at most", 1.5))),
        ((0.5, SHORT), (1.0, SHORT), (1.5, SHORT),
         (("open", 0.5), ("open", 1.5))),
        # More memory carries "at least 90 %": that tells nothing, and it looks like less.
        ((0.5, SHORT), (1.0, TARGET), (0.9, SHORT), (("at least", 0.5), ("open", 0.9))),
        ((1.2, TARGET), (1.0, SHORT), (1.5, TARGET), (("open", 1.2), ("at most", 1.5))),
        # Nothing is nothing.
        ((None, ""), (1.0, SHORT), (1.5, SHORT), (("", 0.0), ("open", 1.5))),
    ],
)  # fmt: skip
def test_what_short_runs_say_about_a_ratio(
    low: tuple[float | None, str],
    base: tuple[float, str],
    high: tuple[float | None, str],
    expected: tuple[tuple[str, float], tuple[str, float]],
) -> None:
    found = ends(changed(low, base, high))
    assert found == tuple(
        LoadRatio(factor, pytest.approx(ratio), bound)
        for factor, (bound, ratio) in zip((0.5, 2.0), expected, strict=True)
    )


def test_longer_searches_are_expected_to_carry_less() -> None:
    found = ends(changed((1.5, SHORT), (1.0, TARGET), (0.5, SHORT), LENGTH))
    assert [end.bound for end in found] == ["at least", "at least"]
    found = ends(changed((0.9, SHORT), (1.0, TARGET), (1.1, SHORT), LENGTH))
    assert [end.bound for end in found] == ["open"] * 2


def test_the_chart_ranks_by_what_is_known_and_hatches_bounds() -> None:
    bandwidth, compute = ASSUMPTIONS[1:3]
    found = [
        changed((0.1, SHORT), (1.0, SHORT), (9.0, SHORT)),  # nothing known, whatever its size
        changed((0.9, TARGET), (1.0, TARGET), (1.1, TARGET), bandwidth),
        changed((0.3, TARGET), (1.0, TARGET), (3.0, SHORT), compute),
    ]
    result = plan()
    figure, reading = overview(result, found)
    assert figure is not None
    assert figure["layout"]["yaxis"]["ticktext"] == ["HBM size", "Compute", "HBM bandwidth"]
    names = {each["name"]: each for each in figure["data"]}
    assert set(names) == {"number × 0.5", "number × 2", "number × 2 (at least)"}
    hatched = names["number × 2 (at least)"]
    assert hatched["marker"]["pattern"]["shape"] == "/"
    assert (hatched["y"], hatched["x"]) == ([1], [200.0])
    assert hatched["customdata"] == ["Compute × 2: at least 300%"]
    assert "pattern" not in names["number × 2"]["marker"]
    assert 0 not in [place for each in figure["data"] for place in each["y"]]
    assert "Hatched bars are bounds" in reading
    open_ones = "show no difference for sure for HBM size × 0.5 and HBM size × 2"
    assert f"Runs of 120 searches {open_ones}" in reading
    assert overview(result, found[1:2])[1] == ""


def test_what_stands_at_the_unchanged_number_says_that_it_is_one_short_run() -> None:
    result = plan()
    for each in choices(result, sensitivities(result)):
        unchanged = each.labels[1].startswith("× 1") and not each.labels[1].startswith("× 1.")
        said = unchanged and not each.labels[0].startswith("Price")
        assert ("one run of 120 searches" in each.note) == said
        assert ("3 runs of 1,000 and takes the smallest load" in each.note) == said
    same = replace(result, runs=1, searches=100)
    assert not any("one run" in each.note for each in choices(same, sensitivities(same)))


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("target", "the latency target limits the load (HBM space is busiest)"),
        ("throughput", "HBM space runs out first"),
        (SHORT, "runs of so few searches show no limit (busiest: HBM space)"),
    ],
)
def test_a_number_that_changes_nothing_says_why(limit: str, why: str) -> None:
    still = changed((1.0, limit), (1.0, limit), (1.0, limit))
    name = short_names([still.variants[0].result])[9]
    for each in choices(plan(), [still])[:3]:
        assert f"HBM size changes nothing for {name}: {why}." in each.note
    found = choices(plan(), [changed((0.5, limit), (1.0, limit), (1.5, limit))])
    assert not any("changes nothing" in each.note for each in found)


def test_what_nothing_moves_over_has_curves_and_no_bar() -> None:
    pcie = ASSUMPTIONS[3]
    still = changed((1.0, TARGET), (1.0, TARGET), (1.0, TARGET), pcie)
    idle = replace(still, idle="nothing moves over PCIe")
    found = [changed((0.5, TARGET), (1.0, TARGET), (1.5, TARGET)), idle]
    figure, note = overview(plan(), found)
    assert figure is not None
    assert figure["layout"]["yaxis"]["ticktext"] == ["HBM size"]
    assert note == "PCIe bandwidth is left out: nothing moves over PCIe."
    drawn = [each for each in choices(plan(), found) if each.labels[0] == "PCIe bandwidth"]
    assert len(drawn) == 3
    assert all("nothing moves over PCIe." in each.note for each in drawn)
