"""The structure of the package: sizes, imports, and how much code one replay runs through.

``python benchmarks/structure.py [--out FILE]`` prints JSON.  With ``--page`` it writes sizes and
cycles into ``docs/architecture.md`` instead.  With ``--check`` it prints the ceilings of
``pyproject.toml`` that are broken and exits with 1.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "arborsim"
BACKENDS = ROOT / "backends"
PAGE = ROOT / "docs" / "architecture.md"
#: What stands around the counts of the page.
MARKS = ("<!-- structure: begin -->\n", "<!-- structure: end -->\n")
#: Commands by name.  SimPy is told the time only while something is transferred.
RUNS = {
    "replay": (
        "replay", "traces/chain-linear.parquet", "--policy", "h2o", "--set", "h2o.per=shared",
        "--episodes", "1",
    ),
    "replay with transfers": (
        "replay", "traces/game24-tot.parquet", "--policy", "hierarchy", "--episodes", "1",
    ),
    "plan": ("plan", "tests/golden/workload.toml"),
}  # fmt: skip


class Measure(NamedTuple):
    """A number that has a ceiling in ``[tool.arborsim.ceilings]`` of ``pyproject.toml``."""

    what: str  # as the page names it
    broken: str  # what is said of a broken ceiling
    before: int  # at commit cd96423
    target: int | None  # None: none was set


MEASURES = {
    "core_lines": Measure("lines of `arborsim`", "core has {} lines", 63_392, 50_000),
    "core_files": Measure("files of `arborsim`", "core has {} files", 285, 225),
    "backends_lines": Measure("lines of `backends`", "backends have {} lines", 23_081, 20_500),
    "backends_files": Measure("files of `backends`", "backends have {} files", 106, None),
    "circles": Measure(
        "modules that import each other in a circle",
        "{} modules of the core import each other in a circle", 21, 0,
    ),
    "fmt_skip": Measure("lines that the formatter skips", "{} lines say `fmt: skip`", 634, 60),
    "longest_function": Measure(
        "lines of the longest function", "the longest function has {} lines", 159, None
    ),
    "longest_file": Measure("lines of the longest file", "the longest file has {} lines", 527, 400),
}  # fmt: skip


def modules() -> dict[str, Path]:
    """The package's modules by dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax of a module."""
    return ast.parse(path.read_text())


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Modules that a module imports, each with when: `load`, `run` (in a function) or `typing`."""

    def walk(node: ast.AST, when: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, when) for alias in child.names if alias.name in known)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                for alias in child.names:
                    inner = f"{child.module}.{alias.name}"
                    name = inner if inner in known else child.module
                    if name in known:
                        yield name, when
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from ((name, "typing") for name, _ in walk(child, when))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from walk(child, "run" if when == "load" else when)
            else:
                yield from walk(child, when)

    yield from walk(parsed(path), "load")


def part(name: str) -> str:
    """The top-level package, or module, that a module is in."""
    return name.split(".")[1] if "." in name else "arborsim"


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node, largest first."""

    def reached(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for name in edges.get(waiting.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return seen

    reach = {
        name: reached(name) for name in {*edges, *(x for each in edges.values() for x in each)}
    }
    found = {
        tuple(sorted(other for other in reach[name] if name in reach[other])) for name in reach
    }
    return sorted(
        (list(each) for each in found if len(each) > 1), key=lambda each: (-len(each), each)
    )


def graph() -> dict[str, Any]:
    """Imports between top-level packages, and the cycles among packages and among modules."""
    known = modules()
    between: Counter[tuple[str, str]] = Counter()
    at_load: dict[str, set[str]] = {}
    by_module: dict[str, set[str]] = {}
    modules_at_load: dict[str, set[str]] = {}
    by_part: dict[str, set[str]] = {}
    for name, path in known.items():
        for other, when in set(imports(path, known)):
            if other != name:
                by_module.setdefault(name, set()).add(other)
                if when == "load":
                    modules_at_load.setdefault(name, set()).add(other)
            if part(name) == part(other):
                continue
            between[part(name), part(other)] += 1
            by_part.setdefault(part(name), set()).add(part(other))
            if when == "load":
                at_load.setdefault(part(name), set()).add(part(other))
    return {
        "parts": sorted({part(name) for name in known}),
        "edges": len(between),
        "edges_at_load": sum(map(len, at_load.values())),
        "imports_between_parts": {
            f"{one} -> {other}": count for (one, other), count in sorted(between.items())
        },
        "cycles_of_parts": cycles(by_part),
        "cycles_of_parts_at_load": cycles(at_load),
        "cycles_of_modules": cycles(by_module),
        "cycles_of_modules_at_load": cycles(modules_at_load),
    }


def size() -> dict[str, Any]:
    """Files and lines, of all and by top-level package; of the products, by product."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, path in modules().items():
        inner = path.relative_to(PACKAGE).parts
        at = "/".join(inner[:2]) if inner[0] == "products" and len(inner) > 2 else part(name)
        lines[at] += len(path.read_text().splitlines())
        files[at] += 1
    return {
        "files": files.total(),
        "lines": lines.total(),
        "by_part": {name: {"files": files[name], "lines": lines[name]} for name in sorted(files)},
    }


def measured() -> dict[str, int]:
    """The value of each of `MEASURES` now."""
    paths = {"core": sorted(PACKAGE.rglob("*.py")), "backends": sorted(BACKENDS.rglob("*.py"))}
    both = {path: path.read_text() for each in paths.values() for path in each}
    lines = {name: [len(both[path].splitlines()) for path in each] for name, each in paths.items()}
    functions = (
        node.end_lineno - node.lineno + 1
        for path in both
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    return {
        **{f"{name}_lines": sum(each) for name, each in lines.items()},
        **{f"{name}_files": len(each) for name, each in lines.items()},
        "circles": sum(map(len, graph()["cycles_of_modules"])),
        "fmt_skip": sum(text.count("# fmt: skip") for text in both.values()),
        "longest_function": max(functions, default=0),
        "longest_file": max((count for each in lines.values() for count in each), default=0),
    }


def ceilings() -> dict[str, int]:
    """The most that each of `measured` may be, from ``pyproject.toml``."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return dict(settings["tool"]["arborsim"]["ceilings"])


def broken(now: dict[str, int], most: dict[str, int]) -> list[str]:
    """A line for every ceiling that is broken, or that is of nothing measured."""
    if unknown := sorted(now.keys() ^ most.keys()):
        return [f"[tool.arborsim.ceilings] of pyproject.toml and MEASURES differ: {unknown}"]
    return [
        f"{MEASURES[name].broken.format(f'{now[name]:,}')}, the ceiling is {most[name]:,}: shrink "
        "it, or raise it in pyproject.toml and say why in docs/decisions.md"
        for name in MEASURES
        if now[name] > most[name]
    ]


def counts() -> str:
    """The page's lines on size and cycles, as they are now."""
    sizes, found, now, most = size(), graph(), measured(), ceilings()
    lines = ["| package | files | lines |", "|---|---|---|"]
    for name, each in sizes["by_part"].items():
        lines.append(f"| `{name}` | {each['files']:,} | {each['lines']:,} |")
    lines += [
        "", "Cycles of imports:", "",
        "| | when modules are loaded | with imports in functions and for types |", "|---|---|---|",
    ]  # fmt: skip
    for what, key in (("packages", "cycles_of_parts"), ("modules", "cycles_of_modules")):
        cells = [_listed(found[f"{key}_at_load"]), _listed(found[key])]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    lines += [
        "", "Ceilings stand in `pyproject.toml` and are checked by `make lint`; before is commit "
        "cd96423.", "",
        "| | before | now | ceiling | target |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, each in MEASURES.items():
        target = "" if each.target is None else f"{each.target:,}"
        cells = [f"{number:,}" for number in (each.before, now[name], most[name])]
        lines.append(f"| {each.what} | {' | '.join(cells)} | {target} |")
    return "\n".join(lines) + "\n"


def _listed(groups: list[list[str]]) -> str:
    """Cycles as the names that they go through, by package: ``"`show`: claims, claims_page"``."""
    shown = []
    for names in groups:
        package, same = part(names[0]), len({part(name) for name in names}) == 1
        inner = [
            name.removeprefix(f"arborsim.{package}." if same else "arborsim.") for name in names
        ]
        shown.append((f"`{package}`: " if same else "") + ", ".join(inner))
    return "; ".join(shown) or "none"


def write_page(path: Path = PAGE) -> None:
    """Put the counts between the marks of the page."""
    begin, end = MARKS
    before, _, rest = path.read_text().partition(begin)
    path.write_text(f"{before}{begin}{counts()}{end}{rest.partition(end)[2]}")


def called(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Files whose code a command runs through, and the events that SimPy processes in it.

    The command runs twice in this process: the first run imports all that it uses, so that only
    functions that it calls count in the second one.
    """
    import simpy

    steps = 0
    step = simpy.Environment.step

    def counted(environment: Any) -> None:
        nonlocal steps
        steps += 1
        step(environment)

    seen: set[str] = set()
    names: set[tuple[str, str, int]] = set()

    def watch(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(str(PACKAGE)):
                seen.add(code.co_filename)
                names.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    def once() -> tuple[set[str], int]:
        seen.clear()
        names.clear()
        sys.setprofile(watch)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _command(arguments)
        finally:
            sys.setprofile(None)
        return set(seen), len(names)

    loaded, _ = once()
    simpy.Environment.step = counted
    running, functions = once()
    simpy.Environment.step = step

    def relative(paths: set[str]) -> list[str]:
        return sorted(str(Path(path).relative_to(ROOT)) for path in paths)

    return {
        "command": " ".join(arguments),
        "files_with_calls": len(running),
        "functions_called": functions,
        "files_with_calls_or_imported": len(loaded),
        "simpy_events": steps,
        "files": relative(running),
    }


def _command(arguments: tuple[str, ...]) -> None:
    old = sys.argv
    sys.argv = ["arborsim", *arguments]
    try:
        runpy.run_module("arborsim", run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv = old


def _in_a_process_of_its_own(name: str) -> dict[str, Any]:
    """`called`, where nothing is imported yet."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--run", name, "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        return dict(json.loads(out.read_text()))


def main() -> None:
    """Print what was asked for as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", choices=tuple(RUNS), help="only this command's calls")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--page", action="store_true", help="write sizes and cycles into the page")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ceiling is broken")
    given = parser.parse_args()
    if given.check:
        wrong = broken(measured(), ceilings())
        print(*wrong, sep="\n", end="\n" if wrong else "")
        sys.exit(bool(wrong))
    if given.page:
        write_page()
        return
    if given.run:
        found = called(RUNS[given.run])
    else:
        runs = {name: _in_a_process_of_its_own(name) for name in RUNS}
        found = {"size": size(), "imports": graph(), **runs}
    text = json.dumps(found, indent=1)
    print(text)
    if given.out:
        given.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
