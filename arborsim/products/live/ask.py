"""`arborsim.live`: policies on a live model, with tokens really removed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path
from arborsim.products import choices
from arborsim.products.declare import (
    AnyPath,
    Count,
    InPython,
    Option,
    Options,
    Positive,
    Silent,
    at_least,
    call,
    equivalent,
)
from arborsim.products.options import PolicyOptions
from arborsim.products.record.problems import RewardedProblems, live_fields

if TYPE_CHECKING:
    from arborsim.play.backends import LiveFacts, LiveResult, ModelUsage
    from arborsim.play.live_log import Collector
    from arborsim.products.live.results import LiveResults
    from arborsim.report.progress import LiveBar

_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Options, panel="Cache"):
    """How the cache of the live model works, or its simulation.

    Parameters
    ----------
    recall
        How DDR tokens are read: stage, stream, near or ondemand.
    overlap
        Let copies run behind computation.
    graphs
        On a GPU, replay decode steps as CUDA graphs.
    page_tokens
        Slots that pools grow by.
    batch
        Searches computed together: more tokens per second, times that overlap.
    attention_top
        Positions kept of attention rows that a policy reads one by one.

        All do with `shadow`.  Sums and newest rows are always whole.
    masked
        Mask tokens in place of removing them: the same answers, sooner, without memory and speed.
    shadow
        Policies decide, nothing is removed. Bytes and seconds are simulated.
    gpu
        --shadow: GPU profile, a name or a TOML file.
    """

    recall: str = "stage"
    overlap: bool = True
    graphs: bool = True
    page_tokens: Annotated[Count, Option(shown="16, with --shadow 1")] = 0
    batch: Positive = 1
    attention_top: Annotated[Count, Option(shown="all, 256 for paths above 4096 tokens")] = 0
    masked: bool = False
    shadow: bool = False
    gpu: Annotated[str, Option(complete="gpu", shown="h100")] = ""


@dataclass(frozen=True, kw_only=True)
class LiveFiles(Options, panel="Output"):
    """Files that a live run writes.

    Parameters
    ----------
    out
        Log of all results, JSON lines.

        Each is on the disk before the next search.
    trace
        --shadow: also record this trace.
    resume
        Go on with the log.
    overwrite
        Replace log and trace.
    progress
        Show progress on standard error.
    """

    out: Annotated[AnyPath | None, Option(writes=True, silent=True)] = None
    trace: Annotated[AnyPath | None, Option(writes=True, silent=True)] = None
    resume: Silent = False
    overwrite: Silent = False
    progress: InPython = False


@dataclass(frozen=True, kw_only=True)
class LiveOptions(PolicyOptions, CacheOptions, RewardedProblems, LiveFiles):
    """Search live under KV-cache policies that really remove tokens, and count what is right.

    Every policy searches the same problems. Shows accuracy with its interval, memory by tier, and
    where the time went, all against full retention. Needs the extra torch. Ctrl-C keeps the log.
    Exit code 130.

    Parameters
    ----------
    full
        Also run full retention, to compare.

    Returns
    -------
    LiveResults

    Examples
    --------
    >>> import arborsim
    >>> results = arborsim.live(task="chain", episodes=40, policies="h2o", budgets=[0.7, 0.85])
    ... # doctest: +SKIP
    """

    full: bool = True

    def results(self) -> LiveResults:
        """Search everything."""
        running = LiveRun(self)
        running.run()
        return running.results()


live = call("live", LiveOptions)


class LiveRun:
    """Searches that were asked for, checked. Those that are done survive an interruption."""

    def __init__(self, options: LiveOptions) -> None:
        from arborsim.memory.pages import MOST_PAGE_TOKENS
        from arborsim.play.backends import LiveRequest
        from arborsim.play.live_log import Collector, LiveLog

        self._options, given = options, options
        self.out = None if given.out is None else output_path(given.out)
        recorded = None if given.trace is None else output_path(given.trace)
        at_least(0, MOST_PAGE_TOKENS, page_tokens=given.page_tokens)
        _check_files(given, self.out, recorded)
        same = ("recall", "overlap", "graphs", "batch", "attention_top", "masked", "shadow")
        self.request = LiveRequest(
            **live_fields(given, given.full),
            **_cache(given),
            **{name: getattr(given, name) for name in same},
            trace=recorded,
            command=equivalent("live", given),
        )
        self._log: LiveLog[LiveResult] | None = None
        if self.out is not None:
            self._log = LiveLog(
                self.out, self.request, resume=given.resume, overwrite=given.overwrite
            )
        self.found: Collector[LiveResult] = Collector(self._log)
        self.models: tuple[ModelUsage, ...] = ()  # what reward and embedding models took
        self.watch = Watch(self.found, len(self.request.cells), recorded)

    def run(self) -> None:
        """Search everything that is missing. What is done stays if this is interrupted."""
        from arborsim.play.backends import get_backend
        from arborsim.report.progress import LiveBar

        try:
            if not self._options.progress:
                self.models = get_backend("torch").live(self.request, self.watch)
                return
            with LiveBar("loading the model") as self.watch.bar:
                self.models = get_backend("torch").live(self.request, self.watch)
        finally:
            if self._log is not None:
                self._log.close()

    def results(self) -> LiveResults:
        """The results of the searches that are done.

        Raises
        ------
        UsageError
            None is: the model was not even loaded.
        """
        from arborsim.products.live.results import LiveResults, live_metadata
        from arborsim.products.live.tables import LiveReport

        if self.found.facts is None:
            raise UsageError("the model was not loaded yet: there are no results")
        report = LiveReport.of(self.request, self.found.facts, self.found.results)
        return LiveResults(report, live_metadata(report))

    def kept(self) -> str:
        """After an interruption: what there is, and how to go on."""
        if self.found.facts is None:
            return "the model was not loaded yet"
        done = f"{len(self.found.results)} of {self.watch.total} searches"
        if self.out is None:
            return f"{done} were finished; --out FILE would have kept them"
        return f"{self.out} holds {done}; --resume goes on"


def _check_files(given: LiveOptions, out: Path | None, trace: Path | None) -> None:
    """Refuse outputs that options contradict."""
    if given.resume and out is None:
        raise UsageError("--resume needs --out, the log to go on with")
    if given.resume and given.overwrite:
        raise UsageError("--resume keeps the log and --overwrite replaces it: give one of them")
    if trace is None:
        return
    if not given.shadow:
        raise UsageError("--trace needs --shadow: a search that policies prune is no recording")
    if given.resume:
        raise UsageError("--trace records whole runs: --resume cannot go with it")
    if trace.exists() and not given.overwrite:
        raise UsageError(f"--trace {trace}: the file exists: --overwrite replaces it")


def _cache(given: LiveOptions) -> dict[str, Any]:
    """Page size and machine, as the fields of a `LiveRequest`. Only a shadow run simulates one."""
    from arborsim.machine.lookup import load_profile
    from arborsim.machine.machine import Machine

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
