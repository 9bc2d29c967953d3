"""Figures drawn with characters: everything stands where it belongs, and nothing is too wide."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.report import page
from arborsim.report.characters import SEVERAL, drawn

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))


def scatter(name: str, points: list[tuple[float, float]], **others: Any) -> page.Figure:
    x, y = [point[0] for point in points], [point[1] for point in points]
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, **others}


def figure(*traces: page.Figure, x: Any = None, y: Any = None, **layout: Any) -> page.Figure:
    return page.figure(list(traces), page.axis("memory (%)", **(x or {})),
                       page.axis("kept (%)", **(y or {})), 400, **layout)  # fmt: skip


def test_a_plane_to_the_letter() -> None:
    made = figure(
        scatter("h2o", [(0, 0), (50, 5)]),
        scatter("snapkv", [(50, 5), (25, 10)]),
        scatter("best", [(0, 10), (100, 0)], mode="lines+markers+text", text=["1", "2"]),
        x={"rangemode": "tozero"},
    )
    assert drawn(made, 40, 15) == [
        "kept (%)",
        " 10┤1·      s",
        "   │  ····",
        "   │      ···",
        "   │         ···",
        "   │            ····",
        "  5┤                ·*·",
        "   │                   ····",
        "   │                       ···",
        "   │                          ···",
        "   │                             ····",
        "  0┤h                                ·2",
        "   └┬────────────────┬────────────────┬",
        "    0               50              100",
        "                             memory (%)",
        "h h2o   s snapkv   1, 2, ... best",
        "* several",
    ]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), min_size=1,
                    max_size=5),
    width=st.integers(30, 160),
    height=st.integers(8, 40),
)  # fmt: skip
def test_every_series_is_drawn_within_the_width(groups, width, height) -> None:
    made = figure(*(scatter(f"policy-{i}", own) for i, own in enumerate(groups)))
    lines = drawn(made, width, height)
    assert max(map(len, lines)) <= width
    plane = "".join(line.partition("│")[2] or line.partition("┤")[2] for line in lines)
    legend = " ".join(lines)
    for i in range(len(groups)):
        place = legend.index(f" policy-{i}")
        assert legend[place - 1] in plane or SEVERAL in plane


@settings(max_examples=60, deadline=None)
@given(values=st.lists(NUMBERS, min_size=2, max_size=2, unique=True), log=st.booleans())
def test_larger_is_higher_and_further_right(values, log) -> None:
    low, high = sorted(abs(v) + 1 for v in values) if log else sorted(values)
    if high <= low:
        return
    axis = {"type": "log"} if log else {}
    traces = [scatter("aaa", [(low, low)]), scatter("bbb", [(high, high)])]
    lines = drawn(figure(*traces, x=axis, y=axis))
    rows = [i for i, line in enumerate(lines) if line.rstrip().endswith(("┤a", "│a", "b"))]
    assert "b" in lines[rows[0]]
    assert "a" in lines[rows[-1]]
    assert lines[rows[0]].index("b") > lines[rows[-1]].index("a")


def test_ticks_that_the_figure_names_are_taken() -> None:
    x = page.named_axis([0, 1, 2], ["0.25", "0.5", "0.75"], (-0.5, 2.5))
    lines = drawn(figure(scatter("h2o", [(0, 1), (2, 3)]), x=x), 60, 12)
    assert any(line.split() == ["0.25", "0.5", "0.75"] for line in lines)


def test_a_limit_is_a_dashed_line() -> None:
    limit = page.limit_line("target", 60.0)
    lines = drawn(figure(scatter("h100", [(1, 10), (2, 50)]), **limit), 60, 12)
    assert any(line.count("╌") > 30 for line in lines)
    assert "╌ target" in lines[-1]


def test_series_of_one_name_share_a_letter_and_an_entry() -> None:
    others = {"legendgroup": "others", "showlegend": False}
    made = figure(scatter("others", [(0, 0)]), scatter("others", [(1, 1)], **others),
                  scatter("others", [(1, 1)], **others), scatter("h2o", [(2, 2)]))  # fmt: skip
    lines = drawn(made, 60, 12)
    assert lines[-1] == "o others   h h2o"
    assert sum(line.count("o") for line in lines[1:-2]) == 2


def test_labels_are_shown_as_they_are() -> None:
    name = page.label("<b>&me</b>")
    lines = drawn(figure(scatter(name, [(0, 1)])), 60, 12)
    assert lines[-1] == "b <b>&me</b>"


@pytest.mark.parametrize("width", [40, 80])
def test_a_heat_map_has_a_shade_behind_each_number(width: int) -> None:
    trace = {
        "type": "heatmap", "x": ["budget 0.25", "budget 0.5"], "y": ["h2o", "streaming-llm"],
        "z": [[1.0, 0.5], [0.0, None]], "text": [["90.0", "80.0"], ["70.0", ""]],
    }  # fmt: skip
    lines = drawn(page.figure([trace], {}, {}, 200), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "90.0██" in text
    assert "80.0▒▒" in text
    assert "70.0" in text
    assert sum(line.startswith("h2o") for line in lines) == (1 if width == 80 else 2)
