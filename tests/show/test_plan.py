"""The page of a plan as text, and what its figures and files hold."""

from __future__ import annotations

import csv
import io
import itertools
import json
import pickle
import re
from dataclasses import replace

import pandas as pd
import pytest
from rich.console import Console

from arborsim.core.errors import UsageError
from arborsim.core.tables import csv_text
from arborsim.products.plan import figures as plan_figures
from arborsim.products.plan import pareto as plan_pareto
from arborsim.products.plan import tables as plan_tables
from arborsim.products.plan.page import PlanReport, report_of
from arborsim.products.plan.recommend import Demanded, recommend
from arborsim.products.plan.results import CandidateResult, Recommendation, Slice
from arborsim.products.plan.sensitivity_page import choices, overview
from arborsim.products.plan.statistics import Estimate
from arborsim.products.plan.tables import tables
from arborsim.products.plan.words import money, short_names
from arborsim.report.report import html, write
from arborsim.report.text import print_report
from arborsim.report.words import digits, sentences_of
from tests.plan.make import small_plan
from tests.show.plan_synthetic import plan, sensitivities
from tests.show.test_html import EVIL, Page


def everywhere_evil():
    """A plan in which every text from a file is hostile."""
    base = plan(name=EVIL)
    rows = tuple(
        replace(each, policy=f"{each.policy}{EVIL}", hardware=f"{each.hardware}{EVIL}",
                reason=each.reason and EVIL)
        for each in base.candidates
    )  # fmt: skip
    evil = replace(
        base, candidates=rows, unit="searches/s", currency=EVIL, notes=(EVIL,), assumed=(EVIL,),
        settings={EVIL: EVIL, "model": EVIL},
        recommendation=replace(base.recommendation, text=EVIL, unknown=(EVIL,)),
    )  # fmt: skip
    found = [
        replace(each, variants=tuple(
            replace(v, result=replace(v.result, policy=EVIL, reason=EVIL)) for v in each.variants
        ))
        for each in sensitivities(base)
    ]  # fmt: skip
    return PlanReport(evil, tuple(found), EVIL)


def render(report: PlanReport) -> str:
    return html(report_of(report))


def data_of(page: str) -> dict:
    """The JSON that the page's scripts read."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def part(page: str, name: str) -> str:
    """The table of that name."""
    found = re.search(f'<table id="{name}"[^>]*>.*?</table>', page, re.S)
    assert found is not None
    return found[0]


def rows_of(frame: pd.DataFrame) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(frame))))


def test_the_same_plan_gives_the_same_bytes_and_no_address() -> None:
    report = PlanReport(plan(), tuple(sensitivities(plan())))
    page = render(report)
    assert page == render(PlanReport(plan(), tuple(sensitivities(plan()))))
    ours = page[: page.index('<script type="application/json"')]
    assert "http" not in ours.replace("http-equiv", "")
    assert "default-src 'none'" in ours


def test_hostile_texts_stay_text() -> None:
    page = Page(render(everywhere_evil()))
    assert not page.open
    assert page.scripts == 3
    assert not [a for a in page.attributes if a[0] == "img" or a[1].startswith("on")]
    assert page.text.count(EVIL) > 40
    data = json.loads(page.data)
    figures = data["figures"]
    assert len(figures) == 10
    drawn = [each["figure"] for choices in figures.values() for each in choices]
    assert "<img" not in json.dumps(drawn)  # Plotly reads markup in labels


def test_the_answer_comes_first_and_names_both_candidates() -> None:
    result = plan()
    page = render(PlanReport(result))
    main = page[page.index("<main>") :]
    assert main.index(result.recommendation.text[:40]) < main.index('id="pareto"')
    for number in (result.recommendation.candidate, result.recommendation.alternative):
        assert result.candidates[number].name in main[: main.index('id="pareto"')]
    for unknown in result.recommendation.unknown:
        assert unknown in main[: main.index('id="pareto"')]
    assert "210 s at the 95th percentile" in main  # why a candidate is not in the table


def test_a_plan_without_prices_or_attention_says_so() -> None:
    page = render(PlanReport(plan(attention=False, prices=False)))
    assert "no price given" in page
    assert "not known: 60% of the tokens are evicted" in page
    titles = [each["labels"] for each in data_of(page)["figures"]["pareto"]]
    assert titles[0][0] == "Tokens never evicted against load"


@pytest.mark.parametrize("width", [80, 160])
def test_a_share_that_is_not_known_per_head_is_no_number(width: int) -> None:
    base = plan()
    rows = []
    for row in base.candidates:
        quality = row.quality
        if quality is not None and not quality.exact and row.policy == "streaming-llm":
            quality = replace(quality, attention_kept=None, kept_note="not known per head")
        rows.append(replace(row, quality=quality))
    result = replace(base, candidates=tuple(rows))
    assert "not known per head" in render(PlanReport(result))
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_report(report_of(PlanReport(result)), console, notes=True)
    assert isinstance(console.file, io.StringIO)
    assert {"not known", "per head"} <= set(re.split(r"\s\s+", console.file.getvalue()))
    assert max(map(len, console.file.getvalue().splitlines())) <= width
    (text,) = [each for each in recommend(result, Demanded()).unknown if "per layer" in each]
    assert "--capture qkv" in text
    assert not any("Generated searches" in each for each in recommend(result, Demanded()).unknown)


def test_texts_of_files_do_not_steer_the_terminal() -> None:
    steering = "US\x1b]0;pwn\x07\x1b[31mD"
    console = Console(file=io.StringIO(), width=200, highlight=False)
    evil = replace(everywhere_evil().result, currency=steering, notes=(steering,))
    print_report(report_of(PlanReport(evil)), console)
    assert isinstance(console.file, io.StringIO)
    assert "\x1b" not in console.file.getvalue()
    assert "\\x1b" in console.file.getvalue()


def test_no_candidate_meets_the_target() -> None:
    base = plan()
    lost = tuple(each for each in base.candidates if each.status != "met")
    none = replace(
        base, candidates=lost, timeline=None,
        recommendation=Recommendation(None, "No candidate meets the target of 60 s."),
    )  # fmt: skip
    page = render(PlanReport(none))
    data = data_of(page)
    assert "No candidate meets the target of 60 s." in page
    assert data["figures"] == {}


def test_an_interrupted_plan_says_so_and_candidates_keep_their_numbers() -> None:
    base = plan()
    part = replace(base, complete=False, candidates=base.candidates[3:12])
    page = render(PlanReport(part, tuple(sensitivities(base))))
    assert "The plan was interrupted." in page
    assert base.candidates[9].name in page
    with pytest.raises(UsageError, match="nothing to report"):
        write(report_of(PlanReport(replace(base, candidates=()))), "unused.html")


def test_a_path_that_cannot_be_written(tmp_path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*plan\.html: No such file"):
        write(report_of(PlanReport(plan())), tmp_path / "missing" / "plan.html")


def test_efficient_candidates_are_those_that_no_other_dominates() -> None:
    result = plan()
    known = plan_pareto.measures(result)
    assert [measure.title for measure in known] == ["cost", "attention kept", "latency"]
    best = plan_pareto.efficient(result.met(), known)

    def better(a, b) -> bool:
        """Slowly: whether a is as good as b in everything, and better in something."""
        signs = [-1 if measure.higher else 1 for measure in known]
        pairs = [(s * m.value(a), s * m.value(b)) for s, m in zip(signs, known, strict=True)]
        return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)

    rows = result.met()
    assert {row.number for row in best} == {
        row.number for row in rows if not any(better(other, row) for other in rows)
    }
    (first, *_), by, _ = plan_pareto.figures(result)
    assert len(first.texts) == len(best)
    assert by == "cost, attention kept and latency"


def test_markers_that_would_cover_each_other_are_one_with_all_their_numbers() -> None:
    base = plan()
    twin, near = base.candidates[9], base.candidates[3]
    assert near.quality is not None
    assert twin.at_stated is not None
    # One candidate equals number 9, another one differs by a hair of attention.
    quality = replace(near.quality, attention_kept=0.9001)
    slower = replace(
        twin.at_stated,
        at_percentile=replace(
            twin.at_stated.at_percentile, value=1.0001 * twin.at_stated.at_percentile.value
        ),
    )
    same = replace(twin, number=30, policy="twin")
    hair = replace(twin, number=31, policy="hair", quality=quality, at_stated=slower)
    result = replace(base, candidates=(*base.candidates, same, hair))
    found, _, _ = plan_pareto.figures(result)
    texts = {text.split(": ")[0]: number for number, text in enumerate(found[0].texts, 1)}
    both = f"{twin.name}, {same.name}"
    assert both in texts
    for plot in found:
        points = plot.figure["data"][-1]
        labels = [label for label in points["text"] if str(texts[both]) in label.split(", ")]
        (label,) = labels
        assert str(texts[hair.name]) in label.split(", ")
        place = points["text"].index(label)
        assert points["textposition"][place] == "top center"
        assert hair.name in points["customdata"][place].split("<br>")
        numbers = [n for text in points["text"] for n in text.split(", ")]
        assert sorted(map(int, numbers)) == list(range(1, len(found[0].texts) + 1))


def test_colours_are_gpus_and_shapes_are_policies_of_efficient_ones_too() -> None:
    result = plan()
    for plot in plan_pareto.figures(result)[0]:
        *others, best = plot.figure["data"]
        gpus, policies = others[:3], others[3:]
        assert [each["name"] for each in gpus] == ["RTX 4090", "H100", "H200"]
        assert [each["name"] for each in policies] == [
            "full", "hierarchy", "arborkv", "streaming-llm"]  # fmt: skip
        paint = {each["name"]: each["marker"]["color"] for each in gpus}
        shape = {each["name"]: each["marker"]["symbol"] for each in policies}
        assert len(set(paint.values())) == 3
        assert len(set(shape.values())) == 4
        points = [*zip(best["customdata"], best["marker"]["color"], best["marker"]["symbol"],
                       strict=True)]  # fmt: skip
        for gpu in gpus:
            points += [(name, gpu["marker"]["color"], symbol) for name, symbol in zip(
                gpu["customdata"], gpu["marker"]["symbol"], strict=True)]  # fmt: skip
        for names, colour, symbol in points:
            name = names.split("<br>")[0]
            assert colour == paint[name.split(" on ")[-1]]
            assert symbol == shape[name.split()[0]]


def test_costs_are_compared_at_the_stated_load() -> None:
    """Two machines that are busy all the time, or three that idle: the load decides."""
    stated, free = plan(), replace(plan(), stated_load=None)
    free = replace(free, candidates=tuple(replace(row, fleet=None) for row in free.candidates))
    row = stated.candidates[9]
    assert row.fleet is not None
    assert row.at_largest is not None
    fleet_cost = sum(row.fleet.cost_per_1000) / 2
    assert fleet_cost > sum(row.at_largest.cost_per_1000) / 2
    for result, cost, axis in (
        (stated, fleet_cost, "cost of 1,000 searches at 5.9 searches/s (USD)"),
        (free, sum(row.at_largest.cost_per_1000) / 2, "cost of 1,000 searches (USD)"),
    ):
        measure = plan_pareto.measures(result)[0]
        assert measure is not None
        assert (measure.value(result.candidates[9]), measure.axis) == (pytest.approx(cost), axis)
        bars = next(
            each
            for each in choices(result, sensitivities(result))
            if each.labels[0].startswith("Price") and each.labels[1].startswith("× 1 (")
        )
        assert bars.figure["data"][0]["x"][0] == pytest.approx(cost, rel=1e-4)
        page = render(PlanReport(result))
        assert ("at 5.9 searches/s</th>" in page) == (result is stated)


def test_quality_that_all_share_is_not_weighed() -> None:
    base = plan()
    full = replace(base, candidates=tuple(r for r in base.candidates if r.policy == "full"))
    found, by, _ = plan_pareto.figures(full)
    assert [plot.labels for plot in found] == [("Latency against cost",)]
    assert by == "cost and latency"
    unpriced = render(PlanReport(plan(prices=False)))
    assert "ranges of prices" not in unpriced
    assert "ranges of prices" in render(PlanReport(base))


def test_the_table_begins_with_the_recommended_row_and_has_plain_values() -> None:
    result = plan()
    page = render(PlanReport(result))
    html, usage = part(page, "comparison"), part(page, "usage")
    for each in (html, usage):
        assert each.count("<tbody>") == 1
        assert each.count("<tr>") + each.count('<tr class="chosen">') == 1 + len(result.met())
        assert each.index('<tr class="chosen">') < each.index("<tr>", each.index("<tbody>"))
    heads = [text.strip() for text in re.findall(r"<button[^>]*>([^<]*)", html)]
    assert heads[:5] == ["Policy", "Budget", "GPU", "Cost per 1,000 solved, stated load",
                         "Cost per 1,000, stated load"]  # fmt: skip
    assert "Refused per 1,000" not in usage
    assert f'data-value="{result.candidates[0].largest:.9g}"' in html
    assert html.count("★") == html.count("☆") == 1


def test_lines_begin_with_the_recommended_candidate() -> None:
    result = plan()
    rows = plan_figures.with_curves(result)
    assert [row.number for row in rows[:2]] == [9, 3]
    (search, *_) = plan_figures.against_load(result)
    assert search.figure["data"][0]["x"] == [
        float(f"{point.load:.6g}") for point in rows[0].curve]  # fmt: skip
    assert search.figure["layout"]["shapes"][0]["y0"] == 60
    first = plan_figures.saturation(result)[0].note
    assert first.startswith("At small loads the busiest part is HBM bandwidth; from ")
    assert "on, HBM space." in first


def test_parts_of_the_time_add_up_to_all_of_it() -> None:
    figure = plan_figures.time_split(plan())
    assert figure is not None
    bars = list(zip(*(each["x"] for each in figure["data"]), strict=True))
    assert [sum(bar) for bar in bars] == pytest.approx([100] * len(bars))


def test_memory_stacks_up_to_what_the_machine_holds() -> None:
    figure = plan_figures.memory(plan())
    assert figure is not None
    names = [each["name"] for each in figure["data"]]
    assert names == ["Weights", "Workspace and reserve", "KV in HBM", "KV in host memory"]
    assert figure["layout"]["shapes"][0]["y0"] == 80.0
    assert len({str(each["x"]) for each in figure["data"]}) == 1  # or they would not stack
    assert plan_figures.memory(replace(plan(), timeline=None)) is None


def test_rows_of_the_timeline_never_overlap() -> None:
    line = plan().timeline
    assert line is not None
    rows: dict[int, list[tuple[float, float]]] = {}
    for search, row in plan_figures._lanes(line.slices).items():
        own = [each for each in line.slices if each.search == search]
        rows.setdefault(row, []).append((min(s.start_s for s in own), max(s.end_s for s in own)))
    for spans in rows.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))
    assert sum(map(len, rows.values())) == 30


def test_of_a_long_timeline_the_middle_is_shown() -> None:
    base = plan()
    assert base.timeline is not None
    slices = [Slice(0.01 * i, 0.01 * i + 5, "decode", i) for i in range(8000)]
    slices += [Slice(49.0, 49.5, "up", -1, 10**9), Slice(0.5, 1.0, "down", -1, 10**9)]
    figure, note = plan_figures.timeline(
        replace(base, timeline=replace(base.timeline, slices=tuple(slices), until_s=80.0))
    )
    assert figure is not None
    assert figure["layout"]["yaxis"]["ticktext"] == ["from host"]  # "to host" is over by then
    assert figure["layout"]["xaxis"]["range"] == pytest.approx([40.0, 60.0], abs=0.01)
    rows = [row for each in figure["data"] for row in each["y"]]
    assert len(rows) <= 2500
    assert (min(rows), max(rows)) == (-2, 47)
    assert note.startswith("Shown is the time from 40.00 s to 60.")
    assert "found no row" in note


def test_every_factor_is_a_choice_and_the_curves_move() -> None:
    result = plan()
    made_elsewhere = pickle.loads(pickle.dumps(sensitivities(result)))  # as worker processes do
    found = choices(result, made_elsewhere)
    titles = list(dict.fromkeys(each.labels[0] for each in found))
    assert titles == ["HBM size", "HBM bandwidth", "Compute", "PCIe bandwidth",
                      "Length of searches", "Price of H100"]  # fmt: skip
    memory = [each for each in found if each.labels[0] == "HBM size"]
    assert [each.labels[1].split(" (")[0] for each in memory] == [
        "× 1", "× 0.5", "× 0.75", "× 1.5", "× 2"]  # fmt: skip
    solid = [[line for line in each.figure["data"] if line.get("showlegend")]
             for each in memory]  # fmt: skip
    assert len({str(lines[0]["x"]) for lines in solid}) == 5
    assert memory[1].texts[1] == "RTX 4090: no room for keys and values"
    assert len({str(each.figure["layout"]["xaxis"]["range"]) for each in memory}) == 1
    price = [each for each in found if each.labels[0] == "Price of H100"]
    assert [len(each.texts) for each in (*memory, *price)] == [2] * 5 + [3] * 7
    usual, dear = price[0].note, price[-1].note
    assert dear == "The cheapest of them is RTX 4090, which is not what is recommended."
    assert usual != dear
    assert choices(result, []) == []


def test_the_overview_shows_what_matters_most_on_top() -> None:
    figure, note = overview(plan(), sensitivities(plan()))
    assert note == ""
    assert figure is not None
    assert figure["layout"]["yaxis"]["ticktext"][-1] == "Length of searches"
    assert figure["layout"]["yaxis"]["ticktext"][0] == "PCIe bandwidth"
    halved, doubled = figure["data"]
    assert halved["x"][-1] == pytest.approx(100 * (2**1.3 - 1), abs=0.01)
    assert doubled["x"][-1] == pytest.approx(100 * (2**-1.3 - 1), abs=0.01)


def test_files_hold_every_candidate_and_load() -> None:
    result = plan()
    everything = rows_of(plan_tables.candidates(result))
    assert len(everything) == len(result.candidates)
    assert float(everything[9]["largest"]) == result.candidates[9].largest
    assert everything[-1]["largest"] == ""
    assert everything[-1]["reason"] == result.candidates[-1].reason
    curves = rows_of(plan_tables.curves(result))
    assert len(curves) == sum(len(row.curve) for row in result.candidates)
    changed = rows_of(plan_tables.sensitivity(sensitivities(result)))
    assert len(changed) == 2 * 5 * 5
    assert {row["number"] for row in changed} == {"9", "3"}


@pytest.mark.parametrize("text", ["=1+1", "+1", "@cell", "-2"])
def test_no_cell_is_a_formula(text: str) -> None:
    (row,) = rows_of(pd.DataFrame([{"policy": text, "budget": "-"}]))
    assert row == {"policy": f"'{text}", "budget": "-"}


def test_a_real_plan_has_a_page() -> None:
    page = render(PlanReport(small_plan()))
    shown = page.replace("&#39;", "'")
    assert all(each in shown for each in sentences_of(small_plan().recommendation.text))
    assert 'href="#about-runs-out-first"' in page
    assert 'id="about-runs-out-first"' in page
    text = data_of(page)["csv"]["arborsim-plan-candidates.csv"]
    assert len(list(csv.DictReader(io.StringIO(text)))) == 4


def test_numbers_in_words() -> None:
    assert [digits(v) for v in (0.01234, 1.2, 1234.5, 0.0, float("inf"))] == [
        "0.0123", "1.20", "1,234", "0", "unlimited"]  # fmt: skip
    assert money((1.5, 1.5), "EUR") == "1.5 EUR"
    assert money((1.5, 2.0), "EUR") == "1.5 to 2 EUR"
    rows = plan().candidates
    assert short_names(rows[2:4]) == {2: "arborkv at 0.5", 3: "arborkv at 0.25"}
    assert short_names([rows[2], rows[9]]) == {2: "budget 0.5, RTX 4090", 9: "budget 0.25, H100"}
    assert short_names([rows[0], rows[6]]) == {0: "RTX 4090", 6: "H100"}
    assert short_names(rows[:1]) == {0: "full"}


def with_beyond(limited_by: str, meets: bool) -> CandidateResult:
    """The recommended candidate with one point above its largest load."""
    row = plan().candidates[9]
    assert row.at_largest is not None
    assert row.largest is not None
    above = replace(row.at_largest, load=1.1 * row.largest, meets=meets)
    return replace(row, limited_by=limited_by, curve=(row.at_largest, above))


@pytest.mark.parametrize(
    ("limited_by", "meets", "shape", "said"),
    [
        ("target", False, "x", "latency target missed"),
        ("throughput", False, "x", "latency target missed"),
        ("throughput", True, "triangle-up", "searches arrive faster than they end"),
        ("run length", True, "diamond-open", "runs too short to tell"),
        ("target", True, "square-open", "met, but a smaller load was missed"),
    ],
)
def test_points_beyond_the_largest_load_say_why(
    limited_by: str, meets: bool, shape: str, said: str
) -> None:
    row = with_beyond(limited_by, meets)
    line = plan_figures.curve(row, lambda p: p.at_percentile.value, "x", 0, "searches/s")
    assert line["marker"]["symbol"] == ["circle", shape]
    assert [texts[0] for texts in line["customdata"]] == ["target met", said]
    assert row.at_largest is not None
    assert line["customdata"][0][2] == f"{row.at_largest.served_per_s.value:.3g}"
    (entry,) = plan_figures.marks([row])
    assert (entry["name"], entry["marker"]["symbol"]) == (said, shape)


def test_what_stops_more_load_is_said_row_by_row() -> None:
    base = plan()
    reasons = ("target", "throughput", "run length")
    rows = [
        replace(
            row, limited_by=reasons[i % 3], at_largest=replace(row.at_largest, saturated="memory")
        )
        for i, row in enumerate(base.candidates[:6])
        if row.at_largest is not None
    ]
    result = replace(base, candidates=tuple(rows), recommendation=Recommendation(None, ""))
    html = part(render(PlanReport(replace(result, timeline=None))), "comparison")
    assert html.count('data-value="HBM bandwidth"') == 4
    assert html.count('data-value="not seen; busiest: HBM bandwidth"') == 2
    for text in ("the latency target", "searches arriving faster than they end",
                 "the length of the runs: longer ones can show more or less"):  # fmt: skip
        assert html.count(f'data-value="{text}"') == 2
    terms = {name: about for each in tables(result) for name, about in each.definitions().items()}
    assert "missed it" not in terms["Largest load, offered"]
    assert {"Served there", "Runs out first", "More load is stopped by"} <= set(terms)


def test_loads_are_offered_and_what_was_served_is_next_to_them() -> None:
    base = plan()
    chosen = base.candidates[9]
    assert chosen.at_largest is not None
    less = replace(
        chosen, at_largest=replace(chosen.at_largest, served_per_s=Estimate(1.25, 1.2, 1.3, 3))
    )
    result = replace(base, candidates=(*base.candidates[:9], less, *base.candidates[10:]))
    page = render(PlanReport(result))
    assert "Largest load offered to one machine" in page
    assert "1.25 searches/s in runs of 1,000 searches, which begin empty" in page
    assert 'data-value="1.25"' in part(page, "usage")
    axes = [plot.figure["layout"]["xaxis"]["title"]["text"]
            for plot in plan_figures.against_load(result)]  # fmt: skip
    assert set(axes) == {"load offered to one machine (searches/s)"}
    assert "Offered to one machine" in page[page.index("Columns of the files") :]


def test_a_cost_comes_with_its_load() -> None:
    result = plan()
    chosen = result.candidates[9]
    assert chosen.at_largest is not None
    page = render(PlanReport(result))
    there = f"at {digits(chosen.at_largest.load)} searches/s"
    shown = money(chosen.at_largest.cost_per_1000, "USD")
    assert f'data-value="{shown} {there}"' in page
    text = small_plan().recommendation.text
    assert text.count("per 1,000 searches at ") == text.count("per 1,000 searches") == 1
    assert text.count("per 1,000 solved searches at 20/s") == 1


def test_space_and_time_stand_together_with_what_each_means() -> None:
    page = render(PlanReport(plan()))
    chosen = plan().candidates[9]
    assert chosen.at_largest is not None
    used = chosen.at_largest.used
    assert chosen.at_largest.saturated == "hbm"
    assert (
        f"HBM space (on average {used.hbm:.0%} held, but full at peaks), which limits how many "
        f"searches have a place; HBM bandwidth is busy {used.memory:.0%} of the time"
    ) in page


def test_nothing_is_said_to_run_out_where_runs_are_too_short() -> None:
    base = plan()
    chosen = base.candidates[9]
    assert chosen.at_largest is not None
    busy = replace(chosen, at_largest=replace(chosen.at_largest, saturated="memory"))
    share = f"HBM bandwidth (busy {chosen.at_largest.used.memory:.0%} of the time)"
    for limit, words in (
        ("target", share),
        ("run length", "not seen in runs of this length; busiest is HBM bandwidth ("),
    ):
        row = replace(busy, limited_by=limit)
        result = replace(base, candidates=(*base.candidates[:9], row, *base.candidates[10:]))
        page = render(PlanReport(result))
        assert words in page
        assert ("not seen in runs of this length" in page) == (limit == "run length")


def test_changed_assumptions_have_units() -> None:
    rows = rows_of(plan_tables.sensitivity(sensitivities(plan())))
    units = {row["assumption"]: row["unit"] for row in rows}
    assert units == {"HBM size": "bytes", "HBM bandwidth": "bytes/s", "Compute": "FLOP/s",
                     "PCIe bandwidth": "bytes/s", "Length of searches": ""}  # fmt: skip


def test_loads_that_short_runs_bound_from_below_are_called_so() -> None:
    result = plan()
    found = []
    for each in sensitivities(result):
        longest = replace(each.variants[-1].result, limited_by="run length")
        last = replace(each.variants[-1], result=longest)
        found.append(replace(each, variants=(*each.variants[:-1], last)))
    (*_, before, last) = (e for e in choices(result, found) if e.labels[0] == "HBM size")
    assert " searches/s or more, " in last.texts[0]
    assert " searches/s, " in before.texts[0]
    figure, _ = overview(result, found)
    assert figure is not None
    halved, doubled = figure["data"]
    assert all(" × 2: at least " in text for text in doubled["customdata"])
    assert not any("at least" in text for text in halved["customdata"])
    note = "Loads \u201cor more\u201d are what runs of this length can show"
    assert note in render(PlanReport(result, tuple(found)))
    assert note not in render(PlanReport(result, tuple(sensitivities(result))))
