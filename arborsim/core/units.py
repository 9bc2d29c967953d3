"""Numbers for people: one unit per column, chosen so that its largest value reads well.

Decimal units only: 1 GB is 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

#: For each kind of quantity its units with their sizes, ascending.
UNITS: dict[str, tuple[tuple[str, float], ...]] = {
    "bytes": (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)),
    "byte-seconds": (("MB s", 1e6), ("GB s", 1e9), ("TB s", 1e12)),
    "tokens": (("tok", 1.0), ("k tok", 1e3), ("M tok", 1e6), ("G tok", 1e9)),
    "seconds": (("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("ks", 1e3)),
    "rate": (("tok/s", 1.0), ("k tok/s", 1e3), ("M tok/s", 1e6)),
    "percent": (("%", 1e-2),),
    "factor": (("x", 1.0),),
    "points": (("pp", 1e-2),),  # percentage points
    "count": (("", 1.0),),
}
#: Below this many of a unit the next smaller one is taken; tokens stay whole for longer.
_LEAST = {"tokens": 10.0, "rate": 100.0}


@dataclass(frozen=True)
class Scale:
    """A unit and how many decimals a column in it shows."""

    unit: str
    size: float
    decimals: int

    def show(self, value: float) -> str:
        """`value` in this unit. ``-`` for nothing, ``n/a`` for unknown."""
        if math.isnan(value):
            return "n/a"
        if value == 0:
            return "-"
        scaled = value / self.size
        least = 10.0**-self.decimals
        if -least / 2 < scaled < 0:
            return f">-{least:.{self.decimals}f}"
        if 0 < scaled < least / 2:
            return f"<{least:.{self.decimals}f}"
        if self.unit == "%" and 100 - least / 2 <= scaled < 100:
            return f">{100 - least:.{self.decimals}f}"  # almost all is not all
        return f"{scaled:,.{self.decimals}f}"


def scale_for(kind: str, values: Iterable[float]) -> Scale:
    """The unit and decimals for a column of `kind` (a key of `UNITS`) with these values."""
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    if kind == "percent":
        return Scale("%", 1e-2, 1)
    if kind in ("points", "count"):
        return Scale(*UNITS[kind][0], 2 if kind == "points" else 0)
    if kind == "factor":
        return Scale("x", 1.0, 2 if largest < 100 else 0)
    units = UNITS[kind]
    least = _LEAST.get(kind, 1.0)
    unit, size = next(((u, s) for u, s in reversed(units) if largest >= least * s), units[0])
    scaled = largest / size
    if size == 1.0 and kind in ("bytes", "tokens"):
        return Scale(unit, size, 0 if kind == "bytes" else int(scaled < 100))
    return Scale(unit, size, 0 if scaled >= 1000 else 1 if scaled >= 100 else 2)


def quantity(kind: str, value: float, digits: int = 3) -> str:
    """One number with its unit, for sentences: ``"1.23 GB"``."""
    if math.isnan(value):
        return "unknown"
    scale = scale_for(kind, [value])
    scaled = value / scale.size
    decimals = 0 if scaled == 0 else max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    text = f"{scaled:,.{decimals}f}"
    unit = {"us": "µs", "tok": "tokens", "k tok": "k tokens", "M tok": "M tokens"}.get(
        scale.unit, scale.unit
    )
    return f"{text} {unit}"
