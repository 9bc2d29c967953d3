"""What ETS saves by depth, width and lambda_b: figures of ``benchmarks/claims/ets.py``, in words.

Trees are synthetic, with stated depth, rewards and meanings
(`arborsim.products.generate.synthetic`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.searches_figures import Ratio, accuracy_text, ratio_of

SOURCE = Path("reports/claims/ets.parquet")
#: Least and most KV reduction of ETS in the paper's table 1 (three models, two data sets).
PAPER = {16: (1.1, 1.5), 64: (1.2, 1.7), 256: (1.3, 1.8)}


@dataclass(frozen=True, eq=False)
class Depths:
    """Searches on synthetic banks.

    Attributes
    ----------
    rows : pandas.DataFrame
        A row per search: of the experiment `depth`, and of `ground`, where one property differs.
    """

    rows: pd.DataFrame

    @classmethod
    def read(cls, path: Path = SOURCE) -> Depths:
        rows = pd.read_parquet(path)
        return cls(rows[rows["experiment"].isin(("depth", "ground"))])

    @cached_property
    def plain(self) -> pd.DataFrame:
        return self.rows[self.rows["experiment"] == "depth"]

    @property
    def widths(self) -> list[int]:
        return sorted(int(width) for width in self.plain["width"].unique())

    @property
    def depths(self) -> list[int]:
        return sorted(int(depth) for depth in self.plain["depth"].unique())

    @property
    def lambdas(self) -> list[float]:
        chosen = self.plain[self.plain["algorithm"] == "ets"]
        return sorted(float(value) for value in chosen["lambda_b"].unique())

    def kv(self, depth: int, width: int, algorithm: str, lambda_b: float = 0.0) -> Ratio | None:
        """How many times less KV than REBASE; None if this was not run."""
        there = self.plain[(self.plain["depth"] == depth) & (self.plain["width"] == width)]
        return _kv(there, algorithm, lambda_b) if len(there) else None

    def at(self, depth: int) -> tuple[float, float]:
        """Least and most of ETS at this depth, over widths and lambda_b."""
        found = [
            ratio.value
            for width in self.widths
            for value in self.lambdas
            if (ratio := self.kv(depth, width, "ets", value))
        ]
        return min(found), max(found)

    def right(self, depth: int, width: int, algorithm: str, lambda_b: float = 0.0) -> str:
        rows = _of(self.plain, algorithm, lambda_b)
        rows = rows[(rows["depth"] == depth) & (rows["width"] == width)]
        return accuracy_text(int(rows["correct"].astype(bool).sum()), len(rows))


def _of(rows: pd.DataFrame, algorithm: str, lambda_b: float) -> pd.DataFrame:
    chosen = rows[(rows["algorithm"] == algorithm) & np.isclose(rows["lambda_b"], lambda_b)]
    return chosen.set_index("episode").sort_index()


def _kv(rows: pd.DataFrame, algorithm: str, lambda_b: float) -> Ratio:
    mine, other = _of(rows, algorithm, lambda_b), _of(rows, "rebase", 0.0)
    return ratio_of(mine["kv_tokens"], other["kv_tokens"])


def sentence(depths: Depths) -> str:
    """What table 1's range is a matter of."""
    parts = [
        f"{low:.2f} to {high:.2f} at {depth} levels"
        for depth in depths.depths
        for low, high in (depths.at(depth),)
    ]
    most = max(depths.lambdas)
    widths = ", ".join(
        f"{ratio} at width {width}"
        for width in depths.widths
        if (ratio := depths.kv(depths.depths[-1], width, "ets", most))
    )
    return (
        "What ETS saves is a matter of depth: on synthetic trees, over widths "
        f"{', '.join(map(str, depths.widths))} and lambda_b from {min(depths.lambdas):g} to "
        f"{most:g}, it needs {'; '.join(parts)} times less KV than REBASE (table 1 of the paper: "
        f"1.1 to 1.8). At {depths.depths[-1]} levels and lambda_b {most:g}: {widths}. The trees of "
        "`game24` have three levels, on which nothing of the kind can be seen."
    )


def table(depths: Depths) -> list[str]:
    """KV reduction by depth and width, a column per lambda_b, and what beam search saves."""
    heads = [f"ETS, lambda_b {value:g}" for value in depths.lambdas]
    lines = [
        f"| levels | width | problems | {' | '.join(heads)} | ETS-KV, lambda_b 1 | beam-sqrt |",
        "|---:|---:|---:|" + "---:|" * (len(heads) + 2),
    ]
    for depth in depths.depths:
        for width in depths.widths:
            first = depths.kv(depth, width, "ets", depths.lambdas[0])
            if first is None:
                continue
            cells = [str(depths.kv(depth, width, "ets", value)) for value in depths.lambdas]
            cells += [str(depths.kv(depth, width, "ets-kv", 1.0))]
            cells += [str(depths.kv(depth, width, "beam-sqrt"))]
            lines.append(f"| {depth} | {width} | {first.problems} | {' | '.join(cells)} |")
    return lines


def ground(depths: Depths) -> list[str]:
    """What else it depends on: one property of the trees changed at a time."""
    rows = depths.rows[depths.rows["experiment"] == "ground"]
    if rows.empty:
        return []
    shown = (1.0, 2.0)
    heads = " | ".join(f"ETS, lambda_b {value:g}" for value in shown)
    lines = [f"| trees | problems | {heads} |", "|---|---:|" + "---:|" * len(shown)]
    for varied in rows["varied"].unique():
        own = rows[rows["varied"] == varied]
        found = [_kv(own, "ets", value) for value in shown]
        cells = " | ".join(map(str, found))
        lines.append(f"| {varied} | {found[0].problems} | {cells} |")
    return lines


def section(depths: Depths, figure: str) -> list[str]:
    """The part of the page."""
    return [
        "## By depth",
        "",
        f"![How many times less KV ETS needs than REBASE, by depth]({figure})",
        "",
        "Times less KV size than REBASE's on synthetic trees (paired bootstrap over problems). "
        "`python -m benchmarks.claims.ets` draws and walks them; its `SPEC` states rewards, "
        "meanings and lengths.",
        "",
        *table(depths),
        *_ground_section(depths),
    ]


def _ground_section(depths: Depths) -> Iterator[str]:
    lines = ground(depths)
    if lines:
        yield from ("", "At 10 levels and width 64, with one property of the trees changed:", "")
        yield from lines
