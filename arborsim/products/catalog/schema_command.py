"""`arborsim schema`: the JSON schemas of what ``--json`` prints."""

from __future__ import annotations

from typing import Annotated

from arborsim.products.declare import Option
from arborsim.products.options import print_json


def schema(
    name: Annotated[str, Option(complete="schema")],
) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with --json.

    Parameters
    ----------
    name
        A command that has --json.
    """
    from arborsim.products.schemas import schema_of

    print_json(schema_of(name))
