"""`arborsim schema`: the JSON schemas of what ``--json`` prints."""

from __future__ import annotations

from arborsim.products.command import argument, command
from arborsim.products.options import print_json


@command
def schema(
    name: str = argument(..., "A command that has --json.", complete="schema"),
) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with --json."""
    from arborsim.products.schemas import schema_of

    print_json(schema_of(name))
