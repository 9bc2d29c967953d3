"""`arborsim search`: every search algorithm on the same recorded thoughts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.core.errors import UsageError
from arborsim.core.settings import whole_number
from arborsim.products.choices import names
from arborsim.products.command import argument, command, panel
from arborsim.products.interrupt import interrupted
from arborsim.products.options import (
    JobOptions,
    MachineOptions,
    OutputOptions,
    PolicyOptions,
    json_option,
    output_option,
    search_help,
)

if TYPE_CHECKING:
    from arborsim.products.search.ask import SearchResults

searches_option = panel("Searches")


@dataclass(frozen=True)
class SearchOptions:
    """The searches that walk the bank."""

    algorithm: list[str] = searches_option(
        ["rebase,ets"],
        f"By comma, or 'all'; repeatable: {search_help()}",
        complete="algorithm",
    )
    width: str = searches_option(
        "16",
        "Thoughts that run together at first, by comma: N chains, beams or slots; tot-bfs "
        "keeps 5 states, each gets width // 5 children.",
    )
    sweep: str = searches_option(
        "",
        "One option, several values: lambda_b=1,1.25,1.5,1.75,2 also names the one that "
        "ETS's paper would take.",
    )
    keep_duplicates: bool = searches_option(
        False, "Go on with thoughts that repeat a sibling.", "--keep-duplicates"
    )

    def fields(self) -> dict[str, Any]:
        """As arguments of `arborsim.search`."""
        return {
            "algorithms": self.algorithm, "widths": self.width, "sweep": self.sweep,
            "keep_duplicates": self.keep_duplicates,
        }  # fmt: skip


@dataclass(frozen=True)
class SearchOutput(OutputOptions):
    """Files to write."""

    out: Path | None = output_option(None, "Write results: .parquet, .csv or .json.", writes=True)
    trees: str = output_option(
        "",
        "Problems whose trees the page shows, by comma.",
        shown="the first that all searches solve, that some do and that none does",
    )
    json: bool = json_option()

    def check(self) -> None:
        from arborsim.core.tables import check_format

        if self.out is not None:
            check_format(self.out)
        if self.trees and self.report is None:
            raise UsageError(f"--trees {self.trees}: also give --report, the page that shows them")
        super().check()

    def problems(self, chosen: range) -> list[int]:
        """The problems of ``--trees``, which must be among those that are searched."""
        found = []
        for part in names(self.trees):
            try:
                number = whole_number(part)
            except ValueError:
                raise UsageError(
                    f"--trees {part:.40}: expected numbers of problems, by comma"
                ) from None
            if number not in chosen:
                raise UsageError(
                    f"--trees {part}: searched are problems {chosen.start} to {chosen.stop - 1}"
                )
            found.append(number)
        return found


@command
def search(
    bank: Path = argument(
        ..., "A trace with thoughts for several searches (record --bank).", complete="trace"
    ),
    searches: SearchOptions = SearchOptions(),
    policies: PolicyOptions = PolicyOptions(),
    machine: MachineOptions = MachineOptions(),
    job: JobOptions = JobOptions(),
    output: SearchOutput = SearchOutput(),
) -> int:
    """Run search algorithms on a bank of recorded thoughts.

    Each walks the same thoughts, as it would have met them live, and is then replayed on a
    simulated GPU.  Shows accuracy, KV size, memory, model calls, tokens and time, against REBASE.
    """
    from arborsim.products.search.ask import Searching

    output.check()
    searching = Searching(
        bank, **searches.fields(), **policies.fields(), **machine.fields(), **job.fields()
    )
    problems = output.problems(searching.problems)
    stopped = False
    try:
        searching.run(progress=True)
    except KeyboardInterrupt:
        stopped = True
    results = searching.results()
    stopped |= _show(results, problems, output)
    if not stopped:
        return 0
    done, of = len({each.episode for each in results.raw}), len(searching.problems)
    return interrupted(f": {done} of {of} problems are in the results")


def _show(results: SearchResults, problems: list[int], output: SearchOutput) -> bool:
    """Print and write what was asked for; returns whether Ctrl-C left out the page's trees."""
    stopped = False
    if output.json:
        typer.echo(results.to_json())
    else:
        results.print()
    if output.out is not None and (results.raw or results.complete):
        results.save(output.out)
        typer.echo(f"wrote {output.out}", err=output.json)
    if output.report is not None and results.raw:
        try:
            results.report(output.report, problems, progress=True)
        except KeyboardInterrupt:  # the page is there, without trees
            stopped = True
        typer.echo(f"wrote {output.report}", err=output.json)
    return stopped
