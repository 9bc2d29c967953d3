"""What an hour of a GPU costs: a dated list that users can replace by their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from arborsim.core.records import from_toml, is_number, parsed, read_toml


def _price_range(value: object) -> tuple[float, float]:
    found: list[Any] = value if isinstance(value, list) else [value, value]
    if len(found) != 2 or not all(map(is_number, found)) or not 0 <= found[0] <= found[1]:
        raise ValueError(
            "must be a price of at least 0, or the lowest and the highest ([0.5, 0.8])"
        )
    return float(found[0]), float(found[1])


#: Lowest and highest price; in a file also one number for both.
PriceRange = Annotated[tuple[float, float], parsed(_price_range)]


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
    per_hour: Mapping[str, PriceRange]
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
        return from_toml(Prices, file.read_text(encoding="utf-8"), "prices.toml")
    return read_toml(Prices, path)
