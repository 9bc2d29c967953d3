"""Results of a sweep: filtered, grouped, exported, as a page."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import ArborsimError
from arborsim.products.replay import figures as replay_figures
from arborsim.products.schemas import schema_of
from arborsim.products.sweep.arms import shown
from arborsim.products.sweep.cells import _BLANK, _DIGEST, Folder, sealed
from arborsim.products.sweep.compare import compared, group_frame, grouping, groups, kept
from arborsim.products.sweep.report import notes, overall, places
from tests.sweep.grids import small


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    arborsim.sweep(small(folder), folder / "cells")
    return folder / "cells"


def test_filters_keep_what_cells_are_compared_with(cells: Path) -> None:
    whole = arborsim.results(cells).to_pandas()
    some = arborsim.results(cells, where={"policy": ["h2o", "random"], "gpu": "l40s"}).to_pandas()
    expected = whole[whole["policy"].isin(["h2o", "random"]) & (whole["gpu"] == "l40s")]
    pd.testing.assert_frame_equal(some, expected.reset_index(drop=True))
    assert some["hbm_vs_full"].notna().sum() == (some["status"] == "done").sum() > 0
    texts = arborsim.results(cells, where=["policy=h2o,random", "gpu=l40s"]).to_pandas()
    pd.testing.assert_frame_equal(texts, some)


def test_groups_are_means_and_sums_of_their_cells(cells: Path) -> None:
    found = arborsim.results(cells, by="policy,budget").summary().set_index(["policy", "budget"])
    frame = arborsim.results(cells).to_pandas()
    for key, own in frame.groupby(["policy", "budget"]):
        group, done = found.loc[key], own[own["status"] == "done"]
        assert group["cells"] == len(own)
        assert group["without"] == len(own) - len(done)
        if len(done):
            for name in ("hbm_vs_full", "time_vs_full", "attention_kept"):
                assert group[name] == pytest.approx(done[name].mean(), nan_ok=True)
    assert len(found) == frame.groupby(["policy", "budget"]).ngroups


def test_the_command_exports_what_python_gives(
    cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: tmp_path / f"out.{name}" for name in ("csv", "parquet", "html")}
    command = ["results", str(cells), "--csv", str(names["csv"]), "--parquet",
               str(names["parquet"]), "--report", str(names["html"])]  # fmt: skip
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "\nMeans of " in said
    assert "Groups are shown" in said
    assert "\nAll cells: vllm" in said
    assert "streaming-llm" in said
    frame = arborsim.results(cells).to_pandas()
    pd.testing.assert_frame_equal(pd.read_parquet(names["parquet"]), frame, check_dtype=False)
    assert len(pd.read_csv(names["csv"])) == len(frame)
    page = names["html"].read_text()
    assert page.count('<th scope="row"') == len(frame)
    assert "attention kept against memory" in page
    assert main(["results", str(cells), "--by", "policy", "--csv", str(names["csv"])]) == 0
    assert list(pd.read_csv(names["csv"])["policy"]) == list(
        arborsim.results(cells, by="policy").summary()["policy"]
    )
    assert main(["results", str(cells), "--by", "policy", "--report", str(names["html"])]) == 0
    page = names["html"].read_text()
    assert "Means of 56 cells by policy" in page
    assert page.count('<th scope="row"') == frame["policy"].nunique()


def test_exported_rows_say_what_shows_them(
    cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(tmp_path / "rows.parquet")
    assert main(["results", str(cells), "--parquet", rows]) == 0
    capsys.readouterr()
    cell = str(next(cells.rglob("*.parquet")))
    for command in (["plot", rows], ["compare", rows, rows], ["plot", cell]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "arborsim results FOLDER, of sweep --out, shows, plots (--report) and" in said
        assert said.count("\n") == 1


def test_numbers_of_markers_that_are_near_stand_in_one(cells: Path) -> None:
    rows = [row for row in arborsim.results(cells).raw.done if row.trace == "a.parquet"][:1] * 6
    kept_by = (0.5, 0.7, 0.701, 0.702, 0.9, 0.999)
    sizes = (10, 40, 41, 42, 60, 100)
    full = [
        replace(row, policy=f"p{kept}", attention_kept=kept, peak_hbm_kv_bytes=size * 1000,
                relative=replace(row.relative, peak_hbm=size / 100))
        for row, kept, size in zip(rows, kept_by, sizes, strict=True)
    ]  # fmt: skip
    drawn = replay_figures.pareto(full, replay_figures.KEPT)
    assert drawn.figure["data"][-1]["text"] == ["1", "", "", "2–4", "5", "6"]
    assert len(drawn.texts) == 6


def test_no_cell_is_written_over(
    cells: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied(cells, tmp_path)
    before, folder = file.read_bytes(), tmp_path / "copy"
    (tmp_path / "link.parquet").hardlink_to(file)
    (tmp_path / "folder").symlink_to(file.parent)
    for name, said in {
        file: "copy/cells is for cells", folder / "failed" / "r.parquet": "there is no directory",
        tmp_path / "folder" / "rows.parquet": "copy/cells is for cells",
        tmp_path / "link.parquet": "is a cell of a sweep, which results would replace",
    }.items():  # fmt: skip
        assert main(["results", str(folder), "--parquet", str(name)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    with pytest.raises(ArborsimError, match="is a cell of a sweep"):
        arborsim.results(folder).save(file)
    assert file.read_bytes() == before
    assert len(arborsim.results(folder).to_pandas()) == len(arborsim.results(cells).to_pandas())


def test_what_is_best_on_all_traces_is_said(cells: Path) -> None:
    """The front of the means, of settings that have figures on all traces and machines."""
    frame = arborsim.results(cells).to_pandas().fillna({"settings": ""})
    own = frame[~frame["policy"].isin(["oracle", "full"])]
    own = own.groupby(["policy", "settings", "budget", "recall"])
    means = own.agg(
        n=("status", lambda values: (values == "done").sum()), memory=("hbm_vs_full", "mean"),
        kept=("attention_kept", "mean"),
    )  # fmt: skip
    grounds = frame[["trace", "gpu"]].drop_duplicates()
    means = means[means["n"] == len(grounds)].sort_values(
        ["memory", "kept"], ascending=[True, False]
    )
    best = means[means["kept"] > means["kept"].cummax().shift(fill_value=-1)]
    assert 1 < len(best) < len(means)
    said = overall(arborsim.results(cells).raw)
    for memory, share in best[["memory", "kept"]].to_numpy():
        assert f"({memory:.2f} of full retention's HBM, {share:.1%})" in said
    assert said.count("full retention's HBM") == len(best)


def test_policies_on_different_traces_are_not_ranked(cells: Path) -> None:
    """As many cells do not make a comparison: all have to be of the same traces."""
    report = arborsim.results(cells).raw
    own = {"h2o": "a.parquet", "streaming-llm": "b.parquet"}
    rows = [row for row in report.rows if row.trace == own.get(row.policy)]
    assert len({row.policy for row in rows}) == len({row.trace for row in rows}) == 2
    assert overall(replace(report, rows=tuple(rows))) == ""


def test_means_say_over_what_they_are(cells: Path) -> None:
    report = arborsim.results(cells, by="policy").raw
    said = " ".join(notes(report, report.by))
    assert "over all there is of trace, budget, gpu, recall and sinks: --by tells those" in said
    assert "groups with some left out do not compare" in said
    assert "is known of" not in said
    first = next(i for i, row in enumerate(report.rows) if row in report.done)
    rows = list(report.rows)
    rows[first] = replace(rows[first], attention_kept=math.nan)
    report = replace(report, rows=tuple(rows))
    number = len(report.done)
    said = " ".join(notes(report, report.by))
    assert f"Attention kept is known of {number - 1} of {number} cells." in said


def test_groups_do_not_mix_what_was_measured_with_what_was_simulated(cells: Path) -> None:
    """Nor, unless they are asked to, settings; those of live runs are parameters like others."""
    report = arborsim.results(cells).raw
    more = shown({"seed": "1", "stop": 'a "b" = c'})
    live = [replace(row, kind="live", more=more) for row in report.rows if row.gpu == "h100"]
    report = replace(report, rows=(*report.rows, *live))
    assert grouping(report) == ("policy", "settings", "budget", "kind")
    found = group_frame(report, grouping(report))
    assert set(found.loc[found["policy"] == "streaming-llm", "settings"]) == {"sinks=2", "sinks=4"}
    for kind, number in {"live": len(live), "replay": len(report.rows) - len(live)}.items():
        assert found.loc[found["kind"] == kind, "cells"].sum() == number
    assert overall(report) == ""
    report = replace(report, by=("seed", "sinks"))
    assert [each.shared for each in groups(report, grouping(report))] == [
        ("", "", "replay"), ("", "2", "replay"), ("", "4", "replay"),
        ("1", "", "live"), ("1", "2", "live"), ("1", "4", "live"),
    ]  # fmt: skip
    assert kept(report.rows, {"seed": ["1"]}) == kept(report.rows, {"stop": ['a "b" = c']}) == live
    with pytest.raises(ArborsimError, match="unknown parameter of cells 'sed': did you mean seed"):
        kept(report.rows, {"sed": ["1"]})


def test_places_of_live_runs_name_nothing_that_only_replays_have(cells: Path) -> None:
    rows = arborsim.results(cells).raw.rows
    live = [replace(row, kind="live", page_size=0, quality=False) for row in rows]
    found = places([*rows, *live])
    assert any("live" in each for each in found)
    assert not any("page size" in each or "quality" in each for each in found)


def test_cells_of_other_inputs_do_not_compare(cells: Path) -> None:
    """A grid that was swept before its trace changed, in a folder with one that was swept since."""
    report = arborsim.results(cells).raw
    older = [replace(row, inputs="trace=0 policy=1") for row in report.rows if row.policy == "h2o"]
    rows = compared([*(row for row in report.rows if row.policy != "h2o"), *older])
    assert len(places(rows)) == len({row.place for row in rows}) > len(places(report.rows))
    for row in rows:
        assert (row.policy == "h2o") == (row.place not in {r.place for r in report.rows})
        assert row.policy != "h2o" or math.isnan(row.relative.peak_hbm)
    assert "of other inputs or versions" in " ".join(notes(replace(report, rows=tuple(rows))))


@pytest.mark.parametrize("by", [(), ("--by", "policy,gpu")])
def test_json_follows_its_schema(
    by: tuple[str, ...], cells: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["results", str(cells), "--json", *by]) == 0
    document = json.loads(capsys.readouterr().out)
    check = Draft202012Validator(schema_of("results"))
    assert not list(check.iter_errors(document))
    del document["rows"][0]["attention_kept"]
    assert list(check.iter_errors(document))


def test_bad_questions_are_one_line(cells: Path, tmp_path: Path) -> None:
    for text, said in {
        "polcy=h2o": "unknown parameter of cells 'polcy': did you mean policy",
        "policy": "--where policy: expected name=value",
        "policy=h3o": "no cell has policy h3o: there are full, h2o, oracle, random and strea",
    }.items():
        with pytest.raises(ArborsimError, match=said):
            arborsim.results(cells, where=[text])
    with pytest.raises(ArborsimError, match="unknown parameter of cells 'budgt'"):
        arborsim.results(cells, by="budgt")
    with pytest.raises(ArborsimError, match="no cells are here"):
        arborsim.results(tmp_path)


def test_a_damaged_cell_is_named(cells: Path, tmp_path: Path) -> None:
    file = sorted(cells.rglob("*.parquet"))[3]
    copy = tmp_path / "cells" / file.parent.name / file.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(file.read_bytes()[:900])
    with pytest.raises(ArborsimError, match=f"{file.name}: the file is truncated"):
        arborsim.results(tmp_path)


def copied(cells: Path, folder: Path) -> Path:
    """The fourth cell, in a copy."""
    shutil.copytree(cells, folder / "copy")
    return sorted((folder / "copy").rglob("*.parquet"))[3]


def forge(file: Path, table: pa.Table) -> None:
    """Write a cell with the digest of what stands in it."""
    with pq.ParquetWriter(file, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_DIGEST: _BLANK})
    file.write_bytes(sealed(file.read_bytes()))


def damaged(cells: Path, folder: Path, **values: object) -> Path:
    """A copy of the cells, in the fourth of which these values stand."""
    file = copied(cells, folder)
    table = pq.read_table(file)
    rows = [{**row, **values} for row in table.to_pylist()]
    forge(file, pa.Table.from_pylist(rows, schema=table.schema))
    return file


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("peak_hbm_kv_bytes", -1, "peak_hbm_kv_bytes of row 1 must be a whole number"),
        ("attention_kept", math.inf, "attention_kept of row 1 must be a finite number, not inf"),
        ("policy", None, "policy of row 1 must be a text"),
        ("answered", 2, "right None of answered 2, infeasible None is no count of answers"),
        ("address", "", "the file is damaged: it does not hold the cell of its name"),
    ],
)
def test_values_that_no_cell_has_are_refused(
    cells: Path, tmp_path: Path, column: str, value: object, said: str
) -> None:
    file = damaged(cells, tmp_path, **{column: value})
    with pytest.raises(ArborsimError) as caught:
        arborsim.results(tmp_path / "copy")
    assert str(caught.value).startswith(f"{file}: {said}")


def test_every_bit_of_a_cell_counts(cells: Path, tmp_path: Path) -> None:
    """Those of the footer, too, which Parquet has no checksum for."""
    file = copied(cells, tmp_path)
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, len(data) - 1) | st.integers(footer, len(data) - 1), st.integers(0, 7))
    def refused(place: int, bit: int) -> None:
        flipped = bytes([data[place] ^ 1 << bit])
        file.write_bytes(data[:place] + flipped + data[place + 1 :])
        with pytest.raises(ArborsimError, match=file.name):
            Folder(tmp_path / "copy").rows([file.stem])

    refused()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: pa.concat_tables([table, table]), "a cell has one row, not 2"),
        (lambda table: table.slice(0, 0), "a cell has one row, not 0"),
        (lambda table: table.drop(["policy"]), "has these columns"),
        (lambda table: table.append_column("polcy", table["policy"]), "has these columns"),
        (lambda table: table.set_column(15, "first", pa.array([0.5])), "has these columns"),
    ],
)
def test_a_cell_has_one_row_of_its_columns(
    change: Callable[[pa.Table], pa.Table], said: str, cells: Path, tmp_path: Path
) -> None:
    file = copied(cells, tmp_path)
    table = pq.read_table(file)
    assert table.column_names[15] == "first"
    forge(file, change(table))
    with pytest.raises(ArborsimError) as caught:
        arborsim.results(tmp_path / "copy")
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


def test_a_small_cell_that_expands_is_refused(
    cells: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arborsim.core.parquet.ALWAYS_BYTES", 1 << 20)
    file = damaged(cells, tmp_path, more="x" * (8 << 20))
    assert file.stat().st_size < 40_000
    with pytest.raises(ArborsimError, match=r"stand for .* GB or more \(column more\)"):
        arborsim.results(tmp_path / "copy")
