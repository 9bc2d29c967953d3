"""Whatever is wrong with a file becomes one line: what, where, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arborsim.core.errors import TraceError
from arborsim.core.observations import Signal
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import METADATA_KEY, VERSION_KEY
from tests.helpers.traces import make_trace


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return make_trace(tmp_path / "good.parquet", episodes=2, layers=2, prompt=4, nodes=3)


def read_all(path: Path) -> None:
    reader = TraceReader(path)
    needs = [signal for signal in Signal if reader.has(signal)]
    list(reader.episodes(needs, text=True, embedding=reader.info.capture != "tree"))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_all(path)
    message = str(caught.value)
    assert message.startswith(str(path)), message
    assert "\n" not in message
    for word in words:
        assert word in message, message


def with_metadata(good: Path, **changes: bytes) -> Path:
    table = pq.ParquetFile(good).read_row_group(0)
    stored = {**table.schema.metadata, **{k.encode(): v for k, v in changes.items()}}
    path = good.with_name("changed.parquet")
    pq.write_table(table.replace_schema_metadata(stored), path)
    return path


def test_missing_file(tmp_path):
    refused(tmp_path / "none.parquet", "no such file", "arborsim record")


def test_not_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("episode,token\n1,2\n")
    refused(path, "not a Parquet file")
    path.write_bytes(b"")
    refused(path, "not a Parquet file")


def test_parquet_but_no_trace(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", "no arborsim metadata", "arborsim record")


def test_truncated(good):
    whole = good.read_bytes()
    for kept in (4, 5, len(whole) // 2, len(whole) - 1):
        good.write_bytes(whole[:kept])
        refused(good, "truncated", f"after {kept} bytes", "copy it again")


def test_footer_that_lies_about_its_length(good):
    data = bytearray(good.read_bytes())
    data[-8:-4] = b"\xff\xff\xff\x7f"
    good.write_bytes(data)
    refused(good, "damaged")


@pytest.mark.parametrize("version", [b"3", b"0", b"-1", b"one", b"\xff", b"", b"9" * 5000])
def test_unknown_version(good, version):
    path = with_metadata(good, **{VERSION_KEY.decode(): version})
    refused(path, "trace format", "upgrade arborsim")


def metadata(good: Path) -> dict:
    return json.loads(pq.ParquetFile(good).schema_arrow.metadata[METADATA_KEY])


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 100_000,
        b'{"geometry": {"layers": 2}}',
    ],
)  # fmt: skip
def test_unreadable_metadata(good, text):
    refused(with_metadata(good, **{METADATA_KEY.decode(): text}), "record it again")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "seven"), ("capture", "everything"), ("attention", "some"), ("task", None),
        ("search_parameters", []), ("qkv_layers", 3), ("extra", 1), ("software", "new"),
        ("rope", []), ("rope", {"inverse_frequencies": [1.0, 0.0]}),
        ("rope", {"inverse_frequencies": [1.0, float("nan")]}),
        ("rope", {"inverse_frequencies": [1.0], "scaling": -1.0}),
        ("rope", {"inverse_frequencies": [1.0] * 5}),  # ten channels of eight
    ],
)  # fmt: skip
def test_metadata_of_the_wrong_type(good, key, value):
    changed = {**metadata(good), key: value}
    path = with_metadata(good, **{METADATA_KEY.decode(): json.dumps(changed).encode()})
    refused(path, "record it again")


@pytest.mark.parametrize("value", [0, -3, "six", 1.5, None, True])
def test_geometry_of_the_wrong_type(good, value):
    changed = metadata(good)
    changed["geometry"]["layers"] = value
    path = with_metadata(good, **{METADATA_KEY.decode(): json.dumps(changed).encode()})
    refused(path, "layers must be")


def test_unknown_metadata_is_kept(good):
    changed = {**metadata(good), "colour": "red"}
    path = with_metadata(good, **{METADATA_KEY.decode(): json.dumps(changed).encode()})
    assert TraceReader(path).info.extra == {"colour": "red"}


@pytest.mark.parametrize("column", ["seq", "node", "correct", "attention", "lag_key"])
def test_missing_column(good, column):
    table = pq.ParquetFile(good).read_row_group(0).drop_columns([column])
    pq.write_table(table, good)
    refused(good, f"column {column} is missing", "capture level 'signals'")


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("node", pa.string()), ("reward", pa.bool_()), ("kind", pa.int8()), ("text", pa.binary()),
        ("attention", pa.float16()), ("hidden_change", pa.list_(pa.list_(pa.float16()))),
    ],
)  # fmt: skip
def test_column_of_the_wrong_type(good, column, kind):
    table = pq.ParquetFile(good).read_row_group(0)
    at = table.column_names.index(column)
    changed = table.set_column(at, column, pa.nulls(table.num_rows, kind))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), good)
    refused(good, f"column {column} has type {str(kind).partition('<')[0]}", "instead of")


def test_column_twice(good):
    table = pq.ParquetFile(good).read_row_group(0)
    pq.write_table(table.append_column("node", table["node"]), good)
    refused(good, "column node is there twice")


def test_no_episodes(good):
    table = pq.ParquetFile(good).read_row_group(0)
    pq.write_table(table.slice(0, 0), good)
    refused(good, "holds no episodes")


def test_empty_episode(good):
    table = pq.ParquetFile(good).read_row_group(0)
    with pq.ParquetWriter(good, table.schema) as writer:
        writer.write_table(table)
        writer.write_table(table.slice(0, 0))
    if pq.ParquetFile(good).metadata.num_row_groups == 2:
        refused(good, "episode 1: it has no rows")


def test_episodes_out_of_order_in_one_row_group(good):
    table = pq.read_table(good)
    first = table["episode"].to_pylist().index(1)
    moved = pa.concat_tables([table.slice(first), table.slice(0, first)])
    pq.write_table(moved, good)
    refused(good, "row 0 of the file is of episode 1, after those of -1")


def test_directory_that_is_no_recording(tmp_path):
    refused(tmp_path, "holds no recorded episodes")
    (tmp_path / "notes.txt").write_text("")
    refused(tmp_path, "holds no recorded episodes", ".parts")


def parts_of(good: Path, count: int = 3) -> Path:
    directory = good.with_name("t.parquet.parts")
    directory.mkdir()
    table = TraceReader(good).table(0)
    at = table.column_names.index("episode")
    for number in range(count):
        column = pa.array(np.full(table.num_rows, number, dtype=np.int32))
        renumbered = table.set_column(at, table.schema.field(at), column)
        pq.write_table(renumbered, directory / f"episode-{number:06d}.parquet")
    read_all(directory)
    return directory


def test_part_that_is_missing(good):
    directory = parts_of(good)
    (directory / "episode-000001.parquet").unlink()
    refused(directory, "episode 1 is missing, although later ones are there")


def test_part_that_is_damaged(good):
    directory = parts_of(good)
    (directory / "episode-000002.parquet").write_bytes(b"PAR1")
    refused(directory, "truncated")


def test_part_of_another_recording(good):
    directory = parts_of(good)
    other = make_trace(good.with_name("o.parquet"), capture="tree", episodes=1)
    other.rename(directory / "episode-000002.parquet")
    refused(directory, "differ")


def test_interrupted_before_the_first_episode(tmp_path):
    (tmp_path / "t.parquet.parts").mkdir()
    refused(tmp_path / "t.parquet", "interrupted before its first whole episode", "resume")


def test_text_that_is_no_text(good):
    table = pq.ParquetFile(good).read_row_group(0)
    at = table.column_names.index("text")
    data = pa.array([b"\xff\xfe"] * table.num_rows).view(pa.string())
    pq.write_table(table.set_column(at, table.schema.field(at), data), good)
    refused(good, "a text is not UTF-8")


def test_damaged_page_is_noticed(good):
    column = pq.ParquetFile(good).metadata.row_group(1).column(0)
    data = bytearray(good.read_bytes())
    last = column.data_page_offset + column.total_compressed_size - 1
    data[last] ^= 0x40
    good.write_bytes(data)
    refused(good, "episode 1: its data are damaged")
    assert next(TraceReader(good).episodes()).index == 0  # although both are read together


def damage(path: Path) -> str | None:
    try:
        read_all(path)
    except TraceError as error:
        return str(error)
    return None


def test_random_damage_never_ends_in_a_traceback(good):
    whole = good.read_bytes()
    rng = np.random.default_rng(0)
    noticed = 0
    for _ in range(150):
        data = bytearray(whole)
        at = int(rng.integers(len(data)))
        data[at] ^= 1 << int(rng.integers(8))
        good.write_bytes(data)
        message = damage(good)
        noticed += message is not None
        assert "\n" not in (message or "")
    assert noticed > 75
