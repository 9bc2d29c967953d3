"""The page about published serving runs in a real browser: it draws and asks for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arborsim.products.validate.aiconfigurator import Prediction
from arborsim.products.validate.published import PlayedRun, Simulated, compare
from arborsim.products.validate.published_report import Published, report_of
from arborsim.report.report import html, write
from tests.show.test_html import EVIL
from tests.validate.test_published import RUN


def render(*given: Any) -> str:
    return html(report_of(*given))


def result(name: str = "llama-3.1-8b") -> Published:
    """Runs of two engines on two GPUs, one of each pair judged, and one that cannot be played."""
    runs = []
    for number in range(24):
        run = replace(
            RUN, id=f"{number // 4:08x}", model=name, engine=("vllm", "trtllm")[number % 2],
            gpu=("h100_sxm", "h200_sxm")[number // 2 % 2], tpot_ms=5.0 * (1 + number),
        )  # fmt: skip
        made = Simulated(0.06, (4.0 + 0.2 * number) * (1 + number) / 1e3, 500.0, 0.05)
        runs.append(PlayedRun(run, made, "", name if number == 4 else "",
                              Prediction(0.06, 5.0 * (1 + number) / 1e3, 480.0)))  # fmt: skip
    return Published((*runs, compare(replace(RUN, model=f"no {name}"))), {"runs": name})


def test_the_same_result_gives_the_same_page() -> None:
    assert render(result()) == render(result())


def test_nothing_played_is_a_page_too() -> None:
    text = render(Published((compare(replace(RUN, gpu="tpu")),), {"runs": "mine.csv"}))
    assert "no profile of GPU tpu" in text
    assert "nan" not in text.partition('id="data"')[0].partition("<body")[2]


def opened(browser: Any, path: Path, width: int, complaints: list[str]) -> Any:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on("request", lambda request: complaints.append(f"request {request.url}")
            if not request.url.startswith(("file:", "blob:", "data:")) else None)  # fmt: skip
    page.goto(path.as_uri())
    page.wait_for_selector("#shares .main-svg")
    return page


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_it_draws_and_sorts(browser: Any, tmp_path: Path, width: int) -> None:
    path, complaints = tmp_path / "page.html", []
    write(report_of(result()), path)
    page = opened(browser, path, width, complaints)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    names = page.locator("#scatter .legendtext").all_text_contents()
    assert names == [
        "trtllm, h100_sxm", "trtllm, h200_sxm", "vllm, h100_sxm", "vllm, h200_sxm", "fitted",
    ]  # fmt: skip
    assert page.locator("#scatter .scatterlayer .point").count() == 12  # fitted ones are hidden
    assert page.locator("#shares .scatterlayer .trace").count() == 3
    shown = page.locator("#errors-table tbody").first.locator("tr th").all_text_contents()
    assert [text.strip() for text in shown][:2] == ["all judged", "without odd runs"]
    assert page.locator("#others-table tbody").first.locator("td").nth(0).text_content() == "12"
    factors = "all => all.map(one => Number(one.cells[7].dataset.value))"
    page.locator("#worst-table thead button").nth(7).click()
    found = page.eval_on_selector_all("#worst-table tbody tr", factors)
    assert found == sorted(found)
    assert len(found) == 10
    with page.expect_download() as download:
        page.locator("#download").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 1 + len(result().runs)
    assert complaints == []
    page.close()


@pytest.mark.slow
def test_names_cannot_become_markup(browser: Any, tmp_path: Path) -> None:
    path, complaints = tmp_path / "evil.html", []
    write(report_of(result(EVIL)), path)
    page = opened(browser, path, 1280, complaints)
    assert page.locator("main img, main script").count() == 0
    assert complaints == []
    page.close()
