"""The bundle for GPU machines: complete, small, and what keeps it from starting is one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from benchmarks.gpu import bundle, needs

#: For msgspec and simpy, which tests do not download: wheels of 0.3 MB.
LIBRARIES_BYTES = 1 << 20
#: Imports everything that a run does, without what it does without, and says where from.
IMPORTS = """
import sys
sys.modules.update(dict.fromkeys({unused}))
sys.path[:0] = [{root!r}, {root!r} + "/backends"]
from importlib import import_module
from pathlib import Path
for path in sorted(Path({root!r}, "benchmarks", "gpu").glob("*.py")):
    import_module("benchmarks.gpu." + path.stem)
import benchmarks.validate_gpu
from arborsim.core.installed import revision
print(revision())
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in ("arborsim", "arborsim_torch", "benchmarks", "tests"):
        print(module.__file__ or list(module.__path__)[0])
"""


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without libraries: this Python has them."""
    folder = tmp_path_factory.mktemp("gpu") / "bundle"
    bundle.copy(folder)
    assert bundle.seal(folder) < bundle.LIMIT_BYTES - LIBRARIES_BYTES
    return folder


@pytest.fixture
def mine(sealed: Path, tmp_path: Path) -> Path:
    """A copy to damage; weights are linked."""
    copy = tmp_path / "bundle"
    shutil.copytree(sealed, copy, copy_function=os.link)
    return copy


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.unlink()  # it is a link
    path.write_text(text.replace(old, new))


def run(folder: Path, *arguments: str, python: str = sys.executable) -> tuple[int, str]:
    """Exit code and what it complained about, started elsewhere, as on another machine."""
    done = subprocess.run(
        ["sh", str(folder / "run.sh"), *arguments], cwd="/", capture_output=True, text=True,
        env={**os.environ, "PYTHON": python, "CUDA_VISIBLE_DEVICES": ""}, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def refused(found: tuple[int, str]) -> str:
    code, said = found
    assert (code, said.count("\n")) == (2, 1), said
    return said


def test_a_bundle_holds_all_that_a_run_imports(sealed: Path) -> None:
    code = IMPORTS.format(root=str(sealed), unused=sorted(needs.UNUSED - {"jinja2"}))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    revision, *files = done.stdout.splitlines()
    assert len(files) > 200
    assert [each for each in files if not Path(each).is_relative_to(sealed)] == []
    assert re.fullmatch("bundle [0-9a-f]{12}", revision)


def test_unused_libraries_are_asked_for_by_the_project() -> None:
    """So that none is left out of the checks by a name that nothing has."""
    asked = {needs.name_of(text) for text in needs.requirements()}
    assert asked & needs.UNUSED == set()
    assert asked > bundle.PRESENT
    text = (bundle.ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}>=' in text for name in needs.UNUSED)


def test_a_changed_file_is_another_revision(mine: Path) -> None:
    code = "from arborsim.core.installed import revision; print(revision())"

    def revision() -> str:
        return subprocess.run(
            [sys.executable, "-c", code], cwd=mine, capture_output=True, text=True, check=True
        ).stdout

    before = revision()
    replace(mine / "benchmarks" / "gpu" / "page.py", "import", "import ")
    assert revision() != before


def test_it_runs_from_anywhere(sealed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, said = run(
        sealed, "--device", "cpu", "--tiny", "--parts", "yardsticks", "--out", str(out)
    )
    assert code == 0, said
    records = [
        json.loads(line) for path in out.rglob("results.jsonl")
        for line in path.read_text().splitlines()
    ]  # fmt: skip
    assert {record["part"]: record["outcome"] for record in records}["yardsticks"] == "done"


def test_the_archive_is_the_folder_and_always_the_same(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_LEVEL", 1)  # small takes seconds
    path = bundle.pack(sealed)
    first = path.read_bytes()
    assert bundle.pack(sealed).read_bytes() == first
    with pa.input_stream(str(path)) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        members = {member.name: member for member in archive if member.isfile()}
    names = {f"bundle/{each}" for each in (*listed(sealed), needs.MANIFEST)}
    assert members.keys() == names
    assert members["bundle/run.sh"].mode & 0o100


def listed(folder: Path) -> list[str]:
    return list(json.loads((folder / needs.MANIFEST).read_text())["files"])


def test_a_folder_that_is_no_bundle_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(SystemExit, match="holds something else"):
        bundle.copy(tmp_path)
    assert (tmp_path / "mine.txt").exists()


# What keeps a run from starting.


@pytest.mark.parametrize("gone", ["benchmarks/validate_gpu.py", "arborsim/core/tiers.py"])
def test_a_missing_file_is_one_line(mine: Path, gone: str) -> None:
    (mine / gone).unlink()
    assert f"the bundle lacks {gone}: unpack it again" in refused(run(mine, "--dry-run"))


def test_another_python_is_one_line(sealed: Path) -> None:
    assert "there is no no-such-python" in refused(run(sealed, python="no-such-python"))
    assert "is not Python 3.11 or newer" in refused(run(sealed, python="/bin/false"))


def test_no_cuda_is_one_line(sealed: Path, tmp_path: Path) -> None:
    code, said = run(sealed, "--out", str(tmp_path))
    assert code == 2
    assert "finds no CUDA here" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_a_missing_library_is_one_line(mine: Path) -> None:
    replace(mine / "pyproject.toml", '"simpy>=4.1"', '"no_such_package>=1"')
    said = refused(run(mine, "--dry-run"))
    assert "needs no_such_package>=1: No module named 'no_such_package'" in said


def test_a_library_of_another_python_is_one_line(mine: Path) -> None:
    replace(mine / "pyproject.toml", '"simpy>=4.1"', '"no_such_package>=1"')
    broken = mine / needs.LIBRARIES / "no_such_package" / "no_such_package.py"
    broken.parent.mkdir(parents=True)
    broken.write_text("import no_such_part")
    said = refused(run(mine, "--dry-run"))
    assert "No module named 'no_such_part'; the bundle's is for Python 3.12" in said


def test_an_older_version_is_a_warning(mine: Path) -> None:
    replace(mine / "pyproject.toml", '"pandas>=2.2.2"', '"pandas>=999"')
    code, said = run(mine, "--dry-run")
    assert code in (0, 1)
    assert re.search(
        r"warning: pandas [\d.]+ is installed, arborsim is tested with pandas>=999", said
    )


def test_a_carried_library_replaces_an_older_one(mine: Path) -> None:
    replace(mine / "pyproject.toml", '"simpy>=4.1"', '"simpy>=999"')
    carried = mine / needs.LIBRARIES / "simpy" / "simpy"
    shutil.copytree(Path(pytest.importorskip("simpy").__file__).parent, carried)
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]; from benchmarks.gpu import needs;"
        "print(list(needs.refusals(torch=False)));"
        "import simpy.events; print(simpy.events.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(mine)], cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", str(carried / "events.py")]
