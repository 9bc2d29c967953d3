"""Records as TOML, JSON and logs of JSON lines: how every result, profile and log is written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import msgspec

from arborsim.core.errors import UsageError
from arborsim.core.outputs import Lock, whole
from arborsim.core.records import convert

R = TypeVar("R")


def plain(value: Any) -> Any:
    """Records as dicts, tuples as lists, NumPy values as Python numbers."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def strict(value: Any) -> Any:
    """`plain`, with None for NaN and infinite numbers, which JSON cannot say."""
    return _finite(plain(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any, indent: int | None = 2) -> str:
    """Strict JSON with sorted keys. The same value gives the same bytes."""
    return json.dumps(strict(value), indent=indent, sort_keys=True, allow_nan=False)


def to_toml(value: Any) -> str:
    """TOML of a record or mapping. Keys keep their order, and what is None is left out."""
    return "\n".join(_toml_lines("", plain(value))).lstrip("\n") + "\n"


def digest(value: Any) -> str:
    """A digest of anything that JSON can say."""
    return hashlib.sha256(to_json(value, indent=None).encode()).hexdigest()[:32]


def file_digest(path: Path) -> str:
    """Beginning of the SHA-256 of a file, or of all files of an interrupted recording."""
    digest = hashlib.sha256()
    for each in sorted(path.iterdir()) if path.is_dir() else [path]:
        with each.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()[:16]


def _toml_lines(name: str, table: Mapping[str, Any], head: str = "") -> Iterator[str]:
    """Lines of a TOML table (``""``: the document): its own values first, then its sub-tables."""
    below = {k: v for k, v in table.items() if isinstance(v, Mapping) or _are_tables(v)}
    values = {k: v for k, v in table.items() if v is not None and k not in below}
    if head or (name and values):
        yield head or f"\n[{name}]"
    for key, value in values.items():
        yield f"{_key(key)} = {_value(value)}"
    for key, value in below.items():
        inner = f"{name}.{_key(key)}" if name else _key(key)
        if isinstance(value, Mapping):
            yield from _toml_lines(inner, value)
        else:
            for each in value:
                yield from _toml_lines(inner, each, f"\n[[{inner}]]")


def _are_tables(value: Any) -> bool:
    listed = isinstance(value, list | tuple) and len(value) > 0
    return listed and all(isinstance(each, Mapping) for each in value)


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else json.dumps(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)  # also TOML's spelling of nan and inf
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
        case Sequence():
            return "[" + ", ".join(map(_value, value)) + "]"
    raise TypeError(f"{value!r} has no place in TOML")


class RecordLog(Generic[R]):
    """A log of records that survives an interruption: JSON lines, each on disk before the next.

    ::

        log = RecordLog(path, Result, "my-results", version=1)
        head = log.read() if path.exists() else {}     # log.records: those of the earlier run
        log.open({"request": ...})                     # goes on behind them
        log.add(Result(...))

    The first line is the head: `format`, `version` (logs of other versions are refused), and
    whatever distinguishes one request from another.  The others are records of the dataclass
    `kind`.  Killing the process loses at most the record that was being written: a line without an
    end is dropped.
    """

    def __init__(self, path: Path, kind: type[R], format: str, version: int) -> None:
        self.path = path
        self.records: list[R] = []  # what `read` found, in the order in which it was written
        self._kind = kind
        self._mark = {"format": format, "version": version}
        self._file: IO[bytes] | None = None
        self._lock: Lock | None = None
        self._kept_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether records can be added."""
        return self._file is not None

    def read(self) -> dict[str, Any]:
        """Read what an earlier run has left. Returns the head, or {} if even that is torn.

        Raises `UsageError` if the file cannot be read, is no such log, or is damaged.
        """
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read ({error.strerror})") from None
        *lines, torn = content.split(b"\n")
        start = _line(self._mark)[:-1].encode()
        if not lines and start.startswith(torn[: len(start)]):
            return {}
        head = self._head(lines[0] if lines else b"")
        for number, line in enumerate(lines[1:], 2):
            try:
                self.records.append(convert(self._kind, json.loads(line), finite=False))
            except (ValueError, RecursionError, UsageError) as error:
                what = error if isinstance(error, UsageError) else "no JSON"
                raise UsageError(
                    f"{self.path}, line {number}: {what}: the log is damaged; delete the line to "
                    "go on without it"
                ) from None
        self._kept_bytes = sum(len(line) + 1 for line in lines)
        return head

    def open(self, head: Mapping[str, Any]) -> None:
        """Get ready to add records: behind those that were read, or in a new file with this head.

        Raises `UsageError`, as `add` does, if the file cannot be written.
        """
        self._lock = Lock(self.path)
        if not self._kept_bytes:  # what is there stays until the head is on the disk
            with whole(self.path) as part:
                part.write_bytes(f"{_line(plain({**self._mark, **head}))}\n".encode())
                self._kept_bytes = part.stat().st_size
        with self._writing():
            self._file = self.path.open("r+b")
            self._file.truncate(self._kept_bytes)
            self._file.seek(self._kept_bytes)

    def add(self, record: Any) -> None:
        """Append a record, or a mapping that reads back as one. It is on the disk afterwards."""
        assert self._file is not None, "add before open"
        with self._writing():
            self._file.write(f"{_line(plain(record))}\n".encode())
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            with self._writing():  # what a full disk has not taken is tried once more
                if self._file is not None:
                    self._file.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _head(self, line: bytes) -> dict[str, Any]:
        try:
            head = json.loads(line)
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict) or any(head.get(k) != v for k, v in self._mark.items()):
            raise UsageError(
                f"{self.path}: not a log of format {self._mark['format']}, version "
                f"{self._mark['version']}"
            )
        return head

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(f"{self.path}: cannot write: {error.strerror}") from None


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
