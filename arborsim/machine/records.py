"""Records of numbers from TOML files: each of its type and in its range, or blamed on the file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from arborsim.core.errors import UnknownName, UsageError
from arborsim.machine.policy_seconds import PolicySeconds

Record = TypeVar("Record")
#: How a message calls the type that a field is annotated with, by how the annotation begins.
_KINDS = {
    "str": "text", "float": "a number", "int": "a whole number", "tuple": "a list of numbers",
    "Mapping": "a table",
}  # fmt: skip


class BadNumber(UsageError):
    """A number of a record is out of its range; `where` is the record, or the file of it."""

    def __init__(self, where: str, name: str, rule: str, value: Any) -> None:
        self.where, self.name, self.rule, self.value = where, name, rule, value
        super().__init__(f"{where}: {name} {rule}, not {value!r}")

    def __reduce__(self) -> tuple[type[BadNumber], tuple[str, str, str, Any]]:
        return BadNumber, (self.where, self.name, self.rule, self.value)


def made(origin: str, make: Callable[[], Record]) -> Record:
    """What `make` makes; a number that it refuses is blamed on the file that gave it."""
    try:
        return make()
    except BadNumber as error:
        raise BadNumber(origin, error.name, error.rule, error.value) from None


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The table of a TOML file, or a `UsageError` that names it."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{origin} is not valid TOML: {error}") from None


def record_values(kind: type[Any], raw: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The fields of a record that a TOML table gives, in the types of their annotations.

    Raises
    ------
    UsageError
        A key, or a key of ``[sources]``, is unknown, or a value is of the wrong type.
    """
    kinds = {entry.name: str(entry.type) for entry in fields(kind)}
    for key in raw:
        if key not in kinds:
            raise UnknownName(f"key in {origin}", key, kinds)
    values = {key: _typed(value, kinds[key], key, origin) for key, value in raw.items()}
    for key in values.get("sources", {}):
        if key not in kinds:
            raise UnknownName(f"source in {origin}", key, kinds)
    return values


def _typed(value: Any, kind: str, key: str, origin: str) -> Any:
    """`value` as the type that the field `key` is annotated with."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and not math.isfinite(value):
        raise UsageError(f"{origin}: {key} must be a finite number, not {value!r}")
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "float" and number:
        return float(value)
    if kind == "int" and number and value == int(value):
        return int(value)
    if kind.startswith("tuple") and isinstance(value, list):
        return tuple(_typed(entry, "float", key, origin) for entry in value)
    if kind == "Mapping[str, Any]" and isinstance(value, dict):
        return value
    if kind == "Mapping[str, PolicySeconds]" and isinstance(value, dict):
        return {
            name: PolicySeconds.from_table(table, f"{origin}, {key}.{name}")
            for name, table in value.items()
        }
    if kind.startswith("Mapping") and isinstance(value, dict):
        return {name: _typed(text, "str", f"{key}.{name}", origin) for name, text in value.items()}
    wanted = next(word for start, word in _KINDS.items() if kind.startswith(start))
    raise UsageError(f"{origin}: {key} must be {wanted}, not {value!r}")
