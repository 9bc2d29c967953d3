"""Results that every function of the API returns, and how they are read from a file again."""

from __future__ import annotations

import html
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from arborsim.core.errors import UsageError
from arborsim.core.tables import check_format, write_table

if TYPE_CHECKING:
    import os

    import pandas as pd
    from rich.console import Console

    from arborsim.report.report import Report

#: How tables look in notebooks: colours and fonts are the notebook's own, light or dark.
_CELL = "padding:0.15em 0.6em;border:0;text-align:{}"
_WIDTH = 100  # columns of `__str__` where there is no terminal


class Results(ABC):
    """Results of one kind: a table, what made it, and ways to show it.

    Attributes
    ----------
    kind : str
        ``"replay"``, ``"search"``, ``"plan"``, ``"live"``, ``"fidelity"``,
        ``"tune"`` or ``"validate"``.
    metadata : dict
        What made the results: `kind`, `version` of arborsim, `command`, `versions` of Python and
        of the libraries, machine and model, `settings`, and what to know about the figures
        (`assumed`, `notes`, `left_out`, `does_not_fit`).  It is stored in every Parquet file that
        `save` writes.
    raw : object
        The records that tables and pages are made of.  They may change between versions.

    Notes
    -----
    ``print(results)`` shows the tables of the command line. A notebook shows `summary`.
    """

    kind: ClassVar[str]
    raw: Any

    def __init__(self, raw: Any, metadata: Mapping[str, Any]) -> None:
        self.raw, self.metadata = raw, dict(metadata)

    @abstractmethod
    def to_pandas(self) -> pd.DataFrame:
        """A row per search (of a plan: per candidate). Names carry their units.

        Nothing is rounded.  What is not known is NaN or missing.
        """

    @abstractmethod
    def summary(self) -> pd.DataFrame:
        """A row per policy and budget (and what else was compared), over all searches."""

    @abstractmethod
    def to_json(self) -> str:
        """Everything as strict JSON, as ``--json`` prints it. Unknown numbers are null."""

    @abstractmethod
    def describe(self) -> Report:
        """The report that pages, terminals and notebooks show."""

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page, and return its path.

        Raises
        ------
        UsageError
            The page cannot be written, or the results do not hold what it shows.
        """
        from arborsim.core.outputs import output_path
        from arborsim.report.report import write

        path = output_path(path)
        write(self.describe(), path)
        return path

    def print(self, console: Console | None = None, notes: bool = False) -> None:
        """Print the answer and tables at the width of the terminal, or of a rich `console`.

        With `notes` all notes follow, else those that can change a decision.
        """
        from arborsim.report.text import print_report

        print_report(self.describe(), console, notes)

    def plot(
        self, kind: str | None = None, *, metric: str | None = None, dark: bool = False
    ) -> Any:
        """Draw the results.

        Parameters
        ----------
        kind : str
            Of replays ``"pareto"`` (memory against a metric), ``"heat"`` (policies by budgets) or
            ``"cliff"`` (answers counted live), of searches ``"pareto"`` (accuracy against KV size)
            or ``"width"``, of plans ``"pareto"`` (cost, quality and latency) or ``"load"``, of live
            runs ``"cliff"`` (accuracy by budget), of fidelity ``"budget"``,
            ``"pareto"`` (memory) or ``"position"``.  None is the first of them.
        metric : str
            What replays are drawn by: ``"right"`` (answers counted live), ``"kept"``, ``"error"``,
            ``"time"`` or ``"memory"``.  None takes the first of ``"right"``, ``"kept"`` and
            ``"time"`` that is known.
        dark : bool
            Light on dark.

        Returns
        -------
        plotly.graph_objects.Figure
            Several plots, such as those of several traces, stand below each other.

        Raises
        ------
        UsageError
            There is no such plot, or the results hold nothing that it could draw.
        """
        from plotly.graph_objects import Figure

        from arborsim.products.plot.plots import plots_of
        from arborsim.report.images import stacked, themed

        return Figure(themed(stacked(plots_of(self.describe(), kind, metric)), dark))

    def _frame(self) -> pd.DataFrame:
        """The frame that `save` writes."""
        return self.to_pandas()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the results to a ``.parquet``, ``.csv`` or ``.json`` file, and return its path.

        Parquet also holds `metadata`: `load_results` reads it again.  The same results give the
        same bytes.

        Raises
        ------
        UsageError
            The ending is another one, or the file cannot be written.
        """
        from arborsim.core.outputs import output_path, write_text

        path = output_path(path)
        check_format(path)
        if path.suffix == ".json":
            write_text(path, f"{self.to_json()}\n")
        else:
            write_table(self._frame(), path, self.metadata)
        return path

    def __str__(self) -> str:
        from rich.console import Console

        page = io.StringIO()
        plain = Console(
            file=page, width=_WIDTH, highlight=False, force_jupyter=False, force_terminal=False
        )
        self.print(plain)
        return page.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.metadata.get('command', '')!r}>"

    def _repr_html_(self) -> str:
        """The answer and the tables, without the columns that a page shows on demand."""
        said = [
            str(note) for key in ("does_not_fit", "notes") for note in self.metadata.get(key, ())
        ]
        return notebook_html(self.describe(), said)


def notebook_html(report: Report, notes: Iterable[str] = ()) -> str:
    """A report as HTML that takes its colours from the page it stands in."""
    parts = ['<div style="overflow-x:auto">']
    for answer in report.answers():
        parts.append(f'<p style="margin:0.4em 0">{html.escape(" ".join(answer.sentences))}</p>')
    for whole in (each.table for each in report.tables()):
        table = whole.under([each for each in whole.columns if not whole.behind(each)])
        parts.append('<table style="border-collapse:collapse"><thead><tr>')
        for column, unit in table.heads():
            side = "left" if column.is_text else "right"
            name = html.escape(
                f"{column.title.replace(chr(0xAD), '')}{f', {unit}' if unit else ''}"
            )
            about = html.escape(column.about, quote=True)
            parts.append(f'<th style="{_CELL.format(side)}" title="{about}">{name}</th>')
        parts.append("</tr></thead><tbody>")
        for title, rows in table.bodies():
            if title:
                head = f'<th style="{_CELL.format("left")}" colspan="{len(table.columns)}">'
                parts.append(f"<tr>{head}{html.escape(title)}</th></tr>")
            for _, cells in rows:
                parts.append("<tr>")
                for cell in cells:
                    side = "left" if cell.look.startswith("text") else "right"
                    text = html.escape(cell.text)
                    wide = f' colspan="{cell.span}"' if cell.span > 1 else ""
                    parts.append(f'<td style="{_CELL.format(side)}"{wide}>{text}</td>')
                parts.append("</tr>")
        parts.append("</tbody></table>")
    parts += [f'<p style="margin:0.2em 0;opacity:0.75">{html.escape(note)}</p>' for note in notes]
    return "".join([*parts, "</div>"])


def not_in_file(what: str, remedy: str) -> UsageError:
    """Error for what a file of results does not hold, with the remedy."""
    return UsageError(f"{what}: the file does not hold what it shows; {remedy}")
