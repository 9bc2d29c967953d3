"""Draw the eviction cliff, `eviction-cliff.svg` in ``docs/assets``: ``python docs/tools/cliff.py``.

Right answers by budget, counted live, from ``arborsim/live/answers.csv``: a panel for chains and
one for trees, a line per policy with its settings.  The same answers give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path

from arborsim.live.answers import shipped
from arborsim.show.cliff import Cliff, Line, cliffs, points
from arborsim.show.images import palette

ROOT = Path(__file__).resolve().parents[2]
FIGURE = ROOT / "docs" / "assets" / "eviction-cliff.svg"
#: In colour, in both panels; of each policy the line with most points.
COLOURED = ("random", "streaming-llm", "h2o", "epikv", "tova", "raas", "pyramidkv")
#: Of each panel its title, and the smallest budget that it shows.
PANELS = {
    "chain (lines 32), linear": ("Chains of 32 lines", 0.5),
    "game24, tot-bfs": ("Game of 24, breadth-first tree of thoughts", 0.2),
}
WIDTH, PANEL, HEAD, FOOT = 640, 330, 108, 34
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 40, 46
_APART = 4.0  # pixels between the whiskers of two lines


def style() -> str:
    """Colours for a light and a dark scheme: those of the pages."""
    names = ["--card", "--ink", "--soft", "--line", "--dot", "--bound"]
    names += [f"--c{number}" for number in range(len(COLOURED))]
    light, dark = (
        " ".join(f"{name}: {palette(at_night)[name]};" for name in names)
        for at_night in (False, True)
    )
    return (
        f"<style>\nsvg.cliff {{ {light} }}\n@media (prefers-color-scheme: dark) {{\n"
        f"svg.cliff {{ {dark} }} }}\n"
        'svg.cliff text { font: 15px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; '
        "fill: var(--ink); }\nsvg.cliff .soft { fill: var(--soft); }\n"
        "svg.cliff .strong { font-weight: 600; }\n</style>"
    )


def text(x: float, y: float, said: str, anchor: str = "start", kind: str = "") -> str:
    looks = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{looks}>{escape(said)}</text>'


def legend() -> list[str]:
    parts = []
    for number, policy in enumerate((*COLOURED, "full retention")):
        x, y = 24 + 154 * (number % 4), 62 + 24 * (number // 4)
        full = number == len(COLOURED)
        paint = "var(--bound)" if full else f"var(--c{number})"
        dash = ' stroke-dasharray="6 4"' if full else ""
        parts.append(f'<path d="M{x} {y - 5}h24" stroke="{paint}" stroke-width="3"{dash}/>')
        parts.append(text(x + 31, y, policy))
    return parts


class Panel:
    """One kind of problems, `top` pixels down."""

    def __init__(self, cliff: Cliff, top: float) -> None:
        self.cliff, self.top = cliff, top
        self.title, self.least = PANELS[cliff.title]
        clipped = (
            replace(line, points=tuple(p for p in line.points if p.share >= self.least))
            for line in cliff.lines
        )
        there = [line for line in clipped if line.points]
        self.lines = sorted(there, key=lambda line: -len(line.points))
        self.low = min(p.share for line in self.lines for p in line.points) - 0.02

    def across(self, share: float) -> float:
        return LEFT + (share - self.low) / (1.01 - self.low) * (WIDTH - LEFT - RIGHT)

    def up(self, accuracy: float) -> float:
        return self.top + PANEL - BOTTOM - accuracy * (PANEL - TOP - BOTTOM)

    def parts(self) -> list[str]:
        found = [text(24, self.top + 20, self.title, kind="strong")]
        for accuracy in (0.0, 0.25, 0.5, 0.75, 1.0):
            y = self.up(accuracy)
            found.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="var(--line)"/>')
            found.append(text(LEFT - 8, y + 5, f"{accuracy:.0%}", "end", "soft"))
        for tenth in range(1, 11):
            if tenth / 10 > self.low:
                x, y = self.across(tenth / 10), self.up(0) + 20
                found.append(text(x, y, f"{tenth / 10:g}", "middle", "soft"))
        if full := self.cliff.full:
            y = self.up(full.accuracy)
            said = f"full retention: {full.right} of {full.n} right"
            found.append(
                f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="var(--bound)" '
                f'stroke-width="2" stroke-dasharray="6 4"><title>{said}</title></path>'
            )
        chosen = [
            next((line for line in self.lines if line.policy == policy), None)
            for policy in COLOURED
        ]
        found += [self.grey(line) for line in self.lines if line not in chosen]
        there = [(number, line) for number, line in enumerate(chosen) if line]
        for place, (number, line) in enumerate(there):
            found += self.coloured(line, number, _APART * (place - (len(there) - 1) / 2))
        return found

    def grey(self, line: Line) -> str:
        places = [(self.across(p.share), self.up(p.accuracy)) for p in line.points]
        if len(places) == 1:
            x, y = places[0]
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="var(--dot)"/>'
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        return f'<path d="M{path}" stroke="var(--dot)" fill="none" opacity="0.6"/>'

    def coloured(self, line: Line, number: int, away: float) -> list[str]:
        paint = f"var(--c{number})"
        places = [(self.across(p.share) + away, self.up(p.accuracy)) for p in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        found = [f'<path d="M{path}" stroke="{paint}" stroke-width="2.5" fill="none"/>']
        for (x, y), point in zip(places, line.points, strict=True):
            ends = f"M{x:.1f} {self.up(point.low):.1f}V{self.up(point.high):.1f}"
            said = (
                f"{line.label} at budget {point.budget}: {point.right} of {point.n} right, 95% "
                f"interval {100 * point.low:.1f} to {100 * point.high:.1f}%"
            )
            found.append(f'<path d="{ends}" stroke="{paint}" stroke-width="1.5"/>')
            found.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{paint}">'
                f"<title>{escape(said)}</title></circle>"
            )
        return found


def drawn() -> list[Cliff]:
    """The panels' answers, in the order of the panels."""
    found = {cliff.title: cliff for cliff in cliffs(shipped().rows)}
    return [found[title] for title in PANELS]


def figure() -> str:
    """The figure as SVG; its ``metadata`` holds the answers of its panels."""
    found = drawn()
    height = HEAD + PANEL * len(found) + FOOT
    told = "Right answers by budget, counted live: a cliff on chains, a slope on trees"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="cliff" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{told}">',
        f"<metadata>{escape(json.dumps(points(found)))}</metadata>",
        style(),
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="var(--card)"/>',
        text(
            24, 30, "Right answers by budget, tokens really removed (95% intervals)", kind="strong"
        ),
        *legend(),
    ]
    for number, cliff in enumerate(found):
        parts += Panel(cliff, HEAD + PANEL * number).parts()
    middle = (LEFT + WIDTH - RIGHT) / 2
    under = "budget, as a share of what full retention holds (grey: other settings)"
    parts.append(text(middle, height - 22, under, "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(figure())
    print(f"wrote {FIGURE.relative_to(ROOT)}")
