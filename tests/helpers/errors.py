"""Lines of standard error, for tests."""

from __future__ import annotations


def without_size(error: str) -> list[str]:
    """Its lines but those by which `record` says beforehand how large a recording gets."""
    return [line for line in error.splitlines() if not line.startswith("recording about ")]
