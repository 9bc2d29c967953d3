"""Results files: what is written comes back, to the byte, and other files are refused in a line."""

from __future__ import annotations

import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import arborsim
from arborsim import __version__, load_results
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.tables import (
    KEY,
    check_columns,
    check_format,
    made_by,
    read_table,
    write_table,
)

TRACE = Path("traces/game24-tot.parquet")
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats(width=64, allow_nan=True, allow_infinity=True)
columns = {
    "policy": texts,
    "peak_bytes": st.integers(-(2**63), 2**63 - 1),
    "total_s": floats,
    "bounded": st.booleans(),
}
rows = st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=6)
extras = st.dictionaries(texts, st.one_of(texts, st.integers(), st.lists(texts)), max_size=4)


def _write(folder: Path, name: str = "r.parquet", **more: Any) -> Path:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]})
    write_table(frame, folder / name, made_by("replay", "arborsim replay t.parquet", **more))
    return folder / name


@given(rows=rows, more=extras)
@settings(max_examples=40, deadline=None)
def test_a_table_comes_back_with_its_metadata(
    rows: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    frame = pd.DataFrame(rows)
    metadata = made_by("replay", "arborsim replay a.parquet", "numpy") | {"settings": more}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("1.parquet", "2.parquet")]
        for path in paths:
            write_table(frame, path, metadata)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        found, said = read_table(paths[0])
    pd.testing.assert_frame_equal(found, frame)
    assert said == metadata


def test_metadata_says_what_made_the_file_and_any_tool_reads_it(tmp_path: Path) -> None:
    path = _write(tmp_path, gpu="h100", error=math.nan)
    said = json.loads(pq.read_schema(path).metadata[KEY])
    assert said["kind"] == "replay"
    assert said["version"] == __version__
    assert said["command"] == "arborsim replay t.parquet"
    assert said["error"] is None  # JSON has no NaN
    assert "python" in said["versions"]
    assert pd.read_parquet(path)["a"].tolist() == [1, 2]


def test_csv_has_the_same_rows(tmp_path: Path) -> None:
    assert _write(tmp_path, "r.csv").read_text() == "a,b\n1,x\n2,\n"


def _truncated(folder: Path) -> Path:
    path = _write(folder)
    path.write_bytes(path.read_bytes()[:-20])
    return path


def _damaged(folder: Path) -> Path:
    """Parquet's marks at both ends, nonsense between."""
    path = folder / "damaged.parquet"
    path.write_bytes(b"PAR1" + bytes(range(64)) + b"PAR1")
    return path


def _stored(value: bytes) -> Any:
    def make(folder: Path) -> Path:
        table = pa.table({"a": [1]})
        pq.write_table(table.replace_schema_metadata({KEY: value}), folder / "r.parquet")
        return folder / "r.parquet"

    return make


def _foreign(folder: Path) -> Path:
    pq.write_table(pa.table({"a": [1]}), folder / "foreign.parquet")
    return folder / "foreign.parquet"


def _text(folder: Path) -> Path:
    (folder / "text.parquet").write_text("policy,budget\n")
    return folder / "text.parquet"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "none.parquet", "cannot be read (No such file or directory)"),
        (lambda folder: folder, "cannot be read (Is a directory)"),
        (lambda folder: TRACE, "the file holds a trace, not results"),
        (_text, "this is not a Parquet file"),
        (_truncated, "the file is truncated"),
        (_damaged, "the file is damaged"),
        (_foreign, "a Parquet file, but no results of arborsim's"),
        (_stored(b"{"), "its metadata is damaged"),
        (_stored(b"[1]"), "its metadata is damaged"),
        (_stored(b'{"kind":"replay","format":99,"version":"9.0"}'), "results of format 99"),
    ],
)
def test_other_files_are_refused_in_a_line(tmp_path: Path, make: Any, said: str) -> None:
    path = make(tmp_path)
    with pytest.raises(UsageError) as caught:
        read_table(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_results_take_no_place_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.parquet"
    trace.write_bytes(TRACE.read_bytes())
    before = trace.read_bytes()
    found = arborsim.replay(trace, policies="epikv", budgets=0.5, quality=False, episodes=1)
    with pytest.raises(UsageError, match="is a trace, which results would replace"):
        found.save(trace)
    assert trace.read_bytes() == before
    assert found.save(tmp_path / "r.parquet").exists()


def test_names_and_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"format of --out '.xlsx'"):
        check_format(Path("r.xlsx"))
    with pytest.raises(UsageError, match=r"cannot write .*No such file"):
        _write(tmp_path / "no")


def test_no_text_is_a_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"name": ["=cmd()", "+1", "-x", "@a", "-", "h2o", None], "value": [-1.5, 2, 3, 4, 5, 6, 7]}
    )
    write_table(frame, tmp_path / "r.csv", {})
    again = pd.read_csv(tmp_path / "r.csv")
    assert again["name"].tolist()[:6] == ["'=cmd()", "'+1", "'-x", "'@a", "-", "h2o"]
    assert again["value"].tolist() == frame["value"].tolist()
    assert frame["name"][0] == "=cmd()", "the table is left alone"


FIGURES = {"peak": "int", "time": "float", "kept": "float", "right": "bool | None", "note": "str"}
GOOD: dict[str, list[Any]] = {
    "peak": [3, 4], "time": [0.5, 1.0], "kept": [math.nan, 0.5], "right": [True, None],
    "note": ["", "x"], "left_out": ["", ""],
}  # fmt: skip


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("peak", [3, math.nan], "peak of row 2 must be a whole number of at least 0, not nan"),
        ("peak", [3, -1], "peak of row 2 must be a whole number of at least 0, not -1"),
        ("peak", [3, 0.5], "peak of row 2 must be a whole number"),
        ("peak", [math.inf, 1], "peak of row 1 must be a whole number of at least 0, not inf"),
        ("peak", ["3", "4"], "peak of row 1 must be a whole number of at least 0, not '3'"),
        ("peak", [True, False], "peak of row 1 must be a whole number of at least 0, not True"),
        ("time", [0.5, None], "time of row 2 must be a finite number, not nan"),
        ("time", [0.5, -math.inf], "time of row 2 must be a finite number, not -inf"),
        ("time", [1e308, 1e308], "time of row 1 must be a finite number, not 1e+308"),
        ("kept", [math.nan, math.inf], "kept of row 2 must be a finite number, not inf"),
        ("right", [True, 2], "right of row 2 must be true or false, not 2"),
        ("note", ["", None], "note of row 2 must be a text, not nan"),
        ("left_out", ["", None], "left_out of row 2 must be a text, not nan"),
    ],
)
def test_numbers_that_no_results_have_are_refused(column: str, values: Any, said: str) -> None:
    check_columns(pd.DataFrame(GOOD), FIGURES, missing=["kept"])
    with pytest.raises(UsageError, match=f"^{re.escape(said)}"):
        check_columns(pd.DataFrame({**GOOD, column: values}), FIGURES, missing=["kept"])


def test_what_was_left_out_has_no_figures() -> None:
    rows = [{"peak": 1, "note": "", "left_out": ""}, {"note": "", "left_out": "too small"}]
    check_columns(pd.DataFrame(rows), FIGURES)
    with pytest.raises(UsageError, match="two columns note"):
        check_columns(pd.DataFrame([["", ""]], columns=["note", "note"]), FIGURES)


@pytest.mark.parametrize("kind", ["replay", "validate"])
def test_names_of_columns_that_are_no_text_are_damage(tmp_path: Path, kind: str) -> None:
    """They fail in Arrow when they are read, not when the file is opened."""
    key = KEY if kind == "replay" else b"arborsim.validation"
    table = pa.table({"odd name": [1]}).replace_schema_metadata({key: b"{}"})
    path = tmp_path / "r.parquet"
    pq.write_table(table, path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"odd name", b"odd\xf0name"))
    with pytest.raises(UsageError, match="the file is damaged"):
        load_results(path)


def test_columns_of_types_that_no_results_have_are_damage(tmp_path: Path) -> None:
    """Pandas' own metadata says that they are texts, and what they are cannot become that."""
    path = _write(tmp_path)
    table = pq.read_table(path)
    odd = pa.nulls(table.num_rows, pa.list_(pa.float16()))
    pq.write_table(table.set_column(1, "b", odd), path)
    with pytest.raises(UsageError, match="the file is damaged"):
        read_table(path)
