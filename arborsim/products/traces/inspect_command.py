"""`arborsim inspect`: what a trace holds, and which policies it can serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from arborsim.products.declare import Count, Option, Positive
from arborsim.products.options import Json, print_json


def inspect(
    trace: Annotated[Path, Option(complete="trace")],
    *,
    all: bool = False,
    episodes: Annotated[Count | None, Option(shown="1, with --all 2")] = None,
    nodes: Annotated[Positive | None, Option(shown="those that fit, with --all 24")] = None,
    json: Json = False,
) -> None:
    """Show what a trace holds: its model and search, its sizes, and what can replay it.

    Parameters
    ----------
    trace
        A trace file, or the .parts of a recording.
    all
        Also how it was made, sizes per column, each policy, more trees.
    episodes
        Episodes whose tree is drawn.
    nodes
        Most nodes per tree.
    json
        Print JSON instead of tables.
    """
    from arborsim.core.documents import strict
    from arborsim.products.traces.ask import open_trace

    found = open_trace(trace)
    if json:
        print_json(strict(found.description))
    else:
        found.inspect(everything=all, episodes=episodes, nodes=nodes)
