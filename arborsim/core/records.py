"""Records: TOML and JSON to frozen dataclasses, every value checked by the field's annotation.

::

    @dataclass(frozen=True)
    class Target:
        percentile: Annotated[float, Meta(gt=0, lt=100)]
        search: Duration | None = None

    target = read_toml(Target, Path("target.toml"))   # or convert(Target, table, "[target]")
    text = to_toml(target)                            # or to_json: `arborsim.core.documents`

The annotations of a record are its rules: types, ``msgspec.Meta`` for ranges and lengths, Literals
and enums for words, records for tables, and `parsed` for what is written in another form.  Whatever
breaks a rule is a `UsageError` of one line: the file, the table and key, the rule, the value.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta, inspect

from arborsim.core.errors import ArborsimError, UnknownName, UsageError
from arborsim.core.settings import MOST_INT
from arborsim.core.units import is_plain, measured, read

Record = TypeVar("Record")
#: Largest number that results in files may have: sums and products of such numbers stay finite.
MOST_FLOAT = 1e100


def read_toml(kind: type[Record], path: Path) -> Record:
    """The record in a TOML file, whose path begins the message of every `UsageError`."""
    return from_toml(kind, read_text(path), str(path))


def from_toml(kind: type[Record], text: str, origin: str) -> Record:
    """The record that a TOML text describes. `origin` names it in messages."""
    table = parse_toml(text, origin)
    with located(origin):
        return convert(kind, table)


def read_text(path: Path) -> str:
    """A UTF-8 file's text, or a `UsageError` that says why it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: cannot be read: it is not UTF-8 text") from None


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The table of a TOML text, or a `UsageError` that names its origin."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers with thousands of digits
        raise UsageError(f"{origin} is not valid TOML: {error}") from None


def convert(kind: type[Record], value: object, place: str = "", *, finite: bool = True) -> Record:
    """A record, or anything else that can be annotated, from what `tomllib` or `json` gives.

    `place` names the value in messages, e.g. ``"[target]"``. Empty for the file itself.  `finite`
    refuses NaN and infinite numbers.

    Raises `UsageError`: a key is unknown (the nearest known ones are named) or missing (it has no
    default), or a value is of another type or out of range.
    """
    made: Record = _Reader(finite).build(_rules(kind), value, place)
    return made


def given_values(kind: type[Any], value: object, place: str = "") -> dict[str, Any]:
    """The fields that a table gives, checked as `convert` does. Any may be missing."""
    rules = _rules(kind)
    assert isinstance(rules, inspect.DataclassType)
    return _Reader(True).given(rules, value, place)


@contextmanager
def located(place: str) -> Iterator[None]:
    """Put `place` in front of the message of a user's error, which becomes one line."""
    try:
        yield
    except ArborsimError as error:
        said = " ".join(str(error).split())  # quoted keys can hold line breaks
        raise UsageError(f"{place}: {said}" if place else said) from None


def check_ranges(record: Any, where: str) -> None:
    """Refuse a record that was made in Python with a number outside of its declared range.

    For ``__post_init__``. `where` names the record in the message.
    """
    rules = _rules(type(record))
    assert isinstance(rules, inspect.DataclassType)
    for entry in rules.fields:
        rule = entry.type.type if isinstance(entry.type, inspect.Metadata) else entry.type
        value = getattr(record, entry.name)
        if isinstance(rule, inspect.IntType | inspect.FloatType) and (
            limit := _broken(rule, value)
        ):
            raise UsageError(f"{where}: {entry.name} must be {limit}, not {value!r:.40}")


def parsed(parse: Callable[[Any], Any]) -> Meta:
    """How a value is made of what stands in the file: ``Annotated[float, parsed(duration)]``.

    `parse` raises `ValueError` with the rule ("must be a time"), to which the codec adds the place
    and the value, or a `UsageError` that says everything but the place.
    """
    return Meta(extra={"parse": parse})


def one_of(what: str, known: Iterable[str]) -> Meta:
    """One of the known words, for words that a Literal cannot list. `what` names their kind."""
    words = tuple(known)

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be one of {', '.join(words)}")
        if value not in words:
            raise UnknownName(what, value, words)
        return value

    return parsed(parse)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text")
    return value.strip()


def _whole(value: object) -> object:
    integral = isinstance(value, float) and value.is_integer()
    return int(value) if integral else value  # type: ignore[call-overload]


def duration_s(value: object) -> float:
    """Seconds of a time with its unit. A `ValueError` that has the rule, as `parsed` wants it."""
    try:
        seconds = read("seconds", value) if isinstance(value, str) else math.nan
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds):
        shown = f"{value:g} s" if is_number(value) else "90 s"
        raise ValueError(f'must be a time with its unit, such as "{shown}" or "50 ms"')
    if not 0 < seconds < math.inf:
        raise ValueError("must be above 0 and finite")
    return seconds


#: A text with something in it, without space around it.
Text = Annotated[str, parsed(_text)]
#: A whole number that may be written as ``80e9``.
Whole = Annotated[int, parsed(_whole)]
#: A time above 0 with its unit, in seconds: ``"90 s"``, ``"50 ms"``, ``"2 min"``.
Duration = Annotated[float, parsed(duration_s)]
Seed = Annotated[int, Meta(ge=0, le=MOST_INT)]


def is_number(value: object) -> bool:
    """Neither a truth value nor NaN nor infinite, all of which TOML can say."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


_rules: Callable[[Any], inspect.Type] = cache(inspect.type_info)


class _Reader:
    """Builds values by the rules of their annotations. `at` is the place and key in messages."""

    def __init__(self, finite: bool) -> None:
        self._finite = finite

    def build(self, rule: inspect.Type, value: Any, at: str) -> Any:
        match rule:
            case inspect.Metadata():
                return self._parsed(rule, value, at)
            case inspect.UnionType():
                return self._one_of(rule, value, at)
            case inspect.LiteralType() | inspect.EnumType():
                return _word(rule, value, at)
        if isinstance(value, str) and isinstance(rule, inspect.IntType | inspect.FloatType):
            value = _number_in(value, at)
        _check_kind(rule, value, at)
        match rule:
            case inspect.DataclassType():
                return self._record(rule, value, at)
            case inspect.DictType():
                inner = rule.value_type
                return {
                    str(key): self.build(inner, each, _inside(inner, at, str(key)))
                    for key, each in value.items()
                }
            case inspect.ListType() | inspect.VarTupleType() | inspect.TupleType():
                return self._list(rule, value, at)
            case inspect.IntType() | inspect.FloatType():
                return self._number(rule, value, at)
        return value

    def given(self, rule: inspect.DataclassType, value: Any, place: str) -> dict[str, Any]:
        """The fields of a record that a table gives."""
        _check_kind(rule, value, place)
        known = {entry.name: entry.type for entry in rule.fields}
        for key in value:
            if key not in known:
                raise UnknownName(f"key of {place}" if place else "key or table", str(key), known)
        return {
            key: self.build(known[key], each, _inside(known[key], place, key))
            for key, each in value.items()
        }

    def _record(self, rule: inspect.DataclassType, value: Any, place: str) -> Any:
        values = self.given(rule, value, place)
        lacking = [each for each in rule.fields if each.required and each.name not in values]
        if len(lacking) == 1:
            raise UsageError(f"{_inside(lacking[0].type, place, lacking[0].name)} is missing")
        if lacking:
            names = ", ".join(each.name for each in lacking)
            raise UsageError(f"{place} {names} are missing".strip())
        with located(place):
            return rule.cls(**values)

    def _parsed(self, rule: inspect.Metadata, value: Any, at: str) -> Any:
        parse = (rule.extra or {}).get("parse")
        if parse is None:
            return self.build(rule.type, value, at)
        try:
            made = parse(value)
        except ValueError as error:
            raise _wrong(at, str(error), value) from None
        except ArborsimError as error:
            raise UsageError(f"{at}: {error}") from None
        whole = isinstance(rule.type, inspect.DataclassType | inspect.CustomType)
        return made if whole else self.build(rule.type, made, at)

    def _one_of(self, rule: inspect.UnionType, value: Any, at: str) -> Any:
        options = [each for each in rule.types if not isinstance(each, inspect.NoneType)]
        if value is None and len(options) < len(rule.types):
            return None
        if len(options) == 1:
            return self.build(options[0], value, at)
        for option in options:
            if _fits(option, value):
                return self.build(option, value, at)
        raise _wrong(at, f"must be {_in_words(rule)}", value)

    def _list(self, rule: Any, value: Any, at: str) -> Any:
        if isinstance(rule, inspect.TupleType):
            kinds = list(rule.item_types)
            if len(kinds) != len(value):
                raise _wrong(at, f"must be {_in_words(rule)}", value)
        else:
            kinds = [rule.item_type] * len(value)
            if len(value) < (rule.min_length or 0):
                raise UsageError(f"{at} is empty: name at least one")
        found = [
            self.build(kind, each, f"{at} {number}" if _is_table(kind) else f"{at} item {number}")
            for number, (kind, each) in enumerate(zip(kinds, value, strict=True), 1)
        ]
        return found if isinstance(rule, inspect.ListType) else tuple(found)

    def _number(self, rule: inspect.IntType | inspect.FloatType, value: Any, at: str) -> Any:
        if isinstance(rule, inspect.FloatType) and not is_number(value):
            if not self._finite and isinstance(value, float):
                return value
            raise _wrong(at, "must be a finite number", value)
        if limit := _broken(rule, value):
            raise _wrong(at, f"must be {limit}", value)
        return float(value) if isinstance(rule, inspect.FloatType) else value


def _number_in(text: str, at: str) -> Any:
    """The number with a unit that a text is; the text itself if it is none."""
    if is_plain(text):
        return text  # numbers without a unit are no texts
    try:
        return _whole(read(measured(re.sub(r" item \d+$", "", at).split(" ")[-1]), text))
    except ValueError:
        return text


def _check_kind(rule: inspect.Type, value: object, at: str) -> None:
    if not _fits(rule, value):
        raise _wrong(at, f"must be {_in_words(rule)}", value)


def _wrong(at: str, rule: str, value: object) -> UsageError:
    return UsageError(f"{at} {rule}, not {value!r:.40}".strip())


def _inside(rule: inspect.Type, place: str, key: str) -> str:
    """A key in messages: ``[table]``, ``[table.key]`` or ``[[list]]`` if it holds tables."""
    listed = isinstance(rule, inspect.VarTupleType | inspect.ListType) and _is_table(rule.item_type)
    if not listed and not _is_table(rule):
        return f"{place} {key}".strip()
    plain = place.startswith("[") and place.endswith("]") and not place.startswith("[[")
    if place and not plain:
        return f"{place} {key}"
    name = f"{place[1:-1]}.{key}" if place else key
    return f"[[{name}]]" if listed else f"[{name}]"


def _is_table(rule: inspect.Type) -> bool:
    if isinstance(rule, inspect.UnionType):  # of tables only
        return all(isinstance(each, inspect.NoneType) or _is_table(each) for each in rule.types)
    return isinstance(rule, inspect.DataclassType | inspect.DictType)


def _broken(rule: inspect.IntType | inspect.FloatType, value: Any) -> str:
    """The limits that a number breaks, in words. "" if it breaks none."""
    limits = {
        f"above {rule.gt}": rule.gt is None or value > rule.gt,
        f"at least {rule.ge}": rule.ge is None or value >= rule.ge,
        f"below {rule.lt}": rule.lt is None or value < rule.lt,
        f"at most {rule.le}": rule.le is None or value <= rule.le,
    }
    broken = [limit for limit, holds in limits.items() if not holds]
    if not broken and isinstance(rule, inspect.IntType) and abs(value) > MOST_INT:
        return "a whole number of 64 bits"
    return " and ".join(broken)


def _word(rule: inspect.LiteralType | inspect.EnumType, value: Any, at: str) -> Any:
    """One of the known words."""
    if isinstance(rule, inspect.LiteralType):
        known: dict[Any, Any] = {each: each for each in rule.values}
    else:
        known = {each.value: each for each in rule.cls}
    if isinstance(value, bool | int | float | str) and value in known:
        return known[value]
    if not isinstance(value, str):
        raise _wrong(at, f"must be one of {', '.join(map(str, known))}", value)
    with located(at):
        raise UnknownName(at.split()[-1].replace("_", " "), value, map(str, known))


#: What a value of each type is to Python, and what messages call it.
_KINDS: dict[type[inspect.Type], tuple[Any, str]] = {
    inspect.NoneType: (type(None), "nothing"),
    inspect.BoolType: (bool, "true or false"),
    inspect.IntType: (int, "a whole number"),
    inspect.FloatType: (int | float, "a number"),
    inspect.StrType: (str, "a text"),
    inspect.DictType: (dict, "a table"),
    inspect.DataclassType: (dict, "a table"),
    inspect.ListType: (list | tuple, "a list"),
    inspect.VarTupleType: (list | tuple, "a list"),
    inspect.TupleType: (list | tuple, "a list"),
}


def _fits(rule: inspect.Type, value: Any) -> bool:
    """Whether a value is of the type, whatever it holds."""
    if isinstance(rule, inspect.Metadata):
        return _fits(rule.type, value)
    if isinstance(rule, inspect.CustomType):
        return isinstance(value, rule.cls)
    if type(rule) not in _KINDS:
        return True
    kind = _KINDS[type(rule)][0]
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _in_words(rule: inspect.Type) -> str:
    """A value of the type in messages."""
    match rule:
        case inspect.Metadata():
            return _in_words(rule.type)
        case inspect.UnionType():
            options = (each for each in rule.types if not isinstance(each, inspect.NoneType))
            return " or ".join(dict.fromkeys(map(_in_words, options)))
        case inspect.TupleType():
            return f"a list of {len(rule.item_types)} values"
        case inspect.ListType() | inspect.VarTupleType():
            article, _, one = _in_words(rule.item_type).partition(" ")
            return f"a list of {one}s" if article == "a" else "a list"
        case inspect.CustomType():
            return f"a {rule.cls.__name__}"
    return _KINDS[type(rule)][1] if type(rule) in _KINDS else "something else"
