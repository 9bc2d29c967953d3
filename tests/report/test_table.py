"""The terminal tables, the data frame and the JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from arborsim.report.export import to_frame, to_json
from arborsim.report.results import ReplayResult
from arborsim.report.table import print_tables
from tests.report.synthetic import result

GOLDEN = Path(__file__).parent / "golden_80.txt"


def printed(replay: ReplayResult, width: int) -> str:
    out = io.StringIO()
    print_tables(replay, Console(file=out, width=width, highlight=False, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_at_80_columns_as_agreed():
    """To accept a change on purpose: write `printed(...)` to the golden file and look at it."""
    shown = printed(result(traces=("chain-tree.parquet",), budgets=("0.25",)), 80)
    assert shown == GOLDEN.read_text(encoding="utf-8")


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


def test_wide_terminals_get_one_table_per_trace():
    assert printed(result(), 80).count("policy  ") == 2
    assert printed(result(), 160).count("policy  ") == 1


def test_the_longest_row_fits_80_columns():
    """Quantised tokens add a column; a policy from a module has a long name, which folds."""
    replay = result(budgets=("0.25",))
    episodes = []
    for e in replay.episodes:
        name = "mypackage.policies.module:VeryLongPolicyName" if e.policy == "h2o" else e.policy
        measured = replace(e.measured, quantised_tokens=123_456.0, evicted_tokens=9.9e7)
        budget = e.budget if e.policy == "full" else "131072"
        episodes.append(replace(e, policy=name, budget=budget, measured=measured))
    shown = printed(replace(replay, episodes=tuple(episodes)), 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "quan-" in shown


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
    assert "n/a" in shown
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
