"""One self-contained HTML page: the answer in words, the table, figures, and what they rest on.

The page carries plotly.js and all data inline and forbids itself any network access (content
security policy).  Everything that comes from a file is escaped: in the markup, in the JSON, and,
because Plotly reads a subset of HTML, in labels (`arborsim.report.figures.label`).
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from arborsim.errors import UsageError
from arborsim.report import figures, forest
from arborsim.report.aggregate import BASELINE, Row, aggregate
from arborsim.report.columns import MEMORY, TIME, Column, scales, shown
from arborsim.report.export import strict, to_frame
from arborsim.report.results import EpisodeResult, ReplayResult, TreePicture
from arborsim.report.summary import headline, summarise
from arborsim.report.units import Scale

#: Points over all memory series of a page, most and fewest points per series.
_ALL_POINTS, _MOST_POINTS, _FEWEST_POINTS = 200_000, 600, 120
#: What decides comes first: it must be in sight on a narrow page.
_LEADING = ("peak_hbm", "hbm_vs_full", "kept", "total", "time_vs_full", "tokens_per_s")


def write_report(result: ReplayResult, path: str | Path) -> None:
    """Write the page; the same result gives the same bytes.

    Raises
    ------
    UsageError
        The file cannot be written, or there is nothing to report.
    """
    if not result.episodes:
        raise UsageError("nothing was replayed: there is nothing to report")
    try:
        Path(path).write_text(render(result), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {path}: {error.strerror}") from error


def render(result: ReplayResult) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    rows = aggregate(result.episodes)
    columns = _ordered(shown((*MEMORY, *TIME), rows))
    data, note = _data(result, rows)
    parts = {
        "style": _asset("report.css"),
        "subtitle": _subtitle(result, rows),
        "summary": _summary(rows),
        "caveat": html.escape(_caveat(result, rows)),
        "table": _table(rows, columns),
        "memory_note": html.escape(note),
        "definitions": _pairs({_title(c): c.about for c in columns}),
        "settings": _pairs(result.settings),
        "assumed": _list(result.assumed),
        "data": _in_script(data),
        "plotly": get_plotlyjs(),
        "script": _asset("report.js") + "\n" + _asset("tree.js"),
    }
    # One pass: what is put in is never searched for placeholders again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("report.html"))


def _asset(name: str) -> str:
    return (files("arborsim.report") / "assets" / name).read_text(encoding="utf-8")


def _in_script(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(strict(value), sort_keys=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _traces(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.trace for row in rows))


def _subtitle(result: ReplayResult, rows: Sequence[Row]) -> str:
    firsts = {row.trace: row for row in rows}
    parts = [
        f"{trace} ({row.searches:,} search{'es' if row.searches > 1 else ''}, "
        f"{row.generated_tokens:,} generated tokens)"
        for trace, row in firsts.items()
    ]
    where = [result.settings[key] for key in ("GPU", "model geometry") if key in result.settings]
    on = f" Simulated on {', '.join(where)}." if where else ""
    return html.escape(f"Recorded searches: {'; '.join(parts)}.{on}")


def _summary(rows: Sequence[Row]) -> str:
    blocks = []
    traces = _traces(rows)
    for trace in traces:
        sentences = summarise([row for row in rows if row.trace == trace])
        if not sentences:
            continue
        name = f"<h3>{html.escape(trace)}</h3>" if len(traces) > 1 else ""
        lead = f'<p class="lead">{html.escape(sentences[0])}</p>'
        blocks.append(name + lead + _list(sentences[1:]))
    return "".join(blocks)


def _caveat(result: ReplayResult, rows: Sequence[Row]) -> str:
    notes = ["Bytes and seconds are simulated."]
    if any(not math.isnan(row.attention_kept) for row in rows):
        notes.append("Attention kept is not accuracy: it says how much of what the recorded model "
                     "looked at was still readable.")  # fmt: skip
    if result.assumed:
        count = len(result.assumed)
        notes.append(
            f"{count} number{'s' if count > 1 else ''} of the hardware profile "
            f"{'are' if count > 1 else 'is'} assumed, not measured (see below)."
        )
    return " ".join(notes)


def _title(column: Column) -> str:
    return {"of full": "HBM peak, of full", "vs full": "Time vs full"}.get(
        column.title, column.title
    )


def _ordered(columns: Sequence[Column]) -> list[Column]:
    """What decides first.  Speed relative to full is the inverse of time relative to full."""
    order = {key: place for place, key in enumerate(_LEADING)}
    kept = [column for column in columns if column.key != "speed_vs_full"]
    return sorted(kept, key=lambda column: order.get(column.key, len(order)))


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The comparison, one body per trace, sortable: each cell carries its plain value."""
    units = scales(columns, rows)
    head = "".join(
        f'<th class="text" scope="col">{_sorter(text, "")}</th>' for text in ("Policy", "Budget")
    )
    head += "".join(
        f'<th scope="col" title="{html.escape(c.about)}">{_sorter(c.title, units[c.key].unit)}</th>'
        for c in columns
    )
    traces = _traces(rows)
    bodies = []
    for trace in traces:
        lines = [_line(row, columns, units) for row in rows if row.trace == trace]
        if len(traces) > 1:
            name = f'<th scope="rowgroup" colspan="{len(columns) + 2}">{html.escape(trace)}</th>'
            lines.insert(0, f'<tr class="group">{name}</tr>')
        bodies.append(f"<tbody>{''.join(lines)}</tbody>")
    return f"<thead><tr>{head}</tr></thead>{''.join(bodies)}"


def _line(row: Row, columns: Sequence[Column], units: dict[str, Scale]) -> str:
    policy, budget = html.escape(row.policy), html.escape(row.budget_label)
    cells = [
        f'<th scope="row" class="text" data-value="{policy}">{policy}</th>',
        f'<td class="text" data-value="{budget}">{budget}</td>',
    ]
    for column in columns:
        value = column.value(row)
        known = not math.isnan(value)
        bar = ""
        if known and column.key in ("hbm_vs_full", "kept"):
            bar = f' class="bar" style="--share:{min(max(value, 0.0), 1.0):.3f}"'
        key = f"{value:.9g}" if known else ""
        text = html.escape(units[column.key].show(value).replace("-", "–"))
        cells.append(f'<td{bar} data-value="{key}">{text}</td>')
    kind = ' class="baseline"' if row.is_baseline else ""
    return f"<tr{kind}>{''.join(cells)}</tr>"


def _sorter(title: str, unit: str) -> str:
    unit = {"us": "µs", "x": "×"}.get(unit, unit)
    small = f" <small>{unit}</small>" if unit else ""
    return f'<button type="button">{html.escape(title)}{small}</button>'


def _pairs(pairs: dict[str, str]) -> str:
    return "".join(
        f"<dt>{html.escape(str(name))}</dt><dd>{html.escape(str(text))}</dd>"
        for name, text in pairs.items()
    )


def _list(items: Sequence[str]) -> str:
    if not items:
        return ""
    return f"<ul>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>"


def _data(result: ReplayResult, rows: Sequence[Row]) -> tuple[dict[str, Any], str]:
    """What the scripts draw, and a note on what was left out."""
    traces = _traces(rows)
    policies = list(dict.fromkeys(row.policy for row in rows))
    by_trace = {trace: [row for row in rows if row.trace == trace] for trace in traces}
    kept, note = _worth_drawing(result.episodes)
    points = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(len(kept), 1)))
    known = [t for t in traces if not all(math.isnan(r.attention_kept) for r in by_trace[t])]
    best = headline(by_trace[traces[0]])
    data = {
        "traces": traces,
        "kept": {t: figures.tradeoff(by_trace[t], policies, "kept") for t in known},
        "slow": {t: figures.tradeoff(by_trace[t], policies, "time") for t in traces},
        "time": {t: figures.time_split(by_trace[t]) for t in traces},
        "memory": [{**_who(e), "figure": figures.memory(e, points)} for e in kept],
        "trees": _trees(result),
        "start": _cell(best.policy, best.budget) if best else "",
        "csv": to_frame(result).to_csv(index=False, lineterminator="\n"),
    }
    return data, note


def _who(shown: EpisodeResult | TreePicture) -> dict[str, str]:
    """Labels by which a search under a policy is picked."""
    return {
        "search": f"{shown.trace}, search {shown.episode}",
        "cell": _cell(shown.policy, shown.budget),
    }


def _cell(policy: str, budget: str) -> str:
    return policy if policy == BASELINE else f"{policy}, budget {budget}"


def _worth_drawing(episodes: Sequence[EpisodeResult]) -> tuple[list[EpisodeResult], str]:
    """Memory series up to the page's number of points: whole searches, evenly over traces."""
    with_series = [e for e in episodes if e.measured.series.time_s]
    order = {
        (trace, episode): i
        for trace in dict.fromkeys(e.trace for e in with_series)
        for i, episode in enumerate(
            dict.fromkeys(e.episode for e in with_series if e.trace == trace)
        )
    }
    most = _ALL_POINTS // _FEWEST_POINTS
    depth = 1 + max(order.values(), default=0)
    while depth > 1 and sum(order[e.trace, e.episode] < depth for e in with_series) > most:
        depth -= 1
    kept = [e for e in with_series if order[e.trace, e.episode] < depth]
    if len(kept) == len(with_series):
        return kept, ""
    return kept, f"Of each trace, the first {depth} searches can be shown here."


def _trees(result: ReplayResult) -> dict[str, Any]:
    """Trees once per search, films once per policy and budget."""
    places: dict[tuple[str, int], int] = {}
    layouts: list[dict[str, Any]] = []
    films = []
    for picture in result.pictures:
        if not picture.nodes or not picture.frames:
            continue
        key = (picture.trace, picture.episode)
        if key not in places:
            places[key] = len(layouts)
            layouts.append({**forest.layout(picture.nodes), **forest.facts(picture.nodes)})
        films.append({**_who(picture), "layout": places[key], "frames": forest.frames(picture)})
    return {"layouts": layouts, "films": films}
