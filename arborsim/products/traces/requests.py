"""Make a trace of a log of requests: what `arborsim import requests` and plans of a log use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from arborsim.machine.lookup import load_geometry
from arborsim.trace.importers.request_logs import Reading, RequestLog, read_requests
from arborsim.trace.importers.requests import shared_prefix_tokens
from arborsim.trace.importers.searches import Advance
from arborsim.trace.importers.sources import (
    NO_ENDS,
    Description,
    check_out,
    refuse_damage,
    trace_info,
    write_trace,
)


def import_requests(
    log: Path,
    out: Path,
    reading: Reading | None = None,
    *,
    limit: int = 0,
    skip_damaged: bool = False,
    overwrite: bool = False,
    model: str = "llama-3.1-8b",
    command: str = "",
    advance: Advance = lambda what, units: None,
) -> RequestLog:
    """Read a log of requests and write it as a trace, whole or not at all.

    Parameters
    ----------
    log, out : Path
        The log, in any of the known formats, and the trace to make.
    reading : Reading, optional
        What the log does not say itself: columns of an unknown format, units, rates of text.
    limit : int
        Items to read, or 0 for all.
    skip_damaged : bool
        Leave out damaged items; by default the first one refuses the log.
    model : str
        Geometry to charge for: a name, or a config.json.

    Returns
    -------
    RequestLog
        The requests in order of arrival, the format, and `notes` for who reads the result.

    Raises `UsageError`: the log cannot be read or is damaged, or `out` cannot be written.
    """
    check_out(out, overwrite)
    reading = reading or Reading()
    found = read_requests(log, limit=limit, reading=reading)
    if not (skip_damaged and found.searches):
        refuse_damage(log, found)
    extra = {"prefix_block_tokens": found.block_tokens, **NO_ENDS}
    if any(request.after for request in found.searches):
        extra["assumed_token_s"] = reading.token_s
    about = Description(found.format or "requests", "requests", "linear", found.lengths, {}, extra)
    info = trace_info(log, about, found, load_geometry(model), command)
    write_trace(found, info, out, overwrite, advance)
    return found


def said_of(log: RequestLog) -> Iterator[str]:
    """Lines for who imported it: what was assumed, and how much prompts share."""
    yield from log.notes
    if log.block_tokens:
        saved = shared_prefix_tokens(log.searches, log.block_tokens)
        whole = sum(request.prompt_tokens for request in log.searches)
        yield (
            f"{saved:,} of {whole:,} prompt tokens ({saved / whole:.1%}) had come before, as a "
            f"prefix of {log.block_tokens}-token blocks: plans share them, replays do not"
        )
