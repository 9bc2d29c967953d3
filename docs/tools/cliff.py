"""Draw the eviction cliff, `eviction-cliff.svg` in ``docs/assets``: ``python docs/tools/cliff.py``.

Right answers by budget, live or masked, from ``arborsim/products/replay/answers.csv``: a panel for
chains and one for trees, a line per policy with its settings.  The same answers give the same
bytes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path

from arborsim.products.replay.answers import shipped
from arborsim.products.replay.cliff import Cliff, Line, cliffs, points
from arborsim.report.images import palette

ROOT = Path(__file__).resolve().parents[2]
FIGURE = ROOT / "docs" / "assets" / "eviction-cliff.svg"
#: Of each panel its title, the smallest budget that it shows, and the lines in colour, by label: a
#: policy with the settings that are not its authors'.
PANELS: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "chain (lines 32), linear": (
        "Chains of 32 lines", 0.5,
        ("h2o", "h2o pin_prompt=true", "raas", "rkv interval=16 pin_prompt=true", "tova", "adakv",
         "epikv inverted recent=16"),
    ),
    "game24, tot-bfs": (
        "Game of 24, breadth-first tree of thoughts", 0.2,
        ("h2o per=shared", "streaming-llm", "tova", "pyramidkv window=16"),
    ),
}  # fmt: skip
#: How settings are said.
WORDS = {"pin_prompt=true": "prompt kept", "per=shared": "one ranking", "inverted": "inverted"}
#: The pages' colours, but for ink and grey, and five more: in light, and at night.
MORE = (
    ("#7a4fb5", "#b08be8"), ("#4a5568", "#cbd5e0"), ("#6b7a00", "#b3c43a"), ("#b0123b", "#ff6b8b"),
    ("#00838a", "#3fc3ca"),
)  # fmt: skip
WIDTH, PANEL, HEAD, FOOT = 640, 300, 44, 34
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 14, 46
ROW, ACROSS = 24, 2  # of a legend: pixels of a row, and entries in it
_APART = 4.0  # pixels between the whiskers of two lines


def colours() -> dict[str, str]:
    """The colour of each label in any panel, one for one."""
    labels = dict.fromkeys(label for _, _, own in PANELS.values() for label in own)
    names = [f"--c{number}" for number in range(1, 7)]
    names += [f"--m{number}" for number in range(len(MORE))]
    return dict(zip(labels, names, strict=False))


def style() -> str:
    """Colours for a light and a dark scheme: those of the pages, and more."""
    names = ["--card", "--ink", "--soft", "--line", "--dot", "--bound"]
    names += [f"--c{number}" for number in range(1, 7)]
    light, dark = (
        " ".join(
            [f"{name}: {palette(bool(night))[name]};" for name in names]
            + [f"--m{number}: {pair[night]};" for number, pair in enumerate(MORE)]
        )
        for night in (0, 1)
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


def said(label: str) -> str:
    """``"h2o pin_prompt=true"`` -> ``"h2o, prompt kept"``."""
    policy, *settings = label.split()
    return ", ".join([policy, *(WORDS.get(each, each.replace("=", " ")) for each in settings)])


class Panel:
    """One kind of problems, `top` pixels down."""

    def __init__(self, cliff: Cliff, top: float) -> None:
        self.cliff = cliff
        self.title, self.least, self.labels = PANELS[cliff.title]
        rows = -(-(len(self.labels) + 1) // ACROSS)
        self.head, self.top = top, top + 28 + ROW * rows
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
        found = [text(24, self.head + 20, self.title, kind="strong"), *self.legend()]
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
            told = f"full retention: {full.right} of {full.n} right"
            found.append(
                f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="var(--bound)" '
                f'stroke-width="2" stroke-dasharray="6 4"><title>{told}</title></path>'
            )
        known = {line.label: line for line in self.lines}
        chosen = [known[label] for label in self.labels]
        found += [self.grey(line) for line in self.lines if line not in chosen]
        for place, line in enumerate(chosen):
            found += self.coloured(line, _APART * (place - (len(chosen) - 1) / 2))
        return found

    def legend(self) -> list[str]:
        parts = []
        for number, label in enumerate((*self.labels, "full retention")):
            x, y = 24 + 306 * (number % ACROSS), self.head + 46 + ROW * (number // ACROSS)
            paint, dash = f"var({colours().get(label, '--bound')})", ""
            if label not in colours():
                dash = ' stroke-dasharray="6 4"'
            parts.append(f'<path d="M{x} {y - 5}h24" stroke="{paint}" stroke-width="3"{dash}/>')
            parts.append(text(x + 31, y, said(label) if label in colours() else label))
        return parts

    def grey(self, line: Line) -> str:
        places = [(self.across(p.share), self.up(p.accuracy)) for p in line.points]
        if len(places) == 1:
            x, y = places[0]
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="var(--dot)"/>'
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        return f'<path d="M{path}" stroke="var(--dot)" fill="none" opacity="0.6"/>'

    def coloured(self, line: Line, away: float) -> list[str]:
        paint = f"var({colours()[line.label]})"
        places = [(self.across(p.share) + away, self.up(p.accuracy)) for p in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        found = [f'<path d="M{path}" stroke="{paint}" stroke-width="2.5" fill="none"/>']
        for (x, y), point in zip(places, line.points, strict=True):
            ends = f"M{x:.1f} {self.up(point.low):.1f}V{self.up(point.high):.1f}"
            told = (
                f"{line.label} at budget {point.budget}: {point.right} of {point.n} right, 95% "
                f"interval {100 * point.low:.1f} to {100 * point.high:.1f}%"
            )
            found.append(f'<path d="{ends}" stroke="{paint}" stroke-width="1.5"/>')
            found.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{paint}">'
                f"<title>{escape(told)}</title></circle>"
            )
        return found


def panels() -> list[Panel]:
    """One below the other."""
    known, found, top = (
        {cliff.title: cliff for cliff in cliffs(shipped().rows)},
        list[Panel](),
        HEAD,
    )
    for title in PANELS:
        found.append(Panel(known[title], top))
        top = int(found[-1].top) + PANEL
    return found


def figure() -> str:
    """The figure as SVG; its ``metadata`` holds the answers of its panels."""
    found = panels()
    height = int(found[-1].top) + PANEL + FOOT
    told = "Right answers by budget: a cliff on chains, a slope on trees"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="cliff" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{told}">',
        f"<metadata>{escape(json.dumps(points([each.cliff for each in found])))}</metadata>",
        style(),
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="var(--card)"/>',
        text(
            24,
            30,
            "Right answers by budget, tokens removed or masked (95% intervals)",
            kind="strong",
        ),
    ]
    for panel in found:
        parts += panel.parts()
    middle = (LEFT + WIDTH - RIGHT) / 2
    under = "budget, as a share of what full retention holds (grey: other settings)"
    parts.append(text(middle, height - 22, under, "middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(figure())
    print(f"wrote {FIGURE.relative_to(ROOT)}")
