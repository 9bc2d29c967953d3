"""The page without a browser: markup, escaping, figures, tree layout."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from arborsim.core.errors import UsageError
from arborsim.core.measurements import MemorySeries, thinned
from arborsim.core.tiers import NUM_TIERS
from arborsim.play.pictures import NodeRecord
from arborsim.play.results import LeftOut, ReplayResult, aggregate
from arborsim.products.replay import figures as figures
from arborsim.products.replay import trees as forest
from arborsim.products.replay.figures import ERROR, KEPT, PEAK, TIMES, efficient, heat, pareto
from arborsim.products.replay.report import report_of
from arborsim.report.report import html, write
from tests.show.synthetic import OTHERS, POLICIES, chain, result, tree

VOID = {"meta", "input", "link", "br", "hr", "img"}
EVIL = "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'>&\u2028"


def render(*given: Any) -> str:
    return html(report_of(*given))


class Page(HTMLParser):
    """Checks that elements nest, and collects ids, attributes and the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.scripts = 0
        self.data = ""
        self._in_data = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.scripts += tag == "script"
        self._in_data = tag == "script" and ("id", "data") in attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> does not nest"
        self._in_data = False

    def handle_data(self, data):
        if self._in_data:
            self.data += data
        elif self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@pytest.fixture(scope="module")
def text() -> str:
    return render(result(traces=("tree.parquet", "linear.parquet")))


def test_elements_nest_and_ids_are_unique(text):
    page = Page(text)
    assert not page.open
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for name in ("comparison", "pareto", "heat", "time", "memory", "map", "tree-box"):
        assert name in ids


def test_one_file_and_no_network(text):
    from plotly.offline import get_plotlyjs

    assert text.count(get_plotlyjs()) == 1
    page = Page(text)
    links = [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action")]
    assert all(name == "href" and value.startswith("#") for _, name, value in links)
    assert "default-src 'none'" in text


def test_same_result_same_bytes(text):
    assert text == render(result(traces=("tree.parquet", "linear.parquet")))


def evil() -> ReplayResult:
    replay = result(episodes=1)
    named = {"trace": EVIL + "t", "policy": EVIL + "p", "budget": EVIL + "b"}

    def renamed(item):
        return replace(item, trace=named["trace"]) if item.policy == "full" else replace(
            item, **named)  # fmt: skip

    keep = ("full", "arborkv")
    episodes = [renamed(e) for e in replay.episodes if e.policy in keep and e.budget != "0.5"]
    pictures = [renamed(p) for p in replay.pictures if p.policy in keep and p.budget != "0.5"]
    pictures = [
        replace(p, frames=tuple(replace(f, label=EVIL + "f") for f in p.frames)) for p in pictures
    ]
    maps = [renamed(m) for m in replay.token_maps if m.policy in keep and m.budget != "0.5"]
    left_out = (LeftOut(EVIL + "t", "q", detail=f"{EVIL}q {EVIL}d", unsuited=True),)
    return ReplayResult(
        tuple(episodes), tuple(pictures), {EVIL + "k": EVIL + "v"}, (EVIL + "a",), left_out,
        tuple(maps),
    )  # fmt: skip


def test_names_from_files_stay_text():
    page = Page(render(evil()))
    assert not page.open
    assert page.scripts == 3
    assert not [a for a in page.attributes if a[0] == "img" or a[1].startswith("on")]
    for end in "tpbkvaqd":
        assert EVIL + end in page.text
    data = json.loads(page.data)
    assert data["figures"]["memory"][0]["labels"][0] == EVIL + "t, search 0"
    assert "pareto" not in data["figures"], "two points are no chart"
    assert data["trees"]["films"][1]["frames"][0]["label"] == EVIL + "f"


def test_placeholders_in_names_are_not_filled():
    replay = result(traces=("{{plotly}}",), episodes=1)
    assert "{{plotly}}" in Page(render(replay)).text


def test_labels_for_plotly_are_escaped():
    name = "<a href='http://x'>p</a>"
    rows = aggregate(replace(e, policy=name) for e in result(policies=("h2o",)).episodes)
    for made in (pareto(rows, KEPT), heat(rows, KEPT), *figures.time_splits(rows)):
        assert "<a" not in json.dumps(made.figure)


def test_figures_are_what_plotly_expects():
    import plotly.graph_objects as go

    replay = result()
    rows = aggregate(replay.episodes)
    drawn = [pareto(rows, metric).figure for metric in (KEPT, TIMES)]
    drawn += [
        *(each.figure for each in figures.time_splits(rows)),
        *(figures.memory(e, 100) for e in replay.episodes),
    ]
    for figure in drawn:
        go.Figure(figure)  # raises on unknown or malformed properties
        for axis in ("xaxis", "yaxis"):
            assert figure["layout"][axis].get("title") or figure["layout"][axis]["ticktext"]


def test_every_colour_is_in_the_style_sheet(text):
    used = set(re.findall(r"var\((--[\w-]+)\)", text)) - {"--share", "--shade"}  # on cells
    style = text[text.index("<style>") : text.index("</style>")]
    assert used <= set(re.findall(r"(--[\w-]+):", style))


def test_thinning_keeps_ends_and_peak():
    n = 10_000
    values = np.zeros(n, dtype=int)
    values[7_777] = 5
    zero = [0] * n
    series = MemorySeries(list(range(n)), values.tolist(), zero, zero, zero)
    kept = thinned(series, 200)
    assert {0, 7_777, n - 1} <= set(kept.tolist())
    assert len(kept) <= 202
    assert (np.diff(kept) > 0).all()


def test_memory_figure_carries_the_budget_in_bytes():
    episode = next(e for e in result().episodes if e.policy == "arborkv")
    figure = figures.memory(episode, 10_000)
    line = figure["data"][-1]
    assert line["name"] == "HBM budget"
    assert line["y"][0] == pytest.approx(episode.budget_tokens * episode.kv_bytes_per_token / 1e6)
    decoded = np.frombuffer(base64.b64decode(figure["data"][0]["y"]["bdata"]), dtype="<f4")
    assert decoded.max() == pytest.approx(max(episode.measured.series.hbm_kv_bytes) / 1e6)


@pytest.mark.parametrize("seed", range(5))
def test_bars_of_a_tree_do_not_overlap(seed):
    nodes = tree(np.random.default_rng(seed))
    place = forest.layout(nodes)
    for i, node in enumerate(nodes):
        if node.parent >= 0:
            assert place["x"][i] > place["x"][node.parent] + place["w"][node.parent]
        for j in range(i):
            if nodes[j].depth == node.depth:
                assert abs(place["row"][i] - place["row"][j]) >= 0.99
    assert max(place["row"]) <= place["rows"] - 1


def test_a_chain_is_one_line_however_long():
    nodes = [NodeRecord(i - 1, i, 5, float("nan"), False, True) for i in range(5_000)]
    place = forest.layout(nodes)
    assert place["rows"] == 1
    assert set(place["row"]) == {0.0}
    assert forest.layout(chain())["rows"] == 1


def test_frames_can_be_rebuilt_from_their_differences():
    picture = next(p for p in result().pictures if p.policy == "arborkv")
    table = np.zeros((len(picture.nodes), NUM_TIERS), dtype=int)
    for frame, shown in zip(picture.frames, forest.frames(picture.frames), strict=True):
        changed = np.array(shown["changed"], dtype=int).reshape(-1, 1 + NUM_TIERS)
        table[changed[:, 0]] = changed[:, 1:]
        assert (table == frame.tokens_by_tier).all()


def test_results_without_extras_still_make_a_page():
    replay = result(policies=("full",), episodes=1, pictures=False)
    unknown = tuple(
        replace(e, attention_kept=float("nan"), measured=replace(e.measured, series=MemorySeries()))
        for e in replay.episodes
    )
    page = Page(render(ReplayResult(unknown, (), {}, ())))
    assert not page.open
    assert "Only full retention was replayed" in page.text


def test_many_searches_stay_within_reason():
    replay = result(episodes=80, pictures=False, budgets=("0.1", "0.25", "0.5"))
    text = render(replay)
    assert len(text) < 20e6
    assert "can be shown here" in text


def test_many_policies_on_three_traces_stay_within_reason():
    """35 policies, 3 budgets and 3 traces, of which plotly.js is 4.6 MB."""
    replay = result(
        traces=("a.parquet", "b-linear.parquet", "c.parquet"), budgets=("0.1", "0.25", "0.5"),
        policies=(*POLICIES, *OTHERS), episodes=1,
    )  # fmt: skip
    assert len(render(replay)) < 12e6


def test_the_oracle_is_no_choice():
    rows = aggregate(result(policies=("full", "h2o", "oracle", "random")).episodes)
    best = efficient(rows, KEPT)
    assert [(row.policy, row.budget) for row in best] == [
        ("h2o", "0.25"), ("h2o", "0.5"), ("full", "any")]  # fmt: skip
    drawn = pareto(rows, KEPT)
    assert "oracle" not in drawn.lines
    assert any(trace["name"].startswith("oracle") for trace in drawn.figure["data"])
    assert drawn.texts[0].startswith("h2o at budget 0.25: 25.0% of full retention's memory")


@pytest.mark.parametrize("metric", [KEPT, TIMES, ERROR])
def test_efficient_settings_are_those_that_nothing_beats(metric):
    """Against the definition, pair by pair, up to what counts as equal memory."""
    rows = aggregate(result(policies=(*POLICIES, *OTHERS), errors=True).episodes)
    able = [row for row in rows if not row.is_oracle]
    sign = -1 if metric.higher else 1
    best = efficient(rows, metric)
    for row in best:
        assert not any(
            other.peak_hbm_kv_bytes <= row.peak_hbm_kv_bytes
            and sign * metric.value(other) < sign * metric.value(row) - 1e-9
            for other in able
        )
    for row in (row for row in able if row not in best):
        assert any(
            other.peak_hbm_kv_bytes <= 1.01 * row.peak_hbm_kv_bytes
            and sign * metric.value(other) <= sign * metric.value(row) + 1e-9
            for other in best
        )


def test_heat_shades_run_from_worst_to_best():
    rows = aggregate(result(policies=("full", "h2o", "oracle", "random")).episodes)
    kept, time, peak = (heat(rows, metric) for metric in (KEPT, TIMES, PEAK))
    (cells,) = kept.figure["data"]
    assert cells["y"] == ["oracle", "h2o", "random"]
    assert cells["z"][0][1] == 1
    assert cells["z"][2][0] == 0
    assert peak.figure["data"][0]["z"][0] == [1, 0], "less memory is better"
    assert "(times full retention)" in time.note


def test_cells_that_were_left_out_have_no_shade():
    replay = result(policies=("full", "h2o", "random"))
    some = [e for e in replay.episodes if (e.policy, e.budget) != ("random", "0.25")]
    (cells,) = heat(aggregate(some), KEPT).figure["data"]
    assert None not in cells["z"][0]
    assert (cells["y"][1], cells["z"][1][0], cells["text"][1][0]) == ("random", None, "")


def test_errors_are_for_users(tmp_path):
    with pytest.raises(UsageError, match="nothing was replayed"):
        write(report_of(ReplayResult((), (), {}, ())), tmp_path / "r.html")
    with pytest.raises(UsageError, match="cannot write"):
        write(report_of(result(episodes=1)), tmp_path / "missing" / "r.html")


def test_who_holds_more_than_the_budget_is_marked_on_the_page():
    replay = result(policies=("full", "h2o", "random"), budgets=("0.25",), pictures=False)
    broken = tuple(replace(e, bounded=e.policy == "random") for e in replay.episodes)
    page = Page(render(replace(replay, episodes=broken, notes=("raas: a caution.",))))
    assert "h2o\u2020" in page.text
    assert "\u2020 does not keep to the budget" in page.text
    assert "raas: a caution." in page.text
    assert "full\u2020" not in page.text
    (cells,) = heat(aggregate(broken), KEPT).figure["data"]
    assert cells["y"] == ["random", "h2o\u2020"]
