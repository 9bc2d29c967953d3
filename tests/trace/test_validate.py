"""One wrong field in an otherwise valid episode is found, and named by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arborsim.core import observations
from arborsim.core.errors import TraceError
from arborsim.core.observations import DenseRows, Signal, SparseRows
from arborsim.trace.columns import encode
from arborsim.trace.decode import decode_episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import PER_LAYER, Kind
from arborsim.trace.validate import Where, check_sums
from tests.helpers.traces import Rows, make_info, sparse_columns

P, T, TURN, END, PRUNE, ANSWER = Kind

# Two branches below the prompt decode together (rows 4-7), end (8, 9), and node 1 gets a child.
ROWS = [
    # kind, iteration, node, parent, depth, position
    (P, 0, 0, -1, 0, 0),
    (P, 0, 0, -1, 0, 1),
    (TURN, 0, 1, 0, 1, None),
    (TURN, 0, 2, 0, 1, None),
    (T, 1, 1, 0, 1, 2),
    (T, 1, 2, 0, 1, 2),
    (T, 2, 1, 0, 1, 3),
    (T, 2, 2, 0, 1, 3),
    (END, 2, 1, 0, 1, None),
    (END, 2, 2, 0, 1, None),
    (PRUNE, 2, 2, 0, 1, None),
    (TURN, 2, 3, 1, 2, None),
    (T, 3, 3, 1, 2, 4),
    (T, 4, 3, 1, 2, 5),
    (END, 4, 3, 1, 2, None),
    (ANSWER, 4, 3, 1, 2, None),
]
DENSE = make_info(layers=2, vocab=10)
SPARSE = make_info(layers=2, vocab=10, attention="sparse", attention_top=2)


LIKE_HIDDEN_CHANGE = [*(signal.value for signal in PER_LAYER[1:]), "key_sketch"]


def good(info=DENSE) -> dict:
    names = ("kind", "iteration", "node", "parent", "depth", "position")
    by_column = zip(*ROWS, strict=True)
    columns: dict = {name: list(values) for name, values in zip(names, by_column, strict=True)}
    columns["kind"] = [int(kind) for kind in columns["kind"]]
    columns["time_s"] = [0.1 * row for row in range(len(ROWS))]
    columns["token"] = [None if p is None else p for p in columns["position"]]
    columns["entropy"] = [0.5] * len(ROWS)
    columns["reward"] = [0.5 if kind == END else None for kind in columns["kind"]]
    columns["end"] = [0] * 14 + [1, 0]
    columns["answer"] = [None] * 14 + ["24", None]
    tokens = [p for p in columns["position"] if p is not None]
    columns["hidden_change"] = [np.ones(2, np.float16) if p is not None else None
                                for p in columns["position"]]  # fmt: skip
    columns |= {name: list(columns["hidden_change"]) for name in LIKE_HIDDEN_CHANGE}
    columns["readers"] = [None if p is None else [1, 2] for p in columns["position"]]
    rows = [np.full(p + 1, 1 / (p + 1), dtype=np.float16) for p in tokens]
    if info is DENSE:
        columns["attention"] = spread(rows, columns)
    else:
        sparse = sparse_columns(rows, 2)
        columns.update({name: spread(values, columns) for name, values in sparse.items()})
    return columns


def spread(values: list, columns: dict) -> list:
    left = iter(values)
    return [None if p is None else next(left) for p in columns["position"]]


def write(path: Path, columns: dict, info=DENSE, seq: list | None = None, **arrow) -> Path:
    """Write without the checks of `TraceWriter`."""
    table = encode(columns, info, 0)
    for name, values in {**({"seq": seq} if seq else {}), **arrow}.items():
        at = table.column_names.index(name)
        field = table.schema.field(at)
        table = table.set_column(at, field, pa.array(values, field.type))
    pq.write_table(table, path)
    return path


def read(path: Path) -> None:
    signals = (Signal.ATTENTION, *PER_LAYER, Signal.KEY_SKETCH, Signal.READERS)
    list(TraceReader(path).episodes(signals, text=True, embedding=True))


def problem(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: episode 0, row ")
    assert "\n" not in message
    tail = "; the file is damaged or was written by a broken recorder"
    assert message.endswith(tail)
    return message.removeprefix(f"{path}: episode 0, ").removesuffix(tail)


@pytest.mark.parametrize(("column", "row"), [("reward", 9), ("entropy", 4), ("time_s", 4)])
def test_nan_is_not_what_was_not_recorded(tmp_path, column, row):
    values = good()[column]
    values[row] = np.nan
    path = write(tmp_path / "t.parquet", good(), **{column: values})
    assert problem(path) == f"row {row}: {column} is nan: what was not recorded is null"


@pytest.mark.parametrize("info", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_unchanged_episode_is_valid(tmp_path, info):
    read(write(tmp_path / "t.parquet", good(info), info))


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("kind", 0, TURN, "row 0: starts with a transition row of node 0 instead of a prefill"),
        ("node", 0, 1, "row 0: starts with a prefill row of node 1 instead of a prefill of node 0"),
        ("kind", 8, P, "row 8: prefill row after other rows"),
        ("node", 3, 3, "row 3: node 3 appears before node 2"),
        ("node", 3, -1, "row 3: node -1 appears before node 2"),
        ("kind", 2, END, "row 2: boundary row of node 1, which no transition has opened"),
        ("parent", 0, 0, "row 0: node 0 names parent 0, which does not exist"),
        ("parent", 2, -1, "row 2: node 1 names parent -1, which does not exist"),
        ("parent", 3, 2, "row 3: node 2 names parent 2, which does not exist"),
        ("parent", 8, 1, "row 8: node 1 names parent 1, but was opened under 0"),
        ("depth", 11, 1, "row 11: node 3 has depth 1, expected 2"),
        ("depth", 0, 1, "row 0: node 0 has depth 1, expected 0"),
        ("depth", 12, 3, "row 12: node 3 has depth 3, but was opened at 2"),
        ("kind", 13, ANSWER, "row 13: rows follow the answer, which ends an episode"),
        ("iteration", 10, 1, "row 10: iteration 1 after 2"),
        ("iteration", 0, -2, "row 0: iteration -2 after 0"),
        ("iteration", 4, 0, "row 4: token row in iteration 0, which is the prefill"),
        ("node", 7, 1, "row 7: second token of node 1 in iteration 2"),
        ("time_s", 5, np.inf, "row 5: time_s is inf"),
        ("time_s", 5, 0.1, "row 5: time_s runs backwards, from 0.4 to 0.1"),
        ("position", 7, 4, "row 7: token row of node 2 has position 4, expected 3"),
        ("position", 4, 1, "row 4: token row of node 1 has position 1, expected 2"),
        ("position", 12, None, "row 12: token row of node 3 has position -1, expected 4"),
        ("token", 6, None, "row 6: token -1 is not in the vocabulary of 10"),
        ("token", 6, 10, "row 6: token 10 is not in the vocabulary of 10"),
        ("reward", 9, 1.5, "row 9: reward is 1.5, not between 0 and 1"),
        ("reward", 9, -0.5, "row 9: reward is -0.5, not between 0 and 1"),
        ("end", 4, 1, "row 4: token row says that a thought is finished"),
        ("end", 8, 2, "row 11: node 3 is opened under node 1, which ended in row 8"),
        ("answer", 9, "24", "row 9: an answer, but no finished thought"),
        ("entropy", 4, -1.0, "row 4: entropy is -1 nats"),
        ("entropy", 4, np.inf, "row 4: entropy is inf nats"),
        ("entropy", 4, 2.31, "row 4: entropy is 2.31 nats, above the ln(10) of the vocabulary"),
        ("hidden_change", 5, [1.0], "row 5: hidden_change has 1 values, but the model has 2"),
        ("hidden_change", 5, None, "row 5: hidden_change has 0 values, but the model has 2"),
        ("hidden_change", 3, [1, 1], "row 3: a row without a token holds hidden_change"),
        ("attention", 5, [0.5, 0.5], "row 5: attention has 2 values, expected 3"),
        ("attention", 5, None, "row 5: attention has 0 values, expected 3"),
        ("attention", 5, [0.5, np.nan, 0.5], "row 5: attention is nan at entry 1, not a prob"),
        ("attention", 6, [0.5, 0.5, 0.25, -0.25], "row 6: attention is -0.25 at entry 3, not"),
        ("attention", 5, [0.5, 0.0, 2.0], "row 5: attention is 2.0 at entry 2, not a probability"),
        ("attention", 5, [0.5, 0.1, 0.2], "row 5: attention sums to 0.7999 instead of 1"),
        ("attention", 5, [0.5, 0.5, 0.5], "row 5: attention sums to 1.5 instead of 1"),
        ("attention", 8, [1.0], "row 8: a row without a token holds attention"),
    ],
)
def test_one_wrong_field_is_named(tmp_path, column, row, value, message):
    columns = good()
    columns[column][row] = value
    assert problem(write(tmp_path / "t.parquet", columns)).startswith(message)


@pytest.mark.parametrize("signal", PER_LAYER)
def test_a_size_that_is_no_size_is_named(tmp_path, signal):
    for value, message in (
        (np.nan, "nan, which is not finite"),
        (np.inf, "inf, which is not finite"),
        (-np.inf, "-inf, which is not finite"),
        (-0.25, "-0.25, which is below 0"),
    ):
        columns = good()
        columns[signal.value][7] = np.array([0.5, value], np.float16)
        found = problem(write(tmp_path / "t.parquet", columns))
        assert found == f"row 7: {signal.value} holds {message}"
    columns[signal.value][7] = np.array([0.5, -0.0], np.float16)
    read(write(tmp_path / "t.parquet", columns))


@pytest.mark.parametrize("column", ["key_sketch", "embedding"])
def test_a_vector_may_be_negative_but_not_infinite(tmp_path, column):
    columns = good()
    columns["embedding"] = [None] * len(ROWS)
    columns[column][8 if column == "embedding" else 7] = np.array([-0.5, 1.0], np.float16)
    read(write(tmp_path / "t.parquet", columns))
    columns[column][9 if column == "embedding" else 7] = np.array([-0.5, np.nan], np.float16)
    found = problem(write(tmp_path / "t.parquet", columns))
    assert found.endswith(f"{column} holds nan, which is not finite")


@pytest.mark.parametrize("column", ["hidden_change", "key_sketch", "attention", "readers"])
def test_a_null_inside_of_a_list_is_named(tmp_path, column):
    write(tmp_path / "t.parquet", good())
    read(tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet")
    at, values = table.column_names.index(column), table[column].to_pylist()
    values[6] = [values[6][0], None, *values[6][2:]]
    field = table.schema.field(at)
    table = table.set_column(at, field, pa.array(values, field.type))
    pq.write_table(table, tmp_path / "t.parquet")
    assert problem(tmp_path / "t.parquet") == f"row 6: {column} holds a null"


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("attention_index", 6, [0, 4], "row 6: attention_index 4 lies beyond the token's own"),
        ("attention_index", 6, [-1, 2], "row 6: attention_index -1 lies beyond the token's own"),
        ("attention_index", 6, [2, 0], "row 6: attention_index 0 is not above the one before it"),
        ("attention_index", 6, [2, 2], "row 6: attention_index 2 is not above the one before it"),
        ("attention_index", 6, [0], "row 6: attention_index and attention_value differ in length"),
        ("attention_value", 6, [0.25, np.inf], "row 6: attention is inf at entry 1"),
        ("attention_value", 6, [0.25, 0.5], "row 6: attention sums to 1.25 instead of 1"),
        ("attention_rest", 6, -0.5, "row 6: attention_rest is -0.5, not a probability"),
        ("attention_rest", 6, None, "row 6: attention_rest is nan, not a probability"),
        ("attention_rest", 6, 0.1, "row 6: attention sums to 0.6 instead of 1"),
    ],
)
def test_one_wrong_field_of_sparse_attention_is_named(tmp_path, column, row, value, message):
    columns = good(SPARSE)
    columns[column][row] = value
    assert problem(write(tmp_path / "t.parquet", columns, SPARSE)).startswith(message)


def test_prefill_of_another_node(tmp_path):
    columns = good()
    columns["kind"][4] = int(P)
    assert problem(write(tmp_path / "t.parquet", columns)).startswith("row 4: prefill row after")


def test_prefill_in_a_later_iteration(tmp_path):
    columns = good()
    columns["iteration"] = [0] + [i + 1 for i in columns["iteration"][1:]]
    path = write(tmp_path / "t.parquet", columns)
    assert problem(path) == "row 1: prefill row in iteration 1, not 0"


def test_token_of_a_leaf_that_is_not_active(tmp_path):
    columns = good()
    for name, value in (("node", 1), ("parent", 0), ("depth", 1)):
        columns[name][12] = value
    path = write(tmp_path / "t.parquet", columns)
    assert problem(path) == "row 12: token row of node 1, which is no leaf of the last transition"


def test_rows_out_of_sequence(tmp_path):
    seq = [*range(3), 4, 3, *range(5, len(ROWS))]
    path = write(tmp_path / "t.parquet", good(), seq=seq)
    assert problem(path) == "row 3: seq is 4, expected 3"


@pytest.mark.parametrize("column", ["episode", "seq", "time_s", "iteration", "node", "depth"])
def test_null_where_there_must_be_a_value(tmp_path, column):
    path = write(tmp_path / "t.parquet", good())
    table = pq.ParquetFile(path).read()
    values = table[column].to_pylist()
    values[3] = None
    path = write(path, good(), **{column: values})
    assert problem(path) == f"row 3: {column} is null"


@pytest.mark.parametrize("label", ["daydream", None])
def test_unknown_kind(tmp_path, label):
    path = write(tmp_path / "t.parquet", good())
    table = pq.ParquetFile(path).read()
    labels = table["kind"].to_pylist()
    labels[4] = label
    at = table.column_names.index("kind")
    field = table.schema.field(at)
    column = pa.array(labels).dictionary_encode().cast(field.type)
    pq.write_table(table.set_column(at, field, column), path)
    assert problem(path) == ("row 4: unknown kind of row" if label else "row 4: kind is null")


def test_unknown_end(tmp_path):
    path = write(tmp_path / "t.parquet", good())
    table = pq.ParquetFile(path).read()
    at = table.column_names.index("end")
    field = table.schema.field(at)
    labels = [None] * 9 + ["asleep"] + [None] * 6
    pq.write_table(table.set_column(at, field, pa.array(labels, field.type)), path)
    assert problem(path) == "row 9: the end of a thought is none of finished, dead"


def test_leaf_twice_in_one_transition(tmp_path):
    columns = good()
    columns["node"][3], columns["node"][2] = 1, 1
    for row in (5, 7, 9, 10):
        columns["kind"][row] = int(END)
        columns["position"][row] = columns["token"][row] = None
        columns["hidden_change"][row] = columns["attention"][row] = None
        columns["node"][row] = 1
    for row in range(11, len(ROWS)):
        columns["node"][row] = 2
    path = write(tmp_path / "t.parquet", columns)
    assert problem(path) == "row 3: transition names node 1 twice in one batch"


def test_pruned_node_is_not_taken_up_again(tmp_path):
    columns = good()
    columns["node"][11:] = [2] * 5
    columns["parent"][11:] = [0] * 5
    columns["depth"][11:] = [1] * 5
    path = write(tmp_path / "t.parquet", columns)
    assert problem(path) == "row 11: transition row of node 2, which was pruned in row 10"


def test_parent_that_goes_on_after_its_child(tmp_path):
    columns = good()
    turn = len(ROWS) - 1
    for name, value in {
        "kind": int(TURN), "iteration": 4, "node": 1, "parent": 0, "depth": 1, "position": None,
        "time_s": 9.0, "token": None, "entropy": None, "reward": None, "hidden_change": None,
        "attention": None, "end": 0, "answer": None, "readers": None,
        **dict.fromkeys(LIKE_HIDDEN_CHANGE),
    }.items():  # fmt: skip
        columns[name][turn] = value
        columns[name].append(value)
    for name, value in {
        "kind": int(T), "iteration": 5, "position": 4, "token": 4,
        "hidden_change": [1, 1], "attention": [0.2] * 5, "readers": [1],
        **{name: [1, 1] for name in LIKE_HIDDEN_CHANGE},
    }.items():  # fmt: skip
        columns[name][-1] = value
    path = write(tmp_path / "t.parquet", columns)
    assert problem(path) == (
        "row 16: token row of node 1, although node 3 below it has tokens already"
    )


def test_ancestor_that_goes_on_below_an_empty_block():
    rows = Rows()
    rows.open(-1)
    rows.token(P, 0, token=1)
    for node, decodes in ((1, True), (2, False), (3, True), (1, True)):
        if node == len(rows.parents):
            rows.open(node - 1)
        rows.add(TURN, node)
        rows.iteration += 1
        if decodes:
            rows.token(T, node, token=1)
    info = make_info(capture="tree")
    with pytest.raises(TraceError, match="row 7: token row of node 1, although node 3 below it"):
        decode_episode(encode(rows.columns, info, 0), info, "t", 0)


def test_the_prompt_itself_may_go_on_before_any_transition(tmp_path):
    columns = good()
    columns["kind"][1] = int(T)
    columns["iteration"][1:] = [1] * 3 + [i + 1 for i in columns["iteration"][4:]]
    read(write(tmp_path / "t.parquet", columns))


@pytest.mark.parametrize("wrong", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_every_row_of_long_attention_is_added_up(attention, wrong, monkeypatch):
    count, bad = 600, 599  # 180,300 weights: sums are taken in blocks
    rows = [np.full(p + 1, 1 / (p + 1), dtype=np.float16) for p in range(count)]
    monkeypatch.setattr(observations, "_SUMMED_VALUES", 1000)
    right = _rows(rows, attention).summed().sums
    assert right == pytest.approx([row.astype(float).sum() for row in rows], abs=1e-6)
    token_rows, where = np.arange(count), Where("t", 0)
    check_sums(right, token_rows, where)
    rows[bad] = np.full(count, wrong / count, dtype=np.float16)
    with pytest.raises(TraceError, match=r"episode 0, row 599: attention sums to .* instead of 1"):
        check_sums(_rows(rows, attention).summed().sums, token_rows, where)
    cut = _rows(rows, attention).summed()[10:20]
    assert cut.sums == pytest.approx(right[10:20])


def _rows(rows, attention):
    """Dense, or with every second weight listed and the rest for the others."""
    if attention == "dense":
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        return DenseRows(np.concatenate(rows), offsets)
    index = [np.arange(0, len(row), 2, dtype=np.int32) for row in rows]
    values = [row[at] for row, at in zip(rows, index, strict=True)]
    rest = [
        row.astype(float).sum() - v.astype(float).sum() for row, v in zip(rows, values, strict=True)
    ]
    offsets = np.concatenate([[0], np.cumsum([len(at) for at in index])])
    lengths = np.array([len(row) for row in rows])
    return SparseRows(
        np.concatenate(index), np.concatenate(values), offsets, np.float32(rest), lengths
    )
