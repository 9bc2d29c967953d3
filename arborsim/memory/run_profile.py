"""What a ledger was like at every iteration of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from arborsim.memory.census import Changes


@dataclass(frozen=True)
class RunProfile:
    """The ledger at every iteration of a run; arrays have shape ``[steps]`` and dtype int64.

    ``before`` is when the iteration's tokens are in HBM and nothing has moved yet (the transient
    peak), ``after`` is when its moves are done.  Token counts are those of the fullest group.

    Attributes
    ----------
    hbm_tokens_before, hbm_tokens_after, quantised_tokens_after, ddr_tokens_after : array
    hbm_page_bytes_before, hbm_page_bytes_after, ddr_bytes_after, quantised_bytes_after : array
    counts_before : int64 ``[tiers, steps]``
        Tokens by tier, summed over the groups.
    changes : Changes
        What the moves of the run changed.
    """

    hbm_tokens_before: np.ndarray
    hbm_tokens_after: np.ndarray
    quantised_tokens_after: np.ndarray
    ddr_tokens_after: np.ndarray
    hbm_page_bytes_before: np.ndarray
    hbm_page_bytes_after: np.ndarray
    ddr_bytes_after: np.ndarray
    quantised_bytes_after: np.ndarray
    counts_before: np.ndarray
    changes: Changes

    def with_windows(self, held_bytes: np.ndarray) -> RunProfile:
        """The profile with what layers with a sliding window hold, ``[steps]``, in its pages."""
        return replace(
            self,
            hbm_page_bytes_before=self.hbm_page_bytes_before + held_bytes,
            hbm_page_bytes_after=self.hbm_page_bytes_after + held_bytes,
        )
