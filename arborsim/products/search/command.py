"""`arborsim search`: every search algorithm on the same recorded thoughts."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Annotated

from arborsim.core.errors import UsageError
from arborsim.core.settings import whole_number
from arborsim.products.choices import names
from arborsim.products.declare import Option
from arborsim.products.options import OutputOptions
from arborsim.products.search.ask import Searching, SearchOptions, SearchResults


@dataclass(frozen=True, kw_only=True)
class SearchOutput(OutputOptions, panel="Output"):
    """Files to write.

    Parameters
    ----------
    trees
        Problems whose trees the page shows, by comma.
    """

    trees: Annotated[
        str, Option(shown="the first that all searches solve, that some do and that none does")
    ] = ""

    def check(self) -> None:
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


def search(options: SearchOptions, output: SearchOutput) -> None:
    """Search, then print and write what was asked for."""
    output.check()
    searching = Searching(replace(options, progress=True))
    problems = output.problems(searching.problems)
    stopped = False
    try:
        searching.run()
    except KeyboardInterrupt:
        stopped = True
    results = searching.results()
    if _show(results, problems, output) or stopped:
        done, of = len({each.episode for each in results.raw}), len(searching.problems)
        raise KeyboardInterrupt(f": {done} of {of} problems are in the results")


def _show(results: SearchResults, problems: list[int], output: SearchOutput) -> bool:
    """Print and write what was asked for. Returns whether Ctrl-C left out the page's trees."""
    stopped, messages = False, sys.stderr if output.json else None
    if output.json:
        print(results.to_json())
    else:
        results.print(notes=output.notes)
    if output.out is not None and (results.raw or results.complete):
        results.save(output.out)
        print(f"wrote {output.out}", file=messages)
    if output.report is not None and results.raw:
        try:
            results.report(output.report, problems, progress=True)
        except KeyboardInterrupt:  # the page is there, without trees
            stopped = True
        print(f"wrote {output.report}", file=messages)
    return stopped
