"""Tables of measured kernels: what they give at measured points, between them, and beyond."""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.sourced import Basis
from arborsim.machine.forward import Forward
from arborsim.machine.grid import Grid, Peak
from arborsim.machine.kernels import (
    TABLES,
    KernelTables,
    load_tables,
    shipped_tables,
    write_tables,
)
from arborsim.machine.lookup import load_geometry, load_profile

ROOT = Path(__file__).parents[2]
SILICON = ROOT.parent / "shared" / "data" / "silicon"
HEADER = {
    "gpu": "some", "engine": "vllm", "versions": {"product": "1.0"}, "source": "made up",
    "licence": "Apache-2.0",
}  # fmt: skip
PEAK = Peak(989e12, 3.35e12)


def bound(*at: Any) -> Any:
    """A lower bound that rises in every argument."""
    return 1e-6 + 1e-9 * math.prod(np.asarray(each, dtype=float) + 1 for each in at)


@st.composite
def grids(draw: st.DrawFn, holes: bool = False) -> tuple[list[np.ndarray], np.ndarray]:
    """Axes of one to three dimensions, and seconds on them."""
    axes = []
    for _ in range(draw(st.integers(1, 3))):
        points = draw(st.sets(st.integers(0, 100_000), min_size=1, max_size=4))
        axes.append(np.array(sorted(points), dtype=float))
    shape = [len(axis) for axis in axes]
    many = math.prod(shape)
    seconds = draw(st.lists(st.floats(1e-6, 1e-1), min_size=many, max_size=many))
    values = np.array(seconds).reshape(shape)
    if holes:
        missing = draw(st.lists(st.booleans(), min_size=many, max_size=many))
        missing[draw(st.integers(0, many - 1))] = False
        values = np.where(np.array(missing).reshape(shape), np.nan, values)
    return axes, values


def slowly(axes: list[np.ndarray], seconds: np.ndarray, at: list[float]) -> float:
    """Between the points around it, one axis after the other, written out."""
    if not axes:
        return float(seconds)
    axis, x = axes[0].tolist(), min(max(at[0], axes[0][0]), axes[0][-1])
    above = next(n for n, value in enumerate(axis) if value >= x)
    high = slowly(axes[1:], seconds[above], at[1:])
    if axis[above] == x:
        return high
    low = slowly(axes[1:], seconds[above - 1], at[1:])
    start, end, here = (math.log(max(value, 0.5)) for value in (axis[above - 1], axis[above], x))
    share = (here - start) / (end - start)
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


@given(grids())
def test_measured_points_are_exact(made: tuple[list[np.ndarray], np.ndarray]) -> None:
    axes, seconds = made
    grid = Grid(axes, seconds, bound)
    np.testing.assert_allclose(grid.seconds(*np.meshgrid(*axes, indexing="ij")), seconds, 1e-12)
    corner = [float(axis[-1]) for axis in axes]
    assert grid.basis(*corner) is Basis.MEASURED
    np.testing.assert_allclose(grid.at(*corner).seconds(), seconds[(-1,) * len(axes)], 1e-12)


@given(grids(), st.data())
def test_between_points_it_is_linear_in_logarithms(
    made: tuple[list[np.ndarray], np.ndarray], data: st.DataObject
) -> None:
    axes, seconds = made
    grid = Grid(axes, seconds, bound)
    at = [float(data.draw(st.integers(int(axis[0]), int(axis[-1])))) for axis in axes]
    found = float(grid.seconds(*at))
    assert found == pytest.approx(slowly(axes, seconds, at), rel=1e-9)
    assert seconds.min() * (1 - 1e-9) <= found <= seconds.max() * (1 + 1e-9)
    fixed = data.draw(st.integers(0, len(axes)))
    assert float(grid.at(*at[:fixed]).seconds(*at[fixed:])) == pytest.approx(found, rel=1e-9)
    on_grid = all(x in axis for x, axis in zip(at, axes, strict=True))
    assert grid.basis(*at) is (Basis.MEASURED if on_grid else Basis.INTERPOLATED)
    assert grid.at(*at[:fixed]).basis(*at[fixed:]) is grid.basis(*at)


@given(grids(), st.data())
def test_beyond_the_grid_the_efficiency_at_its_edge_goes_on(
    made: tuple[list[np.ndarray], np.ndarray], data: st.DataObject
) -> None:
    axes, seconds = made
    grid = Grid(axes, seconds, bound)
    at = [data.draw(st.floats(0, 4 * axis[-1] + 1)) for axis in axes]
    edge = [min(max(x, axis[0]), axis[-1]) for x, axis in zip(at, axes, strict=True)]
    expected = slowly(axes, seconds, at) * bound(*at) / bound(*edge)
    assert float(grid.seconds(*at)) == pytest.approx(expected, rel=1e-9)
    fixed = data.draw(st.integers(0, len(axes)))
    if at != edge:
        assert grid.basis(*at) is Basis.EXTRAPOLATED
        assert grid.at(*at[:fixed]).basis(*at[fixed:]) is Basis.EXTRAPOLATED
    # With arguments fixed beforehand the same at points of the other axes, and close to it between.
    at = [*at[:fixed], *(float(axis[-1]) for axis in axes[fixed:])]
    found = float(grid.at(*at[:fixed]).seconds(*at[fixed:]))
    assert found == pytest.approx(float(grid.seconds(*at)), rel=1e-9)


@given(grids(holes=True))
def test_points_that_were_not_measured_have_the_efficiency_of_one_that_was(
    made: tuple[list[np.ndarray], np.ndarray],
) -> None:
    axes, seconds = made
    grid = Grid(axes, seconds, bound)
    mesh = np.meshgrid(*axes, indexing="ij")
    found, least = grid.seconds(*mesh), bound(*mesh)
    known = np.isfinite(seconds)
    np.testing.assert_allclose(found[known], seconds[known], 1e-12)
    efficiencies = (seconds / least)[known]
    for each in (found / least)[~known]:
        assert np.isclose(efficiencies, each, rtol=1e-9).any()
    for place in itertools.product(*(range(len(axis)) for axis in axes)):
        basis = grid.basis(*(float(axis[n]) for axis, n in zip(axes, place, strict=True)))
        assert basis is (Basis.MEASURED if known[place] else Basis.EXTRAPOLATED)


def test_the_next_efficiency_is_looked_for_along_the_last_axis_first() -> None:
    nan = math.nan
    seconds = np.array([[4e-3, nan, 5e-3], [nan, nan, nan], [nan, 6e-3, nan]])
    grid = Grid([np.arange(3.0), np.arange(3.0)], seconds, lambda *at: 0 * sum(at) + 1e-3)
    found = np.round(grid.seconds(*np.meshgrid(np.arange(3), np.arange(3), indexing="ij")) * 1e3, 9)
    assert found.tolist() == [[4, 4, 5], [4, 4, 5], [6, 6, 6]]


ROWS = pd.DataFrame(
    [(tokens, out, 512, tokens * out * 1e-9) for tokens in (1, 16, 256) for out in (256, 1024)],
    columns=["tokens", "out_features", "in_features", "seconds"],
)


@settings(max_examples=25)
@given(st.lists(st.floats(1e-7, 1.0), min_size=6, max_size=6))
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, seconds: list[float]
) -> None:
    path = tmp_path_factory.mktemp("kernels") / "some-vllm.parquet"
    rows = ROWS.assign(seconds=seconds)
    write_tables(path, {("product", "fp8"): rows.iloc[::-1], ("product", "bf16"): ROWS}, HEADER)
    tables = KernelTables(path)
    assert (tables.gpu, tables.engine, tables.latent_covers) == ("some", "vllm", "")
    assert (tables.source, tables.licence) == ("made up", "Apache-2.0")
    assert tables.versions == {"product": "1.0"}
    assert tables.types("product") == ["fp8", "bf16"]
    assert tables.types("decode") == []
    columns = dict(zip([*TABLES["product"], "seconds"], tables.columns("product", "fp8"),
                       strict=True))  # fmt: skip
    found = pd.DataFrame(columns).merge(rows, on=list(TABLES["product"]), suffixes=("", "_given"))
    assert len(found) == len(rows)
    np.testing.assert_allclose(found["seconds"], found["seconds_given"], 5e-4)
    grid = tables.grid("product", "bf16", bound, 1024)
    assert float(grid.seconds(512, 16)) == pytest.approx(16 * 1024 * 1e-9, rel=5e-4)


def test_experts_of_other_numbers_of_gpus_count_by_their_weights(tmp_path: Path) -> None:
    shape = {"in_features": 2048, "out_features": 768, "experts": 128, "experts_per_token": 8}
    rows = pd.DataFrame(
        [{**shape, "tensor_parallel": tensor, "expert_parallel": expert, "tokens": tokens,
          "seconds": tokens * 1e-5 / tensor / expert}
         for tensor, expert in ((1, 1), (2, 1), (1, 4)) for tokens in (1, 64)]
    )  # fmt: skip
    write_tables(tmp_path / "t.parquet", {("experts", "bf16"): rows}, HEADER)
    tables = load_tables(tmp_path / "t.parquet")

    def seconds(tensor: int, expert: int) -> float:
        model = {**shape, "tensor_parallel": tensor, "expert_parallel": expert}
        found = tables.experts("bf16", model, bound)
        assert found is not None
        grid, share = found
        return share * float(grid.seconds(64))

    assert seconds(2, 1) == pytest.approx(64e-5 / 2, rel=1e-3)
    assert seconds(4, 1) == pytest.approx(64e-5 / 4, rel=1e-3)
    assert seconds(1, 8) == pytest.approx(64e-5 / 8, rel=1e-3)
    other = {**shape, "experts": 64, "tensor_parallel": 1, "expert_parallel": 1}
    assert tables.experts("bf16", other, bound) is None


def _with_header(path: Path, header: bytes) -> None:
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"arborsim.kernels": header}), path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _scribbled(path: Path) -> None:
    stored = path.read_bytes()
    path.write_bytes(stored[:40] + b"\0" * 400 + stored[440:])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "cannot be read as kernel tables"),
        (_cut, "cannot be read as kernel tables"),
        (_scribbled, "kernel tables: product, bf16: the file is damaged"),
        (lambda path: pq.write_table(pa.table({"a": [1]}), path), "of format unknown"),
        (lambda path: _with_header(path, b'{"format": 2}'), "kernel tables of format 2, and this"),
        (lambda path: _with_header(path, b'{"format": 1}'), "no gpu, engine, versions"),
        (lambda path: _with_header(path, b"{"), "cannot be read as kernel tables"),
    ],
)
def test_a_damaged_file_is_one_line(damage: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    many = pd.DataFrame({"out_features": 256, "in_features": 512, "tokens": range(1, 2000)})
    write_tables(path, {("product", "bf16"): many.assign(seconds=1e-5)}, HEADER)
    damage(path)
    with pytest.raises(UsageError) as caught:
        KernelTables(path).columns("product", "bf16")
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_type_names_the_known_ones(tmp_path: Path) -> None:
    write_tables(tmp_path / "t.parquet", {("product", "bf16"): ROWS}, HEADER)
    with pytest.raises(UnknownName, match=r"unknown type of product kernels in t\.parquet 'fp16'"):
        KernelTables(tmp_path / "t.parquet").columns("product", "fp16")


# The shipped tables.

SHIPPED = sorted(shipped_tables())
SHIPPED_IDS = [f"{gpu}-{engine}" for gpu, engine in SHIPPED]


@pytest.mark.parametrize(("gpu", "engine"), SHIPPED, ids=SHIPPED_IDS)
def test_shipped_tables_hold_every_kind_of_kernel(gpu: str, engine: str) -> None:
    tables = KernelTables(shipped_tables()[gpu, engine])
    assert (tables.gpu, tables.engine, tables.licence) == (gpu, engine, "Apache-2.0")
    for table in ("product", "decode", "prefill", "experts", "all-reduce"):
        assert tables.versions[table], table
        kinds = ["graph"] if table == "all-reduce" else ["bf16"]
        assert set(kinds) <= set(tables.types(table)), table
    for table in TABLES:
        for kind in tables.types(table):
            *keys, seconds = tables.columns(table, kind)
            assert len(seconds) == len(np.unique(np.stack(keys), axis=1)[0])
            assert seconds.min() > 1e-6
            assert seconds.max() < 10
    assert bool(tables.types("latent-decode")) == bool(tables.latent_covers)


def test_the_notice_names_every_shipped_file() -> None:
    files = shipped_tables().values()
    notice = next(iter(files)).with_name("NOTICE").read_text()
    assert "Apache License, Version 2.0" in notice
    assert "github.com/ai-dynamo/aiconfigurator" in notice
    for path in files:
        line = next(line for line in notice.splitlines() if line.startswith(f"{path.name}: "))
        assert all(version in line for version in KernelTables(path).versions.values())
    assert sum(path.stat().st_size for path in files) < 5e6


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_adding_up_takes_what_two_bytes_a_number_take(engine: str) -> None:
    """2^29 numbers over 8 H100: NVLink carries 450 GB/s in a direction, more if the switch adds."""
    tables = KernelTables(shipped_tables()["h100", engine])
    seconds = float(tables.grid("all-reduce", "graph", bound, 8).seconds(2**29))
    assert 0.8 < 2 * (7 / 8) * 2 * 2**29 / seconds / 450e9 < 1.1


def test_tables_are_ready_in_an_instant() -> None:
    """Opening, and whole grids of products and attention of one type: 20 ms."""

    def attention(window: Any, size: Any, kv_heads: Any, heads: Any, n: Any, tokens: Any) -> Any:
        moved = n * tokens * kv_heads * size * 4.0 + 0.0 * window
        return PEAK.attention_s(n * tokens, moved, heads, size)

    taken = []
    for _ in range(4):
        start = time.perf_counter()
        tables = KernelTables(shipped_tables()["h100", "vllm"])
        tables.grid("product", "bf16", lambda n, k, m: PEAK.product_s(m, n, k, 2))
        tables.grid("decode", "bf16", attention)
        tables.grid("prefill", "bf16", attention)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.15  # generous: for machines that do other things


SOURCES = [
    ("gemm", "product", "dtype"),
    ("attention_decode", "decode", "kv_dtype"),
    ("attention_prefill", "prefill", "kv_dtype"),
]


@pytest.mark.skipif(not SILICON.is_dir(), reason="needs the measurements as they were published")
@pytest.mark.parametrize(("file", "table", "kind"), SOURCES)
@pytest.mark.parametrize("gpu", ["h100", "h200", "l40s", "a100-80"])
def test_shipped_tables_are_what_was_measured(file: str, table: str, kind: str, gpu: str) -> None:
    tables = KernelTables(shipped_tables()[gpu, "vllm"])
    names = {"cached_tokens": "tokens", "prompt_tokens": "tokens"}
    published = pd.read_parquet(SILICON / f"{file}.parquet").rename(columns=names)
    published = published[published["gpu"] == gpu]
    for theirs, ours in (("bfloat16", "bf16"), ("fp8", "fp8")):
        rows = published[published[kind] == theirs]
        if rows.empty:
            continue
        columns = [*TABLES[table], "seconds"]
        shipped = pd.DataFrame(dict(zip(columns, tables.columns(table, ours), strict=True)))
        shipped = shipped[shipped["window"] == 0] if "window" in shipped else shipped
        both = rows.merge(shipped, on=[key for key in TABLES[table] if key in rows])
        assert len(both) > 0.75 * len(rows)
        np.testing.assert_allclose(both["seconds"], both["latency_ms"] / 1e3, 1e-3)


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "benchmarks" / "kernels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [("h100", "bf16"), ("h100", "fp8"), ("h200", "bf16"), ("l40s", "bf16"), ("a100-80", "bf16")],
)
def test_a_shape_follows_from_the_others(benchmark: ModuleType, gpu: str, kind: str) -> None:
    """Of a layer's products the median is off by 1-4%, and nine in ten by less than 10%."""
    tables = KernelTables(shipped_tables()[gpu, "vllm"])
    errors = benchmark.product_errors(tables, kind, PEAK)["shape"]
    for phase in ("decode", "prefill"):
        assert errors[phase]["median"] < 0.04, phase
        assert errors[phase]["p90"] < 0.10, phase


@pytest.mark.parametrize("table", ["decode", "prefill"])
def test_a_number_of_heads_follows_from_the_others(benchmark: ModuleType, table: str) -> None:
    tables = KernelTables(shipped_tables()["h100", "vllm"])
    errors = benchmark.attention_errors(tables, table, "bf16", PEAK)
    assert errors["median"] < 0.04
    assert errors["p90"] < 0.15


def test_fp32_takes_twice_as_long_as_bf16() -> None:
    """A model recorded in fp32 reads twice the bytes; no engine's kernels were measured in it."""
    profile, bf16 = load_profile("h100", engine="vllm"), load_geometry("llama-3.1-8b")
    assert profile.engine is not None
    wide = replace(bf16, weight_bytes_per_element=4, kv_bytes_per_element=4)
    narrow, single = (Forward(profile, profile.engine, model) for model in (bf16, wide))
    assert single.products_s(8, 8) == pytest.approx(2 * narrow.products_s(8, 8))
    assert single.attention_s(8, 8000) == pytest.approx(2 * narrow.attention_s(8, 8000))
    assert single.least_s == pytest.approx(2 * narrow.least_s)
    assert single.basis("attention", 8, 1023) == Basis.EXTRAPOLATED
