"""A progress bar that appears only when there is something to wait for."""

from __future__ import annotations

import sys
import time
from types import TracebackType

PATIENCE_S = 2.0


class PatientProgress:
    """Shows a bar with time left on standard error once work has taken two seconds.

    Parameters
    ----------
    total : int
        Units of work.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._bar: object | None = None

    def advance(self, what: str, units: int) -> None:
        """`units` more are done; `what` is being worked on."""
        self._done += units
        if self._bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self._start < PATIENCE_S:
                return
            self._open()
        self._update(what)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeLeft(),
            console=Console(stderr=True),
            transient=True,
        )
        self._progress.start()
        self._bar = self._progress.add_task("", total=self._total)

    def _update(self, what: str) -> None:
        self._progress.update(self._bar, completed=self._done, description=what)  # type: ignore[arg-type]

    def __enter__(self) -> PatientProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._progress.stop()
