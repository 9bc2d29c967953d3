"""Wheels for a machine without a package registry: collect them here, install them there.

    python benchmarks/gpu/wheels.py collect wheels   # where pip works and arborsim is installed;
                                                     # --python 3.11: what the other machine has
    python benchmarks/gpu/wheels.py install wheels   # there: into wheels/site, which is printed

The other machine has PyTorch and what commonly comes with it (`PRESENT`).  `install` compares
versions with what `pyproject.toml` wants and installs what is missing or too old, no more; what is
there neither way is one line and exit code 2.  Only Python's standard library and pip are used.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What a machine with PyTorch is expected to have: large wheels that need not travel.
PRESENT = ("numpy", "pandas", "pyarrow", "scipy", "torch", "transformers", "safetensors", "triton")
PYTHON = "3.12"  #: of the other machine, if `collect` is not told
_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
_GLIBC = (17, 24, 27, 28)  # wheels for glibc 2.x

#: A distribution's version and what it requires; raises `metadata.PackageNotFoundError`.
Lookup = Callable[[str], tuple[str, list[str]]]


def core_dependencies() -> list[str]:
    """Requirements of the project without its extras, as `pyproject.toml` states them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: list[str] = tomllib.load(file)["project"]["dependencies"]
    return found


def torch_dependencies() -> list[str]:
    """Requirements of the live backend."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: list[str] = tomllib.load(file)["project"]["optional-dependencies"]["torch"]
    return found


def installed(name: str) -> tuple[str, list[str]]:
    """Version and requirements of a distribution in this Python."""
    found = metadata.distribution(name)
    return found.version, found.requires or []


def wanted(
    requirements: Iterable[str], present: Iterable[str] = PRESENT, lookup: Lookup = installed,
    python: str = PYTHON,
) -> dict[str, str]:  # fmt: skip
    """Versions of all that `requirements` need on the other machine, but for what is present there.

    Parameters
    ----------
    requirements : iterable of str
    present : iterable of str
        Distributions that are there; what they need is there, too.
    lookup : callable
        Says what is installed here: that is what will be collected.
    python : str
        Version of the other machine.

    Raises
    ------
    metadata.PackageNotFoundError
        A requirement is not installed here.
    """
    found: dict[str, str] = {}
    there = {_plain(name) for name in present}
    waiting = list(requirements)
    while waiting:
        name = _needed(waiting.pop(), python)
        if name is None or name in found or name in there:
            continue
        found[name], needs = lookup(name)
        waiting += needs
    return dict(sorted(found.items()))


def collect(folder: Path, python: str = PYTHON) -> list[Path]:
    """Download wheels for a version of Python into `folder`; returns the files.

    Raises
    ------
    SystemExit
        One line: pip could not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}=={each}" for name, each in wanted(core_dependencies(), python=python).items()]
    tags = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    tags += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    _pip(
        "download", "--no-deps", "--only-binary=:all:", "--implementation=cp",
        f"--python-version={python}", *tags, "--dest", str(folder), *pins,
    )  # fmt: skip
    return sorted(folder.glob("*.whl"))


def missing(requirements: Iterable[str], lookup: Lookup = installed) -> list[str]:
    """Requirements that this Python does not meet, those of what it has included."""
    packaging = _packaging()
    found, seen, waiting = [], set(), list(requirements)
    while waiting:
        text = waiting.pop()
        name = _needed(text)
        if name is None or (name, text) in seen:
            continue
        seen.add((name, text))
        try:
            version, needs = lookup(name)
        except metadata.PackageNotFoundError:
            found.append(text)
            continue
        if not packaging.requirements.Requirement(text).specifier.contains(version, True):
            found.append(text)
        waiting += needs
    return sorted(found)


def install(folder: Path) -> Path:
    """Install what is missing here from the wheels in `folder`; returns where it is now.

    Raises
    ------
    SystemExit
        One line: what is missing and not among the wheels.
    """
    site = folder / "site"
    sys.path.insert(0, str(site))
    needs = core_dependencies()
    lacking = missing(needs)
    while lacking:
        files = {_plain(path.name.split("-")[0]): path for path in folder.glob("*.whl")}
        names = {name for text in lacking if (name := _needed(text)) is not None}
        absent = sorted(names - files.keys())
        if absent:
            raise SystemExit(
                f"wheels: {folder} has no wheel of {', '.join(absent)}: collect them again"
            )
        _pip(
            "install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target",
            str(site), *(str(files[name]) for name in sorted(names)),
        )  # fmt: skip
        before, lacking = lacking, missing(needs)  # what was installed has requirements, too
        if before == lacking:
            raise SystemExit(f"wheels: those in {folder} do not meet {', '.join(lacking)}")
    old = missing(torch_dependencies())
    if old:
        raise SystemExit(f"wheels: this Python has not {', '.join(old)}, which come with PyTorch")
    return site


def _pip(command: str, *arguments: str) -> None:
    """Run pip; what it says of an error becomes one line."""
    words = [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*words, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise SystemExit(
            f"wheels: pip {command} failed: {said[0] if said else done.stderr.strip()[-200:]}; "
            f"this Python is {_HERE}: wheels are of the version that `collect --python` named"
        )


def _needed(text: str, python: str = _HERE) -> str | None:
    """The plain name of a requirement; None if it is for an extra or another environment."""
    requirement = _packaging().requirements.Requirement(text)
    environment = {"extra": "", "python_version": python, "python_full_version": f"{python}.0",
                   "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
                   "platform_machine": "x86_64"}  # fmt: skip
    if requirement.marker is not None and not requirement.marker.evaluate(environment):
        return None
    return _plain(requirement.name)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _packaging():  # type: ignore[no-untyped-def]
    """pip's own copy where the library is not installed."""
    try:
        import packaging.requirements as _  # noqa: F401

        return sys.modules["packaging"]
    except ImportError:
        import pip._vendor.packaging.requirements  # noqa: F401

        return sys.modules["pip._vendor.packaging"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("collect", "install"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=PYTHON, help="collect: version of the other machine")
    options = parser.parse_args()
    if options.what == "install":
        print(install(options.folder.resolve()))
        return 0
    files = collect(options.folder, options.python)
    for path in files:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")
    print(f"{sum(path.stat().st_size for path in files) / 1e6:6.2f} MB in {len(files)} wheels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
