"""Write a trace whose searches are all at hand: straight into the file, nothing to resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from arborsim.trace.columns import encode
from arborsim.trace.decode import check_table
from arborsim.trace.encodings import open_parquet
from arborsim.trace.schema import TraceInfo, arrow_schema


class WholeTraceWriter:
    """Writes a trace; a context manager.  `TraceWriter` is for searches that take their time.

    Parameters
    ----------
    path : Path
        The file to make; it is no trace before the writer is left, and stays if it is left by an
        exception: give a name that is moved into place afterwards.
    info : TraceInfo

    Raises
    ------
    OSError
        The disk cannot be written.
    """

    def __init__(self, path: Path, info: TraceInfo) -> None:
        self.path = path
        self.info = info
        self.num_episodes = 0
        self._schema = arrow_schema(info)
        self._file = path.open("wb")
        self._parquet = open_parquet(self._file, self._schema)

    def write_episode(self, columns: Mapping[str, Any]) -> None:
        """Store one whole episode, checked as a reader would check it.

        Parameters
        ----------
        columns : mapping of str to sequence, ndarray or pyarrow.Array
            See `arborsim.trace.columns.encode`.

        Raises
        ------
        UsageError
            The columns do not fit the capture level.
        TraceError
            The rows are not a search that a reader would accept.
        """
        table = encode(columns, self.info, self.num_episodes, self._schema)
        check_table(table, self.info, self.path, self.num_episodes)
        self._parquet.write_table(table, row_group_size=table.num_rows)
        self.num_episodes += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            self._parquet.close()
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
