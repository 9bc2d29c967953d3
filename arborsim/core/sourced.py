"""Records whose numbers name their sources: machines, hosts and inference engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from arborsim.core.errors import UnknownName

ASSUMED, FITTED = "assumed", "fitted"
Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0)]


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
