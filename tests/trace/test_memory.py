"""Reading holds one episode at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from statistics import median

import pyarrow as pa
import pytest

from arborsim.core.observations import Signal
from arborsim.trace.reader import TraceReader
from tests.helpers.traces import make_trace


def peaks(path: Path) -> tuple[int, float]:
    """Bytes in use while reading: the most in Python and NumPy, and usually in Arrow.

    Of Arrow the median, because its threads sometimes free a buffer a moment later.
    """
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    episodes = TraceReader(path).episodes([Signal.ATTENTION, Signal.HIDDEN_CHANGE], text=True)
    arrow = [pa.total_allocated_bytes() - before for _ in episodes]
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return python, median(arrow)


@pytest.mark.parametrize("interrupted", [False, True])
def test_memory_does_not_grow_with_the_number_of_episodes(tmp_path, interrupted, monkeypatch):
    if interrupted:
        monkeypatch.setattr("arborsim.trace.writer.TraceWriter.close", lambda self: None)
    shape = {"kind": "linear", "layers": 4, "prompt": 200, "nodes": 3, "block": (20, 20)}
    paths = [
        make_trace(tmp_path / f"{count}.parquet", episodes=count, **shape) for count in (5, 50)
    ]
    if interrupted:
        paths = [path.with_name(path.name + ".parts") for path in paths]
    peaks(paths[0])  # imports and caches
    few, many = (peaks(path) for path in paths)
    # Parquet's footer, and the names of the parts, take a few kB per episode; its data 100 kB.
    assert many[0] < 1.3 * few[0] + 45 * 3_000
    assert many[1] < 1.3 * few[1] + 45 * 3_000
