"""Draw `attention-against-answers.svg` in ``docs/assets``: ``python docs/tools/figures.py``.

A point is a policy under a budget; right is what it keeps of the recorded attention, up is how many
of its live searches were right, from ``reports/validation/cpu/chain-quality``. The same results
give the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "reports" / "validation" / "cpu" / "chain-quality" / "results.parquet"
FIGURE = ROOT / "docs" / "assets" / "attention-against-answers.svg"
#: Colours for a light and a dark scheme; the site's own win where the figure is part of a page.
STYLE = """<style>
svg.figure { --paper: #ffffff; --ink: #1f2328; --faint: #636c76; --line: #d0d7de;
  --one: #0969da; --two: #bc4c00; }
@media (prefers-color-scheme: dark) {
svg.figure { --paper: #15181d; --ink: #e6edf3; --faint: #8b949e; --line: #3a414a;
  --one: #58a6ff; --two: #f0883e; } }
svg.figure text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif;
  fill: var(--ink); }
svg.figure .faint { fill: var(--faint); }
svg.figure .strong { font-weight: 600; }
</style>"""
WIDTH, HEIGHT = 560, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 52, 58
LOWEST = 92.0  # per cent of the attention, at the left edge
#: Where the name of a point stands: offset in x and y, and what of the text is at that place.
LABELS = {
    ("full", "any"): (0, 24, "end"),
    ("streaming-llm", "0.7"): (-9, 5, "end"),
    ("streaming-llm", "0.85"): (4, -11, "end"),
    ("h2o", "0.85"): (10, -28, "end"),
    ("h2o", "0.7"): (-9, -4, "end"),
    ("tova", "0.7"): (0, -11, "middle"),
    ("tova", "0.85"): (0, 19, "middle"),
    ("vatp", "0.85"): (-9, 4, "end"),
    ("vatp", "0.7"): (0, -11, "middle"),
    ("keydiff", "0.7"): (-9, 4, "end"),
    ("keydiff", "0.85"): (2, 21, "end"),
}
#: How policies are called that were not run as their authors run them.
NAMES = {"h2o": "h2o, one ranking"}
#: Its median counted evicted tokens when this was run (CHANGELOG.md).
CHANGED = ("raas",)


def points(results: pd.DataFrame) -> pd.DataFrame:
    """Attention kept (%), right answers and searches of every policy and budget."""
    by = results[~results["policy"].isin(CHANGED)].groupby(["policy", "budget"], sort=True)
    return by.agg(
        kept=("attention_kept", lambda share: 100 * share.mean()),
        right=("correct", "sum"),
        n=("correct", "size"),
    ).reset_index()


def figure(cells: pd.DataFrame) -> str:
    """The figure as SVG."""

    def across(kept: float) -> float:
        return LEFT + (kept - LOWEST) / (100 - LOWEST) * (WIDTH - LEFT - RIGHT)

    def up(share: float) -> float:
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, said: str, anchor: str, kind: str = "plain") -> str:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        return f'<text {place} class="{kind}">{said}</text>'

    n = int(cells["n"].max())
    told = f"Right answers against attention kept: {len(cells)} policies and budgets, live"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{told}">',
        STYLE,
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="var(--paper)"/>',
        text(LEFT - 44, 28, f"Right answers of {n}, against attention kept", "start", "strong"),
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = up(share)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="var(--line)"/>')
        parts.append(text(LEFT - 10, y + 5, f"{share * n:.0f}", "end", "faint"))
    for kept in range(int(LOWEST), 101):
        parts.append(text(across(kept), HEIGHT - BOTTOM + 22, f"{kept}%", "middle", "faint"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        text(middle, HEIGHT - 12, "share of the recorded attention that is kept", "middle")
    )
    colours = {"tova": "var(--two)", "streaming-llm": "var(--one)"}
    for cell in cells.itertuples():
        x, y = across(cell.kept), up(cell.right / cell.n)
        dx, dy, anchor = LABELS[cell.policy, cell.budget]
        name = NAMES.get(cell.policy, cell.policy)
        name = name if cell.budget == "any" else f"{name} {cell.budget}"
        said = f"{name}: {cell.right} of {cell.n} right, {cell.kept:.1f}% of the attention kept"
        colour = colours.get(cell.policy, "var(--faint)")
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="5"'
        parts.append(f'<circle {place} fill="{colour}"><title>{said}</title></circle>')
        kind = "strong" if cell.policy in colours else "faint"
        parts.append(text(x + dx, y + dy, name, anchor, kind))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(figure(points(pd.read_parquet(RESULTS))))
    print(f"wrote {FIGURE.relative_to(ROOT)}")
