"""What is written is what is read, for random trees and every capture level."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import MissingSignal, TraceError, UsageError
from arborsim.core.observations import Signal
from arborsim.core.shape import Rope
from arborsim.policies.methods.expected_attention import ExpectedAttention
from arborsim.trace.columns import lists, lists_of
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import PER_LAYER, Kind, TraceInfo
from arborsim.trace.writer import TraceWriter
from tests.helpers.traces import make_info, make_trace, random_trace_columns

LEVELS = {
    "tree": {"capture": "tree"},
    "bank": {"capture": "tree", "embeddings": True},
    "dense": {"capture": "signals", "attention": "dense"},
    "sparse": {"capture": "signals", "attention": "sparse", "attention_top": 5},
    "no attention": {"capture": "signals", "attention": "none", "hidden_layers": (0, 2)},
    "qkv": {
        "capture": "qkv",
        "qkv_layers": (0, 2),
        "attention_layer_ids": (1,),
        "hidden_layers": (1,),
        "rope": Rope((1.0, 0.1 + 0.2), 1.25),
    },
}


def or_missing(values: list, missing: float) -> np.ndarray:
    return np.array([missing if value is None else value for value in values])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    level=st.sampled_from(sorted(LEVELS)),
    kind=st.sampled_from(["tree", "linear"]),
    prompt=st.integers(1, 9),
    nodes=st.integers(0, 9),
    block=st.sampled_from([(0, 2), (1, 1), (1, 7)]),
    width=st.integers(1, 5),
)
def test_read_equals_written(seed, level, kind, prompt, nodes, block, width):
    info = make_info(layers=3, seed=seed % 1000, **LEVELS[level])
    rng = np.random.default_rng(seed)
    written = [random_trace_columns(rng, info, kind, prompt, nodes, block, width) for _ in range(2)]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.parquet"
        with TraceWriter(path, info) as writer:
            for columns in written:
                writer.write_episode(columns)
        reader = TraceReader(path)
        assert reader.info == info
        assert reader.num_episodes == 2
        assert reader.file_bytes == path.stat().st_size
        held = [signal for signal in Signal if reader.has(signal)]
        read = list(
            reader.episodes(held, text=True, embedding=info.embeddings or info.capture != "tree")
        )
        for index, (episode, columns) in enumerate(zip(read, written, strict=True)):
            assert episode.index == index
            check_equal(episode, columns, info, held)


def check_equal(episode, columns, info: TraceInfo, held: list[Signal]) -> None:
    for name in ("kind", "iteration", "node", "parent", "depth", "time_s"):
        np.testing.assert_array_equal(getattr(episode, name), columns[name])
    for name in ("entropy", "reward"):
        expected = or_missing(columns[name], np.nan).astype(np.float32)
        np.testing.assert_array_equal(getattr(episode, name), expected)
    np.testing.assert_array_equal(episode.correct, or_missing(columns["correct"], -1))
    assert episode.text == tuple(columns["text"])
    assert episode.answer == tuple(columns["answer"])
    labels = [None, "finished", "dead"]
    np.testing.assert_array_equal(episode.end, [labels.index(end) for end in columns["end"]])
    rows = [r for r, kind in enumerate(columns["kind"]) if kind <= Kind.TOKEN]
    np.testing.assert_array_equal(episode.token_rows, rows)
    for name in ("token", "position"):
        expected = [value for value in columns[name] if value is not None]
        np.testing.assert_array_equal(getattr(episode, name), expected)
    for signal in PER_LAYER:
        if signal in held:
            np.testing.assert_array_equal(episode.per_layer[signal], columns[signal.value])
    if info.attention == "dense":
        for i, row in enumerate(episode.attention):
            np.testing.assert_array_equal(row, columns["attention"][i].astype(np.float32))
    if info.attention == "sparse":
        check_sparse(episode, columns)
    assert (episode.hidden is None) == (not info.hidden_layers)
    if info.hidden_layers:
        shape = (episode.num_tokens, len(info.hidden_layers), info.geometry.hidden)
        np.testing.assert_array_equal(episode.hidden.values, columns["hidden"].reshape(shape))
    if "embedding" in columns:
        given_rows = [r for r, v in enumerate(columns["embedding"]) if v is not None]
        np.testing.assert_array_equal(episode.embedding_rows, given_rows)
        for row, vector in zip(given_rows, episode.embedding, strict=True):
            np.testing.assert_array_equal(vector, columns["embedding"][row])


def check_sparse(episode, columns) -> None:
    for i, row in enumerate(episode.attention):
        index = columns["attention_index"][i]
        assert len(row) == episode.position[i] + 1
        np.testing.assert_array_equal(row[index], columns["attention_value"][i])
        others = np.setdiff1d(np.arange(len(row)), index)
        if len(others):
            assert row[others].sum() == pytest.approx(columns["attention_rest"][i], rel=1e-4)


def test_structure_does_not_depend_on_the_capture_level(tmp_path):
    read = []
    for level, options in LEVELS.items():
        path = make_trace(tmp_path / f"{level}.parquet", 7, 1, info=make_info(**options))
        read.append(next(TraceReader(path).episodes()))
    for other in read[1:]:
        for name in ("kind", "node", "iteration", "token", "position", "reward", "time_s"):
            np.testing.assert_array_equal(getattr(other, name), getattr(read[0], name))


def test_only_the_columns_asked_for_are_decoded(tmp_path):
    reader = TraceReader(make_trace(tmp_path / "t.parquet"))
    episode = next(reader.episodes([Signal.LAG_KEY]))
    assert set(episode.per_layer) == {Signal.LAG_KEY}
    assert episode.attention is None
    assert episode.text is None
    assert episode.embedding is None


def test_range_of_episodes(tmp_path):
    reader = TraceReader(make_trace(tmp_path / "t.parquet", episodes=4))
    assert [episode.index for episode in reader.episodes(start=1, stop=3)] == [1, 2]
    assert [episode.index for episode in reader.episodes(start=3, stop=9)] == [3]


def test_tree_capture_holds_no_signal_and_says_how_to_get_it(tmp_path):
    path = make_trace(tmp_path / "trace.parquet", capture="tree")
    reader = TraceReader(path)
    assert [signal for signal in Signal if reader.has(signal)] == [Signal.REWARD]
    with pytest.raises(MissingSignal) as caught:
        reader.require({Signal.ATTENTION, Signal.REWARD}, "policy h2o")
    assert str(caught.value) == (
        f"policy h2o reads attention, which {path} does not hold: record it with --capture signals"
    )
    with pytest.raises(MissingSignal, match="policy epikv reads hidden_change"):
        next(reader.episodes([Signal.HIDDEN_CHANGE], who="policy epikv"))
    old = make_trace(tmp_path / "old.parquet", 1, 1, capture="qkv", qkv_layers=(0,))
    with pytest.raises(MissingSignal) as caught:
        TraceReader(old).require(ExpectedAttention().reads(), "policy expected-attention")
    assert str(caught.value) == (
        f"policy expected-attention reads RoPE frequencies, which {old} does not hold: record "
        "it with --capture qkv --qkv-layers all by this version of arborsim"
    )
    with pytest.raises(MissingSignal, match=r"ets reads embeddings.*--capture signals.*--bank"):
        next(reader.episodes(embedding=True, who="ets"))


def without(path: Path, columns: list[str], out: Path) -> TraceReader:
    """The same trace as recorders wrote it that did not know these columns."""
    file = pq.ParquetFile(path)
    schema = file.schema_arrow
    keep = [name for name in schema.names if name not in columns]
    kept = pa.schema([schema.field(name) for name in keep], metadata=schema.metadata)
    with pq.ParquetWriter(out, kept) as writer:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=keep)
            writer.write_table(table, row_group_size=table.num_rows)
    return TraceReader(out)


def test_a_trace_of_an_older_recorder_does_not_tell_which_thoughts_ended(tmp_path):
    path = make_trace(tmp_path / "new.parquet", capture="tree")
    old = without(path, ["end", "answer"], tmp_path / "old.parquet")
    for ours, theirs in zip(TraceReader(path).episodes(), old.episodes(text=True), strict=True):
        assert theirs.end is None
        assert theirs.answer is None
        assert ours.end is not None
        np.testing.assert_array_equal(ours.correct, theirs.correct)


def test_a_source_that_does_not_tell_which_thoughts_ended_says_so(tmp_path):
    info = make_info(capture="tree", extra={"ends": "unknown"})
    episode = next(TraceReader(make_trace(tmp_path / "t.parquet", info=info)).episodes(text=True))
    assert episode.end is None
    assert not episode.info.knows_ends


def test_ends_by_label_by_number_and_as_plain_strings(tmp_path):
    info = make_info(capture="tree")
    columns = random_trace_columns(np.random.default_rng(5), info, nodes=30)
    numbers = [["finished", "dead"].index(end) + 1 if end else 0 for end in columns["end"]]
    assert set(numbers) == {0, 1, 2}
    for given_as in (columns["end"], numbers, np.array(numbers), pa.array(columns["end"])):
        path = tmp_path / "t.parquet"
        with TraceWriter(path, info, overwrite=True) as writer:
            writer.write_episode({**columns, "end": given_as})
        np.testing.assert_array_equal(next(TraceReader(path).episodes()).end, numbers)
    for wrong in ([3] * len(numbers), ["lost"] * len(numbers), [-1] * len(numbers)):
        writer = TraceWriter(path, info, overwrite=True)
        with pytest.raises(UsageError, match="end of a thought"):
            writer.write_episode({**columns, "end": wrong})
        writer.close()


def test_missing_attention_and_reward_have_their_own_remedies(tmp_path):
    path = make_trace(tmp_path / "t.parquet", attention="none", rewards=False)
    reader = TraceReader(path)
    with pytest.raises(MissingSignal, match="--attention dense or --attention sparse"):
        reader.require([Signal.ATTENTION], "policy h2o")
    with pytest.raises(MissingSignal, match="a --search that scores its blocks"):
        reader.require([Signal.REWARD], "policy tree")
    reader.require([Signal.ENTROPY, Signal.LAG_VALUE], "policy lag")


def test_one_row_group_per_episode_and_the_promised_encodings(tmp_path):
    path = make_trace(tmp_path / "t.parquet", episodes=3)
    metadata = pq.ParquetFile(path).metadata
    assert metadata.num_row_groups == 3
    group = metadata.row_group(1)
    for i in range(group.num_columns):
        column = group.column(i)
        assert column.compression == "ZSTD"
        assert "BYTE_STREAM_SPLIT" not in column.encodings, column.path_in_schema
        if column.path_in_schema == "kind":
            assert column.has_dictionary_page


def test_a_file_that_another_tool_wrote_again_is_still_a_trace(tmp_path):
    path = make_trace(tmp_path / "t.parquet", episodes=1)
    table = pq.read_table(path)
    plain = table.set_column(
        table.column_names.index("kind"), "kind", table["kind"].cast(pa.string())
    ).replace_schema_metadata(table.schema.metadata)
    pq.write_table(plain, tmp_path / "again.parquet")
    before = next(TraceReader(path).episodes([Signal.ATTENTION]))
    after = next(TraceReader(tmp_path / "again.parquet").episodes([Signal.ATTENTION]))
    np.testing.assert_array_equal(before.kind, after.kind)
    np.testing.assert_array_equal(before.attention.values, after.attention.values)


def test_lists_are_read_from_slices_chunks_and_over_hidden_values():
    column = lists(np.arange(10, dtype=np.float16), np.array([0, 2, 2, 5, 9, 10]))
    hiding = pa.ListArray.from_buffers(
        column.type, 5, [pa.py_buffer(bytes([0b10111])), column.buffers()[1]],
        children=[column.values],
    )  # fmt: skip
    values, offsets = lists_of(pa.chunked_array([column.slice(1, 3), hiding]))
    assert offsets.tolist() == [0, 0, 3, 7, 9, 9, 12, 12, 13]
    assert values.tolist() == [2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 9]
    empty = lists_of(pa.chunked_array([], type=column.type))
    assert len(empty[0]) == 0
    assert empty[1].tolist() == [0]


def test_lists_are_views_of_arrow_buffers():
    column = lists(np.arange(6, dtype=np.float16), np.array([0, 2, 6]))
    values, _ = lists_of(pa.chunked_array([column]))
    assert values.ctypes.data == column.values.buffers()[1].address


def test_episodes_out_of_range_are_refused(tmp_path):
    reader = TraceReader(make_trace(tmp_path / "t.parquet"))
    with pytest.raises(Exception, match="make no range"):
        next(reader.episodes(start=2, stop=1))
    assert issubclass(MissingSignal, TraceError)
