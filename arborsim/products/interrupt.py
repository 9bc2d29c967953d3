"""Commands that Ctrl-C ends with a word on what is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(left: str = "; nothing was written") -> Iterator[None]:
    """Ctrl-C in this work ends the command with exit code 130, and says what it left."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left) from None
