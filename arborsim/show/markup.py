"""Pieces of a page: everything that comes from a file is escaped here."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from arborsim.core.documents import strict


def filled(template: str, parts: Mapping[str, str]) -> str:
    """An asset with ``{{name}}`` replaced by its part.

    In one pass: what is put in is never searched for placeholders again.
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset(template))


def asset(name: str) -> str:
    """The text of a file that ships with this package."""
    return (files("arborsim.show") / "assets" / name).read_text(encoding="utf-8")


def in_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(strict(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def sorter(title: str, unit: str) -> str:
    """The head of a column that can be sorted by."""
    unit = {"us": "µs", "x": "×"}.get(unit, unit)
    small = f" <small>{unit}</small>" if unit else ""
    return f'<button type="button">{html.escape(title)}{small}</button>'


def pairs(texts: Mapping[str, str]) -> str:
    """Terms and what they mean, for a ``<dl>``."""
    return "".join(
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(str(text))}</dd>"
        for name, text in texts.items()
    )


def bullets(items: Sequence[str]) -> str:
    """A list; nothing if there are no items."""
    if not items:
        return ""
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"
