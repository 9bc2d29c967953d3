"""Which results a file holds, and how each kind is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import located
from arborsim.core.tables import holds_key, read_table
from arborsim.products.results import Results


def load_results(path: str | os.PathLike[str]) -> Results:
    """Read results from a file: Parquet of ``--out`` or `Results.save`, or the log of a live run.

    Parameters
    ----------
    path : path
        A Parquet file of `replay`, `search` or `plan`, the log (JSON lines) of `live` or
        `fidelity`, or
        ``results.parquet`` of `arborsim validate`.

    Returns
    -------
    Results
        Of the kind that the file holds.  It offers what the file holds: pages of replays and
        searches also show pictures of searches, which no file keeps.

    Raises
    ------
    UsageError
        The file cannot be read, is damaged or holds no results.
    """
    from arborsim.core.parquet import one_line
    from arborsim.products.fidelity.results import FidelityResults
    from arborsim.products.live.results import LiveResults
    from arborsim.products.plan.ask import PlanResults
    from arborsim.products.replay.ask import ReplayResults
    from arborsim.products.search.ask import SearchResults
    from arborsim.products.tune.ask import TuneResults
    from arborsim.products.validate.ask import ValidationResults

    path = Path(path)
    if head := _head_of_log(path):
        of_documents = b"FidelityResult" in head
        return FidelityResults.read_log(path) if of_documents else LiveResults.read_log(path)
    if path.suffix in (".csv", ".json"):
        raise UsageError(
            f"{path}: a .{path.suffix[1:]} file does not say all that results need: save them as "
            ".parquet"
        )
    if holds_key(path, b"arborsim.validation"):
        return ValidationResults.read_file(path)
    frame, metadata = read_table(path)
    tables: tuple[type[Results], ...] = (
        ReplayResults, SearchResults, PlanResults, LiveResults, FidelityResults,
        TuneResults,
    )  # fmt: skip
    kinds: dict[str, Any] = {each.kind: each for each in tables}
    if metadata["kind"] not in kinds:
        raise UnknownName(f"kind of results in {path}", metadata["kind"], kinds)
    try:
        with located(str(path)):
            found: Results = kinds[metadata["kind"]].read(frame, metadata)
        return found
    except KeyError as error:
        raise UsageError(
            f"{path}: its table or metadata lacks {error}; make the file again with --out"
        ) from None
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UsageError(
            f"{path}: its table or metadata is damaged ({one_line(error)}); make the file again "
            "with --out"
        ) from None


def _head_of_log(path: Path) -> bytes:
    """The beginning of a file of JSON lines with a head, as live runs write them, else nothing."""
    try:
        if path.is_fifo():  # whose writer may never come
            return b""
        with path.open("rb") as file:
            head = file.read(64)
        return head if head.startswith(b'{"format":') else b""
    except OSError:
        return b""
