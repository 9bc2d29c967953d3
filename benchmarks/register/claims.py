"""Claims of papers, our numbers for them, and the verdicts: what ``reports/claims/*.toml`` say.

A file is a paper; each of its claims names the place in the paper, what it says, what we measured
and what follows.  `read_papers` reads the files and works out every number from the raw results
that they name (`benchmarks.register.numbers`), so nothing is typed twice; `to_frame` is the
table that ships, a row per claim and number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError
from arborsim.core.records import Text, convert, given_values, located, parse_toml, read_text
from benchmarks.register.numbers import Measured, Number, Sources, evaluate

if TYPE_CHECKING:
    import pandas as pd

#: A number closer than this share to the paper's reproduces it, whatever its interval.
NEAR = 0.05


class Verdict(StrEnum):
    """What we found, from agreement to what cannot be said here."""

    REPRODUCED = "reproduced"
    IN_FORM = "in-form"
    CONTRADICTED = "contradicted"
    NOT_TESTABLE = "not-testable"

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_WORDS = {
    Verdict.REPRODUCED: "reproduced",
    Verdict.IN_FORM: "in form",
    Verdict.CONTRADICTED: "contradicted",
    Verdict.NOT_TESTABLE: "not testable here",
}
_MEANINGS = {
    Verdict.REPRODUCED: (
        "in a setting of the same class, our interval contains the paper's number, or ours is "
        "within 5% of it"
    ),
    Verdict.IN_FORM: "the same direction, order or shape, at another magnitude",
    Verdict.CONTRADICTED: (
        "our interval excludes the claimed direction, on ground that we think is fair to the claim"
    ),
    Verdict.NOT_TESTABLE: (
        "it needs a model, a GPU or data that this project does not have; the row says which"
    ),
}


@dataclass(frozen=True)
class Claim:
    """One thing that a paper says, and what we make of it."""

    id: Text  #: unique among all papers; never changes
    where: Text  #: table, figure, section or abstract; the paper's own numbers
    claim: Text  #: in one sentence
    theirs: Text  #: the paper's numbers as printed
    setting: Text  #: the paper's model, device, data and settings
    verdict: Verdict
    why: Text  #: what we found, or why it cannot be tested here
    objection: Text  #: what an author could say against our experiment
    #: The paper's number, or its least and largest, as our first number is meant.
    value: float | tuple[float, float] | None = None
    command: str = ""  #: makes the raw rows anew
    measured: tuple[Measured, ...] = ()

    @property
    def range(self) -> tuple[float, float]:
        """The paper's least and largest number; NaN if it is not given as a number."""
        if self.value is None:
            return math.nan, math.nan
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)

    def check(self, numbers: Sequence[Number]) -> None:
        """Refuse a verdict that does not fit the rest of the row, or our numbers."""
        tested = self.verdict is not Verdict.NOT_TESTABLE
        for key in ("command", "measured"):
            given = bool(getattr(self, key))
            if given and not tested:
                raise UsageError(f"{key} says what we measured, but the verdict is not-testable")
            if tested and not given:
                raise UsageError(f"{key} is missing: the verdict is {self.verdict}")
        if self.verdict is Verdict.REPRODUCED and self.value is not None:
            ours, (low, high) = numbers[0], self.range
            ends = (ours.ours, ours.ours) if math.isnan(ours.low) else (ours.low, ours.high)
            near = low - NEAR * abs(low) <= ours.ours <= high + NEAR * abs(high)
            if not near and (ends[1] < low or ends[0] > high):
                raise UsageError(
                    f"verdict is reproduced, but our first number ({ours.ours:.4g}, interval "
                    f"{ends[0]:.4g} to {ends[1]:.4g}) neither contains value nor is within "
                    f"{NEAR:.0%} of it"
                )


@dataclass(frozen=True)
class PaperHead:
    """What a file says before its claims."""

    name: Text  #: what the paper is called here
    title: Text  #: with authors and where it appeared


@dataclass(frozen=True)
class Judged:
    """A claim with our numbers."""

    claim: Claim
    numbers: tuple[Number, ...]


@dataclass(frozen=True)
class Paper:
    """A paper's claims, in the order of their file."""

    key: str  #: name of its file
    head: PaperHead
    rows: tuple[Judged, ...]

    def count(self, verdict: Verdict) -> int:
        return sum(row.claim.verdict is verdict for row in self.rows)


def read_papers(folder: Path, root: Path) -> tuple[Paper, ...]:
    """The papers of a folder, by the names of their files; sources are paths below `root`.

    Raises
    ------
    UsageError
        There is no file, or one of them says something that cannot be: one line that names the
        file, the claim and the key.
    """
    files = sorted(folder.glob("*.toml"))
    if not files:
        raise UsageError(f"{folder}: no files of claims (*.toml) there; name their folder")
    sources, seen = Sources(root), dict[str, Path]()
    return tuple(_read_paper(file, sources, seen) for file in files)


def _read_paper(file: Path, sources: Sources, seen: dict[str, Path]) -> Paper:
    with located(str(file)):
        table = parse_toml(read_text(file), "the file")
        claims = table.pop("claim", None)
        head = convert(PaperHead, table)
        if not isinstance(claims, list) or not all(isinstance(each, dict) for each in claims):
            raise UsageError("[[claim]] is missing: a file of claims has one at least")
        rows = []
        for number, each in enumerate(claims, 1):
            row = _judged(each, number, sources)
            name = row.claim.id
            if name in seen:
                raise UsageError(f"claim '{name}' id is taken by another claim in {seen[name]}")
            seen[name] = file
            rows.append(row)
    return Paper(file.stem, head, tuple(rows))


def _judged(table: dict[str, Any], number: int, sources: Sources) -> Judged:
    name = table.get("id")
    place = f"claim '{name}'" if isinstance(name, str) and name else f"claim {number}"
    given_values(Claim, table, place)
    claim = convert(Claim, table, place)
    numbers = []
    for k, each in enumerate(claim.measured, 1):
        with located(f"{place} measured {k} ('{each.label}')"):
            numbers.append(evaluate(each, sources))
    with located(place):
        claim.check(numbers)
    return Judged(claim, tuple(numbers))


#: Columns of the table, in order.
COLUMNS = (
    "paper", "id", "where", "claim", "theirs", "theirs_low", "theirs_high", "setting", "verdict",
    "why", "objection", "command", "label", "ours", "low", "high", "n", "statistic", "interval",
    "unit", "source",
)  # fmt: skip


def to_frame(papers: Iterable[Paper]) -> pd.DataFrame:
    """A row per claim and number of ours; one row for a claim without numbers."""
    import pandas as pd

    rows = [
        {**_of_claim(paper, row.claim), **number}
        for paper in papers
        for row in paper.rows
        for number in ([_of_number(each) for each in row.numbers] or [{}])
    ]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    texts = ("label", "statistic", "interval", "unit", "source")
    frame = frame.fillna(dict.fromkeys(texts, ""))
    return frame.astype({"n": "Int64", "ours": float, "low": float, "high": float})


def _of_claim(paper: Paper, claim: Claim) -> dict[str, Any]:
    low, high = claim.range
    said = {key: getattr(claim, key) for key in COLUMNS if hasattr(claim, key)}
    return {
        **said, "paper": paper.key, "verdict": claim.verdict.value, "theirs_low": low,
        "theirs_high": high,
    }  # fmt: skip


def _of_number(number: Number) -> dict[str, Any]:
    return {key: getattr(number, key) for key in COLUMNS if hasattr(number, key)}
