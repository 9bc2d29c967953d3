"""Traces and other Parquet tools: what they read of ours, and what we read of theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arborsim.core.errors import TraceError
from arborsim.core.observations import Signal
from arborsim.trace.columns import parquet_writer
from arborsim.trace.reader import TraceReader

TRACES = Path(__file__).parents[2] / "traces"
#: Rows of each search that are compared where a whole one would take long.
ROWS = 150


def duckdb(path: Path, name: str) -> list[Any]:
    sql = pytest.importorskip("duckdb").sql
    return [row[0] for row in sql(f"select \"{name}\" from '{path}'").fetchall()]


def polars(path: Path, name: str) -> list[Any]:
    return list(pytest.importorskip("polars").read_parquet(path, columns=[name])[name].to_list())


def fastparquet(path: Path, name: str) -> list[Any]:
    file = pytest.importorskip("fastparquet").ParquetFile(str(path))
    return list(file.to_pandas(columns=[name])[name])


def pandas(path: Path, name: str) -> list[Any]:
    return list(pytest.importorskip("pandas").read_parquet(path, columns=[name])[name])


def plain(value: Any) -> Any:
    """A value as Python has it, with None for what is not there."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    missing = value is None or str(value) == "<NA>"
    return None if missing or (isinstance(value, float) and math.isnan(value)) else value


def holds_half(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_float16(kind))


@pytest.mark.parametrize("name", ["chain-tree", "chain-vectors"])
@pytest.mark.parametrize("read", [duckdb, polars, fastparquet, pandas], ids=lambda f: f.__name__)
def test_tools_read_all_columns(
    name: str, read: Callable[[Path, str], list[Any]], tmp_path: Path
) -> None:
    source = pq.ParquetFile(TRACES / f"{name}.parquet")
    path = tmp_path / "trace.parquet"
    with parquet_writer(path, source.schema_arrow) as writer:
        for group in range(2):
            writer.write_table(source.read_row_group(group).slice(0, ROWS))
    for field in source.schema_arrow:
        if read is fastparquet and holds_half(field.type):
            continue  # it does not know the type float16, and gives its bytes
        expected = pq.read_table(path, columns=[field.name])[field.name].to_pylist()
        assert plain(read(path, field.name)) == plain(expected), field.name


def by_duckdb(source: Path, out: Path) -> None:
    sql = pytest.importorskip("duckdb").sql
    sql(f"copy (from '{source}') to '{out}' (format parquet, row_group_size 2048)")


def by_polars(source: Path, out: Path) -> None:
    pytest.importorskip("polars").read_parquet(source).write_parquet(out, row_group_size=500)


def by_pandas(source: Path, out: Path) -> None:
    pytest.importorskip("pandas").read_parquet(source).to_parquet(out)


def in_one_group(source: Path, out: Path) -> None:
    pq.write_table(pq.read_table(source), out)


def in_large_types(source: Path, out: Path) -> None:
    def large(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_list(kind):
            return pa.large_list(large(kind.value_type))
        return pa.large_string() if pa.types.is_string(kind) else kind

    table = pq.read_table(source)
    columns = {name: table[name].cast(large(table[name].type)) for name in reversed(
        table.column_names) if name not in ("kind", "end")}  # fmt: skip
    columns["end"] = table["end"].cast(pa.string()) if "end" in table.column_names else None
    columns["kind"] = table["kind"].cast(pa.string()).cast(pa.large_string()).dictionary_encode()
    found = pa.table({name: column for name, column in columns.items() if column is not None})
    pq.write_table(found, out, compression="snappy", data_page_version="2.0")


@pytest.fixture(scope="module")
def rewritable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two searches as the recorder of today writes them."""
    source = pq.ParquetFile(TRACES / "chain-tree.parquet")
    path = tmp_path_factory.mktemp("trace") / "trace.parquet"
    with parquet_writer(path, source.schema_arrow) as writer:
        for group in range(2):
            writer.write_table(source.read_row_group(group))
    return path


def beside(source: Path, out: Path) -> None:
    stored = pq.read_schema(source).metadata
    known = {key.decode(): value.decode() for key, value in stored.items() if b"arborsim" in key}
    out.with_suffix(".json").write_text(json.dumps(known))


WRITERS = [by_duckdb, by_polars, by_pandas, in_one_group, in_large_types]


@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_what_tools_write_again_is_the_same_trace(
    write: Callable[[Path, Path], None], rewritable: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again.parquet"
    write(rewritable, out)
    if b"arborsim.trace" not in (pq.read_schema(out).metadata or {}):
        with pytest.raises(TraceError, match=r"nor is there a again\.json with it"):
            TraceReader(out)
        beside(rewritable, out)
    before, after = TraceReader(rewritable), TraceReader(out)
    assert after.num_episodes == before.num_episodes == 2
    needs = [Signal.ATTENTION, Signal.HIDDEN_CHANGE, Signal.KEY_SKETCH, Signal.ENTROPY]
    for one, other in zip(before.episodes(needs, text=True), after.episodes(needs, text=True),
                          strict=True):  # fmt: skip
        assert one.text == other.text
        for name in ("kind", "node", "parent", "position", "token", "reward", "end", "time_s"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
    (last,) = after.episodes(needs, start=1)
    assert last.index == 1


def test_metadata_next_to_a_file_is_checked(rewritable: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.parquet"
    pq.write_table(pq.read_table(rewritable).replace_schema_metadata(None), out)
    out.with_suffix(".json").write_text('{"arborsim.version": "1"}')
    with pytest.raises(TraceError, match=r"again\.json: no metadata of a trace"):
        TraceReader(out)


def test_values_that_do_not_fit_are_named(rewritable: Path, tmp_path: Path) -> None:
    table = pq.read_table(rewritable)
    at = table.column_names.index("node")
    wrong = table.set_column(at, "node", pc_half(table["node"]))
    pq.write_table(wrong, tmp_path / "half.parquet")
    with pytest.raises(TraceError, match="column node holds double, not int32"):
        list(TraceReader(tmp_path / "half.parquet").episodes())


def pc_half(column: pa.ChunkedArray) -> pa.Array:
    return pa.array(np.asarray(column) + 0.5)
