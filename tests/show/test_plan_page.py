"""The page of a plan in a real browser: it draws, it reacts, it asks the network for nothing."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arborsim.products.plan.page import PlanReport, report_of
from arborsim.report.report import write
from tests.show.plan_synthetic import plan, sensitivities
from tests.show.test_html import EVIL
from tests.show.test_plan import everywhere_evil

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.slow
PLOTS = ("pareto", "load", "saturation", "overview", "moved", "memory", "timeline", "time")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.html"
    write(report_of(PlanReport(plan(), tuple(sensitivities(plan())))), path)
    return path


@pytest.fixture(scope="module")
def opened(browser):
    """Open a file; at the end nothing may have been logged or fetched."""
    contexts, complaints = [], []

    def open_page(path: Path, width: int = 1280, height: int = 900, scheme: str = "light") -> Any:
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
        return page

    open_page.complaints = complaints
    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(autouse=True)
def quiet(opened):
    """No test may leave a complaint behind; pages are opened once, because they are large."""
    yield
    assert opened.complaints == []


@pytest.fixture(scope="module")
def desk(opened, report) -> Any:
    """The page at a desk; each test sets what it looks at."""
    return opened(report)


def drawn_lines(page: Any) -> list[str]:
    """Paths of the lines under the slider."""
    return page.eval_on_selector_all(
        "#moved .scatterlayer .js-line", "all => all.map(one => one.getAttribute('d'))"
    )


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_it_draws_and_fits_light_and_dark(opened, report, width, height):
    page = opened(report, width, height, "dark")
    for scheme, ink in (("dark", "rgb(231, 235, 240)"), ("light", "rgb(27, 36, 48)")):
        page.emulate_media(color_scheme=scheme)
        ticks = page.locator("#time .xtick text").first
        sync_api.expect(ticks).to_have_css("fill", ink)
        assert page.evaluate("getComputedStyle(document.body).color") == ink
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in PLOTS:
            box = page.locator(f"#{name}").bounding_box()
            svg = page.locator(f"#{name} .main-svg").first.bounding_box()
            assert svg["width"] <= box["width"] + 1
    assert page.locator("#pareto .scatterlayer .trace").count() >= 4
    assert page.locator("#timeline .barlayer .point").count() > 100


def test_a_table_fits_or_says_that_it_is_cut(opened, report):
    wide, middle = opened(report), opened(report, 700, 844)
    cut = "all => all.map(one => one.scrollWidth > one.clientWidth + 1)"
    assert not any(wide.eval_on_selector_all(".scroll", cut))
    assert wide.locator(".scroll-hint:visible").count() == 0
    for name in ("comparison", "usage"):
        box, hint = middle.locator(f".scroll:has(> #{name})"), middle.locator(
            f".scroll-hint:has(+ .scroll > #{name})")  # fmt: skip
        sync_api.expect(hint).to_be_visible()
        assert "cut" in box.get_attribute("class").split()
        box.evaluate("one => one.scrollLeft = one.scrollWidth")
        sync_api.expect(box).not_to_have_class(re.compile(r"\bcut\b"))
        if name == "comparison":
            sync_api.expect(box).to_have_class(re.compile(r"\bmore\b"))  # rows below
    wide.set_viewport_size({"width": 718, "height": 1000})
    wide.emulate_media(media="print")
    for name in ("comparison", "usage"):
        box = wide.locator(f"#{name}").bounding_box()
        assert box["x"] + box["width"] <= 719
    assert wide.locator(".scroll-hint:visible").count() == 0


def test_a_number_moves_curves_and_texts(desk):
    page = desk
    page.select_option("#moved-assumption", "HBM size")
    usual = page.inner_text("#moved-texts"), drawn_lines(page)
    assert page.input_value("#moved-number") == "× 1 (80.0 GB)"
    page.select_option("#moved-number", "× 2 (160 GB)")
    assert page.inner_text("#moved-texts") != usual[0]
    moved = drawn_lines(page)
    assert len(moved) == 2 * len(usual[1])  # also as it was, dotted
    assert set(usual[1]) <= set(moved)
    page.select_option("#moved-number", "× 0.5 (40.0 GB)")
    assert "no room for keys and values" in page.inner_text("#moved-texts")


def test_the_price_decides_which_is_the_cheapest(desk):
    page = desk
    page.select_option("#moved-assumption", "Price of H100")
    assert page.inner_text("#moved-note") == "The cheapest of them is H100."
    page.select_option("#moved-number", "× 2 (4 to 7 USD per hour of H100)")
    assert page.inner_text("#moved-note").startswith("The cheapest of them is RTX 4090")


def test_pickers_choose(desk):
    page = desk
    axis = page.text_content("#load .ytitle")
    page.select_option("#load-time", "Per token")
    assert page.text_content("#load .ytitle") != axis
    before = page.inner_text("#saturation-note")
    page.select_option("#saturation-candidate", "full (stage) on RTX 4090")
    assert page.inner_text("#saturation-note") != before
    page.select_option("#pareto-compared", "Latency against cost")
    assert "arrival to answer" in page.text_content("#pareto .ytitle")


def test_the_data_can_be_downloaded(desk, tmp_path):
    for name, rows in (("candidates", 21), ("curves", 96), ("sensitivity", 50)):
        with desk.expect_download() as download:
            desk.click(f"[data-file='arborsim-plan-{name}.csv']")
        assert download.value.suggested_filename == f"arborsim-plan-{name}.csv"
        download.value.save_as(tmp_path / name)
        with (tmp_path / name).open(newline="") as file:
            found = list(csv.DictReader(file))
        assert len(found) == rows
        assert found[0]["hardware"] in ("rtx4090", "h100")


def test_columns_sort(desk):
    page = desk
    first = "#comparison tbody tr > :first-child"
    given = page.locator(first).all_inner_texts()
    assert given[0] == "arborkv ★"
    for _ in range(2):  # ascending, descending
        page.click("#comparison thead button >> text=Cost per 1,000 solved")
    assert page.locator(first).all_inner_texts()[0] == "full"
    page.click("#comparison thead button >> text=Cost per 1,000 solved")
    assert page.locator(first).all_inner_texts() == given


def test_a_plan_with_little_to_show_has_no_empty_plots(opened, tmp_path):
    base = plan()
    lost = replace(
        base, candidates=tuple(each for each in base.candidates if each.status != "met"),
        timeline=None, recommendation=replace(base.recommendation, candidate=None,
                                              alternative=None),
    )  # fmt: skip
    write(report_of(PlanReport(lost)), tmp_path / "lost.html")
    page = opened(tmp_path / "lost.html")
    for name in (
        "pareto",
        "load",
        "saturation",
        "sensitivity",
        "memory",
        "timeline",
        "time",
        "table",
    ):
        assert page.locator(f"#{name}-section").count() == 0
    assert page.locator("#failures-section li").count() == 3
    assert page.locator(".downloads button").count() == 1


def test_print_is_light_and_fits_the_paper(opened, report):
    page = opened(report, scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    ticks = page.locator("#time .xtick text").first
    sync_api.expect(ticks).to_have_css("fill", "rgb(27, 36, 48)")
    for name in PLOTS:
        assert page.locator(f"#{name} .main-svg").first.bounding_box()["width"] <= 660
    assert not page.is_visible(".downloads")


def test_hostile_names_stay_text_everywhere(opened, tmp_path):
    write(report_of(everywhere_evil()), tmp_path / "evil.html")
    page = opened(tmp_path / "evil.html")
    page.locator("#time .points path").first.hover(force=True)
    page.locator("#pareto .points path").first.hover(force=True)
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0
    shown = EVIL.replace("\u2028", "")[:40]
    for place in ("h1", "#comparison", "#moved-texts", "#saturation-candidate", "#time"):
        assert shown in page.text_content(place)


def test_points_beyond_the_target_have_a_shape_that_the_legend_explains(desk):
    page = desk
    page.select_option("#load-time", "Per token")  # where the limit of searches cuts nothing off
    assert "latency target missed" in page.text_content("#load .legend")
    points = page.locator("#load .scatterlayer .trace").first.locator(".points path")
    tip = page.locator("#load .hoverlayer")
    for point, verdict in ((points.first, "target met"), (points.last, "latency target missed")):
        point.hover(force=True)
        sync_api.expect(tip).to_contain_text(verdict)
        sync_api.expect(tip).to_contain_text("offered")
        sync_api.expect(tip).to_contain_text("served")
