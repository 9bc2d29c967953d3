"""Numbers with intervals from raw results: what the claims of a paper are judged by.

A `Measured` names a file of raw results (a row per search, episode or seed), the rows that count
and a statistic; `evaluate` works it out.  Units that belong together (a problem under two
policies) are paired by the columns of `pair`, and resampled as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import Text
from arborsim.core.statistics import bootstrap, clopper_pearson, spearman

if TYPE_CHECKING:
    import pandas as pd

Filter = bool | int | float | str | list[bool | int | float | str]
#: How a number is worked out.  Those of the last line have no interval.
Statistic = Literal[
    "share", "mean", "median", "ratio", "difference", "spearman",
    "value", "sum", "count", "min", "max",
]  # fmt: skip
EXACT, CLOPPER, PAIRED, BOOTSTRAP = "none", "Clopper-Pearson", "paired bootstrap", "bootstrap"
DISCORDANT = "Clopper-Pearson of pairs"
_SEED = 0
#: Units of numbers that are printed in other than the units of results (1, bytes, seconds).
UNITS = {
    "%": 1e2, "points": 1e2, "x": 1.0,
    "kB": 1e-3, "MB": 1e-6, "GB": 1e-9, "TB": 1e-12, "MiB": 2.0**-20, "GiB": 2.0**-30,
    "us": 1e6, "ms": 1e3, "h": 1 / 3600,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One of our numbers: which rows of which file, and what is worked out of them.

    ``share``: rows whose `column` is true, of those that are judged.  ``mean``, ``median``: of
    `column`.  ``ratio``, ``difference``: the mean of `column` in the rows of `where` against the
    mean in the rows of `where` with `against` put over it, or against `over`, another column.
    ``spearman``: rank correlation of `column` with `over`.  ``value``: of the one row that there
    is.  ``sum``, ``min``, ``max``: of `column`; ``count``: rows, or those whose `column` is true.
    Rows in which a column is empty do not count.  A verdict rests on the numbers with bounds: the
    claim holds where they are at least `above` and at most `below`, in the units of the results.
    """

    label: Text
    source: Text  #: Parquet or CSV file, from the root of the repository
    statistic: Statistic
    column: str = ""
    where: dict[str, Filter] = field(default_factory=dict)  #: column to its value, or to several
    against: dict[str, Filter] = field(default_factory=dict)
    over: str = ""
    #: Columns that name what is drawn at random: a problem, a search, a seed.
    pair: Annotated[tuple[Text, ...], Meta(min_length=1)] = ("episode",)
    #: ``%``, ``points``, ``x``, ``GB``, ``ms`` and the like (`UNITS`) scale shares, bytes and
    #: seconds; any other is printed as it is.
    unit: str = ""
    above: float | None = None
    below: float | None = None
    reading: str = ""  #: the way to read the claim that this number is of, if there are several

    @property
    def judged(self) -> bool:
        """Whether the verdict rests on it."""
        return self.above is not None or self.below is not None

    def __post_init__(self) -> None:
        if self.above is not None and self.below is not None and self.above > self.below:
            raise UsageError(f"above {self.above} and below {self.below} leave nothing")
        two = self.statistic in ("ratio", "difference")
        if two and not (self.against or self.over):
            raise UsageError(f"a {self.statistic} needs against or over")
        if self.statistic == "spearman" and not self.over:
            raise UsageError("spearman needs over, the other column")
        if self.against and not two:
            raise UsageError(f"against is of ratios and differences, not of a {self.statistic}")
        if self.over and not two and self.statistic != "spearman":
            raise UsageError(f"over is of ratios, differences and spearman, not {self.statistic}")
        if not self.column and self.statistic != "count":
            raise UsageError(f"column is missing: the {self.statistic} of what")


@dataclass(frozen=True)
class Number:
    """One of our numbers as it was worked out, in the units of the results."""

    label: str
    ours: float
    low: float  #: ends of the 95% interval; NaN without one
    high: float
    n: int  #: rows or pairs that it rests on
    statistic: str
    interval: str  #: how its interval came about; "none" for what is deterministic or counted
    unit: str
    source: str


class Sources:
    """Files of raw results below a folder; each is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[str, pd.DataFrame] = {}

    def frame(self, source: str) -> pd.DataFrame:
        """The rows of a file."""
        if source not in self._read:
            self._read[source] = _frame(self._root / source)
        return self._read[source]


def _frame(path: Path) -> pd.DataFrame:
    import pandas as pd

    from arborsim.core.parquet import ParquetTables
    from arborsim.core.tables import check_parquet

    if path.suffix not in (".parquet", ".csv"):
        raise UsageError(f"source {path}: expected a .parquet or .csv file")
    if not path.is_file():
        raise UsageError(f"source {path}: there is no such file")
    try:
        if path.suffix == ".csv":
            return pd.read_csv(path)
        check_parquet(path)
        file = ParquetTables(path)
        return file.read(range(file.metadata.num_row_groups)).to_pandas()
    except (ValueError, OSError) as error:
        raise UsageError(f"source {path}: cannot be read ({error})") from None


def evaluate(measured: Measured, sources: Sources) -> Number:
    """Work out a number.

    Raises
    ------
    UsageError
        A file, column or row is missing, or no rows make a pair; names the key.
    """
    frame = sources.frame(measured.source)
    rows = _chosen(frame, measured.where, "where")
    value, low, high, n, interval = _KINDS[measured.statistic](measured, frame, rows)
    if (n == 0 and measured.statistic != "count") or math.isnan(value):
        raise UsageError(f"column {measured.column} knows no value in the rows of where")
    return Number(
        measured.label, value, low, high, n, measured.statistic, interval, measured.unit,
        measured.source,
    )  # fmt: skip


# --- which rows ---


def _chosen(frame: pd.DataFrame, wanted: Mapping[str, Filter], key: str) -> pd.DataFrame:
    """The rows that fit every filter; at least one."""
    import pandas as pd

    kept = frame
    for name, value in wanted.items():
        column = _column(kept, name, key)
        values = value if isinstance(value, list) else [value]
        if pd.api.types.is_float_dtype(column.dtype) and all(map(_is_number, values)):
            known = column.to_numpy(dtype=float, na_value=math.nan)
            fits = np.isclose(known[:, None], np.array(values, dtype=float), rtol=1e-6).any(axis=1)
        else:
            fits = column.isin(values).to_numpy()
        if not fits.any():
            found = [repr(each) for each in pd.unique(column.dropna())[:8]]
            raise UsageError(
                f"{key}.{name} = {value!r} matches no row: there {name} is {', '.join(found)}"
            )
        kept = kept[fits]
    return kept


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _column(frame: pd.DataFrame, name: str, key: str) -> pd.Series:
    if name not in frame.columns:
        with_key = f"column of {key}"
        raise UnknownName(with_key, name, map(str, frame.columns))
    return frame[name]


def _values(frame: pd.DataFrame, name: str, key: str) -> pd.Series:
    """A column as numbers: true is 1; NaN where it says nothing."""
    import pandas as pd

    column = _column(frame, name, key)
    try:
        return pd.to_numeric(column.astype("object").where(column.notna()), errors="raise").astype(
            float
        )
    except (TypeError, ValueError):
        raise UsageError(f"{key} {name} holds texts, not numbers") from None


def _only_true_or_false(values: np.ndarray) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


# --- statistics: value, low, high, n, how the interval came about ---

Found = tuple[float, float, float, int, str]
_NONE = (math.nan, math.nan)


def _share(measured: Measured, frame: pd.DataFrame, rows: pd.DataFrame) -> Found:
    judged = _values(rows, measured.column, "column").dropna().to_numpy()
    if not _only_true_or_false(judged):
        raise UsageError(f"column {measured.column} is not true or false: a share needs that")
    right, n = int(judged.sum()), len(judged)
    if not n:
        return math.nan, *_NONE, 0, CLOPPER
    return right / n, *clopper_pearson(right, n), n, CLOPPER


def _typical(measured: Measured, frame: pd.DataFrame, rows: pd.DataFrame) -> Found:
    """Mean or median, with units resampled."""
    values = _values(rows, measured.column, "column")
    known = values.notna().to_numpy()
    values, rows = values[known], rows[known]
    average: Callable[[np.ndarray], np.floating] = (
        np.mean if measured.statistic == "mean" else np.median
    )
    return _resampled(measured, rows, lambda chosen: average(values.to_numpy()[chosen]))


def _spearman(measured: Measured, frame: pd.DataFrame, rows: pd.DataFrame) -> Found:
    x, y = (_values(rows, *each) for each in ((measured.column, "column"), (measured.over, "over")))
    known = (x.notna() & y.notna()).to_numpy()
    a, b = x.to_numpy()[known], y.to_numpy()[known]
    return _resampled(measured, rows[known], lambda chosen: spearman(a[chosen], b[chosen]))


def _resampled(
    measured: Measured, rows: pd.DataFrame, statistic: Callable[[np.ndarray], float | np.floating]
) -> Found:
    """A statistic of row numbers, over all rows and with units drawn at random."""
    n = len(rows)
    if not n:
        return math.nan, *_NONE, 0, BOOTSTRAP
    members = [np.asarray(each) for each in _units(rows, measured.pair).indices.values()]
    value = float(statistic(np.arange(n)))
    if len(members) == 1:
        return value, *_NONE, n, EXACT

    def of_units(drawn: np.ndarray) -> float:
        return float(statistic(np.concatenate([members[unit] for unit in drawn])))

    low, high = bootstrap(of_units, len(members), _SEED)
    return value, float(low), float(high), n, BOOTSTRAP


def _against(measured: Measured, frame: pd.DataFrame, rows: pd.DataFrame) -> Found:
    """Ratio or difference of two means over the units that both sides have."""
    import pandas as pd

    others = _chosen(frame, {**measured.where, **measured.against}, "against")
    mine = _values(rows, measured.column, "column")
    other = (measured.over, "over") if measured.over else (measured.column, "column")
    theirs = _values(others, *other)
    sides = [
        series.groupby([each[key] for key in _keys(each, measured.pair)]).mean().dropna()
        for series, each in ((mine, rows), (theirs, others))
    ]
    both = pd.concat(sides, axis=1, join="inner", keys=("mine", "theirs"))
    n = len(both)
    if not n:
        pair = ", ".join(measured.pair)
        raise UsageError(f"pair {pair}: the rows of where and against have none in common")
    a, b = both["mine"].to_numpy(), both["theirs"].to_numpy()
    if measured.statistic == "difference":
        if _only_true_or_false(a) and _only_true_or_false(b):
            return _discordant(a, b)
        return _paired(lambda drawn: float(a[drawn].mean() - b[drawn].mean()), n)
    if not b.sum():
        raise UsageError(f"the ratio's denominator {measured.over or measured.column} is zero")
    return _paired(lambda drawn: _quotient(float(a[drawn].sum()), float(b[drawn].sum())), n)


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.nan


def _paired(statistic: Callable[[np.ndarray], float], n: int) -> Found:
    value = statistic(np.arange(n))
    if n == 1:
        return value, *_NONE, n, EXACT
    low, high = bootstrap(statistic, n, _SEED)
    return value, float(low), float(high), n, PAIRED


def _discordant(mine: np.ndarray, theirs: np.ndarray) -> Found:
    """Difference of two shares on the same units, from those that only one side has right.

    Their Clopper-Pearson intervals at 97.5% each (Bonferroni): wide, but right where few units
    differ, or none, of which a bootstrap says nothing.
    """
    n = len(mine)
    gained, lost = (
        clopper_pearson(int(only.sum()), n, 0.975) for only in (mine > theirs, theirs > mine)
    )
    value = float(mine.mean() - theirs.mean())
    return value, gained[0] - lost[1], gained[1] - lost[0], n, DISCORDANT


def _exact(measured: Measured, frame: pd.DataFrame, rows: pd.DataFrame) -> Found:
    """Value, sum, least or largest: no interval."""
    known = _values(rows, measured.column, "column").dropna()
    if measured.statistic == "value" and len(rows) != 1:
        raise UsageError(f"where leaves {len(rows)} rows: a value is of one")
    reduced = {"value": known.sum, "sum": known.sum, "min": known.min, "max": known.max}
    value = float(reduced[measured.statistic]()) if len(known) else math.nan
    return value, *_NONE, len(known), EXACT


def _count(measured: Measured, frame: pd.DataFrame, rows: pd.DataFrame) -> Found:
    if not measured.column:
        return float(len(rows)), *_NONE, len(rows), EXACT
    known = _values(rows, measured.column, "column").dropna().to_numpy()
    if not _only_true_or_false(known):
        raise UsageError(f"column {measured.column} is not true or false: a count needs that")
    return float(known.sum()), *_NONE, len(known), EXACT


def _keys(rows: pd.DataFrame, pair: tuple[str, ...]) -> list[str]:
    for name in pair:
        _column(rows, name, "pair")
    return list(pair)


def _units(rows: pd.DataFrame, pair: tuple[str, ...]) -> Any:
    """The rows of each unit."""
    return rows.reset_index(drop=True).groupby(_keys(rows, pair), dropna=False)


_KINDS: dict[str, Callable[[Measured, pd.DataFrame, pd.DataFrame], Found]] = {
    "share": _share,
    "mean": _typical,
    "median": _typical,
    "ratio": _against,
    "difference": _against,
    "spearman": _spearman,
    "value": _exact,
    "sum": _exact,
    "count": _count,
    "min": _exact,
    "max": _exact,
}
