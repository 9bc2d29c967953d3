"""One page on a validation: the verdict, what was compared, line by line, and four figures.

The page needs no script and no network: the figures are SVG.  Everything that comes from a file is
escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from arborsim.core.errors import UsageError
from arborsim.show.validation_figures import (
    bytes_figures,
    jaccard_figures,
    parts_legend,
    quality_figure,
    time_figure,
)
from arborsim.show.validation_table import COLUMNS, cells_of
from arborsim.validate.results import PEAKS, Validation
from arborsim.validate.summary import Line, lines_of, term_errors
from arborsim.validate.verdict import sentences


def write_page(result: Validation, path: Path) -> None:
    """Write the page; the same result gives the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    try:
        path.write_text(render(result), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def render(result: Validation) -> str:
    """The whole page as text."""
    lines = lines_of(result.checks)
    about = result.about
    where = [about[key] for key in ("task", "search", "device", "GPU profile") if key in about]
    left_out = [
        *result.left_out,
        *(f"{c.policy} at {c.budget}, problem {c.episode}: {c.infeasible}"
          for c in result.checks if c.infeasible),
    ]  # fmt: skip
    parts = {
        "style": _asset("report.css"),
        "subtitle": html.escape(", ".join(where)),
        "verdict": _list(sentences(result.checks)),
        "table": _table(lines),
        "bytes": "".join(bytes_figures(result.checks)),
        "parts": parts_legend(),
        "peaks": _peaks(result),
        "time": time_figure(lines),
        "terms": _terms(lines),
        "jaccard": "".join(jaccard_figures(result.checks)),
        "quality": quality_figure(result.checks, lines),
        "about": _pairs(dict(about)),
        "left_out": _list(left_out),
        "columns": _pairs(dict(COLUMNS)),
    }
    # One pass: what is put in is never searched for placeholders again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("validation.html"))


def _asset(name: str) -> str:
    return (files("arborsim.show") / "assets" / name).read_text(encoding="utf-8")


def _table(lines: Sequence[Line]) -> str:
    titles = ("policy", "budget", *(title for title, _ in COLUMNS))
    head = "".join(
        f'<th scope="col"{_text_class(i < 2)}>{html.escape(title)}</th>'
        for i, title in enumerate(titles)
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(map(_row, lines))}</tbody>"


def _text_class(text: bool) -> str:
    return ' class="text"' if text else ""


def _row(line: Line) -> str:
    cells = "".join(f"<td>{html.escape(text)}</td>" for text in cells_of(line))
    name = f'<th scope="row" class="text">{html.escape(line.policy)}</th>'
    return f'<tr>{name}<td class="text">{html.escape(line.budget)}</td>{cells}</tr>'


def _peaks(result: Validation) -> str:
    """Peaks that differ, one by one; the size of tensors and allocator beside them."""
    ran = [check for check in result.checks if not check.infeasible]
    said = []
    for check in ran:
        for name, live, simulated in zip(
            PEAKS, check.live_peaks, check.simulated_peaks, strict=True
        ):
            if live != simulated:
                said.append(
                    f"{check.policy} at {check.budget}, problem {check.episode}: {name} is "
                    f"{simulated:,} B simulated, {live:,} B live"
                )
    gaps = [c.allocated_bytes / c.live_peaks[0] for c in ran if c.live_peaks and c.live_peaks[0]]
    if gaps:
        said.append(
            f"The pools' tensors, gaps included, take {min(gaps):.2f} to {max(gaps):.2f} times the "
            "peak of the tokens in them."
        )
    over = [c.device_peak_bytes - c.weight_bytes - c.allocated_bytes for c in ran
            if c.device_peak_bytes]  # fmt: skip
    if over:
        said.append(
            f"The allocator's peak, less weights and pools, is {min(over):,} to {max(over):,} B: "
            "activations, and copies while pools grow."
        )
    return _list(said)


def _terms(lines: Sequence[Line]) -> str:
    head = "".join(
        f'<th scope="col"{_text_class(title == "term")}>{title}</th>'
        for title in ("term", "policies and budgets", "median error", "worst error", "worst")
    )
    rows = "".join(
        f'<tr><th scope="row" class="text">{error.term.removesuffix("_s").replace("_", " ")}</th>'
        f"<td>{error.lines}</td><td>{_percent(error.median)}</td><td>{_percent(error.worst)}</td>"
        f"<td>{html.escape(error.worst_name)}</td></tr>"
        for error in term_errors(lines)
    )
    return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"


def _percent(value: float) -> str:
    return "n/a" if value != value else f"{100 * value:.1f}%"


def _pairs(pairs: dict[str, str]) -> str:
    return "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in pairs.items()
    )


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(i)}</li>' for i in items)}</ul>" if items else ""
