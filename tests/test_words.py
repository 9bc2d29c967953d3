"""Phrases that no engineer of the field would say aloud stay out of code, pages and documents."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from html import unescape

import pytest

from tests.test_documents import DOCUMENTS, PACKAGES, ROOT, docstrings

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


def test_rates_only_fall() -> None:
    """Sentences that are hard to read do not grow in number."""
    said = [
        text for root in PACKAGES.values() for path in root.rglob("*.py")
        for text in docstrings(path) if text
    ]  # fmt: skip
    found = {
        "docstrings_beginning_with_of_or_what": sum(bool(_BEGINS.match(text)) for text in said),
        "docstrings_with_several_semicolons": sum(text.count(";") > 1 for text in said),
        "semicolons_per_1000_words_of_docstrings": _semicolons(said),
        "semicolons_per_1000_words_of_documents": _semicolons(
            unescape(_CODE.sub("", path.read_text())) for path in DOCUMENTS
        ),
    }
    most = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["arborsim"]["words"]
    assert found.keys() == most.keys()
    over = {name: found[name] for name in found if found[name] > most[name]}
    assert not over, f"above [tool.arborsim.words] of pyproject.toml: {over}"


_BEGINS = re.compile(r"(?:Of|What)\b")
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def _semicolons(texts: Iterable[str]) -> float:
    """Per 1,000 words."""
    text = " ".join(texts)
    return 1000 * text.count(";") / len(text.split())


def test_what_is_counted() -> None:
    assert _semicolons(["one; two", _CODE.sub("", "`a; b`\n```\nc; d\n```\nthree four")]) == 250
    assert _BEGINS.match("What it is.")
    assert not _BEGINS.match("Whatever it is.")
