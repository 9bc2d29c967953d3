"""The figures of a validation: bytes, time, decisions and quality, simulated against live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from arborsim.products.validate import results
from arborsim.products.validate.compare import PARTS
from arborsim.report import page
from arborsim.report.report import Choice

_MOST_DRAWN = 6


def _line(
    name: str, x: Sequence[float], y: Sequence[float], paint: str, dash: str = "solid", **look: Any
) -> page.Figure:
    """A line over the iterations."""
    return page.scatter(name, list(x), list(y), line={"color": paint, "dash": dash, **look})


def _dots(
    lines: Sequence[results.Line], values: Sequence[tuple[float, float]], texts: Sequence[str]
) -> list[page.Figure]:
    """A dot per policy and budget, a colour per budget."""
    found = []
    for number, budget in enumerate(dict.fromkeys(line.budget for line in lines)):
        own = [k for k, line in enumerate(lines) if line.budget == budget]
        x, y = ([page.rounded(values[k][side]) for k in own] for side in range(2))
        marker = {"color": page.colour(number + 1), "size": 8, "opacity": 0.75}
        tips: page.Figure = {
            "customdata": [page.label(texts[k]) for k in own],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        found.append(page.scatter(f"budget {budget}", x, y, "markers", marker=marker, **tips))
    return found


def held(checks: Sequence[results.CellCheck]) -> list[Choice]:
    """Live and simulated bytes over the iterations: those that use most tiers, then most bytes."""
    drawn = [
        (check, np.array(check.bytes_over_time, dtype=np.int64).reshape(-1, 1 + 2 * len(PARTS)))
        for check in checks
        if check.bytes_over_time
    ]
    drawn.sort(key=lambda item: -int(item[1][:, 1:].any(axis=0).sum()))
    first = {item[0].policy: item for item in reversed(drawn[: 4 * _MOST_DRAWN])}
    paints = ("hbm", "quantised", "ddr", "ddr-quantised", "staging")
    found = []
    for check, table in list(first.values())[::-1][:_MOST_DRAWN]:
        at, sides = table[:, 0].tolist(), table[:, 1:].T.tolist()
        data = []
        for part, paint, live, simulated in zip(
            PARTS, paints, sides[: len(PARTS)], sides[len(PARTS) :], strict=True
        ):
            if any(live) or any(simulated):
                name = part.replace("hbm", "HBM").replace("ddr", "DDR").replace("_", ", ")
                data.append(_line(f"{name}, live", at, live, f"var(--{paint})", width=5))
                data.append(
                    _line(f"{name}, simulated", at, simulated, "var(--ink)", "dash", width=1.5)
                )
        across, up = page.axis("iteration"), page.axis("bytes", rangemode="tozero")
        figure = page.figure(data, across, up, 380)
        found.append(Choice(figure, (f"{check.policy} at budget {check.budget}",)))
    return found


def per_token(lines: Sequence[results.Line]) -> list[Choice]:
    """Measured against simulated seconds per token."""
    known = [line for line in lines if line.searches and min(line.per_token_s()) > 0]
    if not known:
        return []
    values = [line.per_token_s() for line in known]
    ends = [0.8 * min(map(min, values)), 1.25 * max(map(max, values))]
    same = _line("", ends, ends, "var(--edge)", "dash", width=1.5) | {"showlegend": False}
    texts = [
        f"{line.name}: {1e3 * live:.3f} ms measured, {1e3 * simulated:.3f} ms simulated"
        for line, (live, simulated) in zip(known, values, strict=True)
    ]
    x, y = (
        page.axis(f"{side}, s per token") | page.size_axis(ends, 1.0)
        for side in ("measured", "simulated")
    )
    return [Choice(page.figure([same, *_dots(known, values, texts)], x, y, 460))]


def drift(checks: Sequence[results.CellCheck]) -> list[Choice]:
    """A figure per budget: every policy's line over the iterations of the first search."""
    drawn = [check for check in checks if check.jaccard and check.shadow_moves]
    first = min((check.episode for check in drawn), default=0)
    drawn = [check for check in drawn if check.episode == first]
    found = []
    for budget in dict.fromkeys(check.budget for check in drawn):
        data = []
        own = [check for check in drawn if check.budget == budget]
        for i, check in enumerate(own):
            at, value, paint = check.jaccard_iteration, check.jaccard, page.colour(i + 1)
            same = sum(iteration <= check.same_iterations for iteration in at)
            group = {"legendgroup": page.label(check.policy)}
            data.append(_line(check.policy, at[:same], value[:same], paint) | group)
            if same < len(at):
                rest = slice(max(0, same - 1), None)
                other = _line(check.policy, at[rest], value[rest], paint, "dot")
                data.append(other | group | {"showlegend": not same})
        x, y = page.axis("iteration"), page.axis("Jaccard index")
        found.append(Choice(page.figure(data, x, y, 420), (budget,), f"Problem {first}."))
    return found


def quality(checks: Sequence[results.CellCheck], lines: Sequence[results.Line]) -> list[Choice]:
    """Attention kept and output error against live accuracy, if there are enough problems."""
    judged = [line for line in lines if line.judged] if results.rank_agreements(checks) else []
    found = []
    for figure in ("attention_kept", "output_error"):
        known = [line for line in judged if not math.isnan(getattr(line, figure))]
        if not known:
            continue
        values = [(getattr(line, figure), line.correct / line.judged) for line in known]
        texts = [
            f"{line.name}: {value:.4f}, {line.correct} of {line.judged} right"
            for line, (value, _) in zip(known, values, strict=True)
        ]
        title = figure.replace("_", " ")
        x, y = page.axis(f"{title} (replay)"), page.axis("share right (live)", range=[0, 1])
        made = page.figure(_dots(known, values, texts), x, y, 420)
        found.append(Choice(made, (title.capitalize(),)))
    return found
