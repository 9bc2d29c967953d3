"""A file is opened, and its footer parsed, as often for many episodes as for few."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import arborsim
from arborsim.products.generate.lengths import TreeSpec, fixed, write_generated
from arborsim.products.generate.synthetic import BankSpec, Dense, write_synthetic
from arborsim.trace.reader import TraceReader, open_trace
from tests.helpers.traces import make_info, make_trace
from tests.plan.make import SMALL

FEW, MANY = 3, 12


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Parquet files that are opened; kernels of a machine are among them."""
    files: list[str] = []
    real = pq.ParquetFile

    def counted(path: Path, **options: object) -> pq.ParquetFile:
        files.append(Path(path).name)
        return real(path, **options)

    monkeypatch.setattr(pq, "ParquetFile", counted)
    return files


def test_replay(tmp_path: Path, opened: list[str]) -> None:
    counts = []
    for episodes in (FEW, MANY):
        trace = make_trace(tmp_path / f"{episodes}.parquet", episodes=episodes, layers=2, nodes=3)
        opened.clear()
        found = arborsim.replay(trace, policies="streaming-llm,tova", budgets=[0.5, 0.7])
        assert found.raw.episodes[-1].episode == episodes - 1
        counts.append(opened.count(trace.name))
    assert counts[0] == counts[1] == 1


def test_replay_at_equal_memory(tmp_path: Path, opened: list[str]) -> None:
    spec = TreeSpec(fixed(40), fixed(30))
    trace = tmp_path / "t.parquet"
    write_generated(spec, MANY, 0, make_info().geometry, trace)
    opened.clear()
    arborsim.replay(trace, policies="streaming-llm", budgets=0.9, equal="peak")
    assert opened.count(trace.name) == 1


def test_search(tmp_path: Path, opened: list[str]) -> None:
    counts = []
    for problems in (FEW, MANY):
        bank = tmp_path / f"{problems}.parquet"
        spec = BankSpec(fixed(20), fixed(8), fixed(2))
        dense = Dense(fixed(4), fixed(2))
        write_synthetic(spec, dense, problems, 0, make_info().geometry, bank)
        opened.clear()
        found = arborsim.search(bank, algorithms="beam-4", widths=4, policies="full")
        assert len(found.to_pandas()) == problems
        counts.append(opened.count(bank.name))
    assert counts[0] == counts[1] == 1


def test_plan(tmp_path: Path, opened: list[str]) -> None:
    counts = []
    for searches in (FEW, MANY):
        trace = tmp_path / f"{searches}.parquet"
        write_generated(TreeSpec(fixed(40), fixed(30)), searches, 0, make_info().geometry, trace)
        workload = tmp_path / f"{searches}.toml"
        workload.write_text(
            SMALL[: SMALL.index("[[mix]]")].replace("= 40", f"= {8 * searches}")
            + f'[[mix]]\nname = "drawn"\ntrace = "{trace.name}"\n\n'
            + SMALL[SMALL.index("[arrivals]") :]
            .replace('"rtx4090", "h100"', '"h100"')
            .replace('"full", "streaming-llm"', '"full"')
        )
        opened.clear()
        arborsim.plan(workload)
        counts.append(opened.count(trace.name))
    assert counts[0] == counts[1] == 1


def test_a_file_that_was_replaced_is_opened_anew(tmp_path: Path) -> None:
    trace = make_trace(tmp_path / "t.parquet", episodes=2, layers=2, nodes=3)
    first = open_trace(trace)
    assert open_trace(trace) is first
    make_trace(tmp_path / "other.parquet", episodes=5, layers=2, nodes=3).replace(trace)
    assert open_trace(trace).num_episodes == 5 == TraceReader(trace).num_episodes
