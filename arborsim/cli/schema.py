"""`arborsim schema`: the JSON schemas of what ``--json`` prints."""

from __future__ import annotations

from arborsim.cli.command import argument, command
from arborsim.cli.options import print_json


@command
def schema(
    name: str = argument(..., "A command that has --json.", complete="schema"),
) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with --json."""
    from arborsim.show.schemas import schema_of

    print_json(schema_of(name))
