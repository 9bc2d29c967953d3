"""Interrupted recordings keep every whole episode; nothing is overwritten unasked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arborsim.core.errors import ArborsimError, TraceError, UsageError
from arborsim.core.observations import Signal
from arborsim.products.traces.describe import column_sizes
from arborsim.trace.columns import lists
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import KINDS, Kind
from arborsim.trace.writer import TraceWriter, WholeTraceWriter
from tests.helpers.traces import make_info, make_trace, random_trace_columns

INFO = make_info(layers=2)
REPOSITORY = Path(__file__).parents[2]


def columns(seed: int = 0) -> dict:
    return random_trace_columns(np.random.default_rng(seed), INFO, prompt=4, nodes=3)


def files(directory: Path) -> list[str]:
    """All but the locks of writers that have not been closed."""
    found = (str(p.relative_to(directory)) for p in directory.rglob("*"))
    return sorted(name for name in found if not name.endswith(".lock"))


def test_closing_leaves_one_file(tmp_path):
    make_trace(tmp_path / "t.parquet", episodes=2)
    assert files(tmp_path) == ["t.parquet"]


def record(path: Path, error: BaseException, monkeypatch=None) -> None:
    """Two episodes and an error; with `monkeypatch`, the error strikes within the second."""

    def strike(*_args: object) -> None:
        raise error

    with TraceWriter(path, INFO) as writer:
        writer.write_episode(columns(0))
        if monkeypatch:
            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", strike)
                writer.write_episode(columns(1))
        writer.write_episode(columns(1))
        strike()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_interrupted_with_episodes_is_merged(tmp_path, error):
    path = tmp_path / "t.parquet"
    with pytest.raises(type(error)):
        record(path, error)
    assert files(tmp_path) == ["t.parquet"]
    assert TraceReader(path).num_episodes == 2


def test_interrupted_before_the_first_episode_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "t.parquet", INFO):
        raise KeyboardInterrupt
    assert files(tmp_path) == []


def test_interrupted_in_the_middle_of_an_episode(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    with pytest.raises(KeyboardInterrupt):
        record(path, KeyboardInterrupt(), monkeypatch)
    assert files(tmp_path) == ["t.parquet"]
    assert TraceReader(path).num_episodes == 1


def test_failed_merge_keeps_the_parts(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    writer = TraceWriter(path, INFO)
    writer.write_episode(columns())

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UsageError, match="No space left on device"):
        writer.close()
    with pytest.raises(UsageError, match="No space left on device"):
        writer.write_episode(columns())
    monkeypatch.undo()
    assert files(tmp_path) == ["t.parquet.parts", "t.parquet.parts/episode-000000.parquet"]
    writer.close()
    assert files(tmp_path) == ["t.parquet"]


RECORD_UNTIL_KILLED = """
import signal, sys
from pathlib import Path
import numpy as np
from arborsim.trace.writer import TraceWriter
from tests.helpers.traces import make_info, random_trace_columns
info = make_info(layers=2)
writer = TraceWriter(Path(sys.argv[1]), info)
for seed in range(3):
    rng = np.random.default_rng(seed)
    writer.write_episode(random_trace_columns(rng, info, prompt=4, nodes=3))
(writer._parts / "episode-000003.tmp").write_bytes(b"PAR1 half an epis")
print("recorded", flush=True)
signal.pause()
"""


def test_killed_recording_is_readable_and_resumes(tmp_path):
    path = tmp_path / "t.parquet"
    process = subprocess.Popen(
        [sys.executable, "-c", RECORD_UNTIL_KILLED, str(path)],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"recorded"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

    with pytest.raises(TraceError) as caught:
        TraceReader(path)
    parts = tmp_path / "t.parquet.parts"
    assert str(caught.value) == (
        f"{path}: the recording was interrupted after 3 whole episodes: read {parts}, "
        "or resume the recording"
    )
    reader = TraceReader(parts)
    assert reader.num_episodes == 3
    assert len(list(reader.episodes([Signal.ATTENTION]))) == 3

    with pytest.raises(UsageError, match="interrupted recording left 3 whole episodes"):
        TraceWriter(path, INFO)
    with TraceWriter(path, INFO, resume=True) as writer:
        assert writer.num_episodes == 3
        writer.write_episode(columns(3))
    assert files(tmp_path) == ["t.parquet"]
    for seed, episode in enumerate(TraceReader(path).episodes()):
        np.testing.assert_array_equal(episode.kind, columns(seed)["kind"])
    assert seed == 3


def abandoned(path: Path) -> None:
    TraceWriter(path, INFO).write_episode(columns())  # never closed


def test_resume_refuses_other_settings_but_not_another_machine(tmp_path):
    path = tmp_path / "t.parquet"
    abandoned(path)
    with pytest.raises(UsageError, match="recorded with another seed, task;"):
        TraceWriter(path, replace(INFO, seed=5, task="other"), resume=True)
    with TraceWriter(path, replace(INFO, device="elsewhere"), resume=True) as writer:
        assert writer.num_episodes == 1
        writer.update_timing({"decode_tokens_per_s": 10.0})
    info = TraceReader(path).info
    assert info.device == "elsewhere"
    assert info.timing == {"decode_tokens_per_s": 10.0}


@pytest.mark.parametrize("resume", [False, True])
def test_killed_within_the_first_episode(tmp_path, resume):
    parts = tmp_path / "t.parquet.parts"
    parts.mkdir()
    (parts / "episode-000000.tmp").write_bytes(b"PAR1 half")
    with TraceWriter(tmp_path / "t.parquet", INFO, resume=resume) as writer:
        assert writer.num_episodes == 0
        writer.write_episode(columns())
    assert files(tmp_path) == ["t.parquet"]


def test_resume_without_parts_starts_afresh(tmp_path):
    with TraceWriter(tmp_path / "t.parquet", INFO, resume=True) as writer:
        assert writer.num_episodes == 0
        writer.write_episode(columns())


def test_existing_file_is_refused_and_kept_until_the_new_one_is_whole(tmp_path):
    path = make_trace(tmp_path / "t.parquet", seed=1, episodes=1)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="exists: choose another --out"):
        TraceWriter(path, INFO)
    with TraceWriter(path, INFO, overwrite=True) as writer:
        writer.write_episode(columns())
        assert path.read_bytes() == before
    assert path.read_bytes() != before


def test_overwrite_drops_old_parts_but_nothing_else(tmp_path):
    path = tmp_path / "t.parquet"
    abandoned(path)
    with TraceWriter(path, INFO, overwrite=True) as writer:
        assert writer.num_episodes == 0
        writer.write_episode(columns())
    parts = tmp_path / "u.parquet.parts"
    parts.mkdir()
    (parts / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"holds files that are no episodes \(thesis.txt\)"):
        TraceWriter(tmp_path / "u.parquet", INFO, overwrite=True)
    assert (parts / "thesis.txt").read_text() == "precious"


def test_same_columns_make_the_same_bytes(tmp_path):
    first = make_trace(tmp_path / "a.parquet", seed=3)
    second = make_trace(tmp_path / "b.parquet", seed=3)
    assert first.read_bytes() == second.read_bytes()


def test_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot record to"):
        TraceWriter(tmp_path / "file" / "t.parquet", INFO)


def test_closed_writer_refuses_and_closes_twice(tmp_path):
    writer = TraceWriter(tmp_path / "t.parquet", INFO)
    writer.write_episode(columns())
    writer.close()
    writer.close()
    with pytest.raises(UsageError, match="is closed"):
        writer.write_episode(columns())


def drop(name):
    return lambda given: given.pop(name)


def put(name, value):
    return lambda given: given.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("node"), "the recorder gave no column node"),
        (put("colour", [1]), "column colour is not part of a trace with capture level 'signals'"),
        (put("queries", [1]), "column queries is not part"),
        (put("depth", [0, 1]), "column depth: 2 entries for"),
        (put("reward", ["good"] * 3), "column reward: 3 entries"),
        (lambda given: put("reward", ["x"] * len(given["kind"]))(given), "column reward:"),
        (put("kind", []), "no rows"),
        (put("kind", ["prefill", "daydream"]), "unknown kind of row 'daydream'"),
        (put("kind", [0, 9]), "rows of a kind beyond"),
    ],
)  # fmt: skip
def test_recorder_mistakes_are_named(tmp_path, change, message):
    given = columns()
    change(given)
    writer = TraceWriter(tmp_path / "t.parquet", INFO)
    with pytest.raises(UsageError, match=message) as caught:
        writer.write_episode(given)
    assert "\n" not in str(caught.value)


def test_a_broken_search_is_refused_when_written(tmp_path):
    given = columns()
    given["position"] = [None if p is None else p + 1 for p in given["position"]]
    path = tmp_path / "t.parquet"
    writer = TraceWriter(path, INFO)
    with pytest.raises(ArborsimError, match=r"episode 0, row 0: .*position 1, expected 0"):
        writer.write_episode(given)
    writer.close()
    assert not path.exists()


def test_columns_may_come_per_row_per_token_as_labels_or_as_arrow(tmp_path):
    given = columns()
    is_token = np.array(given["kind"]) <= Kind.TOKEN
    lengths = np.zeros(len(is_token), dtype=np.int64)
    lengths[is_token] = [len(row) for row in given["attention"]]
    other = {
        **given,
        "kind": [KINDS[kind] for kind in given["kind"]],
        "node": pa.array(given["node"], pa.int64()),
        "token": np.array([token for token in given["token"] if token is not None]),
        "position": [-1 if p is None else p for p in given["position"]],
        "correct": np.array([-1 if c is None else int(c) for c in given["correct"]]),
        "reward": np.array([np.nan if r is None else r for r in given["reward"]]),
        "hidden_change": list(given["hidden_change"]),
        "attention": lists(
            np.concatenate(given["attention"]), np.concatenate([[0], np.cumsum(lengths)]), ~is_token
        ),
    }
    with TraceWriter(tmp_path / "a.parquet", INFO) as writer:
        writer.write_episode(given)
    with TraceWriter(tmp_path / "b.parquet", INFO) as writer:
        writer.write_episode(other)
    first, second = (TraceReader(tmp_path / f"{n}.parquet").table(0) for n in "ab")
    assert first.equals(second)


def test_time_is_not_spent_per_row(tmp_path):
    """A long bare chain is written with far fewer calls than rows."""
    n = 400_000
    info = make_info(capture="tree", vocab=10)
    given = {
        "kind": np.zeros(n, np.int8), "iteration": np.zeros(n, np.int32),
        "node": np.zeros(n, np.int32), "parent": np.full(n, -1), "depth": np.zeros(n, np.int32),
        "position": np.arange(n), "token": np.zeros(n, np.int32), "time_s": np.zeros(n),
    }  # fmt: skip
    with TraceWriter(tmp_path / "first.parquet", info) as writer:  # what is read and kept once
        writer.write_episode({name: each[:2] for name, each in given.items()})
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        with TraceWriter(tmp_path / "t.parquet", info) as writer:
            writer.write_episode(given)
    finally:
        sys.setprofile(None)
    assert calls.total() < n / 10


def test_counters_cost_next_to_nothing(tmp_path: Path) -> None:
    """A long prompt is rows that count upwards; stored one by one they would take 8 bytes each."""
    path = make_trace(tmp_path / "t.parquet", kind="linear", episodes=1, nodes=1, prompt=2_000,
                      capture="tree")  # fmt: skip
    stored = {column.name: column.stored_bytes for column in column_sizes(TraceReader(path))}
    assert stored["seq"] + stored["position"] < 1_500
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    leaves = {chunk.path_in_schema: chunk for chunk in chunks}
    assert "DELTA_BINARY_PACKED" in leaves["position"].encodings
    assert "DELTA_BINARY_PACKED" not in leaves["token"].encodings


def test_files_with_the_encodings_of_before_are_read_and_resumed(tmp_path: Path) -> None:
    path, old = make_trace(tmp_path / "t.parquet", episodes=2, info=INFO), tmp_path / "old.parquet"
    reader = TraceReader(path)
    with pq.ParquetWriter(old, pq.read_schema(path), compression="zstd",
                          use_dictionary=["kind", "end", "answer"]) as parquet:  # fmt: skip
        for episode in range(2):
            parquet.write_table(reader.table(episode))
    assert [reader.table(i).equals(TraceReader(old).table(i)) for i in range(2)] == [True, True]
    with TraceWriter(old, INFO, resume=True) as writer:
        assert writer.num_episodes == 2
        writer.write_episode(columns(7))
    again = TraceReader(old)
    assert again.num_episodes == 3
    assert all(again.table(i).equals(reader.table(i)) for i in range(2))
    assert len(list(again.episodes())) == 3


def test_both_writers_store_the_same(tmp_path: Path) -> None:
    path, whole = make_trace(tmp_path / "t.parquet", episodes=3, info=INFO), tmp_path / "w.parquet"
    rng = np.random.default_rng(0)
    with WholeTraceWriter(whole, INFO) as writer:
        for _ in range(3):
            writer.write_episode(random_trace_columns(rng, INFO))
    assert pq.read_schema(whole).equals(pq.read_schema(path), check_metadata=True)
    assert [TraceReader(whole).table(i).equals(TraceReader(path).table(i)) for i in range(3)] == [
        True, True, True
    ]  # fmt: skip
    assert whole.stat().st_size == path.stat().st_size


def test_rows_that_are_no_search_are_refused_before_they_are_written(tmp_path: Path) -> None:
    broken = columns(0)
    broken["depth"] = np.asarray(broken["depth"]) + 1
    with (
        pytest.raises(TraceError, match="node 0 has depth 1, expected 0"),
        WholeTraceWriter(tmp_path / "w.parquet", INFO) as writer,
    ):
        writer.write_episode(broken)
    with pytest.raises(TraceError, match="holds no episodes"):
        TraceReader(tmp_path / "w.parquet")
