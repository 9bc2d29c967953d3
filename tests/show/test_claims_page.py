"""Claims of papers as a page, as Markdown and in the terminal: every number is a row's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from arborsim.core.tables import read_table
from arborsim.report.report import html
from benchmarks.register.__main__ import main
from benchmarks.register.claims import Claim, Judged, Paper, PaperHead, to_frame
from benchmarks.register.numbers import Measured, Number
from benchmarks.register.page import report_of, write_page
from benchmarks.register.tables import figure, number_text, readme, summary_markdown
from benchmarks.register.verdicts import Verdict
from tests.show.test_html import EVIL

VERDICTS = tuple(Verdict)


def render(*given: Any) -> str:
    return html(report_of(*given))


def papers(name: str = "H2O") -> tuple[Paper, ...]:
    """Two papers with claims of every verdict; the second has seven claims."""
    found = []
    for key, rows in (("first", 5), ("second", 7)):
        judged = []
        for k in range(rows):
            verdict = VERDICTS[k % 5]
            tested = verdict is not Verdict.NOT_TESTABLE
            measured = Measured(name, "reports/raw.parquet", "share", "correct", unit="%")
            number = Number(name, 0.125 * k, 0.01 * k, 0.2 * k, 200, "share", "Clopper-Pearson",
                            "%", "reports/raw.parquet")  # fmt: skip
            counted = Number("rows", 12345.0, float("nan"), float("nan"), 12345, "count", "none",
                             "", "reports/raw.parquet")  # fmt: skip
            claim = Claim(
                f"{key}-{k}", f"Table {k}", f"claim {k} of `{name}`", "90%", "a model",
                "large-model", f"because {name} | so", "an objection",
                ground="toy-model" if tested else None, command="python make.py" if tested else "",
                measured=(measured, measured) if tested else (),
            )  # fmt: skip
            numbers = (number, counted) if tested else ()
            judged.append(Judged(claim, numbers, {"": verdict}, verdict))
        found.append(Paper(key, PaperHead(f"{key} {name}", "A title, 2026"), tuple(judged)))
    return tuple(found)


def test_the_same_claims_give_the_same_page() -> None:
    assert render(papers()) == render(papers())


def test_names_cannot_become_markup() -> None:
    text = render(papers(EVIL))
    assert EVIL not in text
    assert "<img src" not in text


def test_every_number_of_the_page_is_in_the_table() -> None:
    """Percentages and counts that are shown, against the frame that is written next to the page."""
    frame = to_frame(papers())
    body = re.sub(r"<[^>]+>", " ", render(papers()).partition('<table id="claims"')[2]
                  .partition("</table>")[0])  # fmt: skip
    shown = set(re.findall(r"([\d.]+)% \[([\d.]+), ([\d.]+)\], n ([\d,]+)", body))
    tested = frame[frame["unit"] == "%"]
    assert shown == {
        (*(f"{100 * row[end]:.1f}" for end in ("ours", "low", "high")), str(row["n"]))
        for _, row in tested.iterrows()
    }
    assert "12,345, n 12,345" in body


def test_markdown_has_a_section_and_a_row_for_each() -> None:
    text = readme(papers())
    assert re.findall(r"^## (.*)$", text, re.M) == ["first H2O", "second H2O"]
    assert len(re.findall(r"^\| Table \d", text, re.M)) == 12
    assert "because H2O \\| so" in text
    *rows, total = summary_markdown(papers()).splitlines()[2:]
    assert rows == [
        "| first H2O | 1 | 1 | 1 | 1 | 1 | 5 |",
        "| second H2O | 2 | 2 | 1 | 1 | 1 | 7 |",
    ]
    assert total == "| all | 3 | 3 | 2 | 2 | 2 | 12 |"


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(0.12345, "%", "12.3"), (-0.05, "points", "-5.0"), (1.0342, "x", "1.03"),
     (0.000212, "%", "0.0212"), (0.0, "%", "0.0"), (2.5e9, "GB", "2.50"),
     (0.0123, "ms", "12.3"), (1234.5, "tokens", "1,234"), (7, "", "7"),
     (0.00314, "", "0.00314"), (0.0, "GB", "0")],
)  # fmt: skip
def test_numbers_have_three_digits_in_their_unit(value: float, unit: str, shown: str) -> None:
    assert figure(value, unit) == shown


def test_a_gain_has_its_sign() -> None:
    gain = Number("x", 0.05, 0.01, 0.09, 10, "difference", "paired bootstrap", "points", "raw.csv")
    assert number_text(gain) == "+5.0 points [1.0, 9.0], n 10"


# --- the command ---


CLAIM = """name = "A"
title = "A paper"
[[claim]]
id = "a"
where = "Table 1"
claim = "Half is enough."
theirs = "90%"
setting = "large"
needs = "large-model"
ground = "toy-model"
why = "nearly"
objection = "small"
command = "python make.py"
[[claim.measured]]
label = "ours"
source = "raw.csv"
statistic = "share"
column = "correct"
unit = "%"
above = 0.1
"""


def folder_of(root: Path) -> Path:
    pd.DataFrame({"episode": range(4), "correct": [True, True, True, False]}).to_csv(
        root / "raw.csv", index=False
    )
    (root / "claims").mkdir()
    (root / "claims" / "a.toml").write_text(CLAIM)
    return root / "claims"


def test_the_command_writes_table_page_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    document = tmp_path / "doc.md"
    document.write_text("before\n<!-- claims -->\nold\n<!-- /claims -->\nafter\n")
    command = [str(folder), "--out", str(folder), "--summary", str(document)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "1 claim of 1 paper: reproduced 0, in form 1" in said
    frame, about = read_table(folder / "claims.parquet")
    assert about["kind"] == "claims"
    assert frame.iloc[0][["ours", "n"]].tolist() == [0.75, 4]
    assert "75.0% [19.4, 99.4], n 4" in (folder / "README.md").read_text()
    assert "75.0% [19.4, 99.4], n 4" in (folder / "index.html").read_text()
    lines = document.read_text().splitlines()
    assert lines[:2] == ["before", "<!-- claims -->"]
    assert lines[4:6] == ["| A | 0 | 1 | 0 | 0 | 0 | 1 |", "| all | 0 | 1 | 0 | 0 | 0 | 1 |"]
    assert lines[-2:] == ["<!-- /claims -->", "after"]
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(command) == 0  # again: the same bytes
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "nowhere"], "--out nowhere: there is no such folder"),
        (["--summary", "doc.md"], "--summary doc.md: it has no lines <!-- claims --> and"),
        (["--summary", "no.md"], "no.md: cannot be read"),
    ],
)
def test_what_cannot_be_written_is_one_line_before_anything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: list[str], said: str,
) -> None:  # fmt: skip
    folder = folder_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doc.md").write_text("no marks\n")
    before = sorted(tmp_path.rglob("*"))
    assert main([str(folder), *options]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


# --- in a browser ---


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_filters_rows_and_links(browser: Any, tmp_path: Path, width: int) -> None:
    path = tmp_path / "page.html"
    write_page(papers(), path)
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(path.as_uri())
    rows, more = page.locator("tr.claim:visible"), page.locator("tr.more:visible")
    assert (rows.count(), more.count()) == (12, 0)
    page.locator("#second-0 summary").click()
    assert more.count() == 1
    assert "Clopper-Pearson" in page.locator("#second-0-more").inner_text()
    page.locator("#verdict").select_option("not-testable")
    assert (rows.count(), more.count()) == (2, 0)  # the open one is filtered out
    page.locator("#paper").select_option("first")
    assert rows.count() == 1
    assert page.locator("#shown").inner_text() == "1 of 12 claims"
    assert page.locator("tr.group:visible").count() == 1
    page.locator("#against-section a").first.click()  # a link opens its row, whatever the filter
    assert rows.count() == 12
    assert page.locator("#first-3-more").is_visible()
    page.locator("#open-all").click()
    assert more.count() == 12
    page.locator("#open-all").click()
    assert more.count() == 0
    assert complaints == []
    page.close()


@pytest.mark.slow
def test_without_scripts_every_claim_is_there(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(papers(), path)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator("tr.claim:visible").count() == 12
    assert page.locator("#filters:visible").count() == 0
    page.locator("#first-1 summary").click()
    assert page.locator("#first-1-more").is_visible()
    context.close()


def test_the_page_carries_its_table() -> None:
    text = render(papers())
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))  # type: ignore[union-attr]
    assert data["csv"]["arborsim-claims.csv"].count("\n") == 1 + len(to_frame(papers()))
    assert len(text) < 200_000  # without plotly.js
