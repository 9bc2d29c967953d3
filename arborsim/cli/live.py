"""`arborsim live`: policies on a live model, with tokens really removed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.api.choices import check_recall
from arborsim.cli import options
from arborsim.cli.command import command, option, panel
from arborsim.cli.problems import RewardedProblems, describe_usage, problem_option, settled
from arborsim.cli.progress import interrupted
from arborsim.core.errors import ArborsimError, UsageError
from arborsim.show.progress import LiveBar

if TYPE_CHECKING:
    from arborsim.live.backends import LiveFacts, LiveRequest, LiveResult
    from arborsim.live.log import Collector, LiveLog

_EVERY_S = 0.1
cache_option = panel("Cache")


@dataclass(frozen=True)
class LiveProblems(RewardedProblems):
    """Problems; models with random weights take random prompts."""

    prompt_tokens: int = problem_option(0, "Random weights: tokens per prompt.", shown="512", min=0)


@dataclass(frozen=True)
class CacheOptions:
    """How the cache of the live model works, or its simulation."""

    recall: str = cache_option("stage", "How DDR tokens are read: stage, stream, near or ondemand.")
    overlap: bool = cache_option(True, "Let copies run behind computation.")
    page_tokens: int = cache_option(
        0, "Slots that pools grow by.", shown="16, with --shadow 1", min=0
    )
    batch: int = cache_option(
        1, "Searches computed together: more tokens per second, times that overlap.", min=1
    )
    attention_top: int = cache_option(
        0, "Positions kept per attention row that policies see.", min=0,
        shown="all, 256 for paths above 4096 tokens",
    )  # fmt: skip
    shadow: bool = cache_option(
        False, "Policies decide, nothing is removed; bytes and seconds are simulated.", "--shadow"
    )
    gpu: str = cache_option(
        "", "--shadow: GPU profile, a name or a TOML file.", complete="gpu", shown="h100"
    )

    def request(self) -> dict[str, Any]:
        """As the fields of a `LiveRequest`; only a shadow run has a simulated machine."""
        from arborsim.machine.lookup import load_profile
        from arborsim.machine.machine import Machine

        check_recall(self.recall)
        if self.gpu and not self.shadow:
            raise UsageError("--gpu is simulated, by --shadow: a live run takes --device cuda")
        if self.shadow and not self.overlap:
            raise UsageError("--no-overlap is for live runs: leave out --shadow")
        page_tokens = self.page_tokens or (1 if self.shadow else 16)
        machine = None
        if self.shadow:
            machine = Machine(load_profile(self.gpu or "h100"), None, self.recall, page_tokens)
        found = {**vars(self), "page_tokens": page_tokens, "machine": machine}
        del found["gpu"]
        return found


@dataclass(frozen=True)
class LiveOutput(options.OutputOptions):
    """What to print and to write."""

    out: Path | None = options.output_option(None, "Log of all results, JSON lines.")
    trace: Path | None = options.output_option(None, "--shadow: also record this trace.")
    resume: bool = options.output_option(False, "Go on with the log.", "--resume")
    overwrite: bool = options.output_option(False, "Replace log and trace.", "--overwrite")
    json: bool = options.json_option()

    def check_with(self, cache: CacheOptions) -> None:
        """Refuse outputs that cannot be written, or that options contradict."""
        self.check()
        resume, trace = self.resume, self.trace
        if resume and self.out is None:
            raise UsageError("--resume needs --out, the log to go on with")
        if resume and self.overwrite:
            raise UsageError("--resume keeps the log and --overwrite replaces it: give one of them")
        if trace is None:
            return
        if not cache.shadow:
            raise UsageError("--trace needs --shadow: a search that policies prune is no recording")
        if resume:
            raise UsageError("--trace records whole runs: --resume cannot go with it")
        if trace.exists() and not self.overwrite:
            raise UsageError(f"--trace {trace}: the file exists: --overwrite replaces it")


@command
def live(
    policies: options.PolicyOptions = options.PolicyOptions(),
    full: bool = option(True, "Also run full retention, to compare."),
    problems: LiveProblems = LiveProblems(),
    cache: CacheOptions = CacheOptions(),
    output: LiveOutput = LiveOutput(),
) -> int:
    """Search live under KV-cache policies that really remove tokens, and count what is right.

    Every policy searches the same problems. Shows accuracy with its interval, memory by tier, and
    where the time went, all against full retention. Ctrl-C keeps the log; exit code 130.
    """
    from arborsim.live.backends import LiveRequest
    from arborsim.live.log import LiveLog

    output.check_with(cache)
    request = LiveRequest(
        **settled(problems, policies, full=full), **cache.request(), trace=output.trace,
        command=options.command_line(),
    )  # fmt: skip
    log = None
    if output.out is not None:
        log = LiveLog(output.out, request, resume=output.resume, overwrite=output.overwrite)
    return _run(request, output, log)


def _run(request: LiveRequest, output: LiveOutput, log: LiveLog | None) -> int:
    """Search with a bar on standard error, then show the results; returns the exit code."""
    from arborsim.live.backends import get_backend
    from arborsim.live.log import Collector
    from arborsim.run.results import BASELINE
    from arborsim.show.live import LiveReport, live_json, print_live

    found = Collector(log)
    watch = BarWatch(found, len(request.cells), request.trace)

    def show_unfinished() -> None:
        if found.facts is not None and found.results and not output.json:
            print_live(LiveReport.of(request, found.facts, found.results))

    try:
        with watch.bar:
            models = get_backend("torch").live(request, watch)
    except KeyboardInterrupt:
        show_unfinished()
        return interrupted(f": {watch.kept(output.out)}")
    except ArborsimError:
        show_unfinished()
        raise
    finally:
        if log is not None:
            log.close()
    assert found.facts is not None, "the backend has begun"
    result = LiveReport.of(request, found.facts, found.results)
    if output.report is not None:
        from arborsim.show.live_page import write_live_page

        write_live_page(result, output.report)
    if output.json:
        typer.echo(live_json(result))
    else:
        print_live(result)
        for path in output.files.values():
            typer.echo(f"wrote {path}")
        for usage in models:
            typer.echo(describe_usage(usage))
    # Full retention, which always runs, does not count where others were asked for.
    asked = [one for one in found.results if one.policy != BASELINE] or found.results
    if all(one.infeasible for one in asked):
        raise UsageError(f"nothing could run: {asked[0].infeasible}: give a larger --budget")
    return 0


class BarWatch:
    """A `LiveObserver` that collects, and draws a bar: time left, speed and accuracy so far.

    There are `cells` searches per problem; `replaced` is a trace that the run will replace, which
    goes once the model is there.
    """

    def __init__(self, found: Collector, cells: int, replaced: Path | None = None) -> None:
        self.bar = LiveBar("loading the model")
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
        from arborsim.run.results import ANY

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

    def kept(self, out: Path | None) -> str:
        """After an interruption: what there is, and how to go on."""
        if self._found.facts is None:
            return "the model was not loaded yet"
        done = f"{len(self._found.results)} of {self.total} searches"
        if out is None:
            return f"{done} were finished; --out FILE would have kept them"
        return f"{out} holds {done}; --resume goes on"
