"""Claims of papers, our numbers for them, and the verdicts: what ``reports/claims/*.toml`` say.

A file is a paper; each of its claims names the place in the paper, what it says, what we measured
and what follows.  `read_papers` reads the files and works out every number from the raw results
that they name (`benchmarks.register.numbers`), so nothing is typed twice; `to_frame` is the
table that ships, a row per claim and number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError
from arborsim.core.records import Text, convert, given_values, located, parse_toml, read_text
from benchmarks.register.numbers import Measured, Number, Sources, evaluate
from benchmarks.register.verdicts import Ground, Lowered, Need, Verdict, judge, kindest, lower
from benchmarks.register.verdicts import Judged as Bounded

if TYPE_CHECKING:
    import pandas as pd

_NO_VALUE = (math.nan, math.nan)


@dataclass(frozen=True)
class Claim:
    """One thing that a paper says, and what we make of it."""

    id: Text  #: unique among all papers; never changes
    where: Text  #: table, figure, section or abstract; the paper's own numbers
    claim: Text  #: in one sentence
    theirs: Text  #: the paper's numbers as printed
    setting: Text  #: the paper's model, device, data and settings
    needs: Need  #: what can test it
    why: Text  #: what we found, or why it cannot be tested here
    objection: Text  #: what an author could say against our experiment
    #: The paper's number, or its least and largest, as our first number is meant.
    value: float | tuple[float, float] | None = None
    ground: Ground | None = None  #: where our numbers come from
    differs: str = ""  #: what in our settings is not as the authors run it, if it may matter
    lowered: Lowered | None = None
    command: str = ""  #: makes the raw rows anew
    measured: tuple[Measured, ...] = ()

    @property
    def range(self) -> tuple[float, float]:
        """The paper's least and largest number; NaN if it is not given as a number."""
        if self.value is None:
            return math.nan, math.nan
        return self.value if isinstance(self.value, tuple) else (self.value, self.value)

    def check(self) -> None:
        """Refuse a row that says what it was measured on without numbers, or the reverse."""
        tested = bool(self.measured)
        for key in ("ground", "command"):
            given = bool(getattr(self, key))
            if given and not tested:
                raise UsageError(f"{key} says what we measured, but measured is missing")
            if tested and not given:
                raise UsageError(f"{key} is missing: there are numbers")
        if tested and not any(each.judged for each in self.measured):
            raise UsageError(
                "above or below is missing: one number at least says where the claim holds"
            )

    def readings(self, numbers: tuple[Number, ...]) -> dict[str, Verdict]:
        """The verdict of each way to read the claim, by its name; `numbers` are of `measured`."""
        if not self.ground:
            return {"": Verdict.NOT_TESTABLE}
        judged: dict[str, list[Bounded]] = {}
        for k, (asked, number) in enumerate(zip(self.measured, numbers, strict=True)):
            if asked.judged:
                # The paper's number is meant as the first of ours that is judged, in each reading.
                value = self.range if asked.reading not in judged and self._like(k) else _NO_VALUE
                exact = math.isnan(number.low)
                ends = (number.ours, number.ours) if exact else (number.low, number.high)
                judged.setdefault(asked.reading, []).append(
                    Bounded(number.ours, *ends, asked.above, asked.below, value)
                )
        return {
            reading: judge(found, self.needs, self.ground, self.differs)
            for reading, found in judged.items()
        }

    def _like(self, k: int) -> bool:
        """Whether number `k` is of the kind of the first, so that the paper's number is, too."""
        first, own = self.measured[0], self.measured[k]
        return (first.statistic, first.unit) == (own.statistic, own.unit)


@dataclass(frozen=True)
class PaperHead:
    """What a file says before its claims."""

    name: Text  #: what the paper is called here
    title: Text  #: with authors and where it appeared


@dataclass(frozen=True)
class Judged:
    """A claim with our numbers, and the verdict that follows."""

    claim: Claim
    numbers: tuple[Number, ...]
    readings: dict[str, Verdict]  #: of each way to read the claim; "" where there is but one
    verdict: Verdict


@dataclass(frozen=True)
class Paper:
    """A paper's claims, in the order of their file."""

    key: str  #: name of its file
    head: PaperHead
    rows: tuple[Judged, ...]

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict is verdict for row in self.rows)


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
        claim.check()
        readings = claim.readings(tuple(numbers))
        verdict = lower(kindest(readings.values()), claim.lowered)
    return Judged(claim, tuple(numbers), readings, verdict)


#: Columns of the table, in order.
COLUMNS = (
    "paper", "id", "where", "claim", "theirs", "theirs_low", "theirs_high", "setting", "verdict",
    "needs", "ground", "differs", "lowered", "why", "objection", "command", "label", "reading",
    "ours", "low", "high", "above", "below", "n", "statistic", "interval", "unit", "source",
)  # fmt: skip


def to_frame(papers: Iterable[Paper]) -> pd.DataFrame:
    """A row per claim and number of ours; one row for a claim without numbers."""
    import pandas as pd

    rows = [
        {**_of_claim(paper, row), **number}
        for paper in papers
        for row in paper.rows
        for number in (list(map(_of_number, row.claim.measured, row.numbers)) or [{}])
    ]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    texts = ("label", "reading", "statistic", "interval", "unit", "source")
    frame = frame.fillna(dict.fromkeys(texts, ""))
    numbers = dict.fromkeys(("ours", "low", "high", "above", "below"), float)
    return frame.astype({"n": "Int64", **numbers})


def _of_claim(paper: Paper, row: Judged) -> dict[str, Any]:
    low, high = row.claim.range
    said = {key: getattr(row.claim, key) for key in COLUMNS if hasattr(row.claim, key)}
    lowered = row.claim.lowered
    return {
        **said, "paper": paper.key, "verdict": row.verdict.value, "theirs_low": low,
        "theirs_high": high, "ground": row.claim.ground or "",
        "lowered": lowered.because if lowered else "",
    }  # fmt: skip


def _of_number(asked: Measured, number: Number) -> dict[str, Any]:
    bounds = {"above": asked.above, "below": asked.below, "reading": asked.reading}
    return bounds | {key: getattr(number, key) for key in COLUMNS if hasattr(number, key)}
