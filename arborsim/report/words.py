"""Words that the sentences and tables of all products share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from arborsim.core.units import Scale


def plain(text: str) -> str:
    """Names come from files: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listed(names: Iterable[str]) -> str:
    """``"a, b and c"``."""
    found = list(names)
    if len(found) < 2:
        return "".join(found)
    return f"{', '.join(found[:-1])} and {found[-1]}"


def sentences_of(text: str) -> list[str]:
    """A paragraph's sentences, where a capital follows the stop."""
    return re.split(r"(?<=\.) (?=[A-Z])", text)


def counted(number: int, what: str) -> str:
    """``"1 search"``, ``"1,200 problems"``."""
    if number == 1:
        return f"1 {what}"
    return f"{number:,} {what}{'es' if what.endswith('ch') else 's'}"


def percent(value: float) -> str:
    """A share with one decimal."""
    return "n/a" if math.isnan(value) else f"{100 * value:.1f}%"


def hundredths(share: float) -> str:
    """A share in per cent, for a cell whose head has the sign; zero is shown as such."""
    return "n/a" if math.isnan(share) else f"{100 * share:.1f}"


def interval(low: float, high: float) -> str:
    """The ends of an interval, in per cent, for a cell."""
    return "n/a" if math.isnan(low) else f"{hundredths(low)}-{hundredths(high)}"


def nats(value: float) -> str:
    """A divergence with three digits that count, for cells and sentences."""
    if math.isnan(value):
        return "n/a"
    return "0" if value < 5e-7 else f"{value:.2g}" if value < 0.01 else f"{value:.3f}"


def score(right: int, judged: int, low: float, high: float) -> str:
    """Right answers with the interval of their share, for sentences."""
    return (
        f"{right}/{judged} ({100 * right / judged:.1f}%, 95% interval {100 * low:.1f} to "
        f"{100 * high:.1f})"
    )


def digits(value: float, least: int = 3) -> str:
    """A number with `least` significant digits: ``0.0123``, ``1.20``, ``1,234``."""
    if math.isnan(value):
        return "unknown"
    if math.isinf(value):
        return "unlimited" if value > 0 else "none"
    decimals = 0 if value == 0 else max(0, least - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 9)}f}"


def plain_scale(values: Sequence[float], unit: str) -> Scale:
    """A column of numbers without prefixes (loads, prices).

    The smallest shows three digits, unless that gives the largest more than four.
    """
    known = [abs(v) for v in values if math.isfinite(v) and v]
    if not known:
        return Scale(unit, 1.0, 2)
    small, large = (math.floor(math.log10(end)) for end in (min(known), max(known)))
    return Scale(unit, 1.0, min(max(min(2 - small, 3 - large), 0), 6))
