"""Hyper-parameters: dataclass fields that know their unit, their range and what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

from arborsim.core.errors import UsageError
from arborsim.core.units import is_plain, measured, read

T = TypeVar("T")
_KEY = "arborsim.setting"
MOST_INT = (1 << 63) - 1  # of seeds, and of whole numbers in files
#: Largest count that a command or a call takes: sums of such counts stay within 64 bits.
MOST_COUNT = 1_000_000_000
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """The meaning and range of a field."""

    #: One line; the unit is empty for plain numbers
    about: str
    unit: str = ""
    #: Least and largest value, both allowed
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()  # allowed words, if the field holds one

    @property
    def bounds(self) -> str:
        """The range for people, e.g. ``"in [0, 1]"``. Empty if anything goes."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.high == math.inf:
            return f"at least {self.low:g}" if self.low > -math.inf else ""
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        return f"in [{self.low:g}, {self.high:g}]"


def setting(
    default: T,
    about: str,
    *,
    unit: str = "",
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
) -> T:
    """A hyper-parameter: ``recent: int = setting(128, "protected newest tokens", low=1)``.

    Values outside ``low .. high`` or not among `choices` raise `UsageError` when the policy is
    made (`check_settings`).
    """
    return field(default=default, metadata={_KEY: Setting(about, unit, low, high, choices)})


def settings_of(kind: type) -> Iterator[tuple[Field[Any], Setting]]:
    """Fields of a dataclass with their settings. A plain field gets an empty one."""
    for each in fields(kind):
        yield each, each.metadata.get(_KEY, Setting(""))


def default_of(each: Field[Any]) -> Any:
    """The default of a field. None if it has none."""
    if each.default is not MISSING:
        return each.default
    return each.default_factory() if each.default_factory is not MISSING else None


def check_settings(item: Any, who: str) -> None:
    """Raise `UsageError` if a value of the dataclass `item` is out of range."""
    for each, made in settings_of(type(item)):
        value = getattr(item, each.name)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if made.choices and value not in made.choices:
            raise UsageError(f"{who}: {each.name} must be {made.bounds}, not '{value}'")
        if numeric and not made.choices and not made.low <= value <= made.high:  # NaN, too
            raise UsageError(f"{who}: {each.name} must be {made.bounds}, not {value}")


def parsed(who: str, name: str, kind: Any, text: str) -> Any:
    """`text` as a value of the field `name`: bool, int, float or str, as `kind` or its union says.

    Raises `UsageError` if it is none.
    """
    options = getattr(kind, "__args__", (kind,))
    if text.lower() == "none" and type(None) in options:
        return None
    for option in options:
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float, str):
            try:
                return _read(name, text, option)
            except ValueError:
                continue
    expected = " or ".join(_KINDS.get(option, "none") for option in options)
    expected += f" up to {MOST_COUNT:,}" if text.isdecimal() else ""  # it has too many digits
    raise UsageError(f"{who}: {name} must be {expected}, not '{text:.40}'")


def _read(name: str, text: str, kind: type[Any]) -> Any:
    """A text as one of these types; a `ValueError` if it is none."""
    if kind is int:
        return whole_number(text)
    return read(measured(name), text) if kind is float and not is_plain(text) else kind(text)


def whole_number(text: str) -> int:
    """The number that digits write, or ``8k``. A `ValueError` if it is too large, or no number."""
    try:
        number = int(text)  # which itself refuses thousands of digits
    except ValueError:
        if is_plain(text) or not (found := read("number", text)).is_integer():
            raise
        number = int(found)
    if abs(number) > MOST_COUNT:
        raise ValueError(f"{number} is above {MOST_COUNT}")
    return number


def setting_text(value: object) -> str:
    """A value in the form that ``--set`` has."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
