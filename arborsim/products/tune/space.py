"""The space of a study: settings and budgets, as ranges of numbers or choices of values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.settings import parsed
from arborsim.core.tiers import Budget
from arborsim.policies.registry import Parameter, find, parameter_name, parameters

#: Ranges that lie above 0 and span this factor or more are searched on a logarithmic scale.
LOGARITHMIC = 100.0
_DIGITS = ".4g"  # of values that are tried: what is shown and written down is what was tried

Values = dict[str, Any]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    integer: bool = False

    @property
    def text(self) -> str:
        return f"{self.low:g}:{self.high:g}"

    def propose(self, trial: Any, name: str) -> float | int:
        log = self.low > 0 and self.high >= LOGARITHMIC * self.low
        if self.integer:
            return int(trial.suggest_int(name, int(self.low), int(self.high), log=log))
        found = float(f"{trial.suggest_float(name, self.low, self.high, log=log):{_DIGITS}}")
        return min(max(found, self.low), self.high)

    def nearest(self, value: Any) -> float | int:
        """The value of the range that is nearest to a number."""
        found = min(max(value, self.low), self.high)
        return int(found) if self.integer else float(found)


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Any, ...]

    @property
    def text(self) -> str:
        return ",".join(map(str, self.values))

    def propose(self, trial: Any, name: str) -> Any:
        return trial.suggest_categorical(name, list(self.values))

    def nearest(self, value: Any) -> Any:
        return value if value in self.values else self.values[0]


Space = Mapping[str, Range | Choice]


def space_of(policy: str, varied: Sequence[str], fixed: Mapping[str, str]) -> dict[str, Any]:
    """The settings to vary, from texts: a name, ``name=low:high``, or values ``name=a,b,c``.

    Without texts every setting that is a share in [0, 1].

    Raises
    ------
    UsageError
        A range is none, or lies outside of what the policy takes.
    UnknownName
        The policy has no such setting.
    """
    kind = find(policy)
    known = parameters(kind)
    if not varied:
        given = {parameter_name(kind, name) for name in fixed}
        return {
            name: Range(0.0, 1.0)
            for name, each in known.items()
            if _kind(each) is float
            and (each.setting.low, each.setting.high) == (0, 1)
            and name not in given
        }
    found: dict[str, Range | Choice] = {}
    for text in varied:
        given_name, equals, rest = (part.strip() for part in text.partition("="))
        name = parameter_name(kind, given_name)
        if name is None:
            raise UnknownName(f"setting of {policy}", given_name, known)
        found[name] = _dimension(policy, known[name], rest if equals else "")
    return found


def _dimension(policy: str, setting: Parameter, text: str) -> Range | Choice:
    kind, low, high = _kind(setting), setting.setting.low, setting.setting.high
    what = f"--vary {setting.name}"
    if kind in (int, float) and (":" in text or not text):
        if not text and not (math.isfinite(low) and math.isfinite(high)):
            raise UsageError(f"{what}: it has no largest value; give a range, {setting.name}=1:64")
        if text:
            low, high = _ends(f"{what}={text}", text, low, high)
        if kind is int and (low != int(low) or high != int(high)):
            raise UsageError(f"{what}={text}: it takes whole numbers")
        return Range(low, high, kind is int)
    if kind is bool and not text:
        return Choice((False, True))
    texts = [part.strip() for part in text.split(",") if part.strip()]
    texts = texts or list(setting.setting.choices)
    if not texts:
        raise UsageError(f"{what}: say between what, {setting.name}=LOW:HIGH or {setting.name}=a,b")
    values = (parsed(policy, setting.name, setting.kind, each) for each in texts)
    return Choice(tuple(dict.fromkeys(values)))


def budget_range(text: str) -> Range | Choice:
    """``"0.2:0.8"`` or shares by comma. Else a `UsageError`."""
    if ":" in text:
        return Range(*_ends(f"--budget {text}", text, 1e-6, 1.0))
    shares = [Budget.parse(each).share for each in text.split(",") if each.strip()]
    if not shares or None in shares:
        raise UsageError(
            f"--budget {text}: give shares of what full retention holds, 0.2:0.8 or 0.25,0.5"
        )
    return Choice(tuple(dict.fromkeys(shares)))


def _ends(what: str, text: str, least: float, most: float) -> tuple[float, float]:
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        raise UsageError(f"{what}: expected a range LOW:HIGH of two numbers") from None
    if not (least <= low < high <= most and math.isfinite(high)):
        bounds = f"in [{least:g}, {most:g}]" if math.isfinite(most) else f"at least {least:g}"
        raise UsageError(f"{what}: its ends must rise and be finite, {bounds}")
    return low, high


def _kind(setting: Parameter) -> type:
    """The type of a setting, of a union the first that is not None."""
    options = getattr(setting.kind, "__args__", (setting.kind,))
    return next((each for each in options if each in (bool, int, float, str)), str)
