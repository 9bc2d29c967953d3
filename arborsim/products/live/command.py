"""`arborsim live`: policies on a live model, with tokens really removed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.core.errors import ArborsimError, UsageError, more_room
from arborsim.products import options
from arborsim.products.command import command, option, panel
from arborsim.products.interrupt import interrupted
from arborsim.products.record.problem_options import RewardedProblems, problem_option

if TYPE_CHECKING:
    from arborsim.products.live.ask import LiveRun

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
    graphs: bool = cache_option(True, "On a GPU, replay decode steps as CUDA graphs.")
    page_tokens: int = cache_option(
        0, "Slots that pools grow by.", shown="16, with --shadow 1", min=0
    )
    batch: int = cache_option(
        1, "Searches computed together: more tokens per second, times that overlap.", min=1
    )
    attention_top: int = cache_option(
        0, "Positions kept of attention rows that a policy reads one by one.", min=0,
        shown="all, 256 for paths above 4096 tokens",
    )  # fmt: skip
    shadow: bool = cache_option(
        False, "Policies decide, nothing is removed; bytes and seconds are simulated.", "--shadow"
    )
    gpu: str = cache_option(
        "", "--shadow: GPU profile, a name or a TOML file.", complete="gpu", shown="h100"
    )

    def fields(self) -> dict[str, Any]:
        """As arguments of `arborsim.live`."""
        return dict(vars(self))


@dataclass(frozen=True)
class LiveOutput(options.OutputOptions):
    """What to print and to write."""

    out: Path | None = options.output_option(None, "Log of all results, JSON lines.", writes=True)
    trace: Path | None = options.output_option(
        None, "--shadow: also record this trace.", writes=True
    )
    resume: bool = options.output_option(False, "Go on with the log.", "--resume")
    overwrite: bool = options.output_option(False, "Replace log and trace.", "--overwrite")
    json: bool = options.json_option()


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
    from arborsim.products.live.ask import LiveRun

    output.check()
    running = LiveRun(
        **policies.fields(), full=full, **problems.fields(), **cache.fields(), out=output.out,
        trace=output.trace, resume=output.resume, overwrite=output.overwrite,
    )  # fmt: skip
    return _run(running, output)


def _run(running: LiveRun, output: LiveOutput) -> int:
    """Search with a bar on standard error, then show the results; returns the exit code."""
    from arborsim.play.results import BASELINE
    from arborsim.products.live.ask import described

    found = running.found

    def show_unfinished() -> None:
        if found.results and not output.json:
            running.results().print()

    try:
        running.run(progress=True)
    except KeyboardInterrupt:
        show_unfinished()
        return interrupted(f": {running.kept()}")
    except ArborsimError:
        show_unfinished()
        raise
    results = running.results()
    if output.report is not None:
        results.report(output.report)
    if output.json:
        typer.echo(results.to_json())
    else:
        results.print()
        for path in output.files.values():
            typer.echo(f"wrote {path}")
        for line in described(running.models):
            typer.echo(line)
    # Full retention, which always runs, does not count where others were asked for.
    asked = [one for one in found.results if one.policy != BASELINE] or found.results
    if all(one.infeasible for one in asked):
        why = asked[0].infeasible
        raise UsageError(f"nothing could run: {why}: {more_room([why])}")
    return 0
