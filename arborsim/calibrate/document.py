"""The file a calibration is kept in: small, readable TOML that says how it was made.

::

    [calibration]          kind, model, layers, traces, tokens, seed, command, finding
    [calibration.versions] of the software
    [calibration.protocol] what was done, kind by kind
    [policies.NAME]        the settings that `--calibration` gives to the policy NAME
    [evidence...]          what they were derived from
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import arborsim
from arborsim.core.errors import UsageError

KINDS = ("bands", "msve", "arkv")


@dataclass(frozen=True)
class Calibration:
    """What was found on a model.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    model : str
        Name of the model it was found on.
    layers : int
        Of that model.
    traces, tokens : int
        How much it rests on.
    seed : int
    command : str
        That made it.
    policies : mapping of name to mapping
        Settings for each policy.
    finding : str
        The outcome in one sentence.
    protocol, versions, evidence : mapping
    source : str
        File it was read from; "" for a new one.
    """

    kind: str
    model: str
    layers: int
    traces: int
    tokens: int
    seed: int
    command: str
    policies: Mapping[str, Mapping[str, Any]]
    finding: str = ""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def to_toml(self) -> str:
        """The file's text; the same calibration gives the same bytes."""
        head = {
            name: getattr(self, name)
            for name in ("kind", "model", "layers", "traces", "tokens", "seed", "command",
                         "finding", "versions", "protocol")
        }  # fmt: skip
        document = {"calibration": head, "policies": self.policies, "evidence": self.evidence}
        return "\n".join(toml_lines("", document)).lstrip("\n") + "\n"

    def write(self, path: Path) -> None:
        """Write the file.

        Raises
        ------
        UsageError
            It cannot be written.
        """
        try:
            path.write_text(self.to_toml(), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error


def software(*packages: str) -> dict[str, str]:
    """Versions of arborsim and of those of `packages` that are installed."""
    found = {"arborsim": arborsim.__version__}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def toml_lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a TOML table (``""``: the document): its own values first, then its sub-tables."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if name and values:
        yield f"\n[{name}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from toml_lines(f"{name}.{_key(key)}" if name else _key(key), value)


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else json.dumps(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)  # also TOML's spelling of nan and inf
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"{value!r} has no place in a calibration")
