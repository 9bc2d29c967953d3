"""Make the golden results anew, or compare with them: ``python tests/golden/make.py --check``."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (ROOT / "backends", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from tests.golden.cases import CASES, Case  # noqa: E402
from tests.golden.runner import Result, headings, numbers, run, same  # noqa: E402

VALUES, PAGES, DRIFT = HERE / "values.parquet", HERE / "pages", HERE / "drift.toml"
_SHOWN = 10


@dataclass(frozen=True)
class Difference:
    """One value that is not as it was."""

    case: str
    row: str
    column: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.case}  {self.row}  {self.column}  {self.old!r} -> {self.new!r}"


class Drift:
    """Explained differences of ``drift.toml``; counts which of them are used."""

    def __init__(self, path: Path = DRIFT) -> None:
        entries = tomllib.loads(path.read_text()).get("drift", [])
        for entry in entries:
            if not {"case", "column", "reason"} <= entry.keys() or not entry["reason"].strip():
                raise ValueError(f"{path.name}: {entry}: case, column and reason are needed")
        self.entries: list[dict[str, str]] = entries
        self.used = [False] * len(entries)

    def explains(self, found: Difference) -> bool:
        explained = False
        for number, entry in enumerate(self.entries):
            if fnmatchcase(found.case, entry["case"]) and fnmatchcase(
                found.column, entry["column"]
            ):
                self.used[number] = explained = True
        return explained

    def unused(self, ran: Iterable[str]) -> list[dict[str, str]]:
        """Entries that nothing needed, of those whose cases all have run."""
        every = {name for case in CASES for name in (case.name, f"page:{case.name}")}
        ran = {name for case in ran for name in (case, f"page:{case}")}
        return [
            entry
            for entry, used in zip(self.entries, self.used, strict=True)
            if not used and all(name in ran for name in every if fnmatchcase(name, entry["case"]))
        ]


def read() -> dict[str, Result]:
    """The stored results by case."""
    import pyarrow.parquet as pq

    found = {case.name: Result() for case in CASES}
    if VALUES.exists():
        columns = pq.read_table(VALUES).to_pydict()
        for case, row, column, value in zip(*columns.values(), strict=True):
            found.setdefault(case, Result()).values[row, column] = json.loads(value)
    for path in sorted(PAGES.glob("*.txt")):
        case = path.name.removesuffix(".txt").removesuffix(".html")
        found.setdefault(case, Result()).texts[path.name] = path.read_text()
    return found


def write(results: dict[str, Result]) -> None:
    """Store results; what is stored of cases that are no more goes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        (case.name, row, column, json.dumps(value))
        for case in CASES
        for (row, column), value in results[case.name].values.items()
    ]
    names = ("case", "row", "column", "value")
    columns = zip(*rows, strict=True)
    table = pa.table({name: list(each) for name, each in zip(names, columns, strict=True)})
    part = VALUES.with_suffix(".part")
    pq.write_table(table, part, compression="zstd", compression_level=12)
    part.replace(VALUES)
    PAGES.mkdir(exist_ok=True)
    texts = {name: text for case in CASES for name, text in results[case.name].texts.items()}
    for path in PAGES.glob("*.txt"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (PAGES / name).write_text(text)


def compare(case: Case, old: Result, new: Result) -> list[Difference]:
    """What is missing or different; new columns, rows of JSON and numbers on pages may appear."""
    found = []
    for (row, column), value in old.values.items():
        there = new.values.get((row, column), "(missing)")
        if not same(value, there, column):
            found.append(Difference(case.name, row, column, value, there))
    for name, text in old.texts.items():
        here = new.texts.get(name, "")
        page = f"page:{case.name}"
        for number, count in (numbers(text) - numbers(here)).items():
            where = next(line for line in text.splitlines() if number in numbers(line))
            note = f"{count} times less; was in: {where[:120]}"
            found.append(Difference(page, name, "number", number, note))
        for heading in sorted(headings(text) - headings(here)):
            found.append(Difference(page, name, "heading", heading, "(missing)"))
    return found


def changed_words(old: Result, new: Result) -> str:
    """How the texts differ, for a person to read."""
    lines: list[str] = []
    for name, text in old.texts.items():
        here = new.texts.get(name, "")
        lines += difflib.unified_diff(
            text.splitlines(), here.splitlines(), f"old {name}", f"new {name}", lineterm="", n=0
        )
    return "\n".join(lines)


def available(case: Case) -> bool:
    return not case.needs or importlib.util.find_spec(case.needs) is not None


def described(differences: list[Difference]) -> str:
    """The first differences and how many there are."""
    shown = "\n".join(str(each) for each in differences[:_SHOWN])
    return f"{shown}\n{len(differences)} values differ"


def main() -> int:
    """Make or compare; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--quick", action="store_true", help="only the cases of the normal tests")
    parser.add_argument("--only", action="append", default=[], help="glob of names; repeatable")
    parser.add_argument("--words", action="store_true", help="also show how texts differ")
    given = parser.parse_args()
    chosen = [
        case for case in CASES
        if available(case) and (case.quick or not given.quick)
        and (not given.only or any(fnmatchcase(case.name, glob) for glob in given.only))
    ]  # fmt: skip
    if not chosen:
        parser.error("no case has such a name")
    stored, drift = read(), Drift()
    unexplained: list[Difference] = []
    failed: list[str] = []
    accepted, values, began = 0, 0, time.perf_counter()
    for case in chosen:
        start = time.process_time()
        try:
            new = run(case)
        except RuntimeError as error:
            print(error)
            failed.append(case.name)
            continue
        values += len(new.values)
        differences = compare(case, stored[case.name], new)
        left = [each for each in differences if not drift.explains(each)]
        accepted += len(differences) - len(left)
        unexplained += left
        seconds = time.process_time() - start
        print(f"{case.name:40} {len(new.values):7,} values {seconds:6.1f} CPU s", flush=True)
        if given.check and left:
            print(described(left))
        if given.words:
            print(changed_words(stored[case.name], new))
        if not given.check:
            stored[case.name] = new
            write(stored)
    wall, used = time.perf_counter() - began, time.process_time()
    total = f"{len(chosen)} cases, {values:,} values, {wall:.0f} s, {used:.0f} s of a core"
    if not given.check:
        print(f"{total}; {len(unexplained)} values changed; failed: {failed or 'none'}")
        return 1 if failed else 0
    unused = drift.unused(case.name for case in chosen)
    for entry in unused:
        print(f"drift.toml: no difference needs {entry}")
    print(
        f"{total}; {len(unexplained)} values differ, {accepted} differ as drift.toml explains; "
        f"failed: {failed or 'none'}"
    )
    return 1 if unexplained or unused or failed else 0


if __name__ == "__main__":
    sys.exit(main())
