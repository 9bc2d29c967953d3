"""The browser that pages are opened in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


class PatientBrowser:
    """Chromium whose pages wait for minutes: on a busy machine opening one can take long."""

    TIMEOUT = 300_000  # ms; reached only where something hangs

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    def new_context(self, **options: Any) -> Any:
        context = self._chromium.new_context(**options)
        context.set_default_timeout(self.TIMEOUT)
        return context

    def new_page(self, **options: Any) -> Any:
        return self.new_context(**options).new_page()


@pytest.fixture(scope="module")
def browser() -> Iterator[PatientBrowser]:
    """Chromium under Playwright; without them, tests that open pages are skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    sync_api.expect.set_options(timeout=PatientBrowser.TIMEOUT)
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield PatientBrowser(launched)
        launched.close()
