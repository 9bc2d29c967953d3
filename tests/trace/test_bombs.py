"""Small files that would take gigabytes are refused before anything is decoded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arborsim.core import parquet
from arborsim.core.errors import TraceError, UsageError
from arborsim.core.parquet import ParquetTables
from arborsim.core.tables import KEY
from arborsim.trace.reader import TraceReader
from tests.helpers.traces import make_trace

REFUSED = "which no recording does; copy it or make it again"
RESULTS = {KEY: b'{"format": 1, "kind": "replay", "version": "0"}'}
TEXT = "x" * 1_000_000


def read(path: Path) -> pa.Table:
    file = ParquetTables(path)
    return file.read(range(file.metadata.num_row_groups))


def write(path: Path, metadata: dict[bytes, bytes] = RESULTS, **columns: pa.Array) -> Path:
    """A file without Arrow's own schema, so that dictionaries are read as texts."""
    table = pa.table(columns)
    with pq.ParquetWriter(path, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table, row_group_size=table.num_rows)
        writer.add_key_value_metadata(metadata)
    return path


def texts(count: int, *values: str) -> pa.Array:
    """`count` texts, by turns these, which take no more memory than each once."""
    indices = pa.array(np.arange(count, dtype=np.int32) % len(values))
    return pa.DictionaryArray.from_arrays(indices, pa.array(values))


def pages_of(path: Path) -> dict[str, list[parquet._Page]]:
    (chunks,) = ParquetTables(path).chunks
    with path.open("rb") as opened:
        return {chunk.name: list(parquet._pages(opened, chunk)) for chunk in chunks}


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_headers_of_pages_say_what_the_footer_says(tmp_path, version, dictionary):
    rng = np.random.default_rng(0)
    lists = [rng.random(int(n)).astype(np.float32) for n in rng.integers(0, 40, 3000)]
    columns = {
        "number": pa.array(rng.integers(0, 1 << 40, 3000), mask=rng.random(3000) < 0.1),
        "list": pa.array(lists),
        "text": pa.array(["é" * int(n) for n in rng.integers(0, 3000, 3000)]),
        "flag": pa.array(rng.random(3000) < 0.5),
    }
    pq.write_table(
        pa.table(columns), tmp_path / "t.parquet", data_page_version=version,
        use_dictionary=dictionary, compression="snappy", data_page_size=20_000,
    )  # fmt: skip
    group = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0)
    found = pages_of(tmp_path / "t.parquet")
    for i in range(group.num_columns):
        chunk = group.column(i)
        name = chunk.path_in_schema.split(".")[0]
        pages = found[name]
        own = next(
            own for own in ParquetTables(tmp_path / "t.parquet").chunks[0] if own.name == name
        )
        assert own.stored_bytes == chunk.total_compressed_size
        assert own.decompressed_bytes == chunk.total_uncompressed_size
        assert (own.values, own.nulls) == (chunk.num_values, chunk.statistics.null_count)
        data = [page for page in pages if page.kind != parquet._DICTIONARY_PAGE]
        assert sum(page.values for page in data) == chunk.num_values
        assert all(page.kind == (0 if version == "1.0" else 3) for page in data)
        assert len(pages) - len(data) == chunk.has_dictionary_page
        # The footer counts the headers, too.
        header = chunk.total_compressed_size - sum(page.stored for page in pages)
        assert chunk.total_uncompressed_size - header == sum(page.bytes for page in pages)
    assert sum(len(pages) for pages in found.values()) > 10
    assert read(tmp_path / "t.parquet").equals(pa.table(columns))


def test_runs_of_one_value(tmp_path):
    zeros = pa.array(np.zeros(1 << 20, dtype=np.int64))
    path = write(tmp_path / "t.parquet", a=pa.chunked_array([zeros] * 70))
    assert path.stat().st_size < 500_000
    with pytest.raises(UsageError, match=r"\(column a\), " + REFUSED):
        read(path)


def test_a_text_that_a_dictionary_repeats(tmp_path):
    path = write(tmp_path / "t.parquet", a=texts(2000, TEXT))
    assert path.stat().st_size < 10_000
    with pytest.raises(UsageError, match=r"stand for 2 GB or more \(column a\), " + REFUSED):
        read(path)
    # Of as many texts most of which are short, the bound is as high, but not what there is.
    path = write(tmp_path / "t.parquet", a=texts(20_000, TEXT, *map(str, range(9999))))
    assert read(path)["a"].to_pylist()[:2] == [TEXT, "0"]


@pytest.mark.parametrize("kind", ["list", "dictionary"])
def test_a_page_that_is_larger_than_the_footer_says(tmp_path, kind):
    column = pa.array([[1, 2, 3]] * 30, pa.list_(pa.int32()))
    pq.write_table(pa.table({"a": column}), tmp_path / "t.parquet",
                   use_dictionary=kind == "dictionary")  # fmt: skip
    data = (tmp_path / "t.parquet").read_bytes()
    # A struct begins, whose first number is 3 values in the dictionary, or 90 in the page.
    found = b"\x4c\x15\x06" if kind == "dictionary" else b"\x2c\x15\xb4\x01"
    huge = found[:2] + b"\x80\xd0\xac\xf3\x0e"  # 2,000,000,000
    assert data.count(found) == 1
    (tmp_path / "t.parquet").write_bytes(data.replace(found, huge))
    with pytest.raises(UsageError, match=REFUSED):
        read(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("data", "wanted", "found"),
    [
        (b"\xc9\x1c\x00\x00", {12: {3: True}}, {}),  # a list of structs, not a struct
        (b"\xcc\x00\x00", {12: [{3: True}]}, {}),  # a struct, not a list
        (b"\xc5\x02\x00", {12: {3: True}}, {}),  # a number
        (b"\xcc\x00\x00", {12: True}, {}),  # no number
        (b"\xcc\x35\x06\x00\x00", {12: {3: True}}, {12: {3: 3}}),
        (b"\xc9\x1c\x35\x06\x00\x00", {12: [{3: True}]}, {12: [{3: 3}]}),
    ],
)
def test_fields_of_another_type_are_skipped(data, wanted, found):
    assert parquet._struct(data, 0, wanted) == (found, len(data))


@pytest.mark.parametrize("junk", [b"\0" * 64, b"\xff" * 64, b"\x15\x80\x80\x80", b"\x1c" * 64])
def test_a_header_that_is_none(tmp_path, junk):
    pq.write_table(pa.table({"a": list(range(1000))}), tmp_path / "t.parquet")
    data = bytearray((tmp_path / "t.parquet").read_bytes())
    data[4 : 4 + len(junk)] = junk
    (tmp_path / "t.parquet").write_bytes(data)
    with pytest.raises(UsageError, match="damaged"):
        read(tmp_path / "t.parquet")


CHILD = """
import resource, sys
from pathlib import Path
import pandas
from arborsim.core.errors import UsageError
from arborsim.core.tables import read_table
from arborsim.core import parquet
used = 1024 * next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize"))
room = 100 << 20
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
for path in sys.argv[1:]:
    try:
        read_table(Path(path))
    except UsageError as error:
        print(error)
"""


def test_under_a_limit_of_memory(tmp_path):
    """A bomb is refused; what is honest but does not fit says so, and neither takes the process."""
    bomb = write(tmp_path / "bomb.parquet", a=texts(2000, TEXT))
    rng = np.random.default_rng(0)
    large = write(tmp_path / "large.parquet", a=pa.array(rng.random(30_000_000)))
    made = subprocess.run(
        [sys.executable, "-c", CHILD, str(bomb), str(large)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    first, second = made.stdout.splitlines()
    assert first.startswith(f"{bomb}: ")
    assert first.endswith(f"for 2 GB or more (column a), {REFUSED}")
    assert second.startswith(f"{large}: out of memory: reading it takes up to 0.2")
    assert second.endswith("take a machine with more memory")


def test_a_trace_with_a_bomb_names_the_episode(tmp_path):
    path = make_trace(tmp_path / "t.parquet", episodes=1, capture="tree")
    table = pq.read_table(path)
    columns = {name: table[name] for name in table.column_names}
    write(path, table.schema.metadata, **columns | {"text": texts(table.num_rows, TEXT * 20)})
    with pytest.raises(TraceError, match=r"t\.parquet: episode 0: .*\(column text\), which no"):
        list(TraceReader(path).episodes(text=True))
    assert len(list(TraceReader(path).episodes())) == 1  # its texts were not asked for
