"""Progress bars on standard error, and what Ctrl-C does."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 2.0


def interrupted(left: str) -> int:
    """Print what Ctrl-C left; returns the exit code."""
    typer.echo(f"arborsim: interrupted{left}", err=True)
    return 130


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C in work that leaves nothing behind: says so, and ends with exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(interrupted("; nothing was written")) from None


class PatientProgress:
    """Shows a bar with time left on standard error once `total` units of work take two seconds."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._bar: Progress | None = None

    def advance(self, what: str, units: int) -> None:
        """`units` more are done; `what` is being worked on."""
        self._done += units
        if self._bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self._start < PATIENCE_S:
                return
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task("", total=self._total)
        self._bar.update(self._bar.task_ids[0], completed=self._done, description=what)

    def __enter__(self) -> PatientProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class Stages:
    """A patient bar for each stage of the work (`arborsim.calibrate.backend.OnProgress`)."""

    def __init__(self) -> None:
        self._bar: PatientProgress | None = None
        self._what, self._done = "", 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None or what != self._what:
            self.__exit__()
            self._bar, self._what, self._done = PatientProgress(total), what, 0
        self._bar.advance(what, done - self._done)
        self._done = done

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()


class LiveBar:
    """A bar over the searches of a live model; without a terminal it shows nothing.

    `what` is said until the first `show`; with `time_left` the bar estimates that.
    """

    def __init__(self, what: str, *, time_left: bool = False) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        columns: list[Any] = [progress.BarColumn(bar_width=16), progress.MofNCompleteColumn()]
        columns += [progress.TimeRemainingColumn()] if time_left else []
        self._progress = progress.Progress(
            *columns,
            progress.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # rich would still print an empty line
        )
        self._row = self._progress.add_task(what, total=None)
        self.stop = self._progress.stop

    def show(self, what: str | None = None, **counts: int) -> None:
        """Show `what`; `counts` are ``completed`` and ``total``."""
        self._progress.update(self._row, description=what, **counts)  # type: ignore[arg-type]

    def __enter__(self) -> LiveBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
