"""Self-contained pages: one template, one style sheet, everything from files escaped.

A page carries its scripts, its style and all data inline and forbids itself any network access
(content security policy).  Jinja escapes what stands in the markup; the JSON for the scripts cannot
end its element; and labels of figures are escaped where they are made
(`arborsim.show.figures.label`), because Plotly reads a subset of HTML in them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from arborsim.core.documents import strict
from arborsim.core.errors import UsageError


def render(product: str, scripts: Sequence[str] = (), data: Any = None, **facts: Any) -> str:
    """The page of a product; the same facts give the same bytes.

    Parameters
    ----------
    product : str
        Names the template, ``PRODUCT.html``, and the style that is its own.
    scripts : sequence of str
        Assets that follow plotly.js and ``page.js``; a page without any has no script at all.
    data : JSON-like
        For the scripts.
    **facts
        Everything else that the template shows.
    """
    return _templates().get_template(f"{product}.html").render(
        product=product,
        style=Markup(asset("page.css")),
        script=Markup("\n".join(map(asset, ("page.js", *scripts)))) if scripts else "",
        plotly=Markup(_plotly()) if scripts else "",
        data=Markup(in_script(data)),
        **facts,
    )  # fmt: skip


def write(text: str, path: str | Path) -> None:
    """Write a page.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {path}: {error.strerror}") from error


def asset(name: str) -> str:
    """The text of a file that ships with this package."""
    return (files("arborsim.show") / "assets" / name).read_text(encoding="utf-8")


def in_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(strict(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    text: str = get_plotlyjs()
    return text


@cache
def _templates() -> Environment:
    return Environment(
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
