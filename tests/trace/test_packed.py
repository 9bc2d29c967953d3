"""Packed traces: the same episodes as with a row per token, in few rows, refused when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.cli.app import main
from arborsim.core.errors import TraceError, UsageError
from arborsim.trace.columns import lists
from arborsim.trace.importers import requests as request_logs
from arborsim.trace.importers.request_logs import FORMATS, read_requests
from arborsim.trace.importers.requests import Request
from arborsim.trace.importers.searches import Thought, ThoughtBatch, WrittenSearch
from arborsim.trace.importers.sources import Contents
from arborsim.trace.packed import MOST_ROWS
from arborsim.trace.reader import TraceReader, parts_directory
from arborsim.trace.schema import METADATA_KEY, VERSION_KEY, Kind
from arborsim.trace.writer import TraceWriter, WholeTraceWriter
from tests.trace.import_helpers import imported

Log = list[tuple[int, int, int]]  # arrival, tokens of the prompt, of the answer
logs = st.lists(
    st.tuples(st.integers(0, 10**5), st.integers(1, 40), st.integers(0, 4)), min_size=1, max_size=9
)


def write_log(folder: Path, format: str, requests: Log) -> Path:
    """A log in one of `FORMATS`, some requests with other fields and some without whole blocks."""
    path = folder / f"log.{format}"
    if format == "azure":
        start = datetime(2023, 11, 16, tzinfo=UTC)
        lines = [",".join(FORMATS[format].needs)]
        lines += [f"{start + timedelta(seconds=t)},{n},{m}" for t, n, m in requests]
    else:
        block = FORMATS[format].block_tokens
        lines = [
            json.dumps(
                {"timestamp": t, "input_length": n, "output_length": m,
                 "hash_ids": [t % 3, *range(100, 200)][: n // block]}
                | ({"turn": t} if t % 2 else {})
            )
            for t, n, m in requests
        ]  # fmt: skip
    path.write_text("\n".join(lines))
    return path


def literal_columns(request: Request) -> dict[str, Any]:
    """A row for each token, by the code that writes trees: what version 1 holds of a request."""
    answer = [ThoughtBatch([Thought(0, request.answer_tokens)])] if request.answer_tokens else []
    columns = WrittenSearch(request.prompt_tokens, answer).columns()
    rows = len(columns["kind"])
    later = [None] * (rows - 1)
    columns["arrival_s"] = [request.arrival_s, *later]
    if request.prefix_blocks:
        offsets = np.array([0] + [len(request.prefix_blocks)] * rows)
        blocks = np.array(request.prefix_blocks, dtype=np.int64)
        columns["prefix_blocks"] = lists(blocks, offsets, np.arange(rows) > 0)
    if request.other:
        columns["request"] = [json.dumps(request.other, sort_keys=True), *later]
    return columns


def literal_trace(packed: TraceReader, contents: Contents[Request], out: Path) -> TraceReader:
    """The trace of version 1 that holds what a packed one does."""
    with WholeTraceWriter(out, packed.info) as writer:
        for request in contents.searches:
            writer.write_episode(literal_columns(request))
    return TraceReader(out)


def both(folder: Path, format: str, log: Log) -> tuple[TraceReader, TraceReader]:
    """The log as a packed trace, and as one with a row for each token."""
    source = write_log(folder, format, log)
    contents = read_requests(source, format)
    block = FORMATS[format].block_tokens
    packed = imported(source, contents, folder / "p.parquet", format, prefix_block_tokens=block)
    return packed, literal_trace(packed, contents, folder / "l.parquet")


def same(packed: TraceReader, literal: TraceReader) -> None:
    assert packed.num_episodes == literal.num_episodes
    assert packed.columns == (*literal.columns, "run")
    order = [*range(packed.num_episodes)]
    for number in [*order, *reversed(order)]:
        table = packed.table(number)
        assert table.to_pydict() == literal.table(number).to_pydict()
        assert [field.type for field in table.schema] == [
            field.type for field in literal.table(number).schema
        ]
        assert packed.num_rows(number) == literal.num_rows(number) == table.num_rows
        names = ["position", "arrival_s"]
        assert packed.table(number, names).to_pydict() == table.select(names).to_pydict()
        for reader in (packed, literal):
            row = reader.first_row(number, names).to_pydict()
            assert row == table.select(names).slice(0, 1).to_pydict()
    for one, other in zip(packed.episodes(text=True), literal.episodes(text=True), strict=True):
        assert vars(one).keys() == vars(other).keys()
        for name, value in vars(one).items():
            np.testing.assert_equal(value, getattr(other, name), name)


@pytest.mark.parametrize("format", ["mooncake", "bailian", "azure"])
@settings(max_examples=10)
@given(log=logs, group=st.integers(1, 4))
def test_packed_traces_hold_what_a_row_per_token_says(
    format: str, log: Log, group: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_logs, "_GROUP_REQUESTS", group)
        packed, literal = both(tmp_path_factory.mktemp("logs"), format, log)
    assert pq.read_metadata(packed.path).num_row_groups == -(-len(log) // group)
    same(packed, literal)


def test_a_row_group_has_few_ids_of_blocks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(request_logs, "_GROUP_BLOCKS", 3)
    packed, literal = both(tmp_path, "bailian", [(i, 33, 1) for i in range(7)])  # 2 ids each
    assert pq.read_metadata(packed.path).num_row_groups == 4
    same(packed, literal)


LOG: Log = [(1500 * i, 5 + 37 * i % 90, 3 + i % 5) for i in range(12)]


WORKLOAD = """
searches = 8
warm_up = 1
runs = 1
[model]
name = "llama-3.1-8b"
[[mix]]
trace = "t.parquet"
[arrivals]
kind = "recorded"
file = "t.parquet"
[candidates]
gpus = ["h100"]
policies = ["full", "kivi"]
[target]
percentile = 90
search = "20 s"
"""


def results(folder: Path, monkeypatch: Any, *command: str) -> list[str]:
    """What a command finds out about `t.parquet`, packed and with a row per token, as CSV."""
    found = []
    for name, reader in zip("pl", both(folder, "bailian", LOG), strict=True):
        (folder / name).mkdir()
        monkeypatch.chdir(folder / name)
        reader.path.rename("t.parquet")
        Path("w.toml").write_text(WORKLOAD)
        assert main([*command, "--out", "out.parquet"]) == 0
        found.append(pd.read_parquet("out.parquet").to_csv())
    return found


def test_replays_of_both_are_equal_to_the_byte(tmp_path: Path, monkeypatch: Any) -> None:
    policies = ["--policy", "full,streaming-llm", "--budget", "0.8", "--jobs", "2", "--strict"]
    packed, literal = results(tmp_path, monkeypatch, "replay", "t.parquet", *policies)
    assert packed == literal
    assert packed.count("streaming-llm") >= len(LOG)


def test_plans_of_both_are_equal_to_the_byte(tmp_path: Path, monkeypatch: Any) -> None:
    packed, literal = results(tmp_path, monkeypatch, "plan", "w.toml", "--jobs", "1")
    assert packed == literal


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Twelve requests, in row groups of four."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_logs, "_GROUP_REQUESTS", 4)
        return both(tmp_path, "bailian", LOG)[0].path


def rewritten(path: Path, change: Callable[[dict[str, list[Any]]], None], group: int = 16) -> Path:
    """The file with some values changed, in row groups of so many rows."""
    table = pq.read_table(path)
    columns = table.to_pydict()
    change(columns)
    changed = pa.table(columns, schema=table.schema)
    pq.write_table(changed, path, row_group_size=group)
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path).episodes(text=True))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for word in words:
        assert word in message, message


def setting(column: str, row: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][row] = value

    return change


DAMAGE = {
    "no rows": (setting("run", 4, 0), "episode 1, row 0: run is 0, not at least 1"),
    "negative": (setting("run", 6, -7), "episode 1, row 2: run is -7"),
    "without a token": (setting("run", 5, 2), "row 1: a row without a token stands for 2 rows"),
    "one": (setting("run", 6, None), "episode 1, row 44: seq is 47, expected 44"),
    "too many": (setting("run", 4, 1 + 42), "episode 1, row 43: seq is 42, expected 43"),
    "endless": (setting("run", 4, (1 << 31) - 1), f"more than {MOST_ROWS} rows"),
    "first is not 0": (setting("episode", 0, 1), "row 0 of the file is of episode 1, after"),
    "left out": (setting("episode", 20, 6), "row 20 of the file is of episode 6, after those of 4"),
    "comes again": (setting("episode", 21, 4), "row 21 of the file is of episode 4"),
    "no number": (setting("episode", 8, None), "row 8 of the file is of episode -1"),
    "kind": (setting("kind", 4, "burst"), "episode 1, row 0: a row without a token"),
    "position": (setting("position", 6, 3), "position 3, expected 42"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_line(case: str, good: Path) -> None:
    change, named = DAMAGE[case]
    list(TraceReader(rewritten(good, lambda columns: None)).episodes())
    refused(rewritten(good, change), named)


def test_an_episode_in_two_row_groups(good: Path) -> None:
    before = [episode.num_tokens for episode in TraceReader(good).episodes()]
    parted = TraceReader(rewritten(good, lambda columns: None, group=6))
    assert [episode.num_tokens for episode in parted.episodes()] == before


def test_a_known_vocabulary_wants_every_token(good: Path) -> None:
    reader = TraceReader(good)
    reader.info.extra["token_ids"] = "known"
    with pytest.raises(TraceError, match="token -1 is not in the vocabulary"):
        next(reader.episodes())


def with_version(path: Path, version: bytes, drop: tuple[str, ...] = ()) -> Path:
    table = pq.read_table(path).drop_columns(list(drop))
    stored = {**(table.schema.metadata or {}), VERSION_KEY: version}
    assert METADATA_KEY in stored
    pq.write_table(table.replace_schema_metadata(stored), path, row_group_size=16)
    return path


def test_versions_are_told_apart(good: Path) -> None:
    assert pq.read_schema(good).metadata[VERSION_KEY] == b"2"
    refused(with_version(good, b"1"), "episode 0")
    refused(with_version(good, b"3"), "trace format '3'", "upgrade arborsim")
    refused(with_version(good, b"2", ("run",)), "column run is missing")


def test_a_damaged_page_is_noticed(good: Path) -> None:
    for column, said in ((0, "its data are damaged"), (7, "episode 4: its data are damaged")):
        part = pq.ParquetFile(good).metadata.row_group(1).column(column)
        whole = good.read_bytes()
        data = bytearray(whole)
        data[part.data_page_offset + part.total_compressed_size - 1] ^= 0x40
        good.write_bytes(data)
        refused(good, said)
        good.write_bytes(whole)


def test_random_damage_never_ends_in_a_traceback(good: Path) -> None:
    whole, rng = good.read_bytes(), np.random.default_rng(0)
    noticed = 0
    for _ in range(120):
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        good.write_bytes(data)
        try:
            list(TraceReader(good).episodes(text=True))
        except TraceError as error:
            noticed += 1
            assert "\n" not in str(error)
    assert noticed > 40


def test_packed_traces_are_neither_parts_nor_resumed(good: Path) -> None:
    info = TraceReader(good).info
    with pytest.raises(UsageError, match="its columns are not those of this arborsim's recorder"):
        TraceWriter(good, info, resume=True)
    parts = parts_directory(good)
    parts.mkdir(exist_ok=True)
    good.rename(parts / "episode-000000.parquet")
    with pytest.raises(TraceError, match="a part holds one episode, not packed"):
        TraceReader(parts)


def test_the_writer_checks_what_it_is_given(tmp_path: Path, good: Path) -> None:
    request = Request(0.0, 5, 2)
    columns = request_logs.packed_columns([request, request], 0)
    with WholeTraceWriter(tmp_path / "w.parquet", TraceReader(good).info, packed=True) as writer:
        for name, row, value in (("episode", 4, 2), ("seq", 0, 1), ("run", 1, 3)):
            changed = {**columns, name: columns[name].copy()}
            changed[name][row] = value
            with pytest.raises(TraceError):
                writer.write_packed(changed)
        writer.write_packed(columns)
        writer.write_packed(request_logs.packed_columns([request], 2))
    reader = TraceReader(tmp_path / "w.parquet")
    assert [episode.num_tokens for episode in reader.episodes()] == [7, 7, 7]
    assert next(reader.episodes(start=2)).kind[0] == Kind.PREFILL
