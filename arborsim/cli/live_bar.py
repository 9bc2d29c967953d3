"""What a live run shows while it runs: a bar with time left, speed and accuracy so far."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from arborsim.live.collect import Collector
from arborsim.live.log import LiveLog
from arborsim.live.request import LiveFacts, LiveResult
from arborsim.run.aggregate import ANY
from arborsim.show.terminal import plain

_EVERY_S = 0.1


class BarWatch(Collector):
    """A collector that draws a bar on standard error, if that is a terminal.

    Parameters
    ----------
    log : LiveLog or None
    cells : int
        Searches per problem.
    replaced : Path, optional
        A trace that the run will replace; it goes once the model is there.
    """

    def __init__(self, log: LiveLog | None, cells: int, replaced: Path | None = None) -> None:
        super().__init__(log)
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._cells, self._replaced = cells, replaced
        self._before = len(self.results)
        self._tokens = 0
        self._began_s = self._shown_s = time.monotonic()
        text = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(bar_width=16), MofNCompleteColumn(), text)
        # Without a terminal, rich would still print an empty line.
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._row = self._bar.add_task("loading the model", total=None)

    def __enter__(self) -> BarWatch:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def began(self, facts: LiveFacts, episodes: int) -> None:
        super().began(facts, episodes)
        if self._replaced is not None:
            self._replaced.unlink(missing_ok=True)
        self._began_s = time.monotonic()
        self._show("searching")

    def running(self, episode: int, what: str, tokens: int) -> None:
        self._tokens += tokens
        now = time.monotonic()
        # Drawing costs time that would be measured.
        if now - self._shown_s >= _EVERY_S:
            self._shown_s = now
            self._show(f"problem {episode}, {what}")

    def finished(self, result: LiveResult) -> None:
        super().finished(result)
        self._show(f"problem {result.episode}, {result.policy} {result.budget}")

    @property
    def total(self) -> int:
        """Searches of the whole run."""
        return self.episodes * self._cells

    def _show(self, what: str) -> None:
        what = what.removesuffix(f" {ANY}")  # of policies that know no budget
        parts = [plain(what), *self.so_far(time.monotonic() - self._began_s)]
        self._bar.update(
            self._row, completed=len(self.results), total=self.total, description=", ".join(parts)
        )

    def so_far(self, seconds: float) -> list[str]:
        """Time left, speed and accuracy after so many seconds of this run, in words."""
        done = len(self.results) - self._before
        verdicts = [r.correct for r in self.results if r.correct is not None]
        parts = []
        if done:
            left_s = (self.total - len(self.results)) * seconds / done
            minutes, rest = divmod(round(left_s), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02}:{rest:02} left")
        if seconds > 0:
            parts.append(f"{self._tokens / seconds:,.0f} tokens/s")
        if verdicts:
            parts.append(f"{sum(verdicts)}/{len(verdicts)} right")
        return parts


def kept(watch: BarWatch, out: Path | None) -> str:
    """After an interruption: what there is, and how to go on."""
    if watch.facts is None:
        return "the model was not loaded yet"
    done = f"{len(watch.results)} of {watch.total} searches"
    if out is None:
        return f"{done} were finished; --out FILE would have kept them"
    return f"{out} holds {done}; --resume goes on"
