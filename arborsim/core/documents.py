"""Records as TOML and JSON: what every result file, log and profile is written with."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from arborsim.core.errors import UsageError


def plain(value: Any) -> Any:
    """Records as dicts, tuples as lists, NumPy values as Python numbers."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def strict(value: Any) -> Any:
    """`plain`, with None for NaN and infinite numbers, which JSON cannot say."""
    return _finite(plain(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, indent: int | None = 2) -> str:
    """Strict JSON with sorted keys; the same value gives the same bytes."""
    return json.dumps(strict(value), indent=indent, sort_keys=True, allow_nan=False)


def to_toml(value: Any) -> str:
    """TOML of a record or mapping; keys keep their order, and what is None is left out."""
    return "\n".join(toml_lines("", plain(value))).lstrip("\n") + "\n"


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all.

    Raises
    ------
    UsageError
        It cannot be written.
    """
    try:
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(part).chmod(0o644)
            Path(part).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(part).unlink()
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def toml_lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a TOML table (``""``: the document): its own values first, then its sub-tables."""
    values = {k: v for k, v in table.items() if v is not None and not isinstance(v, Mapping)}
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
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"{value!r} has no place in TOML")
