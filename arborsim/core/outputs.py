"""Files that appear whole or not at all, and are never written over what is read.

::

    with whole(path) as part:       # a name next to `path`
        table.to_parquet(part)
    # `path` is there now, on the disk. Had anything failed, it would be what it was before
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from arborsim.core.errors import UsageError

#: In the names of files that are being written.
_PART = ".part"
_ENDS_FOLDERS = tuple(filter(None, (os.sep, os.altsep)))


@contextlib.contextmanager
def whole(path: Path, ending: str | None = None) -> Iterator[Path]:
    """A name to write to, which takes the place of `path` when the block ends without an error.

    The name ends as `path` does, for writers that go by it, or in `ending`.  Devices and pipes of
    the shell are written in place.  A link stays a link: what it points to is replaced.  A new file
    is open to whom the umask says, a replaced one to whom it was.  What killed processes left of
    writing `path` is removed.

    Raises `UsageError`: the file cannot be written. `path` is as it was.
    """
    try:
        if _in_place(path):
            yield path
            return
        target = _target(path)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        begin = f".{target.name[:100]}."
        _remove_stumps(target.parent, begin)
        end = f"{_PART}{target.suffix if ending is None else ending}"
        part = target.with_name(f"{begin}{os.urandom(4).hex()}{end}")
        new = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        os.close(os.open(part, new, 0o666 if mode is None else 0o600))
        try:
            with _kept(part):
                yield part
                if mode is not None:
                    part.chmod(mode)
                _to_disk(part)
                part.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        with contextlib.suppress(OSError):  # not every file system knows how
            _to_disk(target.parent)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _kept(part: Path) -> Iterator[None]:
    """Says that a living process writes this file."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):  # not every system knows how
            stack.enter_context(_locked(part, wait=True))
        yield


def _remove_stumps(folder: Path, begin: str) -> None:
    """Delete files of `whole` that no living process writes, which begin so."""
    for stump in folder.glob(f"{glob.escape(begin)}????????{_PART}*"):
        with contextlib.suppress(ImportError, OSError), _locked(stump):
            stump.unlink(missing_ok=True)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A folder for meanwhile, among the temporary files. `prefix` tells whose it is.

    What killed processes left of their own with this prefix is removed.
    """
    place = Path(tempfile.gettempdir())
    for owner in place.glob(f"{glob.escape(prefix)}????????.lock"):
        with contextlib.suppress(ImportError, OSError), _locked(owner):
            shutil.rmtree(owner.with_suffix(""), ignore_errors=True)
            owner.unlink(missing_ok=True)
    folder = place / f"{prefix}{os.urandom(4).hex()}"
    owner = folder.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        try:
            with contextlib.suppress(ImportError):  # there are no locks on Windows
                stack.enter_context(_locked(owner, wait=True))
            folder.mkdir(0o700)
        except OSError as error:
            raise UsageError(f"cannot write {folder}: {error.strerror or error}") from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            owner.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all. A `UsageError` if it cannot be written."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file, whole or not at all. A `UsageError` if it cannot be written."""
    # A killed process leaves the name, which must not pass for a file of its kind.
    with whole(Path(path), "") as part:
        part.write_bytes(content)


def output_path(given: str | os.PathLike[str]) -> Path:
    """The file of that name. A `UsageError` if it says a folder, which `Path` would forget."""
    name = os.fspath(given)
    if name.endswith(_ENDS_FOLDERS):
        raise UsageError(f"cannot write {name}: this is the name of a folder: name a file")
    return Path(name)


def real_path(path: Path) -> Path:
    """From the root on and without links. One that points to itself stays."""
    return Path(os.path.realpath(path))  # `Path.resolve` raises a RuntimeError for such a link


def check_writable(path: Path, option: str) -> None:
    """Refuse an output that `whole` could not write, before the work is done."""
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"{option}: there is no directory {path.parent}")
    try:
        str(path).encode()  # Arrow writes no other
    except UnicodeEncodeError:
        said = ascii(str(path))[1:-1]
        raise UsageError(f"{option} {said}: the name is not UTF-8: choose another name") from None
    # Asking for permissions would not do: read-only disks and special folders refuse all the same.
    try:
        if _in_place(path):
            with path.open("ab"):
                return
        with tempfile.TemporaryFile(dir=_target(path).parent):
            pass
    except OSError as error:
        raise UsageError(f"{option}: cannot write {path}: {error.strerror}") from None


def refuse_inputs(outputs: Mapping[str, Path], inputs: Iterable[Path]) -> None:
    """Refuse outputs that are files which are read, under whatever name, or each other.

    Parameters
    ----------
    outputs : mapping of str to Path
        By the option that names it.
    inputs : iterable of Path
        Files. Those that are not there are passed over.

    Raises `UsageError`.
    """
    read = {key: path for path in inputs if (key := _identity(path))}
    taken: dict[object, str] = {}
    for option, path in outputs.items():
        key = _identity(path)
        if key in read:
            same = "" if read[key] == path else f" (it is {read[key]})"
            raise UsageError(f"{option} {path}: the command reads it{same}; choose another name")
        if _is_special(path):
            continue  # /dev/null takes everything
        for known in filter(None, (key, real_path(path))):
            if other := taken.get(known):
                raise UsageError(
                    f"{option} {path}: {other} names the same file; choose another name"
                )
        taken |= dict.fromkeys(filter(None, (key, real_path(path))), option)


class Busy(UsageError):
    """Another process, or another writer of this one, is at a file."""


class Lock:
    """Keeps other processes from writing `path` until it is released, or this process has ended.

    The lock is on a hidden file next to `path`, or to what that links to.  A killed process leaves
    its name. An error that forgets the lock does not.

    Raises `Busy`: another process, or another writer of this one, is at it.  `UsageError`: the
    folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            target = _target(path)  # however many names a file has, it has one lock
            name = target.with_name(f".{target.name}.lock")
            file = _locked(name)
        except BlockingIOError:
            raise Busy(
                f"{path}: another arborsim is writing it: wait for it, or choose another name"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        self._release = weakref.finalize(self, _unlocked, name, file, os.getpid())

    def release(self) -> None:
        """Let others write. Calling it again does no harm."""
        self._release()


def _unlocked(name: Path, file: IO[bytes], process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        name.unlink(missing_ok=True)
    file.close()


def _locked(name: Path, wait: bool = False) -> IO[bytes]:
    """The file, made if it is not there, with a lock. `BlockingIOError` if another one has it."""
    import fcntl  # there is none on Windows

    how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        file = name.open("ab")
        try:
            fcntl.flock(file, how)
            # The process that had it may have removed the name after it was opened here.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(name.stat(), os.fstat(file.fileno())):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _target(path: Path) -> Path:
    """The file that a name leads to, there or not. `OSError` for a link that leads to itself."""
    target = real_path(path)
    if target.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link that leads to itself: remove it", str(path))
    return target


def _in_place(path: Path) -> bool:
    """Whether to write into what is there. `OSError` for a named pipe, which may have no reader."""
    if path.is_fifo() and real_path(path).exists():  # the shell's own have no name
        raise OSError(errno.ESPIPE, "a named pipe: name a file, or /dev/stdout", str(path))
    return _is_special(path)


def _is_special(path: Path) -> bool:
    """Whether this is a device, a pipe or a socket."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _identity(path: Path) -> tuple[int, int] | None:
    """A file's identity under any name. None for what is not there, and for devices."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
