"""Run a validation with a bar, keep its results problem by problem, and show what they say."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from arborsim.core.errors import UsageError
from arborsim.live.backends import get_backend
from arborsim.live.log import describe
from arborsim.live.request import LiveFacts, LiveRequest
from arborsim.validate.results import (
    CellCheck,
    Validation,
    merged,
    read_results,
    write_results,
)

RESULTS, PAGE = "results.parquet", "index.html"


class Keeper:
    """A `ValidationWatch` that writes results as they come.

    Parameters
    ----------
    request : LiveRequest
    out : Path
        Folder; it is made when there is something to write.
    resume, overwrite : bool

    Raises
    ------
    UsageError
        There are results already and neither was said, or they are of another request.
    """

    def __init__(self, request: LiveRequest, out: Path, *, resume: bool, overwrite: bool) -> None:
        self.path = out / RESULTS
        self._request = request
        self._described = _without_count(describe(request))
        self._dates: list[str] = []
        self.result = Validation(())
        if self.path.exists() and not overwrite:
            if not resume:
                raise UsageError(f"{self.path} exists: --resume goes on, --overwrite replaces it")
            self.result, there = read_results(self.path)
            self._compare(there)
            self._dates = [self.result.about.get("date", "")]
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        self.bar = Progress(
            BarColumn(bar_width=16), MofNCompleteColumn(), TextColumn("{task.description}"),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._row = self.bar.add_task("loading the model", total=None)

    @property
    def problems(self) -> set[int]:
        """Those that are done."""
        return {check.episode for check in self.result.checks}

    def began(self, facts: LiveFacts, episodes: int) -> None:
        about = _about(self._request, facts, self._dates)
        old = self.result.about
        for key in ("model", "device", "dtype", "versions"):
            if old and old[key] != about[key]:
                raise UsageError(
                    f"{self.path} holds results of another {key} ({old[key]}, now {about[key]}): "
                    "choose another --out, or --overwrite"
                )
        self.result = Validation(self.result.checks, about)
        self.bar.update(self._row, total=episodes, completed=len(self.problems))

    def wants(self, episode: int) -> bool:
        return episode not in self.problems

    def running(self, episode: int, what: str, tokens: int) -> None:
        self.bar.update(self._row, description=f"problem {episode}, {what}")

    def checked(self, checks: tuple[CellCheck, ...]) -> None:
        old = self.result
        self.result = Validation(merged(old.checks, checks), old.about, old.left_out)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self.path.parent}: {error.strerror}") from error
        write_results(self.result, self._described, self.path)
        self.bar.update(self._row, completed=len(self.problems))

    def _compare(self, there: dict[str, Any]) -> None:
        for key in sorted({*there, *self._described}):
            if there.get(key) != self._described.get(key):
                raise UsageError(
                    f"{self.path} holds results of another request (its {key} differs): choose "
                    "another --out, or --overwrite"
                )


def run(request: LiveRequest, out: Path, *, resume: bool, overwrite: bool) -> int:
    """Compare, then show and write what came of it; returns the exit code."""
    keeper = Keeper(request, out, resume=resume, overwrite=overwrite)
    interrupted = False
    try:
        with keeper.bar:
            get_backend("torch").validate(request, keeper)
    except KeyboardInterrupt:
        interrupted = True
    if keeper.result.checks:
        _show(keeper.result, out)
    if not interrupted:
        return 0
    done = f"{keeper.path} holds {len(keeper.problems)} problems; --resume goes on"
    said = done if keeper.result.checks else "no problem was complete, so nothing was written"
    typer.echo(f"arborsim: interrupted: {said}", err=True)
    return 130


def _show(result: Validation, out: Path) -> None:
    from arborsim.show.validation import write_page
    from arborsim.show.validation_table import print_validation

    print_validation(result)
    write_page(result, out / PAGE)
    typer.echo(f"wrote {out / RESULTS} and {out / PAGE}")


def _without_count(described: dict[str, Any]) -> dict[str, Any]:
    """More problems may be added to what there is."""
    return {key: value for key, value in described.items() if key != "episodes"}


def _about(request: LiveRequest, facts: LiveFacts, dates: list[str]) -> dict[str, str]:
    assert request.machine is not None
    profile = request.machine.profile
    today = datetime.now(UTC).date().isoformat()
    options = {**request.search_options, **request.task_options}
    return {
        "model": facts.model + (" (random weights)" if facts.random_weights else ""),
        "task": " ".join([facts.task, *(f"{key} {value}" for key, value in options.items())]),
        "search": f"{request.search}, temperature {request.temperature:g}, seed {request.seed}",
        "device": facts.device,
        "dtype": facts.dtype,
        "GPU profile": profile.name,
        "assumed in the profile": ", ".join(profile.assumed()) or "nothing",
        "recall of DDR tokens": request.recall + ("" if request.overlap else ", without overlap"),
        "KV bytes per token": f"{facts.kv_bytes_per_token:,}",
        "versions": ", ".join(f"{name} {text}" for name, text in facts.software.items()),
        "command": request.command,
        "date": ", ".join(dict.fromkeys([*filter(None, dates), today])),
    }
