"""The documentation, built in strict mode and opened from the disk: nothing clipped or fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import arborsim
from arborsim.cli.app import COMMANDS, load
from arborsim.trace import schema

ROOT = Path(__file__).parents[2]
#: Elements that stick out of the page, and texts that stick out of their drawing.
CLIPPED = """() => {
    const found = [];
    const wide = document.documentElement.clientWidth;
    if (document.documentElement.scrollWidth > wide) found.push('the page');
    for (const text of document.querySelectorAll('svg.figure text')) {
        const box = text.getBBox(), view = text.ownerSVGElement.viewBox.baseVal;
        if (box.x < 0 || box.x + box.width > view.width + 0.5) found.push(text.textContent);
    }
    for (const image of document.querySelectorAll('article img'))
        if (!image.naturalWidth) found.push(image.src);
    return found;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    made = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(made)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return made


def _text(page: Path) -> str:
    return unescape(re.sub(r"<[^>]*>", "", page.read_text()))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_pages_fit_and_ask_for_nothing(browser: Any, site: Path, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda r: said.append(r.url) if not r.url.startswith((site.as_uri(), "data:")) else None,
    )
    paths = sorted(site.rglob("*.html"))
    assert len(paths) > 25
    for path in paths:
        if path.name == "404.html":  # a server's; its links begin at the root
            continue
        page.goto(path.as_uri())
        assert page.evaluate(CLIPPED) == [], path.name
        assert said == [], path.name
    page.close()


def test_search_works_from_the_disk(browser: Any, site: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((site / "reports" / "quality.html").as_uri())
    page.fill("input.md-search__input", "rehydration")
    page.wait_for_selector(".md-search-result__item", timeout=20_000)
    assert "glossary" in page.inner_html(".md-search-result__list")
    page.close()


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    page = _text(site / "cli.html")
    for name in COMMANDS:
        made = load(name)
        every = [
            made,
            *getattr(made, "commands", {}).values(),
            *getattr(made, "others", {}).values(),
        ]
        for command in every:
            for parameter in command.params:
                if not getattr(parameter, "hidden", False):
                    assert (parameter.opts[0] in page) or parameter.name in page, (name, parameter)


def test_everything_exported_is_in_the_reference(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in arborsim.__all__:
        assert re.search(rf'id="arborsim\.[\w.]*\b{name}"', page), name


def test_every_column_and_key_is_in_the_trace_format(site: Path) -> None:
    page = _text(site / "trace-format.html")
    for field in (field for table in schema.COLUMNS.values() for field in table):
        assert field.name in page
        assert field.metadata[b"about"].decode() in page
    for key in schema.TraceInfo.__annotations__:
        assert key in page
    for kind in schema.Kind:
        assert f"\n{kind.name.lower()}\n" in page
