"""Where the keys and values of a token can physically be."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from arborsim.core.tiers import Tier


class Place(IntEnum):
    """A pool, or nowhere.

    A token in DDR can have a second, *staged* copy on the device; attention then reads that one.
    """

    HBM = 0
    HBM_QUANTISED = 1
    DDR = 2
    DDR_QUANTISED = 3
    STAGING = 4
    STAGING_QUANTISED = 5
    LOST = 6

    @property
    def quantised(self) -> bool:
        return self in (Place.HBM_QUANTISED, Place.DDR_QUANTISED, Place.STAGING_QUANTISED)

    @property
    def on_host(self) -> bool:
        return self in (Place.DDR, Place.DDR_QUANTISED)

    @property
    def staged(self) -> bool:
        return self in (Place.STAGING, Place.STAGING_QUANTISED)


#: The place of a tier's own copy, by value of `Tier`.
HOME = np.array([Place.HBM, Place.HBM_QUANTISED, Place.DDR, Place.DDR_QUANTISED, Place.LOST],
                dtype=np.int8)  # fmt: skip
#: The place of the staged copy of a token whose own is in this place.
STAGED = {Place.DDR: Place.STAGING, Place.DDR_QUANTISED: Place.STAGING_QUANTISED}

assert [int(tier) for tier in Tier] == list(range(len(HOME)))
