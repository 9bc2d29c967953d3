"""`arborsim inspect`: what a trace holds, and which policies it can serve."""

from __future__ import annotations

from pathlib import Path

from arborsim.products.command import argument, command, option
from arborsim.products.options import json_option, print_json


@command
def inspect(
    trace: Path = argument(..., "A trace file, or the .parts of a recording.", complete="trace"),
    all: bool = option(
        False, "Also how it was made, sizes per column, each policy, more trees.", "--all"
    ),
    episodes: int | None = option(
        None, "Episodes whose tree is drawn.", shown="1, with --all 2", min=0
    ),
    nodes: int | None = option(
        None, "Most nodes per tree.", shown="those that fit, with --all 24", min=1
    ),
    json: bool = json_option(),
) -> None:
    """Show what a trace holds: its model and search, its sizes, and what can replay it."""
    from arborsim.core.documents import strict
    from arborsim.products.traces.ask import open_trace

    found = open_trace(trace)
    if json:
        print_json(strict(found.description))
    else:
        found.inspect(everything=all, episodes=episodes, nodes=nodes)
