"""A recording goes on from a closed file, and nothing is lost on the way."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arborsim.core.errors import UsageError
from arborsim.core.observations import Signal
from arborsim.trace import writer as writer_module
from arborsim.trace.reader import TraceReader
from arborsim.trace.writer import TraceWriter
from tests.helpers.traces import make_info, random_trace_columns

INFO = make_info(capture="qkv", qkv_layers=(0,), attention_layer_ids=(1,), layers=2)


def columns(seed: int) -> dict:
    return random_trace_columns(np.random.default_rng(seed), INFO, prompt=4, nodes=3)


def files(directory: Path) -> list[str]:
    """All but the locks of writers that have not been closed."""
    found = (str(p.relative_to(directory)) for p in directory.rglob("*"))
    return sorted(name for name in found if not name.endswith(".lock"))


def record_until_interrupted(path: Path, seeds: range, resume: bool = False) -> None:
    with TraceWriter(path, INFO, resume=resume) as writer:
        for seed in seeds:
            writer.write_episode(columns(seed))
            writer.update_timing({"decode_s": 1.0 + seed})
        raise KeyboardInterrupt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two episodes, as Ctrl-C leaves it."""
    path = tmp_path / "t.parquet"
    with pytest.raises(KeyboardInterrupt):
        record_until_interrupted(path, range(2))
    assert files(tmp_path) == ["t.parquet"]
    return path


def check(path: Path, episodes: int) -> TraceReader:
    """The file alone is left, and equals one that was recorded in one go."""
    assert files(path.parent) == [path.name]
    whole = path.parent / "whole.parquet"
    with TraceWriter(whole, INFO) as writer:
        for seed in range(episodes):
            writer.write_episode(columns(seed))
    reader, expected = TraceReader(path), TraceReader(whole)
    assert reader.num_episodes == episodes
    for episode in range(episodes):
        assert reader.table(episode).equals(expected.table(episode))
    list(reader.episodes([Signal.LAYER_ATTENTION]))
    whole.unlink()
    return reader


def test_going_on_from_a_closed_file(path):
    later = replace(INFO, device="elsewhere", command="again")
    with TraceWriter(path, later, resume=True) as writer:
        assert writer.num_episodes == 2
        writer.write_episode(columns(2))
        assert len(files(path.parent)) == 5  # the file, and the parts
        assert TraceReader(path).num_episodes == 2
    reader = check(path, 3)
    assert reader.info.timing == {"decode_s": 2.0}
    assert reader.info.command == "again"


def test_nothing_new_leaves_the_file_as_it_is(path):
    before = path.read_bytes()
    with TraceWriter(path, replace(INFO, command="again"), resume=True):
        pass
    with pytest.raises(KeyboardInterrupt), TraceWriter(path, INFO, resume=True):
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert files(path.parent) == [path.name]


def test_interrupted_again_and_again(path):
    for seed in (2, 3):
        with pytest.raises(KeyboardInterrupt):
            record_until_interrupted(path, range(seed, seed + 1), resume=True)
    check(path, 4)


@pytest.mark.parametrize("step", range(20))
def test_killed_anywhere_it_loses_nothing(path, step, monkeypatch):
    """Every change to the disk is a place to be killed at; each leaves the old episodes whole."""

    class Killed(BaseException):
        pass

    left = [step]

    def mortal(function):
        def run(*arguments, **options):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return function(*arguments, **options)

        return run

    with monkeypatch.context() as patch:
        for module, name in ((os, "fsync"), (os, "replace"), (os, "rmdir"), (os, "mkdir"),
                             (os, "unlink"), (shutil, "rmtree")):  # fmt: skip
            patch.setattr(module, name, mortal(getattr(module, name)))
        patch.setattr(Path, "rename", mortal(Path.rename))
        patch.setattr(Path, "unlink", mortal(Path.unlink))
        writer = None
        try:
            writer = TraceWriter(path, INFO, resume=True)
            writer.write_episode(columns(2))
            writer.close()
        except Killed:
            pass
    if writer is not None:
        writer._lock.release()  # as the end of its process does
    done = left[0] > 0
    assert TraceReader(path).num_episodes in ((3,) if done else (2, 3))
    with TraceWriter(path, INFO, resume=True) as writer:
        assert writer.num_episodes in (2, 3)
        for seed in range(writer.num_episodes, 4):
            writer.write_episode(columns(seed))
    check(path, 4)


def test_full_disk_while_splitting(path, monkeypatch):
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    before = path.read_bytes()
    with TraceWriter(path, INFO, resume=True) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(UsageError, match="No space left on device"):
                writer.write_episode(columns(2))
        assert path.read_bytes() == before
        writer.write_episode(columns(2))
    check(path, 3)


def test_other_settings_are_refused(path):
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"t\.parquet: it was recorded with another seed"):
        TraceWriter(path, replace(INFO, seed=77), resume=True)
    with pytest.raises(UsageError, match="another attention_layer_ids"):
        TraceWriter(path, replace(INFO, attention_layer_ids=(0,)), resume=True)
    with pytest.raises(UsageError, match="exists: choose another --out"):
        TraceWriter(path, INFO)
    assert path.read_bytes() == before
    assert files(path.parent) == [path.name]


def test_a_file_longer_than_its_parts_is_not_replaced(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(writer_module.TraceWriter, "close", lambda self: None)
        with TraceWriter(path, INFO, overwrite=True) as writer:  # killed after its first episode
            writer.write_episode(columns(0))
    writer._lock.release()
    with pytest.raises(UsageError, match=r"holds 2 episodes, but .* only 1: move one"):
        TraceWriter(path, INFO, resume=True)
    assert TraceReader(path).num_episodes == 2
    path.unlink()
    with TraceWriter(path, INFO, resume=True) as writer:
        writer.write_episode(columns(1))
    check(path, 2)
