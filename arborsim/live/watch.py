"""Who hears of a validation while it runs."""

from __future__ import annotations

from typing import Any, Protocol

from arborsim.live.request import LiveFacts


class ValidationWatch(Protocol):
    """Whoever asked for a validation; an exception raised here ends it."""

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """The model is loaded; so many problems will be searched."""

    def wants(self, episode: int) -> bool:
        """Whether this problem is still missing (a resumed run has some)."""

    def running(self, episode: int, what: str, tokens: int) -> None:
        """So many more tokens have been generated."""

    def checked(self, checks: tuple[Any, ...]) -> None:
        """One problem is complete under all policies and budgets: as `CellCheck`s."""
