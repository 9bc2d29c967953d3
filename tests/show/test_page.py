"""The page in a real browser: it draws, it reacts, it asks the network for nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arborsim.products.replay.report import report_of
from arborsim.report.report import write
from tests.show.synthetic import OTHERS, POLICIES, result
from tests.show.test_html import EVIL, evil

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write(report_of(result(traces=("tree.parquet", "linear.parquet"))), path)
    return path


@pytest.fixture
def opened(browser):
    """Open a file; at the end nothing may have been logged or fetched."""
    contexts, complaints = [], []

    def open_page(path: Path, width: int = 1400, height: int = 900, scheme: str = "light") -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(f"request {request.url}")
                if not request.url.startswith(("file:", "blob:", "data:")) else None)  # fmt: skip
        page.goto(path.as_uri())
        page.wait_for_selector("#tree-box svg")
        page.wait_for_selector("#memory .main-svg")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def widths(page: Any) -> list[str]:
    """Widths of all tier rectangles: what the tree shows."""
    return page.eval_on_selector_all(
        "#tree-box .node rect", "all => all.map(one => one.getAttribute('width'))"
    )


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(1400, 900, "light"), (1400, 900, "dark"), (390, 844, "light"), (390, 844, "dark")],
)
def test_it_draws_and_fits(opened, report, tmp_path, width, height, scheme):
    page = opened(report, width, height, scheme)
    page.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("pareto", "time", "memory", "map"):
        assert page.locator(f"#{name} .main-svg").count() >= 1
        box = page.locator(f"#{name}").bounding_box()
        svg = page.locator(f"#{name} .main-svg").first.bounding_box()
        assert svg["width"] <= box["width"] + 1
    assert page.locator("#pareto .scatterlayer .trace").count() > 5
    assert page.locator("#pareto-texts li").count() >= 1
    assert page.locator("#heat .yaxislayer-above text").count() == 7
    assert page.locator("#map .heatmaplayer image").count() == 1
    assert page.locator("#tree-box .node").count() > 20
    ink = page.evaluate("getComputedStyle(document.body).color")
    drawn = page.evaluate("getComputedStyle(document.querySelector('#time .xtick text')).fill")
    assert drawn == ink


def test_no_button_uploads_a_chart(opened, report):
    """plotly.js 4 offers "Share chart..." by default, which sends the data to a public server."""
    page = opened(report)
    titles = page.eval_on_selector_all(".modebar-btn", "all => all.map(one => one.dataset.title)")
    assert set(titles) == {"Download plot as a PNG", "Zoom", "Pan", "Reset axes"}


def test_the_slider_moves_the_tree(opened, report):
    page = opened(report)
    before, moment = widths(page), page.inner_text("#tree-moment")
    page.locator("#tree-slider").fill("3")
    assert page.inner_text("#tree-moment") != moment
    assert page.inner_text("#tree-moment").startswith("4/")
    assert widths(page) != before
    assert page.locator("#tree-box .node.on").count() >= 2


def test_play_runs_to_the_end(opened, report):
    page = opened(report)
    last = int(page.get_attribute("#tree-slider", "max"))
    page.locator("#tree-slider").fill(str(last - 1))
    page.click("#tree-play")
    sync_api.expect(page.locator("#tree-slider")).to_have_value(str(last))
    assert page.inner_text("#tree-play") == "Play"


def test_pickers_choose_policy_search_and_trace(opened, report):
    page = opened(report)
    # The smallest, and among equals the fastest: no answers were counted.
    assert page.eval_on_selector("#memory-policy", "s => s.value") == "random, budget 0.25"
    for cell in ("#memory-policy", "#tree-cell"):
        page.select_option(cell, "hierarchy, budget 0.25")
    layers = "#memory .scatterlayer .trace"
    assert page.locator(layers).count() == 5
    page.select_option("#memory-policy", "full")
    sync_api.expect(page.locator(layers)).to_have_count(1)
    before = widths(page)
    page.select_option("#tree-cell", "full")
    assert widths(page) != before
    page.select_option("#tree-search", "linear.parquet, search 0")
    assert page.locator("#tree-box .node").count() == 5
    assert page.eval_on_selector("#tree-cell", "s => s.value") == "full"
    tops = page.eval_on_selector_all(
        "#tree-box .frame", "all => all.map(one => one.getAttribute('y'))"
    )
    assert len(set(tops)) == 1
    ticks = page.text_content("#time")
    page.select_option("#time-trace", "linear.parquet")
    sync_api.expect(page.locator("#time")).not_to_have_text(ticks)


def test_a_figure_is_chosen_and_a_policy_highlighted(opened, report):
    page = opened(report)
    cells = page.text_content("#heat .heatmaplayer")
    page.select_option("#heat-figure", "Peak HBM")
    assert page.text_content("#heat .heatmaplayer") != cells
    assert page.inner_text("#heat-note").startswith("Peak HBM (%) by budget; less is better")
    traces = page.locator("#pareto .scatterlayer .trace").count()
    page.select_option("#pareto-highlight", "random")
    sync_api.expect(page.locator("#pareto .scatterlayer .trace")).to_have_count(traces + 1)
    page.select_option("#pareto-figure", "Time")
    assert page.eval_on_selector("#pareto-highlight", "s => s.value") == "random"
    assert "×" in page.inner_text("#pareto-texts")


def test_many_policies_are_shown_budget_by_budget(opened, tmp_path):
    replay = result(policies=(*POLICIES, *OTHERS), budgets=("0.1", "0.25", "0.5"), episodes=1)
    write(report_of(replay), tmp_path / "many.html")
    page = opened(tmp_path / "many.html", 390, 844)
    assert page.locator("#heat .yaxislayer-above text").count() == len(POLICIES) + len(OTHERS) - 1
    page.select_option("#time-budget", "0.5")
    sync_api.expect(page.locator("#time .yaxislayer-above text").nth(1)).to_contain_text("0.5")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_figure_without_data_goes_and_comes_back(opened, tmp_path):
    replay = result(traces=("a.parquet", "b.parquet"), episodes=1)
    episodes = tuple(
        replace(e, attention_kept=math.nan) if e.trace == "b.parquet" else e
        for e in replay.episodes
    )
    write(report_of(replace(replay, episodes=episodes)), tmp_path / "partly.html")
    page = opened(tmp_path / "partly.html")
    for trace, drawn in (("b.parquet", False), ("a.parquet", True), ("b.parquet", False)):
        page.select_option("#pareto-trace", trace)
        metrics = page.locator("#pareto-figure option").all_inner_texts()
        assert metrics == (["Attention kept", "Time"] if drawn else ["Time"])
        sync_api.expect(page.locator("#pareto .xaxislayer-above")).to_have_count(1)


def test_pointing_at_a_node_tells_what_it_holds(opened, report):
    page = opened(report)
    page.locator("#tree-box .node").first.hover()
    tip = page.inner_text("#tip")
    assert tip.startswith("prompt\n420 tokens, complete")
    assert "HBM: 420" in tip


def test_columns_sort_within_their_trace(opened, report):
    page = opened(report)
    first = "#comparison tbody:nth-of-type(1) tr:not(.group) > :first-child"
    as_given = page.locator(first).all_inner_texts()
    page.click("#comparison thead th:nth-child(3) button")  # attention kept, ascending
    assert page.locator(first).all_inner_texts()[0] == "random"
    page.click("#comparison thead th:nth-child(3) button")
    assert page.locator(first).all_inner_texts()[0] in ("full", "hierarchy")
    page.click("#comparison thead th:nth-child(3) button")
    assert page.locator(first).all_inner_texts() == as_given
    assert page.locator("#comparison tr.group").all_inner_texts() == [
        "tree.parquet", "linear.parquet"]  # fmt: skip


def test_the_data_can_be_downloaded(opened, report, tmp_path):
    page = opened(report)
    with page.expect_download() as download:
        page.click("#download")
    download.value.save_as(tmp_path / "data.csv")
    lines = (tmp_path / "data.csv").read_text().splitlines()
    assert lines[0].startswith("trace,episode,policy,budget")
    assert len(lines) == 1 + len(result(traces=("a", "b")).episodes)


def test_print_is_light_and_fits_the_paper(opened, report):
    page = opened(report, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    ticks = page.locator("#time .xtick text").first
    sync_api.expect(ticks).to_have_css("fill", "rgb(27, 36, 48)")
    assert page.locator("#time .main-svg").first.bounding_box()["width"] <= 660


def test_hostile_names_stay_text_everywhere(opened, tmp_path):
    write(report_of(evil()), tmp_path / "evil.html")
    page = opened(tmp_path / "evil.html")
    page.locator("#tree-slider").fill("2")
    page.locator("#tree-box .node").first.hover()
    page.locator("#time .points path").first.hover(force=True)
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0
    assert EVIL.replace("\u2028", "")[:40] in page.inner_text("#tree-moment")
    assert "</script>" in page.inner_text("#time")


def test_a_long_table_is_filtered_and_a_moment_has_an_address(opened, report):
    page = opened(report)
    rows = page.locator("#comparison tbody tr:not(.group)")
    before = rows.count()
    page.fill(".filter input", "h2o 0.25")
    shown = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(shown) < before
    assert all("h2o" in row.inner_text() for row in shown)
    page.fill("#map-find", "5")
    said = page.inner_text("#map-moment")
    assert "token 5: HBM" in said or "token 5: " in said
    address = page.get_attribute("#map-moment a", "href")
    assert "token=5" in address
    assert page.locator("#map-cells .found").count() == 1
