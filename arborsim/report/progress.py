"""Progress on standard error: a bar in a terminal, lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from arborsim.report.table import terminal

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE_S = 2.0
#: Between two lines of progress where there is no terminal.
LINE_S = 10.0


def progress_line(
    what: str, done: int, total: int | None, elapsed_s: float, before: int | None = 0
) -> str:
    """How far the work is, how long it took so far, and how long the rest will take at that pace.

    ``"arborsim: 400 of 1,000 (40%), 1:20 so far, about 2:00 left: full on h100"``; `before` were
    done when it began, and None leaves the time left out.
    """
    parts = []
    if total:
        parts.append(f"{done:,} of {total:,} ({100 * min(done / total, 1.0):.0f}%)")
    parts.append(f"{duration(elapsed_s)} so far")
    if total and before is not None and before < done < total:
        parts.append(f"about {duration(elapsed_s * (total - done) / (done - before))} left")
    return f"arborsim: {', '.join(parts)}{f': {what}' if what else ''}"


def duration(seconds: float) -> str:
    """``"1:20"``, ``"2:03:00"``: minutes and seconds, and hours where there are any."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


class ProgressLines:
    """Prints a line of progress on standard error every `LINE_S`, so that a log shows life.

    It does so from a thread of its own: the work may take longer than that to report anything.
    """

    def __init__(self, total: int | None, what: str = "", before: int | None = 0) -> None:
        self.what, self.done, self.total, self.before = what, 0, total, before
        self._start, self._stream = time.monotonic(), sys.stderr
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._print, args=(LINE_S,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No line is printed afterwards."""
        self._over.set()
        self._thread.join()

    def _print(self, every_s: float) -> None:
        while not self._over.wait(every_s):
            elapsed_s = time.monotonic() - self._start
            line = progress_line(self.what, self.done, self.total, elapsed_s, self.before)
            print(line, file=self._stream, flush=True)


def _has_terminal(stream: TextIO) -> bool:
    """Whether a bar can be drawn there; it cannot in a log."""
    return stream.isatty()


def _bar(time_left: bool = True) -> Progress:
    """A line that says "n of m", whatever its width: what is being worked on gives way."""
    from rich import progress
    from rich.table import Column

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return progress.Progress(
        progress.BarColumn(bar_width=16),
        progress.MofNCompleteColumn(separator=" of "),
        *([progress.TimeRemainingColumn()] if time_left else []),
        progress.TextColumn("{task.description}", markup=False, table_column=rest),
        console=terminal(stderr=True),
        transient=True,
        expand=True,
        disable=not _has_terminal(sys.stderr),  # rich would still print an empty line
    )


class PatientProgress:
    """Shows how far the work is, and the time left, on standard error.

    In a terminal a bar, once `total` units of work take two seconds; else lines (`ProgressLines`).
    """

    def __init__(self, total: int | None) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._bar: Progress | None = None
        self._lines = None if _has_terminal(sys.stderr) else ProgressLines(total)

    def advance(self, what: str, units: int) -> None:
        """`units` more are done; `what` is being worked on."""
        self._done += units
        if self._lines is not None:
            self._lines.what, self._lines.done = what, self._done
            return
        if self._bar is None:
            if time.monotonic() - self._start < PATIENCE_S:
                return
            self._bar = _bar()
            self._bar.start()
            self._bar.add_task("", total=self._total)
        self._bar.update(self._bar.task_ids[0], completed=self._done, description=what)

    def __enter__(self) -> PatientProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._lines is not None:
            self._lines.stop()


class Stages:
    """A patient bar for each stage of the work (`calibrate.backend.OnProgress`)."""

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
    """A bar over the searches of a live model; without a terminal, lines (`ProgressLines`).

    `what` is said until the first `show`; with `time_left` the bar estimates that.
    """

    def __init__(self, what: str, *, time_left: bool = False) -> None:
        self._lines: ProgressLines | None = None
        self._what, self._time_left = what, time_left
        self._progress = _bar(time_left)
        self._row = self._progress.add_task(what, total=None)

    def show(self, what: str | None = None, **counts: int) -> None:
        """Show `what`; `counts` are ``completed`` and ``total``."""
        self._progress.update(self._row, description=what, **counts)  # type: ignore[arg-type]
        if self._lines is not None:
            self._lines.what = self._lines.what if what is None else what
            if self._time_left and self._lines.total is None:  # what an earlier run has done
                self._lines.before = counts.get("completed", 0)
            self._lines.done = counts.get("completed", self._lines.done)
            self._lines.total = counts.get("total", self._lines.total)

    def stop(self) -> None:
        """Show nothing more."""
        self._progress.stop()
        if self._lines is not None:
            self._lines.stop()

    def __enter__(self) -> LiveBar:
        self._progress.start()
        if self._progress.disable:
            self._lines = ProgressLines(None, self._what, 0 if self._time_left else None)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def shown(progress: bool, total: int) -> Iterator[Callable[[str, int], None]]:
    """The callback that work reports to: a `PatientProgress` over `total` units, or nothing."""
    if not progress:
        yield lambda what, units: None
        return
    with PatientProgress(total) as bar:
        yield bar.advance
