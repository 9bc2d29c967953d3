"""Statistics of the searches that `benchmarks/searches.py` ran: groups, intervals, lambda_b."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from arborsim.core.statistics import clopper_pearson
from arborsim.products.search.results import LOW, MARGIN, Paired
from arborsim.searches.arms import REFERENCE

RESAMPLES = 4000
FULL = "full"
#: lambda_b of ETS and ETS-KV where none is swept.
DEFAULT = 1.0


@dataclass(frozen=True)
class Ratio:
    """How many times smaller than the reference's a figure is, over the same problems.

    Attributes
    ----------
    value : float
        Sum of the reference's over sum of its own.
    low, high : float
        Percentiles 2.5 and 97.5 of a bootstrap over problems.
    problems : int
    """

    value: float
    low: float
    high: float
    problems: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, eq=False)
class Results:
    """Searches of all banks.

    Attributes
    ----------
    facts : mapping
        Per bank.
    rows : pandas.DataFrame
        A row per search.
    """

    facts: Mapping[str, Any]
    rows: pd.DataFrame

    @classmethod
    def read(cls, path: Path) -> Results:
        table = pq.read_table(path)
        return cls(json.loads(table.schema.metadata[b"arborsim"]), table.to_pandas())

    def bank(self, name: str) -> Searches:
        rows = self.rows[self.rows["bank"] == name]
        keys = ["algorithm", "swept", "width", "policy", "budget"]
        groups = {
            Cell(*key): group.set_index("episode") for key, group in rows.groupby(keys, sort=False)
        }
        return Searches(name, self.facts[name], groups)


@dataclass(frozen=True)
class Cell:
    """One search at one width under one policy and budget."""

    algorithm: str
    swept: str
    width: int
    policy: str = FULL
    budget: str = "any"

    @property
    def label(self) -> str:
        return f"{self.algorithm} {self.swept}".strip()

    @property
    def lambda_b(self) -> float:
        """NaN if another option was swept."""
        option, _, value = self.swept.partition("=")
        return DEFAULT if not option else float(value) if option == "lambda_b" else math.nan


@dataclass(frozen=True, eq=False)
class Searches:
    """All searches of one bank, by cell; frames are indexed by problem."""

    name: str
    facts: Mapping[str, Any]
    groups: Mapping[Cell, pd.DataFrame]

    def label(self, policy: str) -> str:
        """``"h2o per=shared"``: the policy with the settings that were given to it."""
        own = [each.removeprefix(f"{policy}.") for each in self.facts["settings"]
               if each.startswith(f"{policy}.")]  # fmt: skip
        return " ".join([policy, *own])

    def cells(self, *, width: int, swept: bool = False, policy: str = FULL) -> Iterator[Cell]:
        """Those at a width, in order."""
        for cell in self.groups:
            if (cell.width, bool(cell.swept), cell.policy) == (width, swept, policy):
                yield cell

    def accuracy(self, cell: Cell) -> tuple[int, int]:
        """Right answers, and searches."""
        correct = self.groups[cell]["correct"].dropna()
        return int(correct.sum()), len(correct)

    def missed(self, cell: Cell) -> float:
        """Share of the thoughts asked for that the bank lacks."""
        rows = self.groups[cell]
        misses = rows["bank_misses"].sum()
        return float(misses / max(misses + rows["model_calls"].sum(), 1))

    def paired(self, cell: Cell, reference: Cell) -> Paired:
        """Answers problem by problem."""
        both = self.groups[cell][["correct"]].join(
            self.groups[reference]["correct"].rename("other"), how="inner"
        )
        mine, other = both["correct"].astype(bool), both["other"].astype(bool)
        return Paired(
            len(both), int(mine.sum()), int(other.sum()), int((mine & ~other).sum()),
            int((other & ~mine).sum()),
        )  # fmt: skip

    def ratio(self, cell: Cell, reference: Cell, figure: str, against: str = "") -> Ratio:
        """How many times smaller than the reference's, with a paired bootstrap interval.

        `against` is the figure of the reference, if it is another one.
        """
        return ratio_of(self.groups[cell][figure], self.groups[reference][against or figure])

    def rebase(self, width: int) -> Cell:
        return Cell(REFERENCE, "", width)

    def chosen(self, algorithm: str, width: int) -> tuple[Cell | None, list[Cell]]:
        """The value of lambda_b that the paper's rule takes, and all that were tried.

        The largest in [1, 2] whose accuracy is at most 0.2 points below REBASE's.
        """
        tried = [
            cell
            for cell in self.groups
            if (cell.algorithm, cell.width, cell.policy) == (algorithm, width, FULL)
            and cell.lambda_b >= LOW
        ]
        reference = self.rebase(width)
        fine = [c for c in tried if self.paired(c, reference).difference >= -MARGIN - 1e-12]
        return max(fine, key=lambda c: c.lambda_b, default=None), tried


def ratio_of(mine: pd.Series, other: pd.Series) -> Ratio:
    """`other` over `mine`, both by problem, over the problems that both have."""
    if not mine.index.equals(other.index):
        shared = mine.index.intersection(other.index)
        mine, other = mine[shared], other[shared]
    own, theirs = mine.to_numpy(dtype=float), other.to_numpy(dtype=float)
    if not len(own) or not own.sum():
        return Ratio(math.nan, math.nan, math.nan, len(own))
    times = resamples(len(own))
    low, high = np.percentile((times @ theirs) / (times @ own), (2.5, 97.5))
    return Ratio(float(theirs.sum() / own.sum()), float(low), float(high), len(own))


@cache
def resamples(problems: int) -> np.ndarray:
    """How often each problem is drawn, float64 ``[resamples, problems]``; always the same."""
    draws = np.random.default_rng(0)
    share = np.full(problems, 1 / problems)
    return draws.multinomial(problems, share, size=RESAMPLES).astype(float)


def accuracy_text(right: int, judged: int) -> str:
    """``61.0 [50.7, 70.6]``, in percent."""
    low, high = clopper_pearson(right, judged)
    return f"{100 * right / judged:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def difference_text(paired: Paired) -> str:
    """``-3.0 [-9.1, +2.4]``, in points."""
    low, high = paired.interval()
    return f"{100 * paired.difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
