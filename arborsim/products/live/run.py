"""Runs on a live model: what was asked, checked, and its results as they come, in a log."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from arborsim.core.errors import ArborsimError, UsageError, more_room
from arborsim.core.outputs import output_path
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.memory.pages import MOST_PAGE_TOKENS
from arborsim.play.backends import LiveRequest, LiveResult, get_backend
from arborsim.play.fidelity import FidelityResult
from arborsim.play.live_log import Collector, LiveLog
from arborsim.play.results import BASELINE
from arborsim.products import choices
from arborsim.products.declare import at_least, equivalent
from arborsim.products.live.results import LiveResults, live_metadata
from arborsim.products.live.tables import LiveReport
from arborsim.products.record.problems import live_fields

if TYPE_CHECKING:
    from arborsim.play.backends import LiveFacts, ModelUsage
    from arborsim.products.options import ReportOptions
    from arborsim.products.results import Results
    from arborsim.report.progress import LiveBar

R = TypeVar("R", LiveResult, FidelityResult)
_EVERY_S = 0.1


def log_path(given: Any) -> Path | None:
    """The file of --out; refuses what --resume and --overwrite contradict."""
    if given.resume and given.out is None:
        raise UsageError("--resume needs --out, the log to go on with")
    if given.resume and given.overwrite:
        raise UsageError("--resume keeps the log and --overwrite replaces it: give one of them")
    return None if given.out is None else output_path(given.out)


class LoggedRun(ABC, Generic[R]):
    """A request with its results so far, those of an earlier run in the log first.

    `given` are the options `out`, `resume` and `overwrite`.
    """

    units: ClassVar[str]  #: what results are in words, as in "searches were finished"

    def __init__(self, given: Any, request: LiveRequest, kind: type[R], out: Path | None) -> None:
        self.request, self.out = request, out
        self._log: LiveLog[R] | None = None
        if out is not None:
            keep = {"resume": given.resume, "overwrite": given.overwrite}
            self._log = LiveLog(out, request, kind, **keep)
        self.found: Collector[R] = Collector(self._log)

    @abstractmethod
    def run(self) -> None:
        """Do everything that is missing. What is done stays if this is interrupted."""

    @abstractmethod
    def results(self) -> Results:
        """Those that there are; a `UsageError` if the model was not even loaded."""

    @property
    def total(self) -> int:
        """Results of the whole run."""
        return self.found.episodes * len(self.request.cells)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()

    def kept(self) -> str:
        """After an interruption: what there is, and how to go on."""
        if self.found.facts is None:
            return "the model was not loaded yet"
        done = f"{len(self.found.results)} of {self.total}"
        if self.out is None:
            return f"{done} {self.units}; --out FILE would have kept them"
        return f"{self.out} holds {done} {self.units.split()[0]}; --resume goes on"

    def show(self, output: ReportOptions, files: dict[str, Path]) -> None:
        """Run, then print and write the results; those that there are if it is interrupted."""
        try:
            self.run()
        except (KeyboardInterrupt, ArborsimError) as ended:
            if self.found.results and not output.json:
                self.results().print(notes=output.notes)
            if isinstance(ended, ArborsimError):
                raise
            raise KeyboardInterrupt(f": {self.kept()}") from None
        output.print(self.results(), files.values())

    def refuse_nothing(self) -> None:
        """Raise a `UsageError` if no budget could hold anything.

        Full retention, which always runs, does not count where others were asked for.
        """
        results: list[Any] = list(self.found.results)
        asked = [one for one in results if one.policy != BASELINE] or results
        if all(one.infeasible for one in asked):
            why = asked[0].infeasible
            raise UsageError(f"nothing could run: {why}: {more_room([why])}")


class LiveRun(LoggedRun[LiveResult]):
    """Searches that were asked for, checked. Those that are done survive an interruption."""

    units = "searches were finished"

    def __init__(self, options: Any) -> None:
        self._options, given = options, options
        recorded = None if given.trace is None else output_path(given.trace)
        at_least(0, MOST_PAGE_TOKENS, page_tokens=given.page_tokens)
        out = log_path(given)
        _check_trace(given, recorded)
        same = ("recall", "overlap", "graphs", "batch", "attention_top", "masked", "shadow")
        request = LiveRequest(
            **live_fields(given, given.full),
            **_cache(given),
            **{name: getattr(given, name) for name in same},
            trace=recorded,
            command=equivalent("live", given),
        )
        super().__init__(given, request, LiveResult, out)
        self.models: tuple[ModelUsage, ...] = ()  # what reward and embedding models took
        self.watch = Watch(self.found, len(self.request.cells), recorded)

    def run(self) -> None:
        from arborsim.report.progress import LiveBar

        try:
            if not self._options.progress:
                self.models = get_backend("torch").live(self.request, self.watch)
                return
            with LiveBar("loading the model") as self.watch.bar:
                self.models = get_backend("torch").live(self.request, self.watch)
        finally:
            self.close()

    def results(self) -> LiveResults:
        if self.found.facts is None:
            raise UsageError("the model was not loaded yet: there are no results")
        report = LiveReport.of(self.request, self.found.facts, self.found.results)
        return LiveResults(report, live_metadata(report))


def _check_trace(given: Any, trace: Path | None) -> None:
    """Refuse a recording that options contradict."""
    if trace is None:
        return
    if not given.shadow:
        raise UsageError("--trace needs --shadow: a search that policies prune is no recording")
    if given.resume:
        raise UsageError("--trace records whole runs: --resume cannot go with it")
    if trace.exists() and not given.overwrite:
        raise UsageError(f"--trace {trace}: the file exists: --overwrite replaces it")


def _cache(given: Any) -> dict[str, Any]:
    """Page size and machine, as the fields of a `LiveRequest`. Only a shadow run simulates one."""
    choices.check_recall(given.recall)
    if given.gpu and not given.shadow:
        raise UsageError("--gpu is simulated, by --shadow: a live run takes --device cuda")
    if not given.shadow:
        return {"page_tokens": given.page_tokens or 16, "machine": None}
    if not given.overlap:
        raise UsageError("--no-overlap is for live runs: leave out --shadow")
    page_tokens = given.page_tokens or 1
    profile = load_profile(given.gpu or "h100")
    return {
        "page_tokens": page_tokens,
        "machine": Machine(profile, None, given.recall, page_tokens),
    }


class Watch:
    """A `LiveObserver` that collects, and shows time left, speed and accuracy so far on a `bar`.

    There are `cells` searches per problem. `replaced` is a trace that the run will replace, which
    goes once the model is there.
    """

    bar: LiveBar | None = None

    def __init__(
        self, found: Collector[LiveResult], cells: int, replaced: Path | None = None
    ) -> None:
        self.wants, self.full_tokens = found.wants, found.full_tokens
        self._found, self._cells, self._replaced = found, cells, replaced
        self._before = len(found.results)
        self._tokens = 0
        self._began_s = self._shown_s = time.monotonic()

    def began(self, facts: LiveFacts, episodes: int) -> None:
        self._found.began(facts, episodes)
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
        self._found.finished(result)
        self._show(f"problem {result.episode}, {result.policy} {result.budget}")

    @property
    def total(self) -> int:
        """Searches of the whole run."""
        return self._found.episodes * self._cells

    def _show(self, what: str) -> None:
        """Show what is being searched, then time left, speed and accuracy so far."""
        from arborsim.play.results import ANY

        if self.bar is None:
            return
        results, seconds = self._found.results, time.monotonic() - self._began_s
        parts = [what.removesuffix(f" {ANY}")]  # of policies that know no budget
        if done := len(results) - self._before:
            left_s = (self.total - len(results)) * seconds / done
            parts.append(f"{timedelta(seconds=round(left_s))} left")
        if seconds > 0:
            parts.append(f"{self._tokens / seconds:,.0f} tokens/s")
        if verdicts := [result.correct for result in results if result.correct is not None]:
            parts.append(f"{sum(verdicts)}/{len(verdicts)} right")
        self.bar.show(", ".join(parts), completed=len(results), total=self.total)
