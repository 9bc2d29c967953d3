"""What a GPU validation needs to start; only Python's standard library is used.

What cannot work is refused in one line: a module that cannot be imported, a bundle with a file
missing.  What only looks odd is a warning, for it may work: minutes on a GPU are rare.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
MANIFEST = "bundle.json"  #: arborsim's version, a Python's, and what is in a bundle
LIBRARIES = "lib"  #: a bundle's folder of what machines with PyTorch lack, a folder for each
#: Requirements of arborsim that a validation on a GPU does without: pages, plots, the command line.
UNUSED = frozenset({"click", "jinja2", "plotly", "rich", "scipy"})
#: Those of `extras` in `pyproject.toml` which the live backend needs.
_EXTRA = "torch"


def requirements(torch: bool = True) -> list[str]:
    """Requirements in `pyproject.toml` that a run needs, with or without the live backend's."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    asked = project["dependencies"] + (project["optional-dependencies"][_EXTRA] if torch else [])
    return [text for text in asked if name_of(text) not in UNUSED]


def name_of(requirement: str) -> str:
    """``"simpy>=4.1"`` -> ``"simpy"``: the distribution, and here also the module."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found[0].lower()


def manifest() -> dict[str, object]:
    """The bundle's own description; empty in a checkout."""
    path = ROOT / MANIFEST
    if not path.exists():
        return {}
    found: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return found


def refusals(torch: bool = True) -> Iterator[str]:
    """Reasons not to start a run, one line each; also puts a bundle's libraries on the path.

    A library that is installed here is preferred, unless it is older than what is asked for.
    """
    bundle = manifest()
    files = bundle.get("files", {})
    assert isinstance(files, dict)
    if gone := [name for name in files if not (ROOT / name).is_file()]:
        more = f" and {len(gone) - 1} more" * (len(gone) > 1)
        yield f"the bundle lacks {gone[0]}{more}: unpack it again"
        return
    for text in requirements(torch):
        name = name_of(text)
        carried = ROOT / LIBRARIES / name
        # Looked up before it is imported: what has been imported is not replaced.
        if carried.is_dir() and (outdated(text) or _failure(name)):
            sys.path.insert(0, str(carried))
        if (why := _failure(name)) is None:
            continue
        of = f"; the bundle's is for Python {bundle['python']}" if carried.is_dir() else ""
        yield f"this Python ({sys.executable}) needs {text}: {why}{of}"


def warnings(torch: bool = True) -> Iterator[str]:
    """Oddities of this machine that may work."""
    for text in requirements(torch):
        if version := outdated(text):
            yield f"{name_of(text)} {version} is installed, arborsim is tested with {text}"
    if not torch:
        return
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    if not any(map(shutil.which, filter(None, compilers))):
        yield "no C compiler (cc, gcc, clang): Triton needs one to start kernels"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        yield f"no {header}: Triton compiles against it to start kernels"


def outdated(requirement: str) -> str:
    """The installed version if it is not what is asked for; empty also where nobody can tell."""
    parser = _parser()
    try:
        version = metadata.version(name_of(requirement))
    except metadata.PackageNotFoundError:
        return ""
    if parser is None or parser(requirement).specifier.contains(version, True):
        return ""
    return version


def _failure(name: str) -> str | None:
    """Why a module cannot be imported, in one line: installed libraries may fail in any way."""
    try:
        import_module(name)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lines[-1]
    return None


def _parser():  # type: ignore[no-untyped-def]
    """`packaging`'s requirements, pip's own copy of them, or None."""
    for module in ("packaging.requirements", "pip._vendor.packaging.requirements"):
        try:
            return import_module(module).Requirement
        except ImportError:
            continue
    return None
