"""What happens to files, drawn from a seed: bits, cuts, numbers, names, nesting, characters."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

#: In place of numbers and texts; JSON, TOML and CSV take some of each, and must refuse the others.
VALUES = (
    "0", "-1", "1", "1e308", "-1e308", "1e-320", "nan", "NaN", "inf", "-Infinity", "9" * 5000,
    str(10**30), str(-(10**30)), "18446744073709551616", "0.1" + "1" * 400, "true", "null", "[]",
    "{}", '""', '"text"', "[[1, 2], [3]]", '{"a": 1}', "0x10", "1_000", "1979-05-27", "007",
)  # fmt: skip
#: Characters that turn terminals, split lines or are none: odd ones in names and texts.
CHARACTERS = (
    "\x1b[2J\x1b[31m", "\x1b]0;title\x07", "\x9b31m", "\x00", "\x07", "\x7f", "\u202e", "\u2028",
    "\ufeff", "\U0001f600" * 3, "\u0301", "\r", "\t", "\n", "'", '"', "\\", "\\u001b[31m",
    "\\ud800", "=1+1", "../../etc", "a" * 100_000, "%s%n", "\u00df\u0130",
)  # fmt: skip
NOT_UTF8 = (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8\x88\x80\x80\x80")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.])")
_TEXT = re.compile(r'"[^"\n]*"')
_WORD = re.compile(r"[A-Za-z_]\w+")

Damaged = tuple[str, bytes]


def damaged(data: bytes, kind: str, rng: random.Random) -> Damaged:
    """What was done, and the file's bytes after it; `kind` is parquet, toml, json, jsonl or csv."""
    found = (kind, data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        ways = _BYTES if rng.random() < 0.3 else _PARQUET if kind == "parquet" else _LINES
        found = rng.choice(ways)(found[1] or b"\0", rng)
    return found


def harmless(data: bytes, kind: str, rng: random.Random) -> bytes:
    """The file written in another way that means the same."""
    if kind == "toml":
        lines = data.decode().split("\n")
        at = rng.randrange(len(lines) + 1) if '"""' not in data.decode() else 0
        depth = sum(line.count("[") - line.count("]") for line in lines[:at])
        return "\n".join([*lines[: at if depth == 0 else 0], "# é \u202e", "",
                          *lines[at if depth == 0 else 0 :], ""]).encode()  # fmt: skip
    if kind == "json":
        return b" \n\t" * rng.randrange(1, 4) + data + b"\n \n"
    return data


# --- bytes ---


def _flip(data: bytes, rng: random.Random) -> Damaged:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 4))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return "flipped bits", bytes(changed)


def _remove(data: bytes, rng: random.Random) -> Damaged:
    at = rng.randrange(len(data))
    return "removed bytes", data[:at] + data[at + rng.choice((1, 2, 8, 1000)) :]


def _insert(data: bytes, rng: random.Random) -> Damaged:
    at = rng.randrange(len(data))
    return "inserted bytes", data[:at] + rng.randbytes(rng.choice((1, 2, 8, 1000))) + data[at:]


def _cut(data: bytes, rng: random.Random) -> Damaged:
    return "cut off", data[: rng.randrange(len(data))]


def _blank(data: bytes, rng: random.Random) -> Damaged:
    at, size = rng.randrange(len(data)), rng.choice((1, 16, 512))
    return "zeros", data[:at] + bytes(len(data[at : at + size])) + data[at + size :]


def _repeat(data: bytes, rng: random.Random) -> Damaged:
    at, size = rng.randrange(len(data)), rng.choice((8, 100, 5000))
    return "a part twice", data[: at + size] + data[at:]


# --- texts ---


def _replaced(pattern: re.Pattern[str], values: tuple[str, ...]) -> Callable[..., Damaged]:
    def way(data: bytes, rng: random.Random) -> Damaged:
        text = data.decode("utf-8", "surrogateescape")
        places = list(pattern.finditer(text))
        if not places:
            return _insert(data, rng)
        place, value = rng.choice(places), rng.choice(values)
        made = text[: place.start()] + value + text[place.end() :]
        return f"{place[0][:20]} became {value[:20]!r}", made.encode("utf-8", "surrogateescape")

    return way


def _characters(data: bytes, rng: random.Random) -> Damaged:
    """Into a text between quotes, or anywhere."""
    text = data.decode("utf-8", "surrogateescape")
    places = [match.start() + 1 for match in _TEXT.finditer(text)]
    at = rng.choice(places) if places and rng.random() < 0.8 else rng.randrange(len(text) + 1)
    odd = rng.choice(CHARACTERS)
    if rng.random() < 0.5:  # as JSON and TOML can say them
        odd = "".join(f"\\u{ord(c):04x}" if ord(c) < 128 else c for c in odd[:50])
    made = (text[:at] + odd + text[at:]).encode("utf-8", "surrogateescape")
    return f"inserted {odd[:20]!r}", made


def _not_utf8(data: bytes, rng: random.Random) -> Damaged:
    at = rng.randrange(len(data))
    return "no UTF-8", data[:at] + rng.choice(NOT_UTF8) + data[at:]


def _nested(data: bytes, rng: random.Random) -> Damaged:
    text = data.decode("utf-8", "surrogateescape")
    places = list(_NUMBER.finditer(text))
    at = rng.choice(places).span() if places else (len(text), len(text))
    depth, (opened, closed) = (
        rng.choice((50, 2000, 100_000)),
        rng.choice((("[", "]"), ('{"a":', "}"))),
    )
    value = opened * depth + "1" + closed * depth
    return f"{depth} deep", (text[: at[0]] + value + text[at[1] :]).encode(
        "utf-8", "surrogateescape"
    )


def _lines(data: bytes, rng: random.Random) -> Damaged:
    lines = data.split(b"\n")
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.choice(("swapped", "removed", "doubled", "joined"))
    if way == "swapped":
        lines[a], lines[b] = lines[b], lines[a]
    elif way == "removed":
        del lines[a]
    elif way == "doubled":
        lines.insert(b, lines[a])
    else:
        lines[a] = lines[a] + b" " + lines[b]
    return f"lines {way}", b"\n".join(lines)


# --- Parquet, written anew with something else in it ---


def _cells(data: bytes, rng: random.Random) -> Damaged:
    """Values of a column replaced by others of its type, nulls among them."""
    try:
        table, sizes = _table(data)
    except (pa.ArrowException, OSError, ValueError):  # damaged before
        return _flip(data, rng)
    at = rng.randrange(table.num_columns)
    field, values = table.schema.field(at), table.column(at).to_pylist()
    for _ in range(rng.choice((1, 1, 5, 10_000))):
        row = rng.randrange(len(values))
        values[row] = _other(values[row], field.type, rng)
    try:
        column = pa.array(values, field.type)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return _flip(data, rng)
    return f"values of {field.name}", _written(table.set_column(at, field, column), sizes)


def _columns(data: bytes, rng: random.Random) -> Damaged:
    """Columns removed, doubled, of another type or in another order; rows removed or doubled."""
    try:
        table, sizes = _table(data)
    except (pa.ArrowException, OSError, ValueError):
        return _flip(data, rng)
    at, way = rng.randrange(table.num_columns), rng.randrange(6)
    name = table.column_names[at]
    row = rng.randrange(table.num_rows)
    if way == 0:
        table = table.remove_column(at)
    elif way == 1:
        table = table.append_column(name, table.column(at))
    elif way == 2:
        other = rng.choice((pa.string(), pa.float64(), pa.int64(), pa.list_(pa.float16())))
        table = table.set_column(at, name, pa.nulls(table.num_rows, other))
    elif way == 3:
        table = pa.concat_tables([table.slice(0, row), table.slice(row + 1)])
    elif way == 4:
        table = pa.concat_tables([table.slice(0, row + 1), table.slice(row)])
    else:
        sizes = [table.num_rows]
    return f"columns or rows ({way}, {name})", _written(table, sizes)


def _said(data: bytes, rng: random.Random) -> Damaged:
    """Something else in the metadata."""
    try:
        table, sizes = _table(data)
    except (pa.ArrowException, OSError, ValueError):
        return _flip(data, rng)
    stored = {k: v for k, v in (table.schema.metadata or {}).items() if k != b"ARROW:schema"}
    if not stored:
        return _flip(data, rng)
    key = rng.choice(sorted(stored))
    what, stored[key] = rng.choice(_LINES)(stored[key] or b"\0", rng)
    return f"metadata: {what}", _written(table.replace_schema_metadata(stored), sizes)


def _table(data: bytes) -> tuple[pa.Table, list[int]]:
    file = pq.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
    groups = range(file.metadata.num_row_groups)
    sizes = [file.metadata.row_group(group).num_rows for group in groups]
    if not sum(sizes):
        raise ValueError("no rows")
    return file.read(), sizes


def _written(table: pa.Table, sizes: list[int]) -> bytes:
    made, first = io.BytesIO(), 0
    with pq.ParquetWriter(made, table.schema, write_page_checksum=True) as writer:
        for size in sizes:
            part = table.slice(first, size)
            writer.write_table(part, row_group_size=max(part.num_rows, 1))
            first += size
        if first < table.num_rows:
            writer.write_table(table.slice(first))
    return made.getvalue()


def _other(value: Any, kind: pa.DataType, rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return None
    if pa.types.is_list(kind):
        inner = list(value or [])
        if not inner or rng.random() < 0.3:
            return rng.choice(([], inner * 2, inner[:-1]))
        at = rng.randrange(len(inner))
        inner[at] = _other(inner[at], kind.value_type, rng)
        return inner
    if pa.types.is_floating(kind):
        made = rng.choice((float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 6e4, 1e-7, 0.5))
        return np.float16(made) if pa.types.is_float16(kind) else made
    if pa.types.is_boolean(kind):
        return not value
    if pa.types.is_integer(kind):
        most = (1 << (kind.bit_width - 1)) - 1
        return rng.choice((0, -1, 1, most, -most - 1, (value or 0) + 1))
    return rng.choice(("", "text", *CHARACTERS))


_BYTES = (_flip, _flip, _remove, _insert, _cut, _blank, _repeat)
_LINES = (
    _replaced(_NUMBER, VALUES), _replaced(_NUMBER, VALUES), _replaced(_TEXT, VALUES),
    _replaced(_WORD, (*VALUES, "name", "use")), _characters, _not_utf8, _nested, _lines,
)  # fmt: skip
_PARQUET = (_flip, _flip, _cells, _cells, _cells, _columns, _said)
