"""Numbers as people read and write them.

Tables and sentences have one unit per column, chosen so that its largest value reads well.  They
are decimal: 1 GB is 1e9 bytes.  `read` takes what people paste: ``8k``, ``50%``, ``24GiB``,
``1m30s``, ``20rps``.
"""

from __future__ import annotations

import math
import re
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


_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_DECIMAL = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {
    1e-6: "us µs",
    1e-3: "ms",
    1.0: "s sec second seconds",
    60.0: "m min minute minutes",
    3600.0: "h hour hours",
    86400.0: "d day days",
}
#: Units that people write, by what they measure, with their sizes.
_WRITTEN: dict[str, dict[str, float]] = {
    "number": {"": 1.0, "%": 1e-2, **_DECIMAL, **_BINARY},
    "bytes": {**dict(UNITS["bytes"]), **_DECIMAL, **_BINARY},
    "seconds": {name: size for size, names in _SECONDS.items() for name in names.split()},
    "FLOP/s": {f"{name}FLOP{end}": size for name, size in _DECIMAL.items() for end in ("/s", "S")},
}
_WRITTEN["bytes"] |= {f"{name}B": size for name, size in _BINARY.items()}
_WRITTEN["bytes/s"] = {f"{name}/s": size for name, size in _WRITTEN["bytes"].items()}
#: Ends of the names of fields and options, and what these measure.
_MEASURES = {
    "bytes_per_s": "bytes/s",
    "flops_per_s": "FLOP/s",
    "bytes": "bytes",
    "per_s": "rate",
    "load": "rate",
    "_s": "seconds",
}
_PART = re.compile(r"([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(%|[^\W\d_]+(?:/s)?|)\s*")
_RATE = re.compile(r"(.*?)\s*(?:searches|requests|req)?\s*(?:/|\bper\b)\s*(\w+)")


def is_plain(text: str) -> bool:
    """Whether a text is a number by itself, without a unit."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def measured(name: str) -> str:
    """The quantity that a field or an option of that name is: a key of the units people write."""
    return next((kind for end, kind in _MEASURES.items() if name.endswith(end)), "number")


def read(kind: str, text: str) -> float:
    """The number that a text means, which measures `kind` (`measured`), in its plain unit.

    ``8k`` and ``8Ki`` are 8,000 and 8,192, ``50%`` is 0.5, ``24GiB`` bytes, ``1m30s`` and ``40ms``
    seconds; ``20rps``, ``20/min`` and ``1200 per hour`` are rates per second.  Small and capital
    letters are the same where that leaves no doubt.  Raises `ValueError` if it is no such number.
    """
    text = text.strip()
    if kind == "rate":
        match = _RATE.fullmatch(re.sub(r"\s*[rq]ps$", "/s", text))
        number = read("number", match[1] if match else text)
        return number / _size("seconds", match[2]) if match else number
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text) or (len(parts) > 1 and kind != "seconds"):
        raise ValueError(f"{text!r} is no number with a unit")
    sizes = ((float(number), _size(kind, unit)) for number, unit in parts)
    # 70% is 0.7, and 70 times 0.01 is not
    return math.fsum(n * size if size >= 1 else n / round(1 / size) for n, size in sizes)


def _size(kind: str, unit: str) -> float:
    """The size of a unit; a `ValueError` if nothing is measured in it."""
    known = _WRITTEN[kind]
    if unit in known:
        return known[unit]
    alike = {size for name, size in known.items() if name.lower() == unit.lower()}
    if len(alike) != 1:
        raise ValueError(f"{unit!r} is none of {', '.join(filter(None, known))}")
    return alike.pop()
