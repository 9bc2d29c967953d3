"""A log of records that survives an interruption: JSON lines, each on the disk before the next.

::

    log = RecordLog(path, Result, "my-results", version=1)
    head = log.read() if path.exists() else {}     # then log.records are those of the earlier run
    log.open({"request": ...})                     # goes on behind them
    log.add(Result(...))

The first line is the head: format, version, and whatever tells one request from another.  Killing
the process loses at most the record that was being written: a line without an end is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from arborsim.core.documents import plain
from arborsim.core.errors import UsageError
from arborsim.core.records import convert

R = TypeVar("R")


class RecordLog(Generic[R]):
    """The log at `path`.

    Parameters
    ----------
    path : Path
    kind : type
        The dataclass of a record.
    format : str
        What the head calls such a log.
    version : int
        Logs of other versions are refused.

    Attributes
    ----------
    records : list
        What `read` found, in the order in which it was written.
    """

    def __init__(self, path: Path, kind: type[R], format: str, version: int) -> None:
        self.path = path
        self.records: list[R] = []
        self._kind = kind
        self._mark = {"format": format, "version": version}
        self._file: IO[bytes] | None = None
        self._kept_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether records can be added."""
        return self._file is not None

    def read(self) -> dict[str, Any]:
        """Read what an earlier run has left; returns the head, or {} if even that is torn.

        Raises
        ------
        UsageError
            The file cannot be read, is no such log, or is damaged.
        """
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror})") from None
        *lines, torn = content.split(b"\n")
        if not lines and self._begins(torn):
            return {}
        head = self._head(lines[0] if lines else b"")
        for number, line in enumerate(lines[1:], 2):
            try:
                self.records.append(convert(self._kind, json.loads(line), finite=False))
            except (ValueError, UsageError) as error:
                what = error if isinstance(error, UsageError) else "no JSON"
                raise UsageError(
                    f"{self.path}, line {number}: {what}: the log is damaged; delete the line to "
                    "go on without it"
                ) from None
        self._kept_bytes = sum(len(line) + 1 for line in lines)
        return head

    def open(self, head: Mapping[str, Any]) -> None:
        """Get ready to add records: behind those that were read, or in a new file with this head.

        Raises
        ------
        UsageError
            The file cannot be written.
        """
        try:
            self._file = self.path.open("r+b" if self._kept_bytes else "wb")
            self._file.truncate(self._kept_bytes)
            self._file.seek(self._kept_bytes)
        except OSError as error:
            raise self._unwritable(error) from None
        if not self._kept_bytes:
            self.add({**self._mark, **head})

    def add(self, record: Any) -> None:
        """Append a record, or a mapping that reads back as one; it is on the disk afterwards."""
        assert self._file is not None, "add before open"
        try:
            self._file.write(f"{_line(plain(record))}\n".encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begins(self, torn: bytes) -> bool:
        """Whether a lone torn line can be the beginning of a head."""
        start = _line(self._mark)[:-1].encode()
        return start.startswith(torn[: len(start)])

    def _head(self, line: bytes) -> dict[str, Any]:
        try:
            head = json.loads(line)
        except ValueError:
            head = None
        if not isinstance(head, dict) or any(head.get(k) != v for k, v in self._mark.items()):
            raise UsageError(
                f"{self.path}: not a log of format {self._mark['format']}, version "
                f"{self._mark['version']}"
            )
        return head

    def _unwritable(self, error: OSError) -> UsageError:
        return UsageError(f"{self.path}: cannot write: {error.strerror}")


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
