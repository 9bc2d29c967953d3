"""Everything that a GPU validation needs beside PyTorch, in one folder and one archive.

    python benchmarks/gpu/bundle.py --out gpu-bundle    # also gpu-bundle.tar.zst; `make gpu-bundle`
    gpu-bundle/run.sh --out results                     # there: no registry, network or git

The folder holds the sources of arborsim and of its live backend with their data, weights of the
reference models that a validation loads, the program itself, and what machines with PyTorch lack,
unpacked from wheels for `--python`.  `bundle.json` lists the files.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

import pyarrow as pa

from arborsim import __version__
from arborsim.core.installed import revision
from benchmarks.gpu.needs import LIBRARIES, MANIFEST, name_of, requirements

PYTHON = "3.12"  #: of the other machine, unless `--python` says so
LIMIT_BYTES = 40 << 20  #: of the folder, and so of the archive
#: Files and folders that are carried; the modules of tests are those which `benchmarks.gpu` uses.
SOURCES = (
    "LICENSE", "pyproject.toml", "arborsim", "backends/arborsim_torch",
    "benchmarks/validate_gpu.py", "benchmarks/gpu",
    "tests/__init__.py", "tests/live/__init__.py",
    "tests/live/oracle_attention.py", "tests/live/pieces_cases.py",
)  # fmt: skip
_START = "benchmarks/gpu/run.sh"  # at the bundle's top
_WEIGHTS = "backends/arborsim_torch/reference/weights"
MODELS = ("chain", "game24")  #: reference models whose weights are carried
#: What a machine with PyTorch and transformers has.
PRESENT = frozenset({"numpy", "pandas", "pyarrow", "torch", "transformers", "safetensors"})
_GLIBC = (17, 24, 27, 28)  # wheels for glibc 2.x
_LEVEL = 19  # of zstd


def carried() -> Iterator[Path]:
    """Files of this checkout that go into a bundle, relative to it, in order."""
    for place in SOURCES:
        top = ROOT / place
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = path.relative_to(ROOT)
            weights = name.is_relative_to(_WEIGHTS) and name.parts[4:5]
            if path.is_dir() or "__pycache__" in name.parts:
                continue
            if not weights or weights[0] in MODELS:
                yield name


def copy(folder: Path) -> None:
    """Copy what is `carried` to `folder`, which is replaced if it is a bundle.

    Raises
    ------
    SystemExit
        One line: `folder` holds something else.
    """
    if folder.exists() and not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise SystemExit(f"bundle: {folder} holds something else: name another folder")
    shutil.rmtree(folder, ignore_errors=True)
    for name in carried():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / _START).rename(folder / "run.sh")


def seal(folder: Path, python: str = PYTHON) -> int:
    """List the files in `folder`, with their sizes; returns the bytes of all.

    Raises
    ------
    SystemExit
        One line: the bundle is too large.
    """
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip
    about = {"version": __version__, "python": python, "commit": revision(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    size = sum(files.values())
    if size > LIMIT_BYTES:
        raise SystemExit(f"bundle: {size / 2**20:.1f} MiB, more than {LIMIT_BYTES >> 20}")
    return size


def add_libraries(folder: Path, python: str = PYTHON) -> None:
    """Unpack what the other machine lacks into `folder`, in the versions of `constraints.txt`.

    Raises
    ------
    SystemExit
        One line: pip could not get a wheel.
    """
    asked = [text for text in requirements() if name_of(text) not in PRESENT]
    tags = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    with tempfile.TemporaryDirectory() as wheels:
        words = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--only-binary=:all:", "--implementation=cp",
            f"--python-version={python}", *tags, "--platform=manylinux2014_x86_64",
            f"--constraint={ROOT / 'constraints.txt'}", f"--dest={wheels}", *asked,
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise SystemExit(f"bundle: pip: {said[0] if said else done.stderr.strip()[-200:]}")
        for wheel in sorted(Path(wheels).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / LIBRARIES / wheel.name.split("-")[0].lower())


def pack(folder: Path) -> Path:
    """``FOLDER.tar.zst`` next to the folder: the same bytes for the same files."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if info.name.endswith("__pycache__"):  # of a run in the folder
            return None
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.isdir() or info.name.endswith(".sh") else 0o644
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, folder.name, filter=plain)
    path = folder.with_name(f"{folder.name}.tar.zst")
    codec = pa.Codec("zstd", compression_level=_LEVEL)
    path.write_bytes(codec.compress(buffer.getvalue(), asbytes=True))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-bundle"), help="folder to write")
    parser.add_argument("--python", default=PYTHON, help="version of the other machine's")
    options = parser.parse_args()
    folder = options.out.resolve()
    copy(folder)
    add_libraries(folder, options.python)
    size = seal(folder, options.python)
    path = pack(folder)
    print(f"wrote {folder} ({size / 2**20:.1f} MiB) and {path} "
          f"({path.stat().st_size / 2**20:.1f} MiB)")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
