"""What an hour of a GPU costs: a dated list that users can replace by their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.machine.records import parse_toml

_TEXTS = ("currency", "date", "source")


@dataclass(frozen=True)
class Prices:
    """Rent of one GPU.

    Attributes
    ----------
    currency, date, source : str
    per_hour : mapping of str to (float, float)
        Lowest and highest price by name of the GPU's profile.
    notes : mapping of str to str
        What to know about a GPU's price.
    """

    currency: str
    date: str
    source: str
    per_hour: Mapping[str, tuple[float, float]]
    notes: Mapping[str, str] = field(default_factory=dict)

    def of(self, gpu: str) -> tuple[float, float] | None:
        """Lowest and highest price per hour; None if the list does not have the GPU.

        A GPU in another host (``h100+ddr5-2tb``) costs what the GPU costs.
        """
        return self.per_hour.get(gpu.partition("+")[0])


def load_prices(path: Path | None = None) -> Prices:
    """The shipped prices, or those of a TOML file of the same form.

    Raises
    ------
    UsageError
        The file cannot be read, or is no list of prices.
    """
    if path is None:
        file = resources.files("arborsim.machine").joinpath("prices.toml")
        return _parse(file.read_text(encoding="utf-8"), "prices.toml")
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}") from None


def _parse(text: str, origin: str) -> Prices:
    raw = parse_toml(text, origin)
    known = (*_TEXTS, "per_hour", "notes")
    for key in raw:
        if key not in known:
            raise UnknownName(f"key in {origin}", key, known)
    for key in _TEXTS:
        if not isinstance(raw.get(key), str):
            raise UsageError(f"{origin}: {key} must be given as text")
    per_hour, notes = raw.get("per_hour"), raw.get("notes", {})
    if not isinstance(per_hour, dict) or not isinstance(notes, dict):
        raise UsageError(f"{origin} needs a table [per_hour] with a price for each GPU")
    return Prices(
        currency=raw["currency"],
        date=raw["date"],
        source=raw["source"],
        per_hour={gpu: _price(gpu, value, origin) for gpu, value in per_hour.items()},
        notes={gpu: str(note) for gpu, note in notes.items()},
    )


def _price(gpu: str, value: Any, origin: str) -> tuple[float, float]:
    """A price, or the lowest and the highest, as both."""
    values = value if isinstance(value, list) else [value, value]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if len(values) != 2 or not numbers or not 0 <= values[0] <= values[1]:
        raise UsageError(
            f"{origin}: the price of {gpu} must be a number, or the lowest and the highest "
            f"([0.5, 0.8]), not {value!r}"
        )
    return float(values[0]), float(values[1])
