"""`arborsim replay`: what each policy costs and keeps, on recorded searches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arborsim.core.errors import UnknownName, UsageError
from arborsim.products.options import OutputOptions, interruptible
from arborsim.products.replay.ask import ReplayOptions


@dataclass(frozen=True, kw_only=True)
class ReplayOutput(OutputOptions, panel="Output"):
    """Files to write, and what to print.

    Parameters
    ----------
    view
        table (all figures), matrix (a line per policy), pareto or auto.
    explain
        Also print every term of each policy's time.
    """

    view: str = "auto"
    explain: bool = False

    def check(self) -> None:
        from arborsim.products.replay.tables import VIEWS

        if self.view not in (views := (*VIEWS, "pareto")):
            raise UnknownName("view", self.view, views)
        if self.explain and self.json:
            raise UsageError("--explain prints tables: leave --json out")
        super().check()


def replay(options: ReplayOptions, output: ReplayOutput) -> None:
    """Replay, then write and print what was asked for."""
    output.check()
    pictures = output.report is not None
    with interruptible():
        results = replace(
            options, pictures=pictures, explain=output.explain, progress=True
        ).results()

    def show() -> None:
        results.print(view=output.view, notes=output.notes)
        if output.explain:
            from arborsim.products.explain import print_terms

            print_terms(results.raw.episodes)

    output.print(results, show=show)
