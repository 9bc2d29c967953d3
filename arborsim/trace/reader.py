"""Read a trace one episode at a time, and only the columns that are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from arborsim.core.errors import MissingSignal, TraceError, UsageError
from arborsim.core.observations import Signal
from arborsim.trace.decode import decode_episode
from arborsim.trace.episode import Episode
from arborsim.trace.layout import check_columns, columns_for
from arborsim.trace.opening import make_one, must_exist, one_line, open_parquet_file
from arborsim.trace.parts import part_files
from arborsim.trace.schema import (
    FORMAT_VERSION,
    METADATA_KEY,
    VECTORS,
    VERSION_KEY,
    Capture,
    TraceInfo,
)


class TraceReader:
    """A trace file, or the ``.parts`` directory of an interrupted recording.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    info : TraceInfo
    num_episodes : int
    columns : tuple of str
    file_bytes : int
        Size on disk.

    Raises
    ------
    TraceError
        One line that says what is wrong with the file and what to do.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            files = part_files(self.path)
        else:
            must_exist(self.path)
            files = [self.path]
        first = open_parquet_file(files[0], self.path)
        schema = first.schema_arrow
        self.info = _info_of(schema, self.path)
        self.columns = tuple(schema.names)
        check_columns(schema, self.info, str(self.path))
        self._open_file: tuple[Path, pq.ParquetFile] = (files[0], first)
        # Where each episode lies: its file, and the row group in it.
        self._places = (
            [(file, 0) for file in files]
            if self.path.is_dir()
            else [(self.path, group) for group in range(first.metadata.num_row_groups)]
        )
        if not self._places or first.metadata.num_rows == 0:
            raise TraceError(f"{self.path}: the trace holds no episodes; record it again")
        self._held: dict[Signal, bool] = {}
        self.num_episodes = len(self._places)
        self.file_bytes = sum(os.path.getsize(file) for file in files)

    def metadata(self, episode: int) -> pq.RowGroupMetaData:
        """Parquet's own account of one episode: rows, and bytes per column."""
        file, group = self._places[episode]
        return self._file(file).metadata.row_group(group)

    def has(self, signal: Signal) -> bool:
        """Does any episode hold this observation?"""
        if signal not in self._held:
            self._held[signal] = self._fills(signal_column(signal, self.info))
        return self._held[signal]

    def _fills(self, column: str) -> bool:
        if column not in self.columns:
            return False
        for episode in range(self.num_episodes):
            for name, chunk in self.chunks(episode):
                if name != column:
                    continue
                statistics = chunk.statistics
                if statistics is None or not statistics.has_null_count:
                    return True
                if statistics.null_count < chunk.num_values:
                    return True
        return False

    def chunks(self, episode: int) -> Iterator[tuple[str, pq.ColumnChunkMetaData]]:
        """Parquet's account of each part of a column, with the column's name.

        Raises
        ------
        TraceError
            The names are damaged.
        """
        group = self.metadata(episode)
        for i in range(group.num_columns):
            chunk = group.column(i)
            try:
                name = chunk.path_in_schema.split(".")[0]
            except UnicodeDecodeError as error:
                raise TraceError(
                    f"{self.path}: episode {episode}: the name of column {i} is not UTF-8 "
                    f"({error.reason}); copy the file again, or record it again"
                ) from error
            yield name, chunk

    def require(self, needs: Iterable[Signal], who: str) -> None:
        """Refuse to go on without the observations that `who` reads.

        Parameters
        ----------
        needs : iterable of Signal
        who : str
            For the message, e.g. ``"policy h2o"``.

        Raises
        ------
        MissingSignal
            Names the signals and the recording option that would supply them.
        """
        missing = [signal for signal in sorted(needs) if not self.has(signal)]
        if missing:
            options = " ".join(recording_options(missing, self.info))
            remedy = f"record it with {options}"
            if self.info.unrecorded:
                remedy = f"{self.info.unrecorded}; take a trace recorded with {options}"
            raise MissingSignal(
                f"{who} reads {' and '.join(missing)}, which {self.path} does not hold: {remedy}"
            )

    def episodes(
        self,
        needs: Iterable[Signal] = (),
        text: bool = False,
        embedding: bool = False,
        start: int = 0,
        stop: int | None = None,
        who: str = "this run",
        attention_layers: bool = False,
    ) -> Iterator[Episode]:
        """Yield episodes ``start`` to ``stop``, each validated; memory holds one at a time.

        Parameters
        ----------
        needs : iterable of Signal
            The observations to decode; the others are never read from disk.
        text, embedding : bool
            Also decode the text of blocks and answers (those of thoughts too), and the embeddings
            at boundaries.
        start, stop : int
            Episode numbers; all by default.
        who : str
            Who needs the observations, for the message.
        attention_layers : bool
            Also decode the rows of single layers (`LayerRows`).

        Raises
        ------
        MissingSignal
            `needs` names what the trace does not hold, or there are no embeddings or no rows of
            single layers.
        TraceError
            The episode is damaged.
        """
        wanted = frozenset(needs)
        if start < 0 or (stop is not None and stop < start):
            raise UsageError(f"episodes {start} to {stop} make no range")
        self.require(wanted, who)
        if attention_layers and not (
            self.info.attention_layer_ids and "attention_layers" in self.columns
        ):
            raise MissingSignal(
                f"{who} reads attention_layers, which {self.path} does not hold: "
                "record it with --attention-layers"
            )
        if embedding and "embedding" not in self.columns:
            raise MissingSignal(
                f"{who} reads embeddings, which {self.path} does not hold: record it with "
                "--capture signals, or as a bank with --bank"
            )
        extra = {"text": text, "embedding": embedding, "attention_layers": attention_layers}
        names = [n for n in columns_for(wanted, self.info, **extra) if n in self.columns]
        last = self.num_episodes if stop is None else min(stop, self.num_episodes)
        for index in range(start, last):
            table = self.table(index, names)
            yield decode_episode(table, self.info, str(self.path), index, wanted, **extra)

    def table(self, index: int, names: list[str] | None = None) -> pa.Table:
        """One episode as it is stored, not validated; all columns by default.

        Raises
        ------
        TraceError
            The data are damaged.
        """
        path, group = self._places[index]
        file = self._file(path)
        try:
            return file.read_row_group(group, columns=names)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise TraceError(
                f"{self.path}: episode {index}: its data are damaged ({one_line(error)}); "
                "copy the file again, or record it again"
            ) from error

    def _file(self, path: Path) -> pq.ParquetFile:
        if self._open_file[0] != path:
            file = open_parquet_file(path, self.path)
            if not file.schema_arrow.equals(self._open_file[1].schema_arrow):
                raise TraceError(
                    f"{path}: its columns differ from those of the other episodes; record it again"
                )
            if file.metadata.num_row_groups != 1:
                raise TraceError(f"{path}: a part holds one episode; record it again")
            self._open_file = (path, file)
        return self._open_file[1]


def signal_column(signal: Signal, info: TraceInfo) -> str:
    """The column that tells whether a trace holds `signal`."""
    if signal in (Signal.ATTENTION, Signal.EVICTION_TIME):
        return "attention_value" if info.attention == "sparse" else "attention"
    return signal.value


def recording_options(missing: Iterable[Signal], info: TraceInfo) -> list[str]:
    """The options of ``arborsim record`` that would supply these observations."""
    options: list[str] = []
    for signal in missing:
        if signal is Signal.REWARD:
            options.append("a --search that scores its blocks (any but linear)")
        elif signal in VECTORS:
            options.append("--capture qkv --qkv-layers all")
        elif signal is Signal.LAYER_ATTENTION:
            options.append("--attention-layers all")
        else:
            if info.capture is Capture.TREE:
                options.append("--capture signals")
            elif signal in (Signal.ATTENTION, Signal.EVICTION_TIME):
                options.append("--attention dense or --attention sparse")
            else:
                options.append("--capture signals by this version of arborsim")
    return list(dict.fromkeys(options))


def _info_of(schema: pa.Schema, path: Path) -> TraceInfo:
    """The trace's metadata, after a look at the format version."""
    stored = schema.metadata or {}
    if METADATA_KEY not in stored or VERSION_KEY not in stored:
        raise TraceError(
            f"{path}: a Parquet file, but no trace: it has no arborsim metadata; {make_one()}"
        )
    version = stored[VERSION_KEY].decode("ascii", "replace")
    if not version.isdecimal() or not 1 <= int(version) <= FORMAT_VERSION:
        raise TraceError(
            f"{path}: trace format {version[:20]!r}, but this arborsim reads versions up to "
            f"{FORMAT_VERSION}; upgrade arborsim, or record it again"
        )
    try:
        return TraceInfo.from_json(stored[METADATA_KEY].decode())
    except TraceError as error:
        raise TraceError(f"{path}: {' '.join(str(error).split())}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise TraceError(
            f"{path}: the trace's metadata cannot be read ({one_line(error)}); record it again"
        ) from error
