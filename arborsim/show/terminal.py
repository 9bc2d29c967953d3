"""Text for terminals."""

from __future__ import annotations


def plain(text: str) -> str:
    """Names come from files: nothing in them may steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
