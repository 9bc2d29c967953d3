"""The places a token's keys and values can live."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Where a token's keys and values live, best first.

    The order matters: a larger value is further down, and *protected* tokens never move down.
    """

    HBM = 0
    HBM_QUANTISED = 1
    DDR = 2
    DDR_QUANTISED = 3
    EVICTED = 4

    @property
    def in_hbm(self) -> bool:
        return self <= Tier.HBM_QUANTISED

    @property
    def in_ddr(self) -> bool:
        return self in (Tier.DDR, Tier.DDR_QUANTISED)

    @property
    def quantised(self) -> bool:
        return self in (Tier.HBM_QUANTISED, Tier.DDR_QUANTISED)


NUM_TIERS = len(Tier)

#: How tokens in DDR take part in attention: `arborsim.machine.recall` says what each means.
RECALLS = ("stage", "stream", "near", "ondemand")
