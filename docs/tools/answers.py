"""Draw `answers.svg` in ``docs/assets``, the README's picture: ``python -m docs.tools.answers``.

On the left what the authors of R-KV counted on AIME 2024 (``outside.csv`` of replays, their commit
and file in its last column), on the right what live runs of this project counted at one budget.
The same data give the same bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Callable

from arborsim.core.statistics import Score
from arborsim.products.replay.answers import Counted, shipped
from docs.tools.figures import ROOT, STYLE

MODEL = "deepseek-r1-distill-qwen-7b"
FIGURE = ROOT / "docs" / "assets" / "answers.svg"
WIDTH, HEIGHT, TOP, BOTTOM = 720, 340, 84, 78
#: Left and right ends of the two plots.
LEFT, RIGHT = (70, 400), (500, 704)
BUDGETS = {"512": "512", "1024": "1,024", "2048": "2,048", "": "all"}
SHOWN = {"full": "full", "streaming-llm": "streaming", "h2o": "h2o"}


def counted() -> dict[str, dict[str, str]]:
    """Rows of R-KV's authors on AIME 2024, by budget in tokens; "" for full retention."""
    data = ROOT / "arborsim/products/replay/outside.csv"
    with data.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["dataset"] == "aime24"]
    return {row["budget_tokens"]: row for row in rows if row["model"] == MODEL}


def ours() -> dict[str, Counted]:
    """Answers on chains of 120 lines at a budget of 0.85, and under full retention."""
    rows = [row for row in shipped().rows if dict(row.searched.options) == {"lines": 120}]
    return {row.policy: row for row in rows if row.budget in ("any", "0.85")}


def figure() -> str:
    """The figure as SVG."""

    def up(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, said: str, anchor: str = "middle", kind: str = "plain") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{said}</text>'

    told = "Right answers by budget, counted by R-KV's authors and by us"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{told}">',
        STYLE,
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="var(--paper)"/>',
        text(22, 28, "AIME 2024, R1-Distill-Qwen-7B", "start", "strong"),
        text(22, 50, "30 problems, counted by R-KV's authors", "start", "faint"),
        text(452, 28, "Chains of 120 lines, 85% kept", "start", "strong"),
        text(452, 50, "100 problems, our small model, live", "start", "faint"),
    ]
    for first, last in (LEFT, RIGHT):
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = up(share)
            parts.append(f'<path d="M{first} {y:.1f}H{last}" stroke="var(--line)"/>')
            parts.append(text(first - 8, y + 5, f"{100 * share:.0f}%", "end", "faint"))
    places = []
    for place, (budget, name) in enumerate(BUDGETS.items()):
        row = counted()[budget]
        share, n = float(row["right_percent"]) / 100, int(row["n"])
        x = LEFT[0] + (place + 0.5) * (LEFT[1] - LEFT[0]) / len(BUDGETS)
        places.append(f"{x:.1f} {up(share):.1f}")
        parts += _point(x, share, Score(round(share * n), n, 0, None, "R-KV"), "var(--two)", up)
        parts.append(text(x - 8, up(share) - 9, f"{100 * share:.1f}%", "end", "strong"))
        parts.append(text(x, HEIGHT - BOTTOM + 22, name, kind="faint"))
        parts.append(text(x, HEIGHT - BOTTOM + 42, f"{float(row['mean_output_tokens']):,.0f}"))
    parts.insert(3, f'<path d="M{"L".join(places)}" fill="none" stroke="var(--two)"/>')
    middle = sum(LEFT) / 2
    said = "budget in tokens; below: tokens of an answer, mean"
    parts.append(text(middle, HEIGHT - 12, said, kind="faint"))
    for place, (policy, name) in enumerate(SHOWN.items()):
        own = ours()[policy]
        x = RIGHT[0] + (place + 0.5) * (RIGHT[1] - RIGHT[0]) / len(SHOWN)
        paint = "var(--two)" if policy == "h2o" else "var(--one)"
        parts += _point(x, own.accuracy, own, paint, up)
        parts.append(text(x + 9, up(own.accuracy) - 8, f"{own.right}", "start", "strong"))
        parts.append(text(x, HEIGHT - BOTTOM + 22, name, kind="faint"))
    parts.append(text(sum(RIGHT) / 2, HEIGHT - 12, "whiskers: 95% intervals", kind="faint"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _point(
    x: float, share: float, score: Score, paint: str, up: Callable[[float], float]
) -> list[str]:
    low, high = up(score.low), up(score.high)
    y = up(share)
    return [
        f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" stroke="{paint}" stroke-width="1.5"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{paint}"/>',
    ]


if __name__ == "__main__":
    FIGURE.write_text(figure(), encoding="utf-8")
    print(f"wrote {FIGURE.relative_to(ROOT)}")
