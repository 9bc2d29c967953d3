"""Write what a source holds as a trace, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.trace.importers.sources import Contents
from arborsim.trace.schema import Capture, Geometry, TraceInfo
from arborsim.trace.whole import WholeTraceWriter

#: `Description.extra` of a source that does not tell which thoughts ended (`TraceInfo.knows_ends`).
NO_ENDS = {"ends": "unknown"}


@dataclass(frozen=True)
class Description:
    """What a format says about its searches, for the trace's metadata.

    Attributes
    ----------
    format, task, search, lengths : str
        `lengths` says where the numbers of tokens are from.
    parameters : dict
        Options of the import.
    extra : dict
    """

    format: str
    task: str
    search: str
    lengths: str
    parameters: dict[str, Any]
    extra: dict[str, Any]


def refuse_damage(path: Path, contents: Contents) -> None:
    """Raise a `UsageError` that names the first damaged item, and counts all."""
    if not contents.damaged:
        return
    first, count = contents.damaged[0], len(contents.damaged)
    if not contents.searches:
        raise UsageError(f"{path}, {first.place}: {first.what}; {_nothing(contents)}")
    also = f" ({count} of {contents.items} are damaged)" if count > 1 else ""
    raise UsageError(
        f"{path}, {first.place}: {first.what}{also}; repair the file, or leave out what is "
        "damaged with --on-damage skip"
    )


def _nothing(contents: Contents) -> str:
    """What to do about a source of which no item could be read."""
    items = "its only item is" if contents.items == 1 else f"all {contents.items} items are"
    return (
        f"{items} unreadable as this format: is it the right file, and the right one of "
        "`arborsim import --help`?"
    )


def trace_info(
    path: Path, about: Description, contents: Contents, geometry: Geometry, command: str = ""
) -> TraceInfo:
    """Metadata: the source by name and digest, what is made up, and what was left out."""
    extra = {
        **about.extra,
        "source": path.name,
        "source_format": about.format,
        "source_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "source_items": contents.items,
        "lengths": about.lengths,
        "token_ids": "unknown",
        "times": "unknown",
        "left_out": [f"{damaged.place}: {damaged.what}" for damaged in contents.damaged],
    }
    return TraceInfo(
        geometry=geometry,
        model=f"not named by the source; charged as {geometry.name}",
        task=about.task,
        search=about.search,
        search_parameters=about.parameters,
        capture=Capture.TREE,
        command=command,
        extra=extra,
    )


def write_trace(
    contents: Contents,
    info: TraceInfo,
    out: Path,
    overwrite: bool = False,
    advance: Callable[[str, int], None] = lambda what, units: None,
) -> None:
    """Write the searches to `out`, which appears when all of them are written.

    Parameters
    ----------
    contents : Contents
    info : TraceInfo
    out : Path
    overwrite : bool
        Replace `out`.
    advance : callable
        Called with what was written and its number of tokens.

    Raises
    ------
    UsageError
        `out` exists, cannot be written, or there is no search to write.
    """
    check_out(out, overwrite)
    if not contents.searches:
        raise UsageError(f"nothing to import: {_nothing(contents)}")
    scrap = out.with_name(f".{out.name}.import")
    try:
        with WholeTraceWriter(scrap, info) as writer:
            for number, search in enumerate(contents.searches):
                writer.write_episode(search.columns())
                advance(f"search {number}", search.num_tokens)
        os.replace(scrap, out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        scrap.unlink(missing_ok=True)


def check_out(out: Path, overwrite: bool) -> None:
    """Refuse an output that exists or has no folder, before anything is read."""
    if out.is_dir():
        raise UsageError(f"{out} is a directory: name a file to write")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: choose another name, or --overwrite")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: there is no directory {out.parent}")
