"""The page about published serving runs: errors, run by run, and what was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.outputs import write_text
from arborsim.core.tables import csv_text
from arborsim.products.validate import published
from arborsim.products.validate.published import PlayedRun
from arborsim.products.validate.published_tables import (
    ERRORS,
    OTHERS,
    WORST,
    Published,
    error_table,
    not_played,
    odd_runs,
    sentences,
    to_frame,
)
from arborsim.report import page
from arborsim.report.table import Table
from arborsim.report.words import counted


def write_page(result: Published, path: str | Path) -> None:
    """Write the page; `UsageError` where the file cannot be written."""
    write_text(path, render(result))


def render(result: Published) -> str:
    """The whole page as text; the same result gives the same bytes."""
    runs = result.runs
    played = [each for each in runs if each.simulated]
    errors, others = error_table(runs, ERRORS), error_table(runs, OTHERS)
    asked = len(others.columns) > 1
    return page.render(
        "published",
        ("published.js",),
        {
            "figures": {"scatter": scatter(played), "shares": shares(played)} if played else {},
            "csv": csv_text(to_frame(result)),
        },
        title="Published serving runs",
        subtitle=f"{counted(len(played), 'run')} of {len(runs):,} played: {result.about['runs']}",
        sentences=sentences(runs),
        played=bool(played),
        errors=errors,
        others=others if asked else None,
        worst=Table(published.worst(runs), WORST),
        odd=odd_runs(runs),
        not_played=not_played(runs),
        assumed=assumptions(),
        about=dict(result.about),
        definitions=errors.definitions() | (others.definitions() if asked else {}),
    )


def assumptions() -> dict[str, str]:
    """What the runs do not say, and how it was played."""
    low = published.SHORTEST_SHARE
    return {
        "clients": f"a closed loop, all there at 0, {published.REQUESTS_PER_CLIENT} requests each",
        "lengths": (
            f"as stated; of the dated nightly benchmarks, evenly from {low:g} of that on, as "
            f"{published.LENGTHS} lengths each"
        ),
        "tokens per second": "measured ones by Little's law, from both times and the clients",
        "KV cache": "bf16; fp8 for quantised checkpoints under TensorRT-LLM",
        "prompts": "as the engine computes them: in steps of up to its limit of tokens",
        "little queues": (
            f"the median request waits for less than {published.LITTLE_QUEUEING:.0%} of its "
            "simulated time to first token: other times to first token are not judged"
        ),
        "judged": "runs that no constant was fitted on: those with an odd identifier, or none",
        "odd": (
            "the weights exceed the memory, or prompts would take more than "
            f"{published.MOST_OF_PEAK:.0%} of the GPUs' peak"
        ),
    }


def scatter(runs: Sequence[PlayedRun]) -> page.Figure:
    """Measured against simulated time per output token: a colour per engine, a symbol per GPU."""
    engines = sorted({each.run.engine for each in runs})
    gpus = sorted({each.run.gpu for each in runs})
    data = [_line(runs)]
    for number, engine in enumerate(engines):
        for symbol, gpu in enumerate(gpus):
            own = [each for each in runs if (each.run.engine, each.run.gpu) == (engine, gpu)]
            judged = [each for each in own if not each.run.fitted]
            if judged:
                data.append(_markers(f"{engine}, {gpu}", judged, page.colour(1 + number), symbol))
    if fitted := [each for each in runs if each.run.fitted]:
        data.append({**_markers("fitted", fitted, "var(--soft)", 0), "visible": "legendonly"})
    x, y = (
        page.axis(f"{side}, ms per output token") | page.size_axis(_ends(runs), 1.0)
        for side in ("measured", "simulated")
    )
    return page.figure(data, x, y, 560)


def _ends(runs: Sequence[PlayedRun]) -> list[float]:
    """The least and the largest time per output token in ms, measured or simulated."""
    both = [each.run.tpot_ms for each in runs]
    both += [1e3 * each.simulated.tpot_s for each in runs if each.simulated]
    return [min(both), max(both)]


def _line(runs: Sequence[PlayedRun]) -> page.Figure:
    ends = _ends(runs)
    return {
        "type": "scatter", "mode": "lines", "x": ends, "y": ends, "hoverinfo": "skip",
        "showlegend": False, "line": {"color": "var(--bound)", "width": 1.5, "dash": "dash"},
    }  # fmt: skip


def _markers(name: str, runs: Sequence[PlayedRun], paint: str, symbol: int) -> page.Figure:
    made = [1e3 * each.simulated.tpot_s for each in runs if each.simulated]
    return {
        "type": "scatter", "mode": "markers", "name": page.label(name),
        "x": [page.rounded(each.run.tpot_ms) for each in runs],
        "y": [page.rounded(value) for value in made],
        "customdata": [page.label(each.run.name) for each in runs],
        "marker": {"color": paint, "size": 7, "symbol": page.symbol(symbol), "opacity": 0.7},
        "hovertemplate": "%{customdata}<br>measured %{x:.4g} ms<br>simulated %{y:.4g} ms"
                         "<extra></extra>",
    }  # fmt: skip


def shares(runs: Sequence[PlayedRun]) -> page.Figure:
    """Share of judged runs against the size of their error: of all, and by engine."""
    judged = [each for each in runs if not each.run.fitted]
    engines = sorted({each.run.engine for each in judged})
    data = [_steps("all", judged, "var(--c0)")] if judged else []
    for number, engine in enumerate(engines):
        own = [each for each in judged if each.run.engine == engine]
        data.append(_steps(engine, own, page.colour(1 + number)))
    x = page.axis("size of the error (%)", rangemode="tozero")
    return page.figure(data, x, page.axis("share of runs (%)", range=[0, 101]), 380)


def _steps(name: str, runs: Sequence[PlayedRun], paint: str) -> page.Figure:
    sizes = np.sort([100 * abs(each.tpot_error) for each in runs])
    share: Any = 100 * np.arange(1, len(sizes) + 1) / len(sizes)
    return {
        "type": "scatter", "mode": "lines", "name": page.label(name),
        "x": page.packed(sizes), "y": page.packed(share),
        "line": {"shape": "hv", "color": paint, "width": 2},
        "hovertemplate": "%{y:.0f}% of runs within %{x:.1f}%",
    }  # fmt: skip
