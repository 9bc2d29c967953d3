"""`arborsim validate` in a terminal: the verdict, and a line per policy and budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arborsim.show.terminal import plain
from arborsim.validate.results import Validation
from arborsim.validate.summary import Line, lines_of, term_errors
from arborsim.validate.verdict import sentences

if TYPE_CHECKING:
    from rich.console import Console

#: Below this width the columns of `_SPARE` are left out.
_WIDE = 100
_SPARE = ("time", "same", "kept")
#: Title, and what it shows; also the HTML page's columns.
COLUMNS = (
    ("n", "live searches; +k: the budget was too small for k more"),
    ("plans", "shadow runs that decide exactly as the replay of their own recording"),
    ("bytes", "share of steps after which the simulated bytes of every tier are the live ones"),
    ("peaks", "searches in which all simulated peaks are the live ones"),
    ("time", "relative error of all seconds, simulated against measured"),
    ("token", "relative error of the seconds per generated token, without the prompt"),
    ("same", "share of the iterations that the live run repeats token by token"),
    ("J", "Jaccard index of the tokens in HBM, shadow against live, while the tokens are the same"),
    ("J after", "the same after the first other token, matched by order of arrival"),
    ("kept", "attention kept, in the replay of the full-retention trace"),
    ("right", "answers of the live searches"),
)


def cells_of(line: Line) -> list[str]:
    """The text of each of `COLUMNS`."""
    if not line.searches:
        parity = _of(line.parity, line.infeasible)
        return [f"0+{line.infeasible}", parity, *[""] * (len(COLUMNS) - 2)]
    all_searches = line.searches + line.infeasible
    live, simulated = line.per_token_s()
    return [
        f"{line.searches}" + (f"+{line.infeasible}" if line.infeasible else ""),
        _of(line.parity, all_searches),
        _share(line.equal_calls, line.calls),
        _of(line.peaks_equal, line.searches),
        _signed(line.error("total_s")),
        _signed(simulated / live - 1 if live else float("nan")),
        _share(line.same, 1.0),
        _number(line.jaccard_before),
        _number(line.jaccard_after),
        _number(line.attention_kept),
        f"{line.correct}/{line.judged}" if line.judged else "",
    ]


def print_validation(result: Validation, console: Console | None = None) -> None:
    """Print the verdict, the lines and the terms of the time; fits 80 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = console or Console(highlight=False)
    if not result.checks:
        console.print("Nothing was compared.")
        return
    lines = lines_of(result.checks)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    table.add_column("budget", no_wrap=True)
    titles = [title for title, _ in COLUMNS]
    shown = [i for i, t in enumerate(titles) if console.width >= _WIDE or t not in _SPARE]
    for i in shown:
        table.add_column(titles[i], justify="right", no_wrap=True)
    for line in lines:
        cells = cells_of(line)
        table.add_row(plain(line.policy), plain(line.budget), *(cells[i] for i in shown))
    console.print(table)
    console.print(plain(_legend(shown)), style="dim", markup=False)
    for error in term_errors(lines):
        if error.lines:
            console.print(
                f"  {error.term.removesuffix('_s').replace('_', ' ')}: off by "
                f"{100 * error.median:.1f}% in the median, {100 * error.worst:.1f}% at worst "
                f"({plain(error.worst_name)}), n {error.lines}",
                markup=False,
            )
    for sentence in (*sentences(result.checks), *result.left_out):
        console.print(plain(sentence), markup=False)


def _legend(shown: list[int]) -> str:
    """What the columns show, and which of them a wider terminal would show."""
    said = "; ".join(f"{COLUMNS[i][0]}: {COLUMNS[i][1].replace('; ', ', ')}" for i in shown)
    hidden = [title for i, (title, _) in enumerate(COLUMNS) if i not in shown]
    missing = f" From {_WIDE} columns on also {', '.join(hidden)}." if hidden else ""
    return f"{said}.{missing}"


def _of(count: int, total: int) -> str:
    return "all" if count == total else f"{count}/{total}"


def _share(part: float, whole: float) -> str:
    return "all" if part == whole else f"{100 * part / whole:.1f}%" if whole else ""


def _signed(value: float) -> str:
    return "" if value != value else f"{100 * value:+.0f}%"


def _number(value: float) -> str:
    return "" if value != value else f"{value:.3f}"
