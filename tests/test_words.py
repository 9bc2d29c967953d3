"""Phrases that no engineer of the field would say aloud stay out of code, pages and documents."""

from __future__ import annotations

import re

import pytest

from tests.test_documents import DOCUMENTS, ROOT

#: With what to say instead.
AVOIDED = {
    r"beside": "next to, with, against",
    r"(?:no|some|any)body": "no one, a user, a policy: who it is",
    r"so many": "the number",
    r"so much(?! \w+ that)": "the amount",
    r"(?:told|tell|tells) apart": "distinguish",
    r"served at it": "served at this load",
    r"onlookers?": "observer, meter",
    r"whoever|whosoever": "the caller, the user",
    r"streak": "run",
    r"gets? to know": "learns, reads, is given",
    r"in vain": "without effect",
    r"overhears?": "records",
    r"wiretap": "recorder",
}
FILES = sorted(
    path
    for folder in ("arborsim", "backends")
    for ending in ("py", "toml", "j2", "html", "js")
    for path in (ROOT / folder).rglob(f"*.{ending}")
    if "min." not in path.name
)


@pytest.mark.parametrize("pattern", AVOIDED)
def test_phrases_are_those_of_the_field(pattern: str) -> None:
    phrase = re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*FILES, *DOCUMENTS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if phrase.search(line)
    ]
    assert not found, f"say {AVOIDED[pattern]}:\n" + "\n".join(found)
