"""What a policy takes on the host, beside the model: taking signals in, scoring, deciding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from arborsim.core.errors import UnknownName, UsageError


@dataclass(frozen=True)
class PolicySeconds:
    """A policy's seconds.

    Attributes
    ----------
    iteration_s : float
        Every decode iteration, also those after which nothing is decided.
    lane_s : float
        The same for each sequence that decodes: its newest token's signals.
    turn_s, turn_lane_s : float
        Whenever the search turns to other sequences, once and for each of them: thoughts end and
        begin, with the signals that were held back until then.
    decision_base_s, decision_per_token_s : float
        A decision: once, and per token it looks at.
    """

    iteration_s: float = 0.0
    lane_s: float = 0.0
    turn_s: float = 0.0
    turn_lane_s: float = 0.0
    decision_base_s: float = 0.0
    decision_per_token_s: float = 0.0

    def decision_s(self, examined_tokens: Any) -> Any:
        """One decision over so many tokens; a number or an array."""
        return self.decision_base_s + self.decision_per_token_s * examined_tokens

    def observing_s(self, sequences: int) -> float:
        """One iteration of so many sequences, without a decision."""
        return self.iteration_s + self.lane_s * sequences

    def turning_s(self, sequences: int) -> float:
        """One turn to so many sequences."""
        return self.turn_s + self.turn_lane_s * sequences

    @classmethod
    def from_table(cls, table: Any, where: str) -> PolicySeconds:
        """Parse a TOML table; `where` names it in error messages.

        Raises
        ------
        UsageError
            A key is unknown, or a value is no number of seconds.
        """
        if not isinstance(table, Mapping):
            raise UsageError(f"{where} must be a table of seconds, not {table!r}")
        known = [entry.name for entry in fields(cls)]
        for key, value in table.items():
            if key not in known:
                raise UnknownName(f"key in {where}", key, known)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < inf:
                raise UsageError(f"{where}: {key} must be 0 seconds or more, not {value!r}")
        return cls(**{key: float(value) for key, value in table.items()})
