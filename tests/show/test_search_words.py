"""The page of a search without its trees: what it says and what it plots."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from arborsim.core.measurements import TimeSplit
from arborsim.products.search.figures import against_size, against_width
from arborsim.products.search.report import SearchReport, report_of
from arborsim.products.search.results import SearchResult, rows_of
from arborsim.products.search.tables import ANSWERS, MEMORY, WORK, cells_of
from arborsim.products.search.words import cautions, missing, summarise
from arborsim.report.table import scales, shown
from arborsim.report.text import print_report
from arborsim.searches import find_search, search_names
from tests.bank.test_results import PLAIN, result


def several(
    label: str, right: int, problems: int, kv: int = 100, **others: object
) -> list[SearchResult]:
    """The first `right` of `problems` are solved."""
    name, _, swept = label.partition(" ")
    return [
        result(name, i, i < right, kv_tokens=kv, swept=swept, bank_misses=0, **others)
        for i in range(problems)
    ]


def lines(*results: list[SearchResult]) -> list[str]:
    found = [one for some in results for one in some]
    return summarise(found, rows_of(found))


def test_the_least_kv_that_reaches_rebase() -> None:
    (lead, best, evidence) = lines(
        several("rebase", 50, 100), several("ets", 50, 100, kv=60),
        several("ets-kv", 30, 100, kv=40), several("beam-4", 60, 100, kv=90),
    )  # fmt: skip
    assert lead == (
        "At width 16, ets reaches REBASE's accuracy with 0.60 times its KV size: 50/100 against "
        "50/100, a difference of 0 points (95% interval \u22124.3 to +4.3)."
    )
    assert evidence == (
        "It solves 50/100 (50.0%, 95% interval 39.8 to 60.2), REBASE 50/100 (50.0%, 95% interval "
        "39.8 to 60.2). The intervals overlap; of the same 100 problems, only ets solves 0 and "
        "only REBASE 0, a difference of 0 points (95% interval \u22124.3 to +4.3): 100 problems "
        "are too few to show a difference."
    )
    assert best == (
        "beam-4 at width 16 solves most: 60/100 (60.0%, 95% interval 49.7 to 69.7), with 0.90 "
        "times REBASE's KV size."
    )


def test_intervals_that_tell_apart() -> None:
    (*_, evidence) = lines(several("rebase", 20, 100), several("ets", 90, 100, kv=50))
    assert "The intervals do not overlap; of the same 100 problems, only ets solves 70" in evidence
    assert "and only REBASE 0, a difference of +70.0 points" in evidence
    assert evidence.endswith("): more than chance.")


def test_no_search_reaches_rebase_or_needs_less() -> None:
    (lead, best, _) = lines(several("rebase", 9, 10), several("ets", 2, 10, kv=10),
                         several("beam-4", 5, 10, kv=90))  # fmt: skip
    assert lead.startswith(
        "At width 16, no search reaches REBASE's accuracy; beam-4 comes closest, with 0.90 times"
    )
    assert best.startswith("rebase at width 16 solves most: 9/10")
    assert best.endswith("99.7).")
    (lead, *_) = lines(several("rebase", 5, 10, kv=1000), several("ets", 5, 10, kv=1003))
    assert lead.startswith("At width 16, ets reaches REBASE's accuracy with its KV size: 5/10")
    (lead, *_) = lines(several("rebase", 5, 10), several("ets", 6, 10, kv=150))
    assert "with less KV; ets does with 1.50 times its KV size: 6/10" in lead


def test_other_widths_follow_in_short() -> None:
    found = lines(
        several("rebase", 5, 10), several("ets", 5, 10, kv=80),
        several("rebase", 6, 10, width=64), several("ets", 7, 10, kv=70, width=64),
        several("ets", 1, 10, width=256),
    )  # fmt: skip
    assert found[0].startswith("At width 64, ets reaches REBASE's accuracy with 0.70 times")
    assert found[1] == (
        "At width 16, ets reaches REBASE's accuracy with 0.80 times its KV size: 5/10 against "
        "5/10, a difference of 0 points (95% interval \u221235.5 to +35.5)."
    )
    assert found[2].startswith("ets at width 64 solves most: 7/10")
    assert found[3].startswith("It solves 7/10")
    assert len(found) == 4


def test_what_other_policies_make_of_the_answer() -> None:
    half = replace(
        PLAIN.simulated,
        measured=replace(
            PLAIN.simulated.measured, peak_hbm_kv_bytes=400, time=TimeSplit(decode_s=3.0)
        ),
        attention_kept=0.9,
    )
    whole = replace(
        PLAIN.simulated, measured=replace(PLAIN.simulated.measured, peak_hbm_kv_bytes=1000)
    )
    found = [
        replace(r, policy=policy, budget=budget, simulated=simulated)
        for policy, budget, simulated in (("full", "any", whole), ("arborkv", "0.5", half))
        for r in (*several("rebase", 5, 10), *several("ets", 5, 10, kv=50))
    ]
    _, other, *_ = summarise(found, rows_of(found))
    assert other == (
        "Under arborkv at budget 0.5, ets at width 16 peaks at 0.40 times the HBM that it needs "
        "under full (400 B against 1.00 kB), in 1.50 times the time, and keeps 90.0% of the "
        "attention."
    )
    # Where a budget left problems out, the others are left out of the comparison.
    huge = replace(whole, measured=replace(whole.measured, peak_hbm_kv_bytes=9000))
    uneven = [
        replace(r, simulated=huge) if r.policy == "full" and r.episode > 3 else r
        for r in found
        if r.policy == "full" or r.episode <= 3
    ]
    _, other, *_ = summarise(uneven, rows_of(uneven))
    assert other.endswith("(400 B against 1.00 kB), in 1.50 times the time, and keeps 90.0% of "
                          "the attention. On 4 of 10 problems.")  # fmt: skip


def test_without_anything_to_compare_with() -> None:
    assert lines() == ["No search was completed."]
    (line,) = lines(several("ets", 3, 4))
    assert line.startswith("ets at width 16 solves most: 3/4 (75.0%")
    assert line.endswith("REBASE was not run, so nothing is compared with it.")
    (line,) = lines(several("rebase", 3, 4))
    assert line.endswith("Nothing else was run that could be compared with it.")
    unjudged = [replace(r, correct=None) for r in several("ets", 0, 3, kv=50)]
    (line,) = lines(unjudged, [replace(r, correct=None) for r in several("rebase", 0, 3)])
    assert line == (
        "The bank does not judge answers, so it is not known which searches were right. ets at "
        "width 16 needs the least KV, with 0.50 times REBASE's KV size."
    )


def test_sizes_are_compared_where_they_count_the_same() -> None:
    apart = [name for name in search_names() if not find_search(name).by_levels]
    assert apart == ["dpts", "mcts", "tot-dfs"]
    found = [*several("rebase", 5, 10), *several("dpts", 9, 10, kv=1), *several("ets", 5, 10)]
    lead, best, _ = summarise(found, rows_of(found))
    assert lead.startswith("At width 16, ets reaches REBASE's accuracy with its KV size: 5/10")
    assert best.startswith("dpts at width 16 solves most: 9/10")
    assert "KV size" not in best
    assert any(line.startswith("dpts comes back") for line in cautions(found, rows_of(found)))


def test_what_the_bank_lacked_is_said() -> None:
    found = several("rebase", 5, 10)
    assert missing(rows_of(found)) == ""
    short = [replace(r, bank_misses=2, model_calls=8) for r in several("ets", 5, 10)]
    few = [replace(r, bank_misses=r.episode == 0, model_calls=800) for r in several("dpts", 5, 10)]
    other = [replace(r, policy="h2o", budget="0.5", model_calls=18) for r in short]
    text = missing(rows_of([*found, *short, *few, *other]))
    assert "ets at width 16: 20.0%; dpts at width 16: <0.1%. Such a search" in text


def test_a_width_that_the_bank_could_not_serve_does_not_lead() -> None:
    wide = [
        replace(r, bank_misses=4, model_calls=16, width=64)
        for r in (*several("rebase", 5, 10), *several("ets", 5, 10, kv=10))
    ]
    found = [*several("rebase", 5, 10), *several("ets", 5, 10, kv=90), *wide]
    lead, other, *_, evidence = summarise(found, rows_of(found))
    assert lead.startswith("At width 16, ets reaches REBASE's accuracy with 0.90 times")
    assert evidence.endswith("too few to show a difference.")
    assert other.startswith("At width 64, ets reaches REBASE's accuracy with 0.10 times")
    assert other.endswith(
        " Up to 20.0% of the thoughts that one of the two asked for were not recorded."
    )


def test_cautions() -> None:
    found = several("rebase", 5, 10)
    assert cautions(found, rows_of(found)) == [
        "Bytes and seconds are simulated, each search alone on the GPU."]  # fmt: skip
    partly = [replace(r, correct=None if r.episode == 3 else r.correct) for r in found]
    assert "On 1 of 10 problems" in cautions(partly, rows_of(partly))[-1]
    tight = [*found, *(replace(r, policy="h2o", budget="0.1") for r in found[:4])]
    assert "different problems" in " ".join(cautions(tight, rows_of(tight)))
    assert "never an answer" in " ".join(cautions(tight, rows_of(tight)))


def sized() -> list[SearchResult]:
    return [
        r
        for width, scale in ((16, 1), (64, 4), (256, 16))
        for r in (
            *several("rebase", 4 + scale // 4, 10, kv=100 * scale, width=width),
            *several("ets <b>", 4 + scale // 4, 10, kv=50 * scale, width=width),
        )
    ]


def test_accuracy_against_size_is_the_papers_figure() -> None:
    rows = rows_of(sized())
    relative, in_bytes, *_, seconds = against_size(rows)
    rebase, ets = relative.figure["data"]
    assert rebase["x"] == [0.0625, 0.25, 1.0]
    assert ets["x"] == [0.03125, 0.125, 0.5]
    assert rebase["y"] == [40.0, 50.0, 80.0]
    low, high = rows[0].low, rows[0].high
    assert rebase["error_y"]["arrayminus"][0] == pytest.approx(40 - 100 * low, abs=1e-3)
    assert rebase["error_y"]["array"][0] == pytest.approx(100 * high - 40, abs=1e-3)
    axis = relative.figure["layout"]["xaxis"]
    assert axis["type"] == "log"
    assert axis["ticktext"] == ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert "REBASE at width 256 is 1" in axis["title"]["text"]
    assert [x * 1e3 for x in in_bytes.figure["data"][1]["x"]] == [200.0, 800.0, 3200.0]
    assert "kB" in in_bytes.figure["layout"]["xaxis"]["title"]["text"]
    assert seconds.figure["layout"]["xaxis"]["rangemode"] == "tozero"
    assert "<b>" not in json.dumps([f.figure for f in against_size(rows)])


def test_intervals_of_many_lines_are_hidden() -> None:
    many = [r for i in range(6) for r in several(f"ets lambda_b={i}", i, 10)]
    (width,) = against_width(rows_of(many))
    assert not any(line["error_y"]["visible"] for line in width.figure["data"])
    (few,) = against_width(rows_of(many[:50]))
    assert all(line["error_y"]["visible"] for line in few.figure["data"])
    places = [line["x"][0] for line in few.figure["data"]]
    assert places == sorted(set(places))
    assert -0.5 < places[0] < places[-1] < 0.5


def test_figures_are_what_plotly_expects() -> None:
    import plotly.graph_objects as go

    found = [*sized(), *(replace(r, policy="h2o", budget="0.5") for r in sized())]
    cells = cells_of(rows_of(found)).values()
    for item in [made for rows in cells for made in (*against_size(rows), *against_width(rows))]:
        assert all(item.lines[name] for name in ("rebase", "ets <b>"))
        named = json.loads(json.dumps(item.figure).replace("var(--", "red#").replace("#", ""))
        for line in named["data"]:
            line["line"]["color"] = line["marker"]["color"] = line["error_y"]["color"] = "red"
        go.Figure(named)
    unjudged = [replace(r, correct=None) for r in sized()]
    assert against_size(rows_of(unjudged)) == against_width(rows_of(unjudged)) == []


def test_columns_that_say_nothing_are_left_out() -> None:
    rows = rows_of(several("ets", 2, 4))
    found = shown((*ANSWERS, *MEMORY, *WORK), rows)
    keys = [column.key for column in found]
    assert "kv" in keys
    assert not {"kv_vs", "hbm_vs", "time_vs", "ddr", "kept"} & set(keys)
    units = scales(found, rows)
    assert units["kv"] == units["kv_prompt"]
    assert math.isnan(rows[0].times("kv_tokens"))


@pytest.mark.parametrize("width", [80, 160])
def test_a_share_that_is_not_known_per_head_is_no_number(width: int) -> None:
    simulated = replace(PLAIN.simulated, attention_kept=math.nan, kept_note="not known per head")
    found = [replace(r, simulated=simulated, policy="key-norm") for r in several("ets", 1, 2)]
    assert {r.flat()["attention_kept_note"] for r in found} == {"not known per head"}
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_report(report_of(SearchReport("x", tuple(found), (), {})), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert re.search(r"not known.*\n.*per head", text)
    assert max(map(len, text.splitlines())) <= width
