"""What the time of each policy consists of, term by term, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from arborsim.core.units import scale_for
from arborsim.machine.terms import Term, total
from arborsim.run.results import EpisodeResult
from arborsim.show.words import plain


def explained(episodes: Sequence[EpisodeResult]) -> dict[tuple[str, str, str], tuple[Term, ...]]:
    """The terms of all searches of each trace, policy and budget, added up."""
    groups: dict[tuple[str, str, str], list[tuple[Term, ...]]] = {}
    for each in episodes:
        groups.setdefault((each.trace, each.policy, each.budget), []).append(each.terms)
    return {key: total(terms) for key, terms in groups.items()}


def print_terms(episodes: Sequence[EpisodeResult], console: Console | None = None) -> None:
    """Print a table per trace, policy and budget that adds up to its total time."""
    console = console or Console(highlight=False)
    for (trace, policy, budget), terms in explained(episodes).items():
        console.print()
        head = Text(plain(policy), style="bold")
        head.append(f"  budget {budget}, {plain(trace)}", style="not bold")
        console.print(head)
        console.print(_table(terms))
    console.print(
        "beside: ran behind something else, or how long the link was in use; no part of the total.",
        style="dim", markup=False,
    )  # fmt: skip


def _table(terms: Sequence[Term]) -> Table:
    whole_s = sum(term.seconds for term in terms)
    unit = scale_for("seconds", [whole_s / 1000])  # small terms count, too
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("  term", no_wrap=True)
    for name in (unit.unit, "share", f"beside {unit.unit}"):
        table.add_column(name, justify="right", no_wrap=True)
    for term in terms:
        table.add_row(
            f"  {term.name}",
            unit.show(term.seconds),
            f"{term.seconds / whole_s:.1%}" if whole_s else "-",
            unit.show(term.hidden_s) if term.hidden_s else "",
        )
    table.add_row("  total", unit.show(whole_s), "100.0%" if whole_s else "-", "", style="bold")
    return table
