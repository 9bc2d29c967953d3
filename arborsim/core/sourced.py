"""Records whose numbers name their sources: machines, hosts and inference engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from enum import IntEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, Self, cast, get_type_hints

from msgspec import Meta

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import given_values

ASSUMED, FITTED = "assumed", "fitted"
Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0)]


class Meaning(NamedTuple):
    """A number's meaning, and the unit people quote it in (`scale` of the profile's own)."""

    about: str
    unit: str
    scale: float


def meant(about: str, unit: str = "share", scale: float = 1.0) -> Meta:
    """Says what a field of a record with sources is for."""
    return Meta(extra={"meaning": Meaning(about, unit, scale)})


def required(kind: type) -> tuple[str, ...]:
    """The fields of a record that have no default."""
    optional, known = (MISSING, MISSING), fields(kind)
    return tuple(each.name for each in known if (each.default, each.default_factory) == optional)


def meanings(kind: type) -> dict[str, Meaning]:
    """The fields of a record that say what they are for (`meant`), in order."""
    return _meanings(cast(Any, kind))


@cache
def _meanings(kind: Any) -> dict[str, Meaning]:
    return {
        name: each.extra["meaning"]
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for each in getattr(hint, "__metadata__", ())
        if each.extra and "meaning" in each.extra
    }


class Basis(IntEnum):
    """The basis of a number, the most trustworthy first."""

    MEASURED = 0  # or published by its maker
    INTERPOLATED = 1  # between measurements
    EXTRAPOLATED = 2  # from them, beyond where they end
    FITTED = 3  # to measurements of something it is a part of
    ASSUMED = 4


class Sourced:
    """A record whose numbers name their sources in `sources`."""

    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        known = [entry.name for entry in fields(self)]  # type: ignore[arg-type]
        for name in self.sources:
            if name not in known:
                raise UnknownName("source of", name, known)

    def source(self, name: str) -> str:
        """Where the number `name` comes from, or "assumed"."""
        return self.sources.get(name, ASSUMED)

    def is_assumed(self, name: str) -> bool:
        """Whether the number `name` was neither published nor measured."""
        return self.source(name).startswith(ASSUMED)

    def basis(self, name: str) -> Basis:
        """The basis of the number `name`, as its source says."""
        if self.is_assumed(name):
            return Basis.ASSUMED
        return Basis.FITTED if self.source(name).startswith(FITTED) else Basis.MEASURED

    @classmethod
    def over(cls, base: Self | None, table: Mapping[str, Any], hint: str) -> Self:
        """The record that a table describes, which gives only what differs from a `base`.

        What it gives without a source is assumed.  `hint` says what to do about missing keys.
        """
        values = given_values(cls, table)
        if base is not None:
            kept = {name: text for name, text in base.sources.items() if name not in values}
            values["sources"] = {**kept, **values.get("sources", {})}
            return replace(base, **values)  # type: ignore[type-var]
        if missing := [name for name in required(cls) if name not in values]:
            raise UsageError(f"{', '.join(missing)} missing; {hint}")
        return cls(**values)
