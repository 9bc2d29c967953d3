"""Which results a file holds, and how each kind is read."""

from __future__ import annotations

from pathlib import Path

from arborsim.api.results import Results
from arborsim.core.errors import UnknownName
from arborsim.core.tables import read_table


def read(path: Path) -> Results:
    """The results in a file.

    Raises
    ------
    UsageError
    """
    from arborsim.api.replay import ReplayResults
    from arborsim.api.search import SearchResults

    kinds = {each.kind: each for each in (ReplayResults, SearchResults)}
    frame, metadata = read_table(path)
    if metadata["kind"] not in kinds:
        raise UnknownName(f"kind of results in {path}", metadata["kind"], kinds)
    return kinds[metadata["kind"]].read(frame, metadata)
