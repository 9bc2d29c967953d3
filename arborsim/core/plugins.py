"""Classes that users bring, by name.

Installed packages register theirs under an entry-point group; any other class goes by its place,
``package.module:Class``.  Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from arborsim.core.errors import UsageError

Kind = TypeVar("Kind")


def installed(group: str) -> tuple[str, ...]:
    """Names that installed packages register under an entry-point group; imports none."""
    return tuple(_points(group))


@cache
def _points(group: str) -> dict[str, EntryPoint]:
    """By name; looking through what is installed takes some milliseconds."""
    return {point.name: point for point in entry_points(group=group)}


def check_no_code(what: str, name: str) -> None:
    """Refuse a name in a file for which a module would have to be imported."""
    module, colon, _ = name.partition(":")
    if colon and module not in sys.modules:
        raise UsageError(
            f"{what} '{name}' is code that a file names: if you trust it, name the {what} on "
            "the command line, or give --allow-code (allow_code=True) where there is that"
        )


def find_plugin(
    what: str, name: str, base: type[Kind], group: str, *, code: bool = True
) -> type[Kind]:
    """The subclass of `base` at ``package.module:Class``, or installed under `group` as `name`.

    Modules of the working directory are found, too.  `what` it is, e.g. ``"policy"``, is for
    messages.  Without `code`, for names that stand in a file, no module is imported from a place
    that only the name says: installed classes, and what is imported already, are found.

    Raises
    ------
    UsageError
        It cannot be imported, may not be, or is no subclass of `base`.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), attribute)):
            raise UsageError(f"{what} '{name}': expected package.module:Class")
        if not code:
            check_no_code(what, name)
        here = str(Path.cwd())
        if here not in sys.path:  # it stays there: worker processes import the class again
            sys.path.append(here)
        importlib.invalidate_caches()
        point = EntryPoint(name, name, group)
    else:
        point = _points(group)[name]
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # whatever a module of the user's may raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{what} '{name}' cannot be imported: {said}") from None
    if not (isinstance(found, type) and base in found.__mro__):
        wanted = f"{base.__module__}.{base.__qualname__}"
        raise UsageError(f"{what} '{name}' is not a subclass of {wanted}")
    return found
