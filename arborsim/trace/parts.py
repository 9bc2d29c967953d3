"""The directory of an unfinished recording: one small Parquet file per whole episode."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from arborsim.core.errors import TraceError, UsageError

PARTS_SUFFIX = ".parts"
_PART = re.compile(r"episode-(\d{6,})\.parquet")


def parts_directory(path: Path) -> Path:
    """Where the episodes of a running or interrupted recording of `path` lie."""
    return path.with_name(path.name + PARTS_SUFFIX)


def part_name(episode: int) -> str:
    return f"episode-{episode:06d}.parquet"


def has_parts(directory: Path) -> bool:
    return any(_PART.fullmatch(entry.name) for entry in directory.iterdir())


def part_files(directory: Path) -> list[Path]:
    """The episodes in a parts directory, in order.

    Raises
    ------
    TraceError
        There are none, or one is missing.
    """
    found = {
        int(match[1]): entry
        for entry in directory.iterdir()
        if (match := _PART.fullmatch(entry.name))
    }
    if not found:
        raise TraceError(
            f"{directory}: this directory holds no recorded episodes; give a trace file, or the "
            f"{PARTS_SUFFIX} directory of an interrupted recording"
        )
    for number in range(len(found)):
        if number not in found:
            raise TraceError(
                f"{directory}: episode {number} is missing, although later ones are there; "
                "record it again"
            )
    return [found[number] for number in range(len(found))]


def scrap_directory(directory: Path) -> Path:
    """Where a parts directory lies while it is made from a file, or deleted: never half of one."""
    return directory.with_name(directory.name + ".tmp")


def remove_parts(directory: Path) -> None:
    """Delete a parts directory, but refuse to touch one that holds anything else.

    All of it goes at once: a process killed in the middle leaves only a `scrap_directory`.
    """
    _refuse_strange(directory)
    remove_scrap(directory)
    scrap = directory.rename(scrap_directory(directory))
    shutil.rmtree(scrap)


def remove_scrap(directory: Path) -> None:
    """Delete what a killed process left of making or deleting this parts directory."""
    scrap = scrap_directory(directory)
    if scrap.is_dir():
        _refuse_strange(scrap)
        shutil.rmtree(scrap)


def _refuse_strange(directory: Path) -> None:
    strange = [
        entry.name
        for entry in directory.iterdir()
        if not _PART.fullmatch(entry.name) and entry.suffix != ".tmp"
    ]
    if strange:
        raise UsageError(f"{directory} holds files that are no episodes ({strange[0]}): move them")
