"""Where a token's keys and values live, and how many tokens HBM may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from arborsim.core.errors import UsageError


class Tier(IntEnum):
    """Where a token's keys and values live, best first.

    The order matters: a larger value is further down, and *protected* tokens never move down.  The
    quantised tiers hold the first of the policy's formats (`arborsim.core.formats`), the coarse
    ones the second, which is narrower.
    """

    HBM = 0
    HBM_QUANTISED = 1
    HBM_COARSE = 2
    DDR = 3
    DDR_QUANTISED = 4
    DDR_COARSE = 5
    EVICTED = 6

    @property
    def in_hbm(self) -> bool:
        return self < Tier.DDR

    @property
    def in_ddr(self) -> bool:
        return Tier.DDR <= self < Tier.EVICTED

    @property
    def rung(self) -> int:
        """How far it is quantised: 0 not at all, else the number of its format, from 1."""
        return 0 if self == Tier.EVICTED else self % RUNGS

    @property
    def quantised(self) -> bool:
        return self.rung > 0


RUNGS = 3  # of HBM, and of DDR: full precision, and two formats
NUM_TIERS = len(Tier)
_DDR = int(Tier.DDR)  # NumPy compares int8 with a member of an enum ten times slower

#: How tokens in DDR take part in attention: `arborsim.machine.reading` says what each means.
RECALLS = ("stage", "stream", "near", "ondemand")
#: Those under which CUDA graphs compute live decode steps; under the others a step that reads DDR
#: waits for the host in every layer.
CAPTURED_RECALLS = ("stage", "stream")


def hbm_mask(tiers: np.ndarray) -> np.ndarray:
    """Bool, in the shape of `tiers`, int8: which of them are in HBM."""
    return np.asarray(tiers < _DDR)


@dataclass(frozen=True)
class Budget:
    """How many tokens HBM may hold, as the user gave it."""

    text: str  # as given, for tables
    tokens: int | None = None  # an absolute number of tokens,
    share: float | None = None  # or a share in (0, 1] of the episode's full-retention peak

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``"2048"`` is tokens, ``"0.25"`` a share, ``"1"`` the whole; else a `UsageError`."""
        text = text.strip()
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= 0:
            what = "must be above 0" if math.isfinite(number) else "is not a number"
            raise UsageError(f"budget '{text}' {what}: give tokens (2048) or a share (0.25)")
        if number <= 1:
            return cls(text, share=number)
        if number != int(number):
            raise UsageError(
                f"budget '{text}' is neither a share up to 1 nor a whole number of tokens"
            )
        return cls(text, tokens=int(number))

    @classmethod
    def stated(cls, value: object) -> Budget:
        """A file's budget, a number or a text; a `ValueError` has the rule, as `parsed` wants."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError("must be a budget: 2048, or 0.25")
        return cls.parse(str(value))

    def in_tokens(self, full_peak_tokens: int) -> int:
        """Tokens for an episode that peaks at `full_peak_tokens` when nothing is evicted."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(1, math.floor(self.share * full_peak_tokens))
