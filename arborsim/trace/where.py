"""Where in a trace something is wrong, and the one-line error that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from arborsim.core.errors import TraceError


@dataclass(frozen=True)
class Where:
    """The place that error messages name."""

    file: str
    episode: int

    def error(self, what: str, row: int | None = None) -> TraceError:
        at = f"episode {self.episode}" + ("" if row is None else f", row {row}")
        return TraceError(
            f"{self.file}: {at}: {what}; the file is damaged or was written by a broken recorder"
        )

    def check(
        self, wrong: np.ndarray, what: Callable[[int], str], rows: np.ndarray | None = None
    ) -> None:
        """Raise for the first true entry of `wrong`.

        Parameters
        ----------
        wrong : bool ``[n]``
        what : callable
            Makes the message from the entry's index.
        rows : int ``[n]``, optional
            Row of each entry, if they are not rows themselves.
        """
        if wrong.any():
            first = int(np.argmax(wrong))
            raise self.error(what(first), first if rows is None else int(rows[first]))
