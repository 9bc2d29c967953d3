"""ArborKV's theta: what a thought block is worth, found by hiding blocks (arXiv:2605.22106, 5.1).

On searches recorded with their whole cache, every closed block on the path to a right answer is
hidden from all that follows, which is then generated anew.  Its target is 1 if the answer is lost.
A logistic fit of the targets on the features of MSVE (Eq. 1) gives theta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arborsim.calibrate.blocks import Block
from arborsim.calibrate.statistics import (
    auc,
    bootstrap,
    fit_logistic,
    leave_one_out_scores,
    rows_of,
)
from arborsim.core.errors import UsageError

FEATURES = ("value", "certainty", "attention")
LEAST_SHARE = 0.05  #: of blocks that matter, and of blocks that do not
RESAMPLES = 200  #: each is a fit


@dataclass(frozen=True)
class Msve:
    """The outcome.

    Attributes
    ----------
    theta : tuple of float
        Of v, u and a.
    low, high : tuple of float
        95% interval of each, by bootstrap over traces.
    auc : float
        How well blocks are told apart by a fit that has not seen their trace.
    auc_alone : tuple of float
        How well each feature tells them apart by itself.
    blocks, traces : int
        That could be judged: without hiding anything, the answer came out right.
    lost : float
        Share of those blocks without which the answer was lost.
    unjudged : int
        Blocks after which even the whole cache does not lead to the right answer.
    """

    theta: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    auc: float
    auc_alone: tuple[float, ...]
    blocks: int
    traces: int
    lost: float
    unjudged: int


def fit_msve(blocks: Sequence[Block], ridge: float, seed: int) -> Msve:
    """Fit theta to what hiding the blocks did.

    Raises
    ------
    UsageError
        Nearly all blocks matter, or nearly none: theta cannot be told from them.
    """
    judged = [block for block in blocks if block.whole]
    lost = np.array([not block.masked for block in judged], dtype=bool)
    names, trace = np.unique([block.trace for block in judged], return_inverse=True)
    share = float(lost.mean()) if len(lost) else 0.0
    if len(names) < 2 or not LEAST_SHARE <= share <= 1 - LEAST_SHARE:
        raise UsageError(
            f"{share:.1%} of {len(lost)} blocks of {len(names)} traces are needed for the answer: "
            "theta cannot be told from such targets"
        )
    x = np.array([block.features for block in judged])

    def resampled(chosen: np.ndarray) -> np.ndarray:
        rows = rows_of(trace, chosen)
        return fit_logistic(x[rows], lost[rows], ridge)

    low, high = bootstrap(resampled, len(names), seed, RESAMPLES)
    return Msve(
        tuple(fit_logistic(x, lost, ridge).tolist()),
        tuple(low.tolist()),
        tuple(high.tolist()),
        auc(leave_one_out_scores(x, lost, trace, ridge), lost),
        tuple(auc(feature, lost) for feature in x.T),
        len(lost),
        len(names),
        share,
        len(blocks) - len(judged),
    )
