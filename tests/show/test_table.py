"""The terminal tables, the data frame and the JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from arborsim.machine.serving import FullGpu
from arborsim.play.results import LeftOut, ReplayResult, aggregate
from arborsim.products.live import tables as live
from arborsim.products.replay import tables as replay
from arborsim.products.replay.report import report_of
from arborsim.products.replay.tables import to_frame, to_json
from arborsim.products.replay.words import left_out
from arborsim.products.search import tables as search
from arborsim.report.text import print_report
from tests.show.synthetic import OTHERS, POLICIES, result

GOLDEN = Path(__file__).parent / "golden_80.txt"


def printed(replay: ReplayResult, width: int, view: str = "auto", notes: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, color_system=None)
    print_report(report_of(replay, view=view), console, notes)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_at_80_columns_as_agreed():
    """To accept a change on purpose: write `printed(...)` to the golden file and look at it."""
    replay = result(traces=("chain-tree.parquet",), budgets=("0.25",))
    asked = tuple(each for each in POLICIES if each != "full")
    replay = replace(replay, full=filled(replay), asked=asked)
    shown = printed(replay, 80, notes=False)
    assert shown == GOLDEN.read_text(encoding="utf-8")
    table = shown.split("─\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table] == list(asked), "seven policies, seven rows"


def filled(replay: ReplayResult) -> dict[tuple[str, str, str], FullGpu]:
    """A GPU holds as many searches as their peaks allow."""
    found = {}
    for row in replay.rows():
        searches = int(4e10 / row.peak_hbm_kv_bytes)
        found[row.cell] = FullGpu(searches, 90.0 * searches / row.total_s)
    return found


@pytest.mark.parametrize("width", [80, 100, 160, 200])
@pytest.mark.parametrize("budgets", [("0.25",), ("0.1", "0.25", "65536")])
def test_nothing_is_cut_and_no_line_is_too_long(width, budgets):
    replay = result(traces=("a.parquet", "b.parquet", "c.parquet"), budgets=("0.25", "0.5", "0.75"))
    renamed = dict(zip(("0.25", "0.5", "0.75"), budgets, strict=False))
    episodes = tuple(replace(e, budget=renamed.get(e.budget, e.budget)) for e in replay.episodes)
    shown = printed(replace(replay, episodes=episodes), width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for name in ("streaming-llm", "hierarchy", "arborkv", *budgets):
        assert name in shown


def heads(shown: str) -> list[str]:
    """The last line of the heads of each table."""
    return [line for line in shown.splitlines() if line.startswith(" policy ")]


def test_one_table_per_trace_and_all_figures_on_wide_terminals_or_request():
    for width, view, tables in ((80, "auto", 1), (80, "table", 2), (160, "auto", 1)):
        shown = printed(result(), width, view)
        assert len(heads(shown)) == tables
        assert ("evicted" in shown) is (view == "table")


def test_few_notes_unless_all_are_asked_for():
    few = printed(result(), 80, notes=False)
    assert few.splitlines()[-1] == "3 more notes: --notes"
    assert "Peaks are" not in few
    every = printed(result(), 80)
    assert len(every) > len(few)
    assert "--notes" not in every


def test_no_figure_that_is_nothing_everywhere_takes_a_column():
    replay = result(policies=("full", "h2o"))
    shown = printed(replay, 160, "table")
    assert "DDR" not in heads(shown)[0]
    assert "computed" not in shown.split(" policy ")[0]


def test_footnotes_are_said_once_for_all_traces():
    shown = printed(result(traces=("a", "b", "c"), budgets=("0.25",)), 80)
    assert len(heads(shown)) == 3
    assert [shown.count(note) for note in ("attn. kept:", "Peaks are")] == [1, 1]


@pytest.mark.parametrize(
    "columns",
    [replay.NAMES, replay.MEMORY, replay.TIME, search.NAMES, search.ANSWERS, search.MEMORY,
     search.WORK, live.ANSWERS, live.MEMORY, live.TIME],
)  # fmt: skip
def test_no_word_of_a_head_is_broken(columns):
    """Each line of a head holds whole words of it, of its title or of its meaning."""
    for column in columns:
        for line in column.head:
            assert not line.endswith("-"), column.key
            assert line.strip()


def test_what_fits_no_form_takes_several_tables():
    shown = printed(result(budgets=("0.25",)), 34, "table")
    assert len(heads(shown)) > 1
    for line in shown.splitlines():
        assert len(line) <= 34
    for head in ("HBM", "full", "DDR", "PCIe", "total", "kept"):
        assert head in "".join(heads(shown)) + shown[: shown.index("Peaks")]


def test_the_longest_row_fits_80_columns():
    """Quantised tokens add a column; a policy from a module has a long name, which folds."""
    replay = result(budgets=("0.25",))
    episodes = []
    for e in replay.episodes:
        name = "mypackage.policies.module:VeryLongPolicyName" if e.policy == "h2o" else e.policy
        measured = replace(
            e.measured, quantised_tokens=123_456.0, peak_quantised_bytes=10**8,
            evicted_tokens=9.9e7, prompt_tokens=10**8,
        )  # fmt: skip
        budget = e.budget if e.policy == "full" else "131072"
        episodes.append(replace(e, policy=name, budget=budget, measured=measured))
    for view in ("auto", "table"):
        shown = printed(replace(replay, episodes=tuple(episodes)), 80, view)
        assert max(map(len, shown.splitlines())) <= 80
        assert "…" not in shown
        assert ("quant." in shown) is (view == "table")


def test_all_columns_of_memory_fit_80_columns():
    """With tiers of fewer bits, DDR and selection; figures that are zero go first."""
    replay = result(budgets=("0.25",))
    episodes = []
    for e in replay.episodes:
        name = "expected-attention" if e.policy == "h2o" else e.policy
        measured = replace(
            e.measured, quantised_tokens=384.0, peak_quantised_bytes=5 * 10**6,
            evicted_tokens=9_900, prompt_tokens=10_000, offloaded_tokens=464.0, rehydrated_tokens=0,
            kv_read_bytes=3 * 10**9, bounds_read_bytes=10**6,
        )  # fmt: skip
        episodes.append(replace(e, policy=name, measured=measured))
    few = printed(replace(replay, episodes=tuple(episodes)), 80, "table")
    all_of_them = [
        replace(e, measured=replace(e.measured, rehydrated_tokens=1_234.0)) for e in episodes
    ]
    every = printed(replace(replay, episodes=tuple(all_of_them)), 80, "table")
    for shown in (few, every):
        assert max(map(len, shown.splitlines())) <= 80
        memory = shown[: shown.index("Time and quality")]
        assert "/tok" in memory
        assert "PCIe" in memory
    assert "again" not in few[: few.index("Time and quality")]
    assert "again" in every[: every.index("Time and quality")]


MANY = {"policies": (*POLICIES, *OTHERS), "budgets": ("0.1", "0.25", "0.5"), "errors": True}


@pytest.mark.parametrize("width", [80, 160])
def test_the_matrix_as_agreed(width):
    """To accept a change on purpose: write `printed(...)` to the golden file and look at it."""
    shown = printed(result(traces=("chain-tree.parquet",), **MANY), width)
    assert shown == (GOLDEN.parent / f"matrix_{width}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_the_matrix_fits_and_has_every_policy_at_every_budget(width):
    replay = result(**MANY)
    quantised = tuple(
        replace(e, measured=replace(e.measured, peak_quantised_bytes=123_456_789))
        for e in replay.episodes
    )
    shown = printed(replace(replay, episodes=quantised), width)
    assert max(map(len, shown.splitlines())) <= width
    shown = shown.partition("Peaks are")[0]  # below are sentences
    tables = len(heads(shown))
    for budget in MANY["budgets"]:
        assert (
            sum(
                f"at {budget} " in f"{line} "
                for line in shown.splitlines()
                if line.startswith("  ")
            )
            == 1
        )
    for name in (*OTHERS, *POLICIES):
        assert sum(line.startswith(f" {name} ") for line in shown.splitlines()) == tables


def test_the_matrix_is_sorted_and_led_by_the_oracle():
    replay = result(policies=("full", "random", "oracle", "h2o"), budgets=("0.25",))
    lines = [line.split()[0] for line in printed(replay, 80, "matrix").splitlines() if line]
    first = lines.index("oracle")
    assert lines[first : first + 3] == ["oracle", "h2o", "random"]


def test_what_a_budget_left_out_is_blank():
    replay = result(policies=("full", "h2o", "random"))
    some = [e for e in replay.episodes if (e.policy, e.budget) != ("random", "0.25")]
    shown = printed(replace(replay, episodes=tuple(some)), 160, "matrix")
    random, full = (
        next(line for line in shown.splitlines() if line.startswith(f" {name} "))
        for name in ("random", "full")
    )
    assert 2 * len(random.split()[1:]) == len(full.split()[1:])


def test_the_gap_is_in_points_and_may_be_negative():
    replay = result(policies=("full", "oracle", "h2o", "hierarchy"), budgets=("0.25",))
    rows = {row.policy: row for row in aggregate(replay.episodes)}
    assert rows["h2o"].oracle_gap == pytest.approx(0.03)
    assert rows["hierarchy"].oracle_gap == pytest.approx(-0.03)
    shown = printed(replay, 80, "table")
    assert " 3.00" in shown
    assert "-3.00" in shown
    assert "a choice per head can beat it" in " ".join(shown.split())
    assert to_frame(replay).query("policy == 'h2o'")["oracle_gap"].iloc[0] == pytest.approx(0.03)


def test_what_was_left_out_takes_a_few_lines():
    names = [f"policy-{i:02}" for i in range(20)]
    lacking = [LeftOut(t, n, remedy="--capture qkv") for n in names for t in ("a", "b")]
    (first,) = left_out(lacking)
    assert first.endswith("a and b do not hold what they read; record with --capture qkv.")
    assert all(name in first for name in names)
    assert left_out([]) == []


SMALL = LeftOut("chain-tree.parquet", "pinned", "0.1", least="0.3", instead="pin_prompt=false",
                reason="needs 0.3 or more: prompt 60 + recent 4 = 64 tokens, not 10")  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_budget_that_is_too_small_is_a_row_with_its_reason(width):
    """First those budgets under which nothing ran; a reason may fold, nothing of it is lost."""
    bare = replace(SMALL, policy="bare", budget="0.25", instead="", reason="no budget is enough: x")
    few = result(policies=("full", "h2o", "random"))
    shown = printed(replace(few, left_out=(SMALL, bare)), width)
    assert max(map(len, shown.splitlines())) <= width
    text = " ".join(shown.split())
    assert f"pinned 0.1 {SMALL.reason}" in text
    assert "bare 0.25 no budget is enough: x" in text
    text = text[text.index("policy budget") :]
    places = [text.index(part) for part in ("pinned 0.1", "random 0.25", "bare 0.25", "h2o 0.5")]
    assert places == sorted(places)
    assert text.count("--set pin_prompt=false lets the prompt compete under pinned") == 1


def test_in_the_matrix_it_says_what_is_needed():
    shown = printed(replace(result(), left_out=(replace(SMALL, budget="0.25"),)), 160, "matrix")
    lines = iter(shown.splitlines())
    line = next(line for line in lines if line.startswith(" pinned"))
    assert line.split() == ["pinned", "needs", "0.3"]
    assert next(lines).split() == ["or", "more"]


def test_left_out_rows_keep_numbers_whole_in_files(tmp_path):
    for found, missing in ((replace(result(), left_out=(SMALL,)), 1), (result(), 0)):
        frame = to_frame(found)
        frame.to_parquet(tmp_path / "r.parquet", index=False)
        read = pd.read_parquet(tmp_path / "r.parquet")
        assert list(read["left_out"]).count("") == len(found.episodes)
        assert len(read) == len(found.episodes) + missing
        assert str(read["peak_hbm_kv_bytes"].dtype).lower() == "int64"
        assert read["hbm_byte_seconds"].dtype == float
    rows = json.loads(to_json(replace(result(), left_out=(SMALL,))))["rows"]
    assert [row["left_out"] for row in rows if row["left_out"]] == [SMALL.reason]
    assert [row["total_s"] for row in rows if row["left_out"]] == [None]


def test_nobody_is_told_to_record_what_was_imported():
    lacks = "the source of this import lacks it"
    own = LeftOut("log", "h2o", remedy="--capture signals", unrecorded=lacks)
    assert left_out([own]) == [f"Left out: h2o. log does not hold what they read; {lacks}."]


def test_what_another_setting_would_serve_is_said():
    own = [LeftOut(t, n, remedy="--capture qkv", instead="per=shared")
           for n in ("snapkv", "tova") for t in ("a", "b")]  # fmt: skip
    (line,) = left_out([*own, LeftOut("a", "arkv", remedy="--capture qkv")])[:1]
    assert line.endswith(
        "--capture qkv. Without that, --set per=shared runs snapkv and tova: "
        "one ranking for all heads, not its authors' form."
    )
    assert "per=shared" not in left_out([LeftOut("a", "arkv", remedy="--capture qkv")])[0]


def unbounded(replay: ReplayResult, *names: str) -> ReplayResult:
    """`names` do not keep to their budgets."""
    episodes = tuple(replace(e, bounded=e.policy not in names) for e in replay.episodes)
    return replace(replay, episodes=episodes)


@pytest.mark.parametrize("view", ["table", "matrix"])
def test_who_holds_more_than_the_budget_is_marked_and_comes_last(view):
    replay = result(policies=("full", "oracle", "h2o", "arborkv", "random"), budgets=("0.25",))
    shown = printed(unbounded(replay, "full", "arborkv"), 80, view)
    assert " ".join(shown.split()).count("\u2020 does not keep to the budget: see HBM peak.") == 1
    assert shown.count("arborkv\u2020") == (1 if view == "matrix" else 2), "two tables"
    assert "full\u2020" not in shown
    if view == "matrix":
        lines = [line.split()[0] for line in shown.splitlines() if line]
        first = lines.index("oracle")
        assert lines[first : first + 4] == ["oracle", "h2o", "random", "arborkv\u2020"]
    assert "\u2020" not in printed(replay, 80, view)


def test_equal_shares_are_no_ranking():
    replay = result(policies=("full", "oracle", "h2o", "epikv", "random"), traces=("a", "b"))
    same = tuple(
        replace(e, attention_kept=0.7) if e.policy in ("h2o", "epikv") and e.trace == "a" else e
        for e in replay.episodes
    )
    same_on_a = "; ".join(f"h2o and epikv at {budget} on a" for budget in ("0.25", "0.5"))
    said = f"Same attention kept, so in no order: {same_on_a}."
    assert said in " ".join(printed(replace(replay, episodes=same), 80).split())
    assert "in no order" not in printed(replay, 80)


def test_cautions_about_single_policies_are_printed():
    replay = replace(result(), notes=("raas: a caution.",))
    assert "raas: a caution." in printed(replay, 80)
    assert json.loads(to_json(replay))["notes"] == ["raas: a caution."]


def test_names_cannot_steer_the_terminal():
    replay = result(traces=("evil\x1b[2J[bold]name\n.parquet",), episodes=1)
    shown = printed(replay, 80)
    assert "\x1b" not in shown
    assert "[bold]name" in shown


def test_without_full_there_is_no_relative_column():
    replay = result()
    some = tuple(e for e in replay.episodes if e.policy != "full")
    assert " vs " not in printed(replace(replay, episodes=some), 160)


def test_unknown_attention_is_said():
    replay = result()
    unknown = tuple(replace(e, attention_kept=float("nan")) for e in replay.episodes)
    shown = printed(replace(replay, episodes=unknown), 80)
    assert "trace holds no attention" in shown


def test_nothing_replayed():
    assert printed(ReplayResult((), (), {}, ()), 80) == "Nothing was replayed.\n"
    assert "peak_hbm_kv_bytes" in to_frame(ReplayResult((), (), {}, ())).columns


def test_frame_has_a_row_per_search_and_the_same_bytes_each_time(tmp_path):
    replay = result()
    frame = to_frame(replay)
    assert len(frame) == len(replay.episodes)
    first = replay.episodes[0]
    assert frame.loc[0, "peak_hbm_kv_bytes"] == first.measured.peak_hbm_kv_bytes
    assert frame.loc[0, "total_s"] == first.measured.time.total_s
    to_frame(result()).to_parquet(tmp_path / "a.parquet", index=False)
    frame.to_parquet(tmp_path / "b.parquet", index=False)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_json_is_strict_and_the_same_each_time():
    replay = result()
    unknown = tuple(replace(e, attention_kept=float("nan")) for e in replay.episodes)
    text = to_json(replace(replay, episodes=unknown))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(text, parse_constant=refuse)
    assert read["episodes"][0]["attention_kept"] is None
    assert read["rows"][0]["relative"]["peak_hbm"] == 1.0
    assert text == to_json(replace(result(), episodes=unknown))
