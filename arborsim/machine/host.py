"""A host that GPUs can be put into: its memory, and its end of the PCIe link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial

from arborsim.core.errors import UsageError
from arborsim.machine.profile import ASSUMED, HardwareProfile
from arborsim.machine.records import BadNumber, made, parse_toml, record_values

_LINK = ("h2d_bytes_per_s", "d2h_bytes_per_s")


@dataclass(frozen=True)
class HostProfile:
    """Host memory and PCIe; the names are those of `HardwareProfile`.

    Attributes
    ----------
    name : str
    ddr_bytes : int
        Memory that offloading may use.
    ddr_bytes_per_s : float
        Peak bandwidth.
    h2d_bytes_per_s, d2h_bytes_per_s : float
        Pinned PCIe transfers of large contiguous blocks that the host can carry.
    sources : mapping of str to str
        Where each number comes from; one without an entry is assumed.
    """

    name: str
    ddr_bytes: int
    ddr_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ddr_bytes", "ddr_bytes_per_s", *_LINK):
            value = getattr(self, name)
            if not value > 0:
                raise BadNumber(f"host '{self.name}'", name, "must be positive", value)

    def source(self, name: str) -> str:
        """Where the number `name` comes from, or "assumed"."""
        return self.sources.get(name, ASSUMED)

    @classmethod
    def from_toml(cls, text: str, origin: str) -> HostProfile:
        """Parse a host; `origin` names it in error messages.

        Raises
        ------
        UsageError
            Not TOML, or a key is missing, unknown, of the wrong type, or out of its range.
        """
        values = record_values(cls, parse_toml(text, origin), origin)
        needed = (e.name for e in fields(cls) if e.default_factory is MISSING)
        if missing := [name for name in needed if name not in values]:
            raise UsageError(f"{origin} lacks {', '.join(missing)}")
        return made(origin, partial(cls, **values))


def attach(profile: HardwareProfile, host: HostProfile) -> HardwareProfile:
    """The GPU of `profile` in `host`: its memory, and a link as fast as the slower of both ends."""
    limited = [name for name in _LINK if getattr(host, name) < getattr(profile, name)]
    given = ("ddr_bytes", "ddr_bytes_per_s", *limited)
    sources = {name: f"{host.source(name)} (host {host.name})" for name in given}
    return replace(
        profile,
        name=f"{profile.name}+{host.name}",
        ddr_bytes=host.ddr_bytes,
        ddr_bytes_per_s=host.ddr_bytes_per_s,
        h2d_bytes_per_s=min(profile.h2d_bytes_per_s, host.h2d_bytes_per_s),
        d2h_bytes_per_s=min(profile.d2h_bytes_per_s, host.d2h_bytes_per_s),
        sources={**profile.sources, **sources},
    )
