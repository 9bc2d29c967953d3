"""Draw `ets-depth.svg` in ``docs/assets``: ``python docs/tools/depth.py``.

How many times less KV ETS needs than REBASE on synthetic trees, by depth, a panel per width and a
line per lambda_b, from ``reports/claims/ets.parquet``. The same results give the same bytes.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.searches_depth import PAPER, SOURCE, Depths
from docs.tools.figures import STYLE

FIGURE = ROOT / "docs" / "assets" / "ets-depth.svg"
PANEL, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 256, 330, 54, 10, 84, 52
LOW, HIGH = 0.9, 2.1
PAINTS = ("var(--faint)", "var(--two)", "var(--one)")  # of lambda_b, ascending


def text(x: float, y: float, said: str, anchor: str = "middle", kind: str = "") -> str:
    looks = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{looks}>{escape(said)}</text>'


def up(ratio: float) -> float:
    share = (min(max(ratio, LOW), HIGH) - LOW) / (HIGH - LOW)
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def panel(depths: Depths, width: int, left: float) -> list[str]:
    """One width, `left` pixels from the left."""
    most = max(depths.depths)
    inner = PANEL - LEFT - RIGHT

    def across(depth: float) -> float:
        return left + LEFT + depth / (most + 0.5) * inner

    ends = f"M{left + LEFT:.1f} {{y:.1f}}H{left + PANEL - RIGHT:.1f}"
    low, high = PAPER[width]
    found = [
        text(left + LEFT, TOP - 12, f"width {width}", "start", "strong"),
        f'<rect x="{left + LEFT}" y="{up(high):.1f}" width="{inner}" '
        f'height="{up(low) - up(high):.1f}" fill="var(--line)" opacity="0.6">'
        f"<title>table 1 of the paper: {low:g} to {high:g}</title></rect>",
    ]
    for ratio in (1.0, 1.25, 1.5, 1.75, 2.0):
        found.append(f'<path d="{ends.format(y=up(ratio))}" stroke="var(--line)"/>')
        if not left:
            found.append(text(left + LEFT - 6, up(ratio) + 5, f"{ratio:g}x", "end", "faint"))
    found += [text(across(d), HEIGHT - BOTTOM + 20, f"{d}", kind="faint") for d in depths.depths]
    for paint, value in zip(PAINTS, depths.lambdas, strict=True):
        points = [
            (depth, ratio)
            for depth in depths.depths
            if (ratio := depths.kv(depth, width, "ets", value))
        ]
        path = "L".join(f"{across(depth):.1f} {up(ratio.value):.1f}" for depth, ratio in points)
        found.append(f'<path d="M{path}" stroke="{paint}" stroke-width="2.5" fill="none"/>')
        for depth, ratio in points:
            x = across(depth)
            said = f"{depth} levels, lambda_b {value:g}: {ratio}, {ratio.problems} problems"
            found.append(
                f'<path d="M{x:.1f} {up(ratio.low):.1f}V{up(ratio.high):.1f}" stroke="{paint}"/>'
            )
            found.append(
                f'<circle cx="{x:.1f}" cy="{up(ratio.value):.1f}" r="4" fill="{paint}">'
                f"<title>{escape(said)}</title></circle>"
            )
    return found


def figure(depths: Depths) -> str:
    """The figure as SVG."""
    width = PANEL * len(depths.widths) + 10
    told = "How many times less KV ETS needs than REBASE, by depth: more, the deeper the trees"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {width} {HEIGHT}" '
        f'role="img" aria-label="{told}">',
        STYLE,
        f'<rect width="{width}" height="{HEIGHT}" rx="8" fill="var(--paper)"/>',
        text(16, 26, "KV size, times less than REBASE (95% intervals)", "start", "strong"),
    ]
    for number, (paint, value) in enumerate(zip(PAINTS, depths.lambdas, strict=True)):
        x = 16 + 140 * number
        parts.append(f'<path d="M{x} 45h22" stroke="{paint}" stroke-width="3"/>')
        parts.append(text(x + 28, 50, f"lambda_b {value:g}", "start"))
    x = 16 + 140 * len(depths.lambdas)
    parts.append(f'<rect x="{x}" y="38" width="22" height="14" fill="var(--line)"/>')
    parts.append(text(x + 28, 50, "table 1 of the paper", "start"))
    for number, each in enumerate(depths.widths):
        parts += panel(depths, each, PANEL * number)
    parts.append(text(width / 2, HEIGHT - 12, "levels of the (synthetic) trees"))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(figure(Depths.read(ROOT / SOURCE)))
    print(f"wrote {FIGURE.relative_to(ROOT)}")
