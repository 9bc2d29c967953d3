"""What Ctrl-C does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


def interrupted(left: str) -> int:
    """Print what Ctrl-C left; returns the exit code."""
    typer.echo(f"arborsim: interrupted{left}", err=True)
    return 130


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C in work that leaves nothing behind: says so, and ends with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(interrupted("; nothing was written")) from None
