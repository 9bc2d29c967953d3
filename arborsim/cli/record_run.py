"""A recording under way: its bar, Ctrl-C, and what is said at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from arborsim.cli.reward_options import describe_usage

if TYPE_CHECKING:
    from arborsim.live.backends import Backend, RecordProgress, RecordRequest


def run(request: RecordRequest, backend: Backend) -> int:
    """Record with a bar on standard error; returns the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from arborsim.live.backends import RecordProgress

    console = Console(stderr=True)
    seen = RecordProgress(0, 0, 0, 0, 0, 0.0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    # Without a terminal, rich would still print an empty line.
    silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=silent) as bar:
        row = bar.add_task("recording", total=None)

        def show(progress: RecordProgress) -> None:
            nonlocal seen
            seen = progress
            bar.update(
                row, completed=progress.episode, total=progress.episodes,
                description=describe(progress, request.bank is not None),
            )  # fmt: skip

        try:
            seen = backend.record(request, show)
        except KeyboardInterrupt:
            bar.stop()
            left = (
                f"{request.out} holds {seen.episode} whole episodes (of {seen.episodes}); "
                "--resume goes on"
                if seen.episode
                else "no episode was complete, so nothing was written"
            )
            typer.echo(f"arborsim: interrupted: {left}", err=True)
            return 130
    typer.echo(
        f"{request.out}: {seen.episode} episodes, {describe(seen, request.bank is not None)}"
    )
    for usage in seen.beside:
        typer.echo(describe_usage(usage))
    return 0


def describe(progress: RecordProgress, bank: bool = False) -> str:
    """Accuracy so far (of a bank: problems that some thought solves) and speed, in words."""
    verdict = f"{progress.correct}/{progress.judged} {'solvable' if bank else 'correct'}, "
    thoughts = f"{progress.thoughts} thoughts, " if bank else ""
    speed = f"{progress.tokens} tokens, {progress.tokens_per_s:.0f} tokens/s"
    return f"{verdict if progress.judged else ''}{thoughts}{speed}"
