"""Write a trace: while it is recorded, one episode at a time, or all at once.

While recording (`TraceWriter`), every episode is a complete Parquet file of its own in
``<path>.parts/``.  Closing merges the parts into ``<path>``, one row group per episode, and removes
them.  If the process is killed, the parts stay: `TraceReader` reads the directory as it is, and
``resume=True`` goes on.  It also goes on from a closed file, whose row groups become parts again.
The file itself stays until the longer one replaces it, so whenever the process is killed, no
episode is lost.  `WholeTraceWriter` is for searches that are all there from the start.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.core.errors import UsageError
from arborsim.core.outputs import Lock
from arborsim.trace.columns import encode, parquet_writer
from arborsim.trace.decode import decode_episode
from arborsim.trace.packed import EpisodeIndex, expand
from arborsim.trace.reader import TraceReader, is_part, parts_directory
from arborsim.trace.schema import TraceInfo, arrow_schema
from arborsim.trace.validate import Where

# What may differ between the two halves of a resumed recording: where and how it ran, not what.
_MAY_DIFFER = {"device", "software", "timing", "command", "extra"}


class TraceWriter:
    """Writes a trace, as a context manager.

    The file `path` appears, whole, when the writer is closed.  On an exception inside ``with``
    (Ctrl-C included) the whole episodes are merged before the exception goes on.

    Parameters
    ----------
    overwrite : bool
        Replace `path`, and drop the parts of an earlier interrupted recording.
    resume : bool
        Go on after the whole episodes that `path` or its parts hold.  `num_episodes` says how many.
    check : bool
        Validate every episode as a reader would before it is stored.

    Raises
    ------
    UsageError
        The file or its parts exist and neither option was given, or they were recorded with other
        settings.
    TraceError
        What is to be resumed is damaged.
    """

    def __init__(
        self,
        path: Path,
        info: TraceInfo,
        overwrite: bool = False,
        resume: bool = False,
        check: bool = True,
    ) -> None:
        self.path = Path(path)
        self.info = info
        self.num_episodes = 0
        self._parts = parts_directory(self.path)
        self._check = check
        self._closed = False
        if overwrite and resume:
            raise UsageError("overwrite and resume exclude each other")
        if self.path.exists() and not (overwrite or resume):
            raise UsageError(
                f"{self.path} exists: choose another --out, or --overwrite or --resume"
            )
        self._scrap = self._parts.with_name(self._parts.name + ".tmp")  # never half of the parts
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot record to {self.path}: {error.strerror}") from error
        self._lock = Lock(self.path)
        try:
            self._begin(overwrite, resume)
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, overwrite: bool, resume: bool) -> None:
        self._remove_scrap()
        if overwrite:
            self._remove_parts()
        if self._parts.is_dir():
            self._continue_after_parts(resume)
        self._unsplit = False  # whether the episodes so far are in `path`, not in parts
        if resume and self.path.exists():
            self._continue_after_file()
        try:
            self._parts.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot record to {self.path}: {error.strerror}") from error

    def _continue_after_parts(self, resume: bool) -> None:
        for scrap in self._parts.glob("*.tmp"):
            scrap.unlink()
        if not any(self._parts.iterdir()):
            return
        earlier = TraceReader(self._parts)
        if not resume:
            raise UsageError(
                f"an interrupted recording left {earlier.num_episodes} whole episodes in "
                f"{self._parts}: resume it, or overwrite it"
            )
        self._must_match(earlier)
        self.num_episodes = earlier.num_episodes

    def _continue_after_file(self) -> None:
        earlier = TraceReader(self.path)
        self._must_match(earlier)
        if self.num_episodes:  # killed while going on from this file: the parts hold all of it
            if earlier.num_episodes > self.num_episodes:
                raise UsageError(
                    f"{self.path} holds {earlier.num_episodes} episodes, but {self._parts} only "
                    f"{self.num_episodes}: move one of them away, or overwrite both"
                )
            return
        if not pq.read_schema(self.path).equals(arrow_schema(self.info)):
            raise UsageError(
                f"cannot resume {self.path}: its columns are not those of this arborsim's recorder"
            )
        self.num_episodes = earlier.num_episodes
        self.update_timing(earlier.info.timing)
        self._unsplit = True

    def _must_match(self, earlier: TraceReader) -> None:
        before, now = (json.loads(info.to_json()) for info in (earlier.info, self.info))
        differing = [key for key in now if key not in _MAY_DIFFER and now[key] != before.get(key)]
        if differing:
            raise UsageError(
                f"cannot resume {earlier.path}: it was recorded with another "
                f"{', '.join(differing)}; use the same settings, or overwrite it"
            )

    def write_episode(self, columns: Mapping[str, Any]) -> None:
        """Store one whole episode (`arborsim.trace.columns.encode`), safe on disk on return.

        Raises `UsageError` if the columns do not fit the capture level or the disk cannot be
        written, and `TraceError` if a reader would not accept the rows as a search.
        """
        if self._closed:
            raise UsageError(f"{self.path} is closed")
        table = encode(columns, self.info, self.num_episodes)
        if self._check:
            decode_episode(table, self.info, str(self.path), self.num_episodes)
        if self._unsplit:
            self._split()
        _write_part(table, self._parts, self.num_episodes)
        self.num_episodes += 1

    def _split(self) -> None:
        """Make parts of the file's episodes: all of them appear at once."""
        self._remove_scrap()
        earlier = TraceReader(self.path)
        try:
            self._scrap.mkdir()
            for episode in range(self.num_episodes):
                _write_part(earlier.table(episode), self._scrap, episode)
            self._parts.rmdir()
            self._scrap.rename(self._parts)
        except OSError as error:
            raise UsageError(f"cannot write {self._scrap}: {error.strerror or error}") from error
        self._unsplit = False

    def update_timing(self, timing: Mapping[str, float]) -> None:
        """Set the timing profile, which is known only once the recording is over."""
        self.info = replace(self.info, timing={**self.info.timing, **timing})

    def close(self) -> None:
        """Merge the parts into `path`, or leave nothing behind with no episode written."""
        if self._closed:
            return
        self._closed = True
        if self.num_episodes and not self._unsplit:
            self._merge()
        self._remove_scrap()
        self._remove_parts()
        self._lock.release()

    def _merge(self) -> None:
        whole = self.path.with_name(self.path.name + ".tmp")
        schema = arrow_schema(self.info)
        try:
            with _parquet_on_disk(whole, schema) as parquet:
                parts = TraceReader(self._parts)
                for episode in range(parts.num_episodes):
                    table = parts.table(episode).replace_schema_metadata(schema.metadata)
                    parquet.write_table(table, row_group_size=table.num_rows)
            os.replace(whole, self.path)
        except BaseException as error:
            # The parts are still whole: the recording can be merged later with resume.
            self._closed = False
            whole.unlink(missing_ok=True)
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise UsageError(f"cannot write {self.path}: {reason}") from error
            raise

    def _remove_parts(self) -> None:
        """Delete the parts, all at once: a process killed in the middle leaves only scrap."""
        if self._parts.is_dir():
            _refuse_strange(self._parts)
            self._remove_scrap()
            shutil.rmtree(self._parts.rename(self._scrap))

    def _remove_scrap(self) -> None:
        """Delete what a killed process left of making or deleting the parts."""
        if self._scrap.is_dir():
            _refuse_strange(self._scrap)
            shutil.rmtree(self._scrap)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # the first error is the one to report
            error.add_note(f"and the episodes could not be merged ({second}): see {self._parts}")
        finally:
            self._lock.release()


class WholeTraceWriter:
    """Writes a trace straight into the file, with nothing to resume, as a context manager.

    The file is no trace before the writer is left, and stays if it is left by an exception: give a
    name that is moved into place afterwards.  A disk that cannot be written is an `OSError`.  One
    that is `packed` has many episodes at once, of which nothing is known per token.
    """

    def __init__(self, path: Path, info: TraceInfo, packed: bool = False) -> None:
        self.path = path
        self.info = info
        self.num_episodes = 0
        self._schema = arrow_schema(info, packed)
        self._file = _parquet_on_disk(path, self._schema)

    def write_episode(self, columns: Mapping[str, Any], check: bool = True) -> None:
        """Store one whole episode as `TraceWriter` does, checked as a reader would check it."""
        table = encode(columns, self.info, self.num_episodes, self._schema)
        if check:
            decode_episode(table, self.info, str(self.path), self.num_episodes)
        self._parquet.write_table(table, row_group_size=table.num_rows)
        self.num_episodes += 1

    def write_packed(self, columns: Mapping[str, Any]) -> None:
        """Store whole episodes as one row group, with the columns `episode`, `seq` and `run`.

        The first one is checked as a reader would check it.
        """
        first, file = self.num_episodes, str(self.path)
        table = encode(columns, self.info, first, self._schema)
        places = EpisodeIndex.of(table, np.array([table.num_rows]), file, first)
        episode = expand(table.slice(0, int(places.stored[0])), Where(file, first))
        decode_episode(episode, self.info, file, first)
        self._parquet.write_table(table, row_group_size=table.num_rows)
        self.num_episodes += len(places.rows)

    def __enter__(self) -> Self:
        self._parquet = self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


@contextmanager
def _parquet_on_disk(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """A Parquet file that is safe on disk when the context is left without an error."""
    with path.open("wb") as file:
        with parquet_writer(file, schema) as parquet:
            yield parquet
        file.flush()
        os.fsync(file.fileno())


def _write_part(table: pa.Table, directory: Path, episode: int) -> None:
    """One episode as a file of its own, which appears whole and on disk."""
    part = directory / f"episode-{episode:06d}.parquet"
    scrap = part.with_suffix(".tmp")
    try:
        with _parquet_on_disk(scrap, table.schema) as parquet:
            parquet.write_table(table, row_group_size=table.num_rows)
        os.replace(scrap, part)
    except OSError as error:
        scrap.unlink(missing_ok=True)
        raise UsageError(f"cannot write {part}: {error.strerror or error}") from error


def _refuse_strange(directory: Path) -> None:
    strange = [e.name for e in directory.iterdir() if not is_part(e) and e.suffix != ".tmp"]
    if strange:
        raise UsageError(f"{directory} holds files that are no episodes ({strange[0]}): move them")
