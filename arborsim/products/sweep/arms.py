"""Policies with their settings, as a grid names them, and what tells them apart."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from arborsim.core.documents import digest, file_digest
from arborsim.core.errors import UsageError
from arborsim.core.outputs import real_path
from arborsim.core.plugins import source_files
from arborsim.core.settings import setting_text
from arborsim.play.results import ANY, BASELINE, BOUNDS
from arborsim.policies.base import Policy
from arborsim.policies.registry import available, values_of
from arborsim.products.sweep.grid import PolicyTable

_ALL = "all"


@dataclass(frozen=True)
class Arm:
    """A policy with its settings."""

    use: str  # as replay takes it
    policy: Policy
    settings: Mapping[str, str]
    asked: bool = True  # by its name, not by "all"

    def head(self, budget: str) -> dict[str, str]:
        """Its parameters in a cell's head, under this budget."""
        return {"policy": self.policy.label, "settings": shown(self.settings), "budget": budget}

    def given(self, budget: str, settings: Sequence[str] = ()) -> dict[str, Any]:
        """Its arguments of `arborsim.replay` or `arborsim.live`, after `settings` of all."""
        own = [f"{self.policy.name}.{key}={value}" for key, value in self.settings.items()]
        budgets = "1" if budget == ANY else budget
        return {"policies": self.use, "settings": [*settings, *own], "budgets": budgets}

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Digests of what it is made of, beyond arborsim's own code."""
        held = [digest(values_of(self.policy))]
        if self.use.endswith(".toml"):
            held.append(file_digest(Path(self.use)))
        return {"policy": digest([*held, code_of(type(self.policy))])}


def code_of(kind: type) -> dict[str, str]:
    """Digests of the files that a user's class is made of; none of arborsim's own."""
    return {name: file_digest(file) for name, file in source_files(kind).items()}


def arms_of(
    tables: Iterable[str | PolicyTable], base: Path, baseline: bool = True
) -> list[tuple[str, Mapping[str, str], bool]]:
    """Name, settings and whether it was asked for by name, of each; full retention leads."""
    found: list[tuple[str, Mapping[str, str], bool]] = [(BASELINE, {}, True)] if baseline else []
    for each in tables:
        table = PolicyTable(each) if isinstance(each, str) else each
        if table.use == _ALL:
            names = [name for name in available() if name not in (*BOUNDS, BASELINE)]
            found += [(name, {}, False) for name in names]
            continue
        use = str(real_path(base / table.use)) if table.use.endswith(".toml") else table.use
        found += [(use, settings, True) for settings in settings_of(table.set)]
    return found


def settings_of(table: Mapping[str, Any]) -> list[dict[str, str]]:
    """Settings as ``--set`` has them, one for each combination of lists.

    ``allocate.alpha`` may be a table in a table.
    """
    flat: dict[str, list[str]] = {}
    for key, value in table.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, given in inner:
            full = f"{key}.{name}" if name else key
            values = given if isinstance(given, list | tuple) else [given]
            if not values:
                raise UsageError(f"set.{full} is empty: name at least one value, or leave it out")
            flat[full] = [setting_text(each) for each in values]
    return [dict(zip(flat, each, strict=True)) for each in product(*flat.values())]


def shown(settings: Mapping[str, str]) -> str:
    """``"sinks=4 recent=64"``; values with spaces are quoted."""
    return " ".join(
        f"{key}={json.dumps(value) if re.search(_QUOTED, value) else value}"
        for key, value in settings.items()
    )


def settings_in(text: str) -> dict[str, str]:
    """The settings that `shown` made a text of."""
    return {
        key: json.loads(value) if value.startswith('"') else value
        for key, value in re.findall(_SHOWN, text)
    }


_QUOTED = r'[\s"]'
_SHOWN = r'([^\s=]+)=("(?:[^"\\]|\\.)*"|\S*)'
