"""How many tokens HBM may hold: a number of tokens, or a share of what full retention peaks at."""

from __future__ import annotations

import math
from dataclasses import dataclass

from arborsim.core.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """A budget as the user gave it."""

    text: str  # as given, for tables
    tokens: int | None = None  # an absolute number of tokens,
    share: float | None = None  # or a share in (0, 1] of the episode's full-retention peak

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``"2048"`` is tokens, ``"0.25"`` a share; ``"1"`` is the whole.

        Raises
        ------
        UsageError
            Not a number, not positive, or a share above 1.
        """
        text = text.strip()
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise UsageError(
                f"budget '{text}' is not a number: give tokens (2048) or a share (0.25)"
            )
        if number <= 0:
            raise UsageError(
                f"budget '{text}' must be above 0: give tokens (2048) or a share (0.25)"
            )
        if number <= 1:
            return cls(text, share=number)
        if number != int(number):
            raise UsageError(
                f"budget '{text}' is neither a share up to 1 nor a whole number of tokens"
            )
        return cls(text, tokens=int(number))

    def in_tokens(self, full_peak_tokens: int) -> int:
        """Tokens for an episode that peaks at `full_peak_tokens` when nothing is evicted."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(1, math.floor(self.share * full_peak_tokens))
