"""What the engine's rules ask of the driver that lets time pass."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from arborsim.machine.priced import NOTHING, Extra, PricedProgram


@dataclass(frozen=True, slots=True)
class Spend:
    """Let so many seconds pass, for a phase of this kind (`Op`) of one search."""

    seconds: float
    op: int = -1
    search: int = -1


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode up to so many iterations, one if something joins it."""

    most: int
    extra: Extra = NOTHING


@dataclass(frozen=True, slots=True)
class Idle:
    """Let time pass up to the next event."""


@dataclass(frozen=True, slots=True)
class Starve:
    """Wait until more of this program has been written."""

    program: PricedProgram


Command = Spend | Decode | Idle | Starve
Commands = Generator[Command, None, None]
Tries = Generator[Command, None, bool]
