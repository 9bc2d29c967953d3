"""Where a token's keys and values live, and how many tokens HBM may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.core.units import is_plain, read

#: Memories that tokens can lie in, the nearest first, by the `Tier.memory` of their tiers; what has
#: no name stands for none of them.  A machine has the first two, and those that its profile lists.
MEMORIES = ("HBM", "DDR", "", "NVMe", "remote")
HBM, DDR = MEMORIES.index("HBM"), MEMORIES.index("DDR")
BELOW_DDR = tuple(name for name in MEMORIES[DDR + 1 :] if name)
RUNGS = 3  # of each memory: full precision, and two formats


class Tier(IntEnum):
    """A place for a token's keys and values: one of the `MEMORIES`, in a format, nearest first.

    The value is ``RUNGS * memory + rung``.  *Protected* tokens never move further down.  The
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
    NVME = 9  # logs and pictures have marks of their own in between
    NVME_QUANTISED = 10
    NVME_COARSE = 11
    REMOTE = 12
    REMOTE_QUANTISED = 13
    REMOTE_COARSE = 14

    @property
    def memory(self) -> int:
        """Which of the `MEMORIES` it lies in."""
        return self // RUNGS

    @property
    def in_hbm(self) -> bool:
        return self.memory == HBM

    @property
    def offloaded(self) -> bool:
        """Whether it lies in a memory other than HBM."""
        return not self.in_hbm and self != Tier.EVICTED

    @property
    def rung(self) -> int:
        """How far it is quantised: 0 not at all, else the number of its format, from 1."""
        return self % RUNGS

    @property
    def quantised(self) -> bool:
        return self.rung > 0

    def is_below(self, other: Tier) -> bool:
        """Whether it is further down: what is evicted is below everything."""
        return bool(lowered(np.array(self), np.array(other)))


#: Columns of a table by tier: of machines with HBM and DDR alone, and of all others.
NUM_TIERS, MOST_TIERS = 1 + Tier.EVICTED, 1 + max(Tier)
_DDR, _EVICTED = int(Tier.DDR), int(Tier.EVICTED)  # members of an enum are slow to compare with


def by_tier(rule: Callable[[Tier], Any]) -> np.ndarray:
    """A table by tier of what `rule` says, ``[MOST_TIERS]``. 0 or False where there is none."""
    found = {int(tier): rule(tier) for tier in Tier}
    return np.array([found.get(value, type(found[0])()) for value in range(MOST_TIERS)])


def num_tiers(tiers: Iterable[int]) -> int:
    """How many columns a table by tier needs that counts these."""
    return MOST_TIERS if max(tiers) > _EVICTED else NUM_TIERS


def in_two_memories(tiers: np.ndarray) -> np.ndarray:
    """Tiers as pictures show them, which have a colour for HBM and one for all other memories."""
    return np.where(tiers > _EVICTED, _DDR + tiers % RUNGS, tiers)


def lowered(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Bool: which of tiers, int8, `target` are further down than `source`, of the same shape."""
    down: np.ndarray = target > source
    return np.asarray(down | ((target == _EVICTED) & (source > _EVICTED)))


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
        """``"2048"`` is tokens, ``"0.25"`` a share, ``"1"`` the whole. Else a `UsageError`.

        With units, ``"2k"`` is tokens, and ``"25%"`` a share.
        """
        text = text.strip()
        try:
            number = float(text) if is_plain(text) else read("number", text)
        except ValueError:
            number = math.nan
        else:
            text = text if is_plain(text) else f"{number:.12g}"
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
        """A file's budget, a number or a text. A `ValueError` has the rule, as `parsed` wants."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError("must be a budget: 2048, or 0.25")
        return cls.parse(str(value))

    def in_tokens(self, full_peak_tokens: int) -> int:
        """Tokens for an episode that peaks at `full_peak_tokens` when nothing is evicted."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(1, math.floor(self.share * full_peak_tokens))
