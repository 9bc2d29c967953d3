"""Files, modules and names that the documentation and docstrings mention exist."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # `benchmarks` is no installed package
from benchmarks import structure  # noqa: E402
from tests.conftest import LONGEST  # noqa: E402

PACKAGES = {"arborsim": ROOT / "arborsim", "arborsim_torch": ROOT / "backends" / "arborsim_torch"}
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "reports/*/README.md", "backends/*/reference/README.md")
    for path in ROOT.glob(pattern)
)
SOURCES = sorted(
    path
    for folder in ("arborsim", "backends", "benchmarks", "tests", "traces")
    for path in (ROOT / folder).rglob("*.py")
)
_TOP = "arborsim|backends|benchmarks|docs|reports|tests|traces"
_PATH = re.compile(rf"(?<![\w/.-])(?:{_TOP})/[\w./*-]*\w/?")
_INNER = re.compile(r"`((?:[a-z]\w*/)+(?:[\w*]+\.\w+)?)`")  # of arborsim/, or of all
_DOTTED = re.compile(r"(?<![\w/.-])(?:arborsim|arborsim_torch)(?:\.\w+)+")
_LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
_MADE_BY_RUNS = re.compile(r"DEVICE|\.jsonl$")  # written by a run on a GPU, not shipped
#: Of entry points, and a key of a file's metadata.
_GROUPS = {"arborsim.backends", "arborsim.policies", "arborsim.searches", "arborsim.version"}
_CLASS = re.compile(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)\b")
_ELSEWHERE = {"BlockStored", "DynamicCache", "LlamaForCausalLM", "ParamSpec"}  # of others
_FILE = re.compile(r"\.(?:parquet|toml|html|json|jsonl)$")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_in_documents_exist(path: Path) -> None:
    mentioned = {m for m in _PATH.findall(path.read_text()) if not _MADE_BY_RUNS.search(m)}
    missing = [m for m in mentioned if not any(ROOT.glob(m.rstrip("/")))]
    assert not missing, f"{path.name} mentions what does not exist: {sorted(missing)}"


def test_files_of_the_architecture_exist() -> None:
    mentioned = set(_INNER.findall((ROOT / "docs" / "architecture.md").read_text()))
    assert len(mentioned) > 20
    roots = ROOT, ROOT / "arborsim"
    missing = [m for m in mentioned if not any(any(r.glob(m.rstrip("/"))) for r in roots)]
    assert not missing, f"docs/architecture.md mentions what does not exist: {sorted(missing)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_documents_lead_somewhere(path: Path) -> None:
    for target, anchor in _LINK.findall(path.read_text()):
        if target.startswith("http"):
            continue
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor[1:] in _anchors(file), f"{path.name} links to {target}{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_dotted_names_in_documents_exist(path: Path) -> None:
    missing = {name for name in _dotted(path.read_text()) if not _defined(name)}
    assert not missing, f"{path.name} mentions what is not there: {sorted(missing)}"


def test_classes_in_documents_exist() -> None:
    defined = {
        node.name
        for path in SOURCES
        for node in ast.walk(structure.parsed(path))
        if isinstance(node, ast.ClassDef)
    }
    mentioned = {name for path in DOCUMENTS for name in _CLASS.findall(path.read_text())}
    assert mentioned <= defined | _ELSEWHERE


def test_dotted_names_in_docstrings_exist() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for text in docstrings(path)
        for name in _dotted(text)
        if not _defined(name)
    }
    assert not missing, "\n".join(sorted(missing))


def test_the_table_of_the_architecture_lists_the_packages() -> None:
    section = (
        (ROOT / "docs" / "architecture.md").read_text().split("## Packages")[1].split("\n## ")[0]
    )
    names = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    assert names == {path.parent.name for path in (ROOT / "arborsim").glob("*/__init__.py")}


def test_the_counts_of_the_architecture_are_those_of_the_sources() -> None:
    """``python benchmarks/structure.py --page`` writes them; a change of 5% may wait for that."""
    begin, end = structure.MARKS
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page.count(begin) == page.count(end) == 1
    written, now = page.partition(begin)[2].partition(end)[0], structure.counts()
    number = re.compile(r"\d[\d,]*")
    assert number.sub("n", written) == number.sub("n", now)
    for one, other in zip(number.findall(written), number.findall(now), strict=True):
        assert int(one.replace(",", "")) == pytest.approx(int(other.replace(",", "")), 0.05, 2)


def test_every_invariant_is_held_by_a_test_and_every_number_is_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## Invariants\n")[1].split("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    named = {
        int(number)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(structure.parsed(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for said in re.findall(r"Invariants? ([\d, and]+):", ast.get_docstring(node) or "")
        for number in re.findall(r"\d+", said)
    }
    assert named == set(numbers)


def test_files_that_are_tested_first_exist() -> None:
    assert not [name for name in LONGEST if not (ROOT / "tests" / name).is_file()]


def test_ceilings_hold() -> None:
    assert not structure.broken(structure.measured(), structure.ceilings())


def test_a_broken_ceiling_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = structure.measured()
    lower = dict(now, core_lines=now["core_lines"] - 1)
    monkeypatch.setattr(structure, "ceilings", lambda: lower)
    monkeypatch.setattr(sys, "argv", ["structure.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        structure.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out == (
        f"core has {now['core_lines']:,} lines, the ceiling is {lower['core_lines']:,}: shrink it, "
        "or raise it in pyproject.toml and say why in docs/decisions.md\n"
    )


def test_a_ceiling_of_nothing_that_is_measured_is_named() -> None:
    now = structure.measured()
    assert "['core_words']" in structure.broken(now, now | {"core_words": 1})[0]


def test_cycles_are_found_whenever_the_import_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package := tmp_path / "arborsim" / "a").mkdir(parents=True)
    (package / "one.py").write_text("from arborsim.a import two\n")
    (package / "two.py").write_text("def late():\n    import arborsim.a.one\n")
    (package / "three.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import arborsim.a.four\n"
    )
    (package / "four.py").write_text("import arborsim.a.three\n")
    for name, path in (("ROOT", tmp_path), ("PACKAGE", tmp_path / "arborsim")):
        monkeypatch.setattr(structure, name, path)
    monkeypatch.setattr(structure, "ceilings", structure.measured)
    found = structure.graph()
    assert sorted(found["cycles_of_modules"]) == [
        ["arborsim.a.four", "arborsim.a.three"], ["arborsim.a.one", "arborsim.a.two"],
    ]  # fmt: skip
    assert found["cycles_of_modules_at_load"] == []
    assert "`a`: one, two" in structure.counts()


def _dotted(text: str) -> Iterator[str]:
    for name in _DOTTED.findall(text):
        if not _FILE.search(name) and name not in _GROUPS:
            yield name


def _anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def docstrings(path: Path) -> Iterator[str]:
    """Those of a module, its classes and its functions; empty where there is none."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(structure.parsed(path)):
        if isinstance(node, kinds):
            yield ast.get_docstring(node) or ""


def _defined(name: str) -> bool:
    """Whether a dotted name is a module, or is defined in one."""
    package, *parts = name.split(".")
    place = PACKAGES[package]
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place = place / f"{parts.pop(0)}.py"
    elif place.is_dir():
        place /= "__init__.py"
    return not parts or _has(structure.parsed(place), parts)


def _has(scope: ast.AST, parts: list[str]) -> bool:
    first, *rest = parts
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == first:
            return not rest or _has(node, rest) or _sets(node, rest[0])
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.ImportFrom) and first in _names(node):
            return True
        if isinstance(node, ast.If) and _has(node, parts):  # what a package exports lazily
            return True
    return False


def _names(node: ast.Assign | ast.AnnAssign | ast.ImportFrom) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    }


def _sets(scope: ast.AST, name: str) -> bool:
    """Whether a class assigns an attribute to its instances."""
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(scope))
