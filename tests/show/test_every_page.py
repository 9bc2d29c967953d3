"""Every page in a real browser, wide and light, narrow and dark: nothing is clipped or empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.products.plan import page as plan_page
from arborsim.products.replay import report as replay_page
from arborsim.products.validate import published_report as published_page
from arborsim.products.validate import report as validation_page
from arborsim.products.validate.files import read_results
from arborsim.report.report import write
from benchmarks.register import page as claims_page
from benchmarks.register.claims import read_papers
from tests.show import plan_synthetic, synthetic, test_published_page
from tests.show.test_search_page import POLICIES, SEARCHES, evil_bank

pytestmark = pytest.mark.slow
REPORTS = Path(__file__).parents[2] / "reports"
VALIDATIONS = REPORTS / "validation" / "cpu"
PAGES = ("replay", "search", "plan", "live", "validation", "published", "claims")

#: What holds more than it shows, and text that ends in an ellipsis.
CLIPPED = """() => [...document.querySelectorAll("body *")].filter((one) => {
  const style = getComputedStyle(one);
  return style.display !== "inline" && style.overflowX !== "visible" && one.clientWidth
    && !one.closest("svg") && one.scrollWidth > one.clientWidth + 1;
}).map((one) => `${one.tagName} ${one.id} ${one.className}: ${one.scrollWidth}`)"""
#: Visible cards that have nothing but a heading, a note and buttons.
EMPTY = """() => [...document.querySelectorAll(".card")].filter((card) => card.checkVisibility()
  && !card.querySelector("table tr, svg, li, dt, .lead, .headline")).map((card) => card.id)"""
#: Lines of the list of contents that lead nowhere, or to what is not shown.
LOST = """() => [...document.querySelectorAll(".contents a")].filter((link) => {
  const section = document.querySelector(link.getAttribute("href"));
  return link.checkVisibility() !== section.checkVisibility();
}).map((link) => link.href)"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in PAGES}
    traces = ("tree.parquet", "linear.parquet")
    write(replay_page.report_of(synthetic.result(traces=traces)), found["replay"])
    bank = evil_bank(folder / "bank.parquet")
    command = ["search", str(bank), *SEARCHES, *POLICIES, "--report", str(found["search"])]
    assert main(command) == 0
    plan = plan_synthetic.plan()
    report = plan_page.PlanReport(plan, tuple(plan_synthetic.sensitivities(plan)))
    write(plan_page.report_of(report), found["plan"])
    command = ["live", "--task", "game24", "--policy", "h2o,streaming-llm", "--budget", "0.7"]
    assert main([*command, "--episodes", "2", "--report", str(found["live"])]) == 0
    stored, _ = read_results(VALIDATIONS / "game24" / "results.parquet")
    write(validation_page.report_of(stored), found["validation"])
    write(published_page.report_of(test_published_page.result()), found["published"])
    claims_page.write_page(read_papers(REPORTS / "claims", REPORTS.parent), found["claims"])
    return found


@pytest.fixture(scope="module")
def complaints(browser: Any) -> Iterator[list[str]]:
    """What pages logged or asked for."""
    found: list[str] = []
    yield found
    assert found == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_nothing_is_clipped_or_empty(
    browser: Any, pages: dict[str, Path], complaints: list[str], name: str, width: int, scheme: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: complaints.append(f"{name}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"{name}: {error}"))
    page.on("request", lambda request: complaints.append(f"{name}: request {request.url}")
            if not request.url.startswith(("file:", "blob:", "data:")) else None)  # fmt: skip
    page.goto(pages[name].as_uri())
    if name not in ("claims",):  # which draws nothing
        page.wait_for_selector(".main-svg")
    page.wait_for_function("document.readyState === 'complete'")
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollWidth") == page.evaluate(f"{root}.clientWidth")
    assert page.evaluate(CLIPPED) == []
    assert page.evaluate(EMPTY) == []
    assert page.evaluate(LOST) == []
    assert page.locator(".contents a:visible").count() >= 4
    page.close()


def test_a_box_shows_all_columns(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(pages["replay"].as_uri())
    assert page.locator("#comparison .more:visible").count() == 0
    page.locator("#comparison-every").check()
    hidden = page.locator("#comparison .more").count()
    assert page.locator("#comparison .more:visible").count() == hidden > 0
    page.close()
