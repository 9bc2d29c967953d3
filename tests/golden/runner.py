"""Run a command line in this process, and take the numbers and texts out of its results."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.golden.cases import Case

ROOT = Path(__file__).resolve().parents[2]
_NAMES = ("trace", "episode", "policy", "budget", "name", "term", "algorithm", "width", "gpu")
_REVISION = re.compile(r", revision [0-9a-f]{12}(, dirty)?")
_VERSIONS = re.compile(
    r"\b(arborsim|numpy|pandas|pyarrow|simpy|python|torch|transformers|scipy|plotly)"
    r"([ =]|\": \")\d+\.\d[\w.+]*"
)
_DATES = re.compile(r"\b\d{4}-\d\d-\d\d(, \d{4}-\d\d-\d\d)*")
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        "p div section header footer main h1 h2 h3 h4 h5 h6 li ul ol dl dt dd tr table thead tbody "
        "caption details summary label select option figure figcaption text title pre br",
    )
)


@dataclass
class Result:
    """What a case gave: values by row and column, texts by name."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def command(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of ``python -m arborsim`` with `arguments`."""
    out, err = io.StringIO(), io.StringIO()
    old_argv, old_cwd, old_columns = sys.argv, Path.cwd(), os.environ.get("COLUMNS")
    sys.argv = ["arborsim", *arguments]
    os.environ["COLUMNS"] = "160"
    os.chdir(ROOT)
    code: Any = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("arborsim", run_name="__main__", alter_sys=False)
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.argv = old_argv
        os.chdir(old_cwd)
        os.environ.pop("COLUMNS")
        if old_columns is not None:
            os.environ["COLUMNS"] = old_columns
    return int(code), out.getvalue(), err.getvalue()


def run(case: Case) -> Result:
    """Run a case.

    Raises
    ------
    RuntimeError
        Its exit code is another than expected.
    """
    folder = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        for source, name in case.copies:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, folder / name)
        given = [argument.replace("{tmp}", str(folder)) for argument in case.arguments]
        code, out, err = command(given)
        if code != case.code:
            raise RuntimeError(f"{case.name}: exit code {code}: {err or out[-2000:]}")
        return _taken(case, folder, out)
    finally:
        shutil.rmtree(folder)


def _taken(case: Case, folder: Path, out: str) -> Result:
    result = Result()

    def clean(text: str) -> str:
        text = text.replace(str(folder), "TMP").replace(str(ROOT), "ROOT")
        text = _DATES.sub("DATE", text)
        return _REVISION.sub("", _VERSIONS.sub(r"\1\2VERSION", text))

    def keep(prefix: str, items: Iterator[tuple[str, str, Any]]) -> None:
        for row, column, value in items:
            key = (f"{prefix}{row}", column)
            assert key not in result.values, f"{case.name}: {key} twice"
            result.values[key] = clean(value) if isinstance(value, str) else value

    if "--json" in case.arguments:
        found = json.loads(out)
        if isinstance(found, dict):
            found = {key: value for key, value in found.items() if key not in case.skip}
        keep("json", _flat(found, ""))
    elif case.text:
        result.texts[f"{case.name}.txt"] = clean(_stripped(out))
        if "--explain" in case.arguments:
            keep("explain", _terms(out))
    for path in sorted(folder.rglob("*.*")):
        if path.name in case.unread:
            continue
        if path.suffix == ".parquet":
            keep(path.stem, _table(path, case.keys))
        elif path.suffix == ".json":
            keep(path.stem, _flat(json.loads(path.read_text()), ""))
        elif path.suffix == ".html":
            result.texts[f"{case.name}.html.txt"] = clean(visible(path.read_text()))
    return result


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def _table(path: Path, keys: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Cells of a Parquet table, rows named by `keys` and counted where these are the same."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    yield "", "rows", table.num_rows
    seen: Counter[str] = Counter()
    used = [key for key in keys if key in table.column_names]
    for row in table.to_pylist():
        name = "/".join(_plain(row[key]) for key in used)
        seen[name] += 1
        name = f"/{name}#{seen[name]}" if seen[name] > 1 or not used else f"/{name}"
        for column, value in row.items():
            if isinstance(value, list | dict):
                value = json.dumps(value, default=str)
            yield name, column, value


def _terms(text: str) -> Iterator[tuple[str, str, Any]]:
    """Numbers of tables of terms: the row is the table's title, the column the term."""
    title, before, units = "", "", []
    for line in text.splitlines():
        cells = re.split(r"\s{2,}", line.strip())
        if cells[0] == "term":
            title, units = before, cells[1:]
        elif not line.strip():
            title = ""
        elif title:
            yield f"/{title} [{' '.join(units)}]", cells[0], " ".join(cells[1:])
        before = line.strip()


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, float) else str(value)


def _flat(value: Any, row: str) -> Iterator[tuple[str, str, Any]]:
    """Leaves of JSON: the row is the path, items of lists go by what names them or by number."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, dict | list):
                yield from _flat(inner, f"{row}/{key}")
            else:
                yield row, key, inner
    elif isinstance(value, list):
        yield row, "(length)", len(value)
        seen: Counter[str] = Counter()
        for number, inner in enumerate(value):
            if not isinstance(inner, dict | list):
                yield row, str(number), inner
                continue
            name = str(number)
            if isinstance(inner, dict):
                named = [
                    _plain(inner[key]) for key in _NAMES
                    if isinstance(inner.get(key), str | int | float)
                ]  # fmt: skip
                name = "/".join(named) or name
            seen[name] += 1
            yield from _flat(inner, f"{row}/{name}" + (f"#{seen[name]}" if seen[name] > 1 else ""))
    else:
        yield row, "", value


class _Visible(HTMLParser):
    """Collects the text of a page: a line per block, a line per table row."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._words = ""
        self._hidden = 0
        self._cells: list[str] | None = None
        self._header = False
        self._level = ""

    def flush(self) -> None:
        text = " ".join(self._words.split())
        self._words = ""
        if text:
            self.lines.append(f"{self._level}{text}")

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("script", "style"):
            self._hidden += 1
        elif tag == "tr":
            self.flush()
            self._cells, self._header = [], True
        elif tag in ("td", "th") and self._cells is not None:
            self._words = ""
            self._header &= tag == "th"
        elif self._cells is None and tag in _BLOCKS:
            self.flush()
            if re.fullmatch("h[1-6]", tag):
                self._level = "#" * int(tag[1]) + " "
        elif tag in _BLOCKS:
            self._words += " "

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._hidden -= 1
        elif tag in ("td", "th") and self._cells is not None:
            self._cells.append(" ".join(self._words.split()))
            self._words = ""
        elif tag == "tr" and self._cells is not None:
            if any(self._cells):
                self.lines.append(("= " if self._header else "") + " | ".join(self._cells))
            self._cells, self._words = None, ""
        elif self._cells is None and tag in _BLOCKS:
            self.flush()
            self._level = ""

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._words += data


def visible(page: str) -> str:
    """The text that a reader of an HTML page sees before its scripts draw anything."""
    parser = _Visible()
    parser.feed(page)
    parser.close()
    parser.flush()
    return "\n".join(parser.lines) + "\n"


_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


def numbers(text: str) -> Counter[str]:
    """How often each number stands in a text."""
    return Counter(found.rstrip(",") for found in _NUMBER.findall(text))


def headings(text: str) -> set[str]:
    """Headings of tables, and of sections of a page."""
    found: set[str] = set()
    for line in text.splitlines():
        if line.startswith("= "):
            found.update(cell for cell in line[2:].split(" | ") if cell)
        elif line.startswith("#") and not numbers(line):
            found.add(line.lstrip("# "))
    return found


#: Columns made of products in float32, which processors add up in orders of their own.
ROUGH = ("output_error", "oracle_gap")


def same(old: Any, new: Any, column: str = "") -> bool:
    """Whether two values are equal: counts and strings exactly, floats to 1e-9 of their size.

    Those of some columns (`ROUGH`) to a millionth, or to 1e-8, a tenth of float32's last digit.
    """
    if isinstance(old, bool) or isinstance(new, bool) or old is None or new is None:
        return old is new
    if isinstance(old, str) or isinstance(new, str):
        return bool(old == new)
    if isinstance(old, int):
        return bool(old == new)
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) and math.isnan(new)
    rel, least = (1e-6, 1e-8) if column in ROUGH else (1e-9, 1e-15)
    return math.isclose(old, new, rel_tol=rel, abs_tol=least)
