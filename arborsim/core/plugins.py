"""Classes that users bring, by name.

Installed packages register theirs under an entry-point group. Any other class goes by its place,
``package.module:Class``.  Nothing is imported before it is asked for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from arborsim.core.errors import UsageError

Kind = TypeVar("Kind")


def installed(group: str) -> tuple[str, ...]:
    """Names that installed packages register under an entry-point group. Imports none."""
    return tuple(_points(group))


@cache
def _points(group: str) -> dict[str, EntryPoint]:
    """By name. Looking through what is installed takes some milliseconds."""
    return {point.name: point for point in entry_points(group=group)}


def check_no_code(what: str, name: str) -> None:
    """Refuse a name in a file for which a module would have to be imported."""
    module, colon, _ = name.partition(":")
    if colon and module not in sys.modules:
        raise UsageError(
            f"{what} '{name}' is code that a file names: if you trust it, name the {what} on "
            "the command line, or give --allow-code (allow_code=True) where there is that"
        )


def named_object(what: str, name: str, form: str = "package.module:Class") -> Any:
    """The object at ``package.module:name``, also of a module in the working directory.

    Raises `UsageError`: the name is not of that `form`, or it cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise UsageError(f"{what} '{name}': expected {form}")
    here = str(Path.cwd())
    if here not in sys.path:  # it stays there: worker processes import the class again
        sys.path.append(here)
    importlib.invalidate_caches()
    return _loaded(what, name, EntryPoint(name, name, ""))


def _loaded(what: str, name: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # whatever a module of the user's may raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{what} '{name}' cannot be imported: {said}") from None


def find_plugin(
    what: str, name: str, base: type[Kind], group: str, *, code: bool = True
) -> type[Kind]:
    """The subclass of `base` at ``package.module:Class``, or installed under `group` as `name`.

    Modules of the working directory are found, too.  `what` it is, e.g. ``"policy"``, is for
    messages.  Without `code`, for names that stand in a file, no module is imported from a place
    that only the name says: installed classes, and what is imported already, are found.

    Raises `UsageError`: it cannot be imported, may not be, or is no subclass of `base`.
    """
    if ":" in name:
        if not code:
            check_no_code(what, name)
        found = named_object(what, name)
    else:
        found = _loaded(what, name, _points(group)[name])
    if not (isinstance(found, type) and base in found.__mro__):
        wanted = f"{base.__module__}.{base.__qualname__}"
        raise UsageError(f"{what} '{name}' is not a subclass of {wanted}")
    return found


# ------------------------------------------------------------------------- what they are made of

#: Packages whose code is known otherwise: by version, or by a digest of its own.
_KNOWN = {*sys.stdlib_module_names, "arborsim", "arborsim_torch"}


def source_files(kind: type) -> dict[str, Path]:
    """Files of the module of a user's class and of all that it imports, by name of the module.

    Import statements are followed wherever they stand, without importing anything: not into the
    standard library and arborsim, and of installed packages only into that of the class.  Empty for
    a class of arborsim's own.
    """
    found: dict[str, Path] = {}
    waiting = [each.__module__ for each in kind.__mro__]
    own = kind.__module__.partition(".")[0]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if name in found or (top in _KNOWN and name != "__main__"):
            continue
        file, package = _file_of(name)
        if file is None or (top != own and _INSTALLED.intersection(file.parts)):
            continue
        found[name] = file
        if file.suffix == ".py":
            with suppress(OSError, SyntaxError, ValueError):
                waiting += _imports(file.read_bytes(), package)
        waiting += [name.rpartition(".")[0]] if "." in name else []
    return found


_INSTALLED = {"site-packages", "dist-packages"}


def _file_of(name: str) -> tuple[Path | None, str]:
    """A module's file, and the package that its relative imports begin at."""
    module, spec = sys.modules.get(name), None
    if module is not None:
        spec = module.__spec__
        if spec is None:  # a script
            with suppress(TypeError):
                return Path(inspect.getsourcefile(module) or ""), ""
            return None, ""
    else:
        spec = _spec(name)
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return None, ""
    return Path(spec.origin), spec.parent or ""


def _spec(name: str) -> ModuleSpec | None:
    spec, places, whole = None, None, ""
    for part in name.split("."):
        whole = f"{whole}.{part}" if whole else part
        spec = PathFinder.find_spec(whole, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    return spec


@cache
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Modules that the import statements of a module may mean."""
    return tuple(dict.fromkeys(_named(ast.parse(source), package)))


def _named(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, above), *([node.module] if node.module else [])])
            yield from filter(None, (base, *(f"{base}.{each.name}" for each in node.names)))
