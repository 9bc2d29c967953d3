"""The packages and GPUs of this machine, what works with them, and what to install for the rest.

Packages that are only needed by some commands are imported in a process of their own: one that is
installed but broken cannot take this one down, and the core stays free of frameworks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arborsim.core import __version__

#: The module of the torch backend that imports everything it can use, and says what came of it.
PROBE = "arborsim_torch.probe"
_PROBE_S = 180.0  # first imports of torch from a cold disk take long
_BROWSERS = "google-chrome google-chrome-stable chrome chromium chromium-browser"
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


@dataclass(frozen=True)
class Package:
    """A distribution that arborsim can use."""

    name: str
    wanted: str  #: versions, e.g. ``">=2.0"``
    extra: str  #: the extra that installs it; "" if arborsim cannot run without
    version: str = ""  #: "" if it is not installed
    problem: str = ""  #: why it cannot be used; "" if it can

    @property
    def usable(self) -> bool:
        return bool(self.version) and not self.problem


@dataclass(frozen=True)
class Gpu:
    """A GPU that the driver, or torch, knows."""

    name: str
    memory_bytes: int
    driver: str = ""


@dataclass(frozen=True)
class Ability:
    """Something that arborsim does if what it needs is there."""

    name: str
    works: bool
    about: str  #: with what it works, or why it does not
    remedy: str = ""  #: what to do for it; "" if it works
    required: bool = False  #: whether nothing works without it


@dataclass(frozen=True)
class Installation:
    """Everything that `arborsim doctor` shows."""

    arborsim: str
    python: str
    executable: str
    platform: str
    cores: int
    memory_bytes: int  #: 0 if the system does not say
    gpus: tuple[Gpu, ...]
    browser: str  #: path of Chrome or Chromium; "" for none
    packages: tuple[Package, ...]
    abilities: tuple[Ability, ...]

    @property
    def sound(self) -> bool:
        """Whether all that is required works."""
        return all(ability.works for ability in self.abilities if ability.required)


def examine() -> Installation:
    """Look at this machine. Takes as long as importing torch and transformers, if they are there.

    Nothing that is missing or broken raises.
    """
    probe = _probe() if _version("torch") else {}
    found = {each.name: _probed(each, probe.get("broken", {})) for each in packages()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = _gpus(probe)
    browser = os.environ.get("BROWSER_PATH", "")
    browser = browser or next(filter(None, map(shutil.which, _BROWSERS.split())), "") or ""
    return Installation(
        arborsim=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        platform=f"{platform.system()} {platform.machine()}",
        cores=cores or 1,
        memory_bytes=_memory_bytes(),
        gpus=gpus,
        browser=browser,
        packages=tuple(found.values()),
        abilities=tuple(_abilities(found, probe, gpus, browser)),
    )


# --- packages ---


def packages(declared: Sequence[str] | None = None) -> tuple[Package, ...]:
    """The packages that arborsim declares to use, with what is installed of them.

    `declared` are requirements as package metadata has them, by default arborsim's own.  Each is
    listed once. Those that every command needs come first.
    """
    from packaging.requirements import Requirement

    if declared is None:
        try:
            declared = requires("arborsim") or ()
        except PackageNotFoundError:  # run from a folder of sources
            declared = ()
    found: dict[str, Package] = {}
    for made in map(Requirement, declared):
        extra = _EXTRA.search(str(made.marker or ""))
        if made.name == "arborsim" or (extra and extra[1] in ("test", "dev", "docs")):
            continue
        there, wanted = _version(made.name), str(made.specifier)
        problem = f"version {there} is not {wanted}" if there and not meets(there, wanted) else ""
        package = Package(made.name, wanted, extra[1] if extra else "", there, problem)
        found.setdefault(made.name, package)
    return tuple(sorted(found.values(), key=lambda each: bool(each.extra)))


def meets(version: str, wanted: str) -> bool:
    """Whether a version, also one before its release, is among those wanted: ``">=5.4,<6"``."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(wanted).contains(version, prereleases=True)
    except InvalidVersion:  # of a build of one's own
        return not wanted


def versions(*names: str) -> dict[str, str]:
    """Versions of arborsim and of those of these packages that are installed."""
    found = {"arborsim": __version__} | {name: _looked_up(name) for name in names}
    return {name: text for name, text in found.items() if text}


@functools.cache
def _looked_up(name: str) -> str:
    """Reading a package's metadata takes milliseconds, and a sweep asks for each cell."""
    return _version(name)


def in_words(made_with: Mapping[str, str]) -> str:
    """``"arborsim 1.0, numpy 2.1"``."""
    return ", ".join(f"{name} {text}" for name, text in made_with.items())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _probed(package: Package, broken: Mapping[str, str]) -> Package:
    problem = package.problem or broken.get(package.name, "")
    return replace(package, problem=problem if package.version else "")


# --- the machine ---


def _probe() -> dict[str, Any]:
    """The outcome of importing the packages of the extras, and of using the GPU."""
    try:
        done = _run(sys.executable, "-m", PROBE, timeout=_PROBE_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"importing torch took more than {_PROBE_S:.0f} s"}
    except OSError as error:
        return {"failed": str(error)}
    lines = done.stdout.strip().splitlines()
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        return {"failed": said[-1][:200] if said else f"Python ended with code {done.returncode}"}


def _gpus(probe: Mapping[str, Any]) -> tuple[Gpu, ...]:
    known = probe.get("gpus")
    if isinstance(known, list) and known:
        return tuple(Gpu(**each) for each in known)
    rows = _nvidia_smi("name,memory.total,driver_version", "nounits")
    try:
        return tuple(Gpu(name, int(mib) << 20, driver) for name, mib, driver in rows)
    except ValueError:
        return ()


def _nvidia_smi(wanted: str, *options: str, gpu: str = "") -> list[list[str]]:
    """A row of values per GPU, or of the one given. None without a driver."""
    query = [f"--query-gpu={wanted}", f"--format={','.join(('csv', 'noheader', *options))}"]
    found = _output("nvidia-smi", *query, *(["-i", gpu] if gpu else []))
    return [line.split(", ") for line in found.strip().splitlines()]


def _output(program: str, *options: str) -> str:
    """A program's output. "" if it is not there or fails."""
    if not (path := shutil.which(program)):
        return ""
    try:
        done = _run(path, *options, timeout=30)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return "" if done.returncode else done.stdout


def _run(*command: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


#: What a GPU's speed depends on, by nvidia-smi's name of it.
_STATE = {
    "driver": "driver_version",
    "SM clock": "clocks.sm",
    "highest SM clock": "clocks.max.sm",
    "memory clock": "clocks.mem",
    "power limit": "power.limit",
}


def gpu_state(gpu: str) -> dict[str, str]:
    """Driver, clocks and power limit of a GPU, named as nvidia-smi does. Empty if that is absent.

    Clocks are those of the moment.  A GPU without work lowers them.
    """
    rows = _nvidia_smi(",".join(_STATE.values()), gpu=gpu)
    return dict(zip(_STATE, rows[0], strict=False)) if rows else {}


@functools.cache
def revision() -> str:
    """The git revision of these sources, and whether they differ from it: ``1a2b3c4d5e6f, dirty``.

    Empty if arborsim was installed from a wheel. ``bundle 1a2b3c4d5e6f``, a digest of all files, in
    a bundle for GPU machines.  As it was when first asked for.
    """
    sources = Path(__file__).resolve().parents[2]
    if (listed := sources / "bundle.json").is_file():
        return f"bundle {_bundle_digest(listed)}"
    if not (sources / ".git").exists():
        return ""
    at = _output("git", "-C", str(sources), "rev-parse", "--short=12", "HEAD").strip()
    changed = _output("git", "-C", str(sources), "status", "--porcelain", "--untracked-files=no")
    return at + (", dirty" if at and changed.strip() else "")


def _bundle_digest(listed: Path) -> str:
    """Digest of the files in a bundle's list as they are now. They may have been changed."""
    digest = hashlib.sha256()
    for name in sorted(json.loads(listed.read_text(encoding="utf-8"))["files"]):
        digest.update(f"{name}\0".encode())
        digest.update((listed.parent / name).read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def sources(*places: str) -> str:
    """A digest of these sources, so that results of others can be recognised.

    `places` are packages (``"arborsim_torch"``), or files and folders of one
    (``"arborsim/products/replay/ask.py"``).  None is imported. One that is not installed counts as
    empty.
    """
    digest = hashlib.sha256()
    for place in places:
        package, _, rest = place.partition("/")
        spec = find_spec(package)
        for root in map(Path, (spec and spec.submodule_search_locations) or ()):
            top = root / rest
            files = [top] if top.is_file() else sorted(top.rglob("*"))
            for file in files:
                if file.is_file() and "__pycache__" not in file.parts:
                    digest.update(f"{package}/{file.relative_to(root).as_posix()}\0".encode())
                    digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


# --- what works ---


def _abilities(
    known: Mapping[str, Package], probe: Mapping[str, Any], gpus: Sequence[Gpu], browser: str
) -> list[Ability]:
    core = [each for each in known.values() if not each.extra]
    return [
        _of("replay, search, plan, reports", core, "pip install --upgrade arborsim", required=True),
        _live(known, probe),
        _cuda(known, probe, gpus),
        _kernels(known, probe),
        _images(known, browser),
        _of("embed thoughts (--embed)", _named(known, "sentence-transformers"), _pip("embed")),
        _of("calibrate and tune policies", _named(known, "optuna"), _pip("tune")),
        _of("sweeps on several machines", _named(known, "ray"), _pip("ray")),
        _of("import measured kernels", _named(known, "aiconfigurator-core"), _pip("kernels")),
    ]


def _pip(extra: str) -> str:
    return f"pip install 'arborsim[{extra}]'"


def _named(known: Mapping[str, Package], *names: str) -> list[Package]:
    return [known.get(name, Package(name, "", "", _version(name))) for name in names]


def _of(name: str, needed: Sequence[Package], remedy: str, required: bool = False) -> Ability:
    """Works if all the packages do."""
    broken = [f"{each.name}: {each.problem}" for each in needed if each.problem]
    missing = [each.name for each in needed if not each.version]
    if not broken and not missing:
        shown = needed[:3] if required else needed
        return Ability(name, True, ", ".join(f"{p.name} {p.version}" for p in shown), "", required)
    lacks = [f"{', '.join(missing)} not installed"] if missing else []
    return Ability(name, False, "; ".join([*lacks, *broken]), remedy, required)


def _live(known: Mapping[str, Package], probe: Mapping[str, Any]) -> Ability:
    name = "record, live, validate"
    found = _of(name, _named(known, "torch", "transformers", "safetensors"), _pip("torch"))
    why = probe.get("failed") or probe.get("backend")
    return Ability(name, False, str(why), _pip("torch")) if found.works and why else found


def _cuda(known: Mapping[str, Package], probe: Mapping[str, Any], gpus: Sequence[Gpu]) -> Ability:
    name, torch = "live models on a GPU", _named(known, "torch")[0]
    if probe.get("cuda") is True:
        return Ability(name, True, f"CUDA {probe.get('cuda_version')}, {gpus[0].name}")
    if not torch.usable:
        why, remedy = "torch not installed", _pip("torch")
    elif failed := probe.get("cuda_failed"):
        why = f"torch cannot use the GPU: {failed}"
        remedy = "match torch's CUDA version and the driver's"
    elif gpus and not probe.get("cuda_version"):
        why = f"torch {torch.version} is built without CUDA"
        remedy = "install torch from pytorch.org's CUDA index"
    elif gpus:
        why = "torch sees no GPU, but the driver does"
        remedy = "check CUDA_VISIBLE_DEVICES and the driver"
    else:
        why, remedy = "no GPU found; --device cpu works, slowly", ""
    return Ability(name, False, why, remedy)


def _kernels(known: Mapping[str, Package], probe: Mapping[str, Any]) -> Ability:
    name = "fused attention kernels"
    fast = _named(known, "flash-attn", "flashinfer-python")
    usable = [f"{each.name} {each.version}" for each in fast if each.usable]
    triton = _named(known, "triton")[0]
    usable += [f"triton {triton.version}"] if triton.usable else []
    if probe.get("cuda") is True and usable:
        uses = [f"{use}: {why}" for use, why in probe.get("attention", {}).items()]
        return Ability(name, True, "; ".join([", ".join(usable), *uses]))
    broken = [f"{each.name}: {each.problem}" for each in (*fast, triton) if each.problem]
    if broken:
        return Ability(name, False, "; ".join(broken), "reinstall them for this version of torch")
    if probe.get("cuda") is not True:
        return Ability(name, False, "they need a GPU that torch can use")
    return Ability(name, False, "none installed; torch's own attention is used", _pip("cuda"))


def _images(known: Mapping[str, Package], browser: str) -> Ability:
    name = "plots as SVG and PNG"
    found = _of(name, _named(known, "kaleido"), _pip("images"))
    if found.works and not browser:
        why = "kaleido finds no Chrome or Chromium"
        return Ability(name, False, why, "install one, or set BROWSER_PATH")
    return replace(found, about=f"{found.about}, {browser}") if found.works else found
