"""`arborsim search --report`: the page, without a browser and in a real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.products.search.report import SearchReport, report_of
from arborsim.products.search.trees import MOST_NODES
from arborsim.report.report import write
from arborsim.trace.writer import TraceWriter
from tests.bank.banks import bank_columns, bank_info
from tests.bank.test_results import result
from tests.cli.test_search_command import fail
from tests.show.test_html import EVIL, Page

SEARCHES = ["--algorithm", "rebase,ets,beam-sqrt", "--width", "4,8", "--model", "llama-3.1-8b"]
POLICIES = ["--policy", "full,streaming-llm", "--budget", "0.6", "--set", "sinks=2"]


def evil_bank(path: Path, problems: int = 3) -> Path:
    """Thoughts and answers that hold markup."""
    with TraceWriter(path, bank_info(task=f"{EVIL}task", model=f"{EVIL}model")) as writer:
        for seed in range(problems):
            columns = bank_columns(seed, width=4, depth=3, block=(3, 9))
            columns["text"] = [text and f"{EVIL}{text}" for text in columns["text"]]
            columns["answer"] = [answer and f"{EVIL}{answer}" for answer in columns["answer"]]
            writer.write_episode(columns)
    return path


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evil_bank(tmp_path_factory.mktemp("bank") / "bank.parquet")


@pytest.fixture(scope="module")
def report(bank: Path) -> Path:
    path = bank.parent / "page.html"
    command = ["search", str(bank), *SEARCHES, *POLICIES, "--sweep", "lambda_b=1,2"]
    assert main([*command, "--report", str(path)]) == 0
    return path


def test_one_file_whose_elements_nest(report: Path) -> None:
    from plotly.offline import get_plotlyjs

    text = report.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert page.scripts == 3
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert text.count(get_plotlyjs()) == 1
    links = [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action")]
    assert all(name == "href" and value.startswith("#") for _, name, value in links)
    assert "default-src 'none'" in text


def test_text_from_traces_stays_text(report: Path) -> None:
    page = Page(report.read_text(encoding="utf-8"))
    assert not [a for a in page.attributes if a[0] == "img" or a[1].startswith("on")]
    assert f"{EVIL}task" in page.text
    assert f"on {EVIL}model" in page.text
    (first, *_) = json.loads(page.data)["trees"]["layouts"]
    assert first["text"][1].startswith(f"{EVIL}thought")
    assert {answer for answer in first["answer"] if answer} <= {EVIL + a for a in "abc"}


def test_what_it_rests_on_is_there(report: Path, bank: Path) -> None:
    import hashlib

    text = Page(report.read_text(encoding="utf-8")).text
    assert f"sha256 {hashlib.sha256(bank.read_bytes()).hexdigest()[:16]}" in text
    assert "width 4, 8; score last, answer weighted, depth 25" in text
    assert "lambda_b 2" in text
    assert "adaptation path, pin_prompt False, sinks 2" in text
    assert "h100" in text
    assert "llama-3.1-8b" in text
    assert "ets at width 8" in text  # the paper's choice of lambda_b, in the answer
    assert "The bank ran out of thoughts." in text


def test_the_same_for_any_number_of_jobs(bank: Path, report: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    command = ["search", str(bank), *SEARCHES, *POLICIES, "--sweep", "lambda_b=1,2"]
    assert main([*command, "--jobs", "2", "--report", str(again)]) == 0
    assert again.read_bytes() == report.read_bytes()


def test_trees_of_chosen_problems(bank: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    command = ["search", str(bank), "--algorithm", "beam-4", "--width", "4", "--report", str(path)]
    assert main([*command, "--trees", "2,0"]) == 0
    films = json.loads(Page(path.read_text(encoding="utf-8")).data)["trees"]["films"]
    assert [film["search"].partition(":")[0] for film in films] == ["problem 2", "problem 0"]


def test_bad_input(bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "p.html"
    assert "--trees 7: searched are problems 0 to 2" in fail(
        capsys, bank, "--report", page, "--trees", "7"
    )
    assert "expected numbers" in fail(capsys, bank, "--report", page, "--trees", "first")
    assert "--trees 1: also give --report" in fail(capsys, bank, "--trees", "1")
    assert "the command reads it; choose another name" in fail(capsys, bank, "--report", bank)
    assert "there is no directory" in fail(capsys, bank, "--report", tmp_path / "no" / "p.html")
    out = tmp_path / "p.csv"
    assert "--out names the same file" in fail(capsys, bank, "--out", out, "--report", out)
    assert not page.exists()


def test_a_broken_off_run_has_a_page_without_trees(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import arborsim.products.search.run as job_module

    original, calls = job_module.run_problem, []

    def stop_at_the_second(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments, **named)

    monkeypatch.setattr(job_module, "run_problem", stop_at_the_second)
    path = tmp_path / "page.html"
    assert main(["search", str(bank), *SEARCHES, "--report", str(path)]) == 130
    page = Page(path.read_text(encoding="utf-8"))
    assert "The run was interrupted: some problems are missing" in page.text
    assert json.loads(page.data)["trees"] == {"films": [], "layouts": []}


def test_trees_that_are_interrupted(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import arborsim.products.search.trees as trees_module

    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(trees_module, "problem_trees", stop)
    path = tmp_path / "page.html"
    assert main(["search", str(bank), *SEARCHES, "--report", str(path)]) == 130
    page = Page(path.read_text(encoding="utf-8"))
    assert "Drawing the trees was interrupted: none is shown." in page.text
    assert "3 problems of" in page.text


# --- in a real browser ---

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
Opener = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Opener]:
    """Open the page; at the end nothing may have been logged or fetched."""
    contexts, complaints = [], []

    def open_page(
        width: int = 1280, height: int = 900, scheme: str = "light", path: Path | None = None
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(f"request {request.url}")
                if not request.url.startswith(("file:", "blob:", "data:")) else None)  # fmt: skip
        page.goto((path or report).as_uri())
        if path is None:
            page.wait_for_selector("#tree-box svg.search")
            page.wait_for_selector("#size .main-svg")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


class TestInBrowser:
    pytestmark = pytest.mark.slow

    @pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
    def test_it_draws_and_fits(self, opened: Opener, width: int, scheme: str) -> None:
        page = opened(width, 844, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in ("size", "width"):
            assert page.locator(f"#{name} .scatterlayer .trace").count() == 4
            box = page.locator(f"#{name}").bounding_box()
            svg = page.locator(f"#{name} .main-svg").first.bounding_box()
            assert svg["width"] <= box["width"] + 1
            assert page.locator(f"#{name} .errorbars path").count() >= 4
        assert page.locator("#tree-box .node").count() > 5
        assert page.locator("#tree-box .mark").count() > 0
        ink = page.evaluate("getComputedStyle(document.body).color")
        assert page.evaluate("getComputedStyle(document.querySelector('.xtick text')).fill") == ink
        assert page.evaluate("window.broken") is None
        assert page.locator("img").count() == 0

    def test_the_slider_by_keyboard(self, opened: Opener) -> None:
        page = opened()
        slider = page.locator("#tree-slider")
        slider.press("Home")
        assert page.inner_text("#tree-moment").startswith("1/")
        assert "opened" in page.inner_text("#tree-moment")
        first = page.locator("#tree-box .new").count()
        assert first > 0
        assert page.locator("#tree-box .dropped").count() == 0
        slider.press("ArrowRight")
        assert page.inner_text("#tree-moment").startswith("2/")
        slider.press("End")
        last = int(page.get_attribute("#tree-slider", "max")) + 1
        assert page.inner_text("#tree-moment").startswith(f"{last}/{last}")
        assert page.locator("#tree-box .handed").count() == 1
        assert "handed in" in page.inner_text("#tree-marks")

    def test_policy_search_and_problem_can_be_chosen(self, opened: Opener) -> None:
        page = opened()
        assert page.eval_on_selector("#tree-cell", "s => s.value").startswith("ets lambda_b=1, wi")
        page.select_option("#tree-cell", "rebase, width 8, full")
        page.locator("#tree-slider").press("End")
        assert page.locator("#tree-box .tier6").count() == 0
        page.select_option("#tree-cell", "rebase, width 8, streaming-llm at 0.6")
        assert page.locator("#tree-box .tier6").count() > 0  # evicted
        titles = page.locator("#tree-search option").all_inner_texts()
        assert len(titles) == len(set(titles)) >= 2
        before = page.inner_html("#tree-box svg")
        page.select_option("#tree-search", titles[-1])
        assert page.inner_html("#tree-box svg") != before
        assert page.eval_on_selector("#tree-cell", "s => s.value").startswith("rebase, width 8, s")

    def test_all_recorded_thoughts_and_their_rewards(self, opened: Opener) -> None:
        page = opened()
        few = page.locator("#tree-box .node").count()
        page.click("#tree-which >> text=All recorded")
        assert page.locator("#tree-box .node").count() > few
        assert page.locator("#tree-box .never").count() > 0
        fill = "e => getComputedStyle(e.querySelector('.frame')).fill"
        assert page.locator("#tree-box .node").nth(1).evaluate(fill) == "none"
        page.click("#tree-colour >> text=Reward")
        fills = {page.locator("#tree-box .node").nth(i).evaluate(fill) for i in range(1, 5)}
        assert "none" not in fills
        assert len(fills) > 1
        assert "reward 0." in page.inner_text("#tree-legend")
        low = page.locator("#tree-box svg").bounding_box()["height"]
        page.click("#tree-size >> text=Large")
        assert page.locator("#tree-box svg").bounding_box()["height"] > low
        assert page.locator("#tree-box .said").count() > 1

    def test_a_thought_that_holds_markup_is_text(self, opened: Opener) -> None:
        page = opened()
        page.locator("#tree-box .node").nth(2).hover()
        tip = page.inner_text("#tip")
        assert EVIL.replace("\u2028", "")[:60] in tip
        assert "thought [" in tip
        assert "reward 0." in tip
        assert page.evaluate("window.broken") is None
        assert page.locator("#tip img, #tree-box img, #tree-box script").count() == 0

    def test_walking_the_tree_by_arrow_keys(self, opened: Opener) -> None:
        page = opened()
        box = page.locator("#tree-box")
        for key, text in (("ArrowRight", "prompt"), ("ArrowRight", ", depth 1"),
                          ("ArrowRight", ", depth 2"), ("ArrowLeft", ", depth 1"),
                          ("ArrowDown", ", depth 1"), ("ArrowLeft", "prompt")):  # fmt: skip
            before = page.inner_text("#tip")
            box.press(key)
            assert text in page.inner_text("#tip")
            assert page.inner_text("#tip") != before
            assert page.locator("#tree-box .cursor").count() == 1
        box.press("Escape")
        assert page.locator("#tip").is_hidden()

    def test_sizes_switch_and_lines_are_highlighted(self, opened: Opener) -> None:
        page = opened()
        axis = page.locator("#size .xtitle")
        sync_api.expect(axis).to_have_text("KV size (REBASE at width 8 is 1)")
        page.select_option("#size-against", "Time")
        sync_api.expect(axis).to_contain_text("simulated time per search")
        ticks = page.text_content("#size .xaxislayer-above")
        page.select_option("#size-policy", "streaming-llm at 0.6")
        page.select_option("#size-against", "Peak HBM")
        assert page.text_content("#size .xaxislayer-above") != ticks
        page.select_option("#size-highlight", "beam-sqrt")
        faint = "all => all.filter(e => getComputedStyle(e).opacity < 1).length"
        sync_api.expect(page.locator("#size .scatterlayer .trace")).to_have_count(6)
        assert page.eval_on_selector_all("#size .scatterlayer .trace", faint) == 4
        page.select_option("#size-highlight", "none")
        assert page.eval_on_selector_all("#size .scatterlayer .trace", faint) == 0

    def test_the_table_sorts_within_a_policy(self, opened: Opener) -> None:
        page = opened()
        rows = "#comparison tbody:nth-of-type(1) tr:not(.group)"
        column = 4  # KV size, after search, width, accuracy, right and interval
        kv = f"{rows} > :nth-child({column + 2})"
        page.click(f"#comparison thead th:nth-child({column + 2}) button")
        values = page.eval_on_selector_all(kv, "all => all.map(e => Number(e.dataset.value))")
        assert values == sorted(values)
        assert len(set(values)) > 2
        assert page.locator("#comparison tr.group").count() == 2
        assert page.locator("#comparison td.short").count() > 0

    def test_the_data_can_be_downloaded(self, opened: Opener, tmp_path: Path) -> None:
        page = opened()
        with page.expect_download() as download:
            page.click("#download")
        download.value.save_as(tmp_path / "data.csv")
        lines = (tmp_path / "data.csv").read_text().splitlines()
        assert lines[0].startswith("trace,episode,algorithm,swept,width,policy,budget,correct")
        assert len(lines) == 1 + 3 * 8 * 2  # problems, searches, policies

    def test_without_verdicts_and_trees(self, opened: Opener, tmp_path: Path) -> None:
        results = tuple(result("ets", i, None) for i in range(3))
        report = SearchReport(f"{EVIL}heading", results, (), {"bank": "x"})
        write(report_of(report), tmp_path / "bare.html")
        page = opened(path=tmp_path / "bare.html")
        for hidden in ("size-section", "width-section", "tree-section"):
            assert page.locator(f"#{hidden}").count() == 0
        assert "it is not known which searches were right" in page.inner_text(".lead")
        assert "n/a" in page.inner_text("#comparison")
        assert page.locator("#comparison tbody tr").count() == 1

    def test_a_tree_of_thousands(self, opened: Opener, tmp_path: Path) -> None:
        """All elements are there; what is not drawn is said."""
        bank = tmp_path / "wide.parquet"
        with TraceWriter(bank, bank_info()) as writer:
            writer.write_episode(bank_columns(5, width=15, depth=3, block=(1, 2)))
        command = ["search", str(bank), "--algorithm", "rebase", "--width", "150"]
        assert main([*command, "--report", str(tmp_path / "wide.html")]) == 0
        page = opened(path=tmp_path / "wide.html")
        page.wait_for_selector("#tree-box svg.search")
        page.click("#tree-which >> text=All recorded")
        nodes = page.locator("#tree-box .node").count()
        assert nodes == MOST_NODES
        assert "2,000 are drawn" in page.inner_text("#tree-section")
        page.locator("#tree-slider").press("Home")
        page.locator("#tree-slider").press("ArrowRight")
        assert page.inner_text("#tree-moment").startswith("2/")
        assert page.locator("#tree-box .new").count() > 10

    def test_print_is_light_and_fits_the_paper(self, opened: Opener) -> None:
        page = opened(scheme="dark")
        page.emulate_media(media="print", color_scheme="dark")
        ticks = page.locator("#size .xtick text").first
        sync_api.expect(ticks).to_have_css("fill", "rgb(27, 36, 48)")
        assert page.locator("#size .main-svg").first.bounding_box()["width"] <= 660
        assert page.locator("#tree-box svg").bounding_box()["width"] <= 680
        assert not page.locator("#tree-slider").is_visible()
