"""Bars for work that takes a while, on standard error, and what Ctrl-C does to it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

PATIENCE_S = 2.0


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C in work that leaves nothing behind: says so, and ends with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("arborsim: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None


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
        self._progress.update(self._bar, completed=self._done, description=what)  # type: ignore[arg-type]

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeLeft()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._progress.start()
        self._bar = self._progress.add_task("", total=self._total)

    def __enter__(self) -> PatientProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._progress.stop()


class Stages:
    """A patient bar for each stage of the work (`arborsim.calibrate.backend.OnProgress`)."""

    def __init__(self) -> None:
        self._bar: PatientProgress | None = None
        self._what, self._done = "", 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None or what != self._what:
            self.__exit__()
            self._bar = PatientProgress(total)
            self._what, self._done = what, 0
        self._bar.advance(what, done - self._done)
        self._done = done

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()


class LiveBar:
    """A bar over the searches of a live model; without a terminal it shows nothing.

    Parameters
    ----------
    what : str
        Said until the first `show`.
    time_left : bool
        Let the bar estimate it.
    """

    def __init__(self, what: str, *, time_left: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        console = Console(stderr=True)
        columns: list[Any] = [BarColumn(bar_width=16), MofNCompleteColumn()]
        columns += [TimeLeft()] if time_left else []
        self._progress = Progress(
            *columns,
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # rich would still print an empty line
        )
        self._row = self._progress.add_task(what, total=None)

    def show(self, what: str | None = None, **counts: int) -> None:
        """Say `what`; `counts` are ``completed`` and ``total``."""
        self._progress.update(self._row, description=what, **counts)  # type: ignore[arg-type]

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def __enter__(self) -> LiveBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
