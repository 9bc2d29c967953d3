"""`arborsim inspect`: the numbers, the trees, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import binomtest

from arborsim.cli.commands import Command
from arborsim.core.documents import to_json
from arborsim.core.events import Transition
from arborsim.core.observations import Signal
from arborsim.products.traces.describe import (
    Spread,
    accuracy,
    clopper_pearson,
    column_sizes,
    describe,
    draw_tree,
    episode_facts,
    escaped,
    policy_fits,
)
from arborsim.products.traces.tables import inspect
from arborsim.trace.columns import encode
from arborsim.trace.decode import decode_episode
from arborsim.trace.episode import play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from arborsim.trace.writer import TraceWriter
from tests.helpers.traces import Rows, make_info, make_trace

INFO = make_info(capture="tree", vocab=10)


def episode_of(rows: Rows):
    table = encode(rows.columns, INFO, 0)
    return decode_episode(table, INFO, "t", 0, text=True)


def small_tree() -> Rows:
    """Prompt; 1 and 2 together; 3 below 1; back to 2, which was left in mid-block; answer 3."""
    rows = Rows()
    rows.open(-1)
    for _ in range(2):
        rows.token(Kind.PREFILL, 0, token=1)
    rows.open(0), rows.open(0)
    rows.add(Kind.TRANSITION, 1), rows.add(Kind.TRANSITION, 2)
    rows.iteration = 1
    rows.token(Kind.TOKEN, 1, token=1), rows.token(Kind.TOKEN, 2, token=1)
    rows.add(Kind.BOUNDARY, 1, reward=0.25, text="one\n\x1b[31mred")
    rows.open(1)
    rows.add(Kind.TRANSITION, 3)
    rows.iteration = 2
    rows.token(Kind.TOKEN, 3, token=1)
    rows.add(Kind.BOUNDARY, 3, reward=0.75, text="two")
    rows.add(Kind.TRANSITION, 2)
    rows.iteration = 3
    rows.token(Kind.TOKEN, 2, token=1)
    rows.add(Kind.PRUNE, 2)
    rows.time_s = 1.5
    rows.add(Kind.ANSWER, 3, correct=True, text="42")
    return rows


def test_facts_of_a_small_tree():
    facts = episode_facts(episode_of(small_tree()))
    assert (facts.prompt_tokens, facts.generated_tokens) == (2, 4)
    assert (facts.nodes, facts.depth, facts.longest_path_tokens) == (4, 2, 4)
    assert facts.branching == 1.5
    assert (facts.transitions, facts.revisits, facts.prunes) == (3, 1, 1)
    assert (facts.iterations, facts.duration_s) == (3, 1.5)
    assert facts.answered
    assert facts.correct is True
    assert (facts.finished, facts.dead) == (0, 0)


def test_a_verdict_on_a_thought_is_none_on_the_search():
    rows = small_tree()
    last = len(rows.columns["kind"]) - 1
    at = next(r for r in range(last) if rows.columns["node"][r] == 3 and
              rows.columns["kind"][r] == Kind.BOUNDARY)  # fmt: skip
    rows.columns["end"][at], rows.columns["correct"][at] = "finished", True
    cut = Rows({name: values[: at + 1] for name, values in rows.columns.items()}, rows.parents)
    facts = episode_facts(episode_of(cut))
    assert (facts.finished, facts.dead) == (1, 0)
    assert facts.correct is None
    assert not facts.answered


def test_tree_of_a_small_search():
    lines = draw_tree(episode_of(small_tree()), nodes=10)
    assert lines == [
        "0 * (2 tok, prompt)",
        r"├─ 1 * (1 tok, reward 0.25, visit 1) | one\n\x1b[31mred",
        "│  ↓  3 * (1 tok, reward 0.75, visit 2) | two",
        "└─ 2 (2 tok, visit 1,3, open, pruned)",
    ]
    assert draw_tree(episode_of(small_tree()), nodes=2)[2:] == ["... 2 more"]
    plain_lines = draw_tree(episode_of(small_tree()), unicode=False)
    assert all(line.isascii() for line in plain_lines)
    assert [line[:3] for line in plain_lines[1:]] == ["|- ", "|  ", "`- "]


def test_every_block_is_drawn_once_however_deep(tmp_path):
    path = make_trace(
        tmp_path / "t.parquet", kind="linear", episodes=1, nodes=3000, block=(0, 0),
        capture="tree", prompt=1,
    )  # fmt: skip
    lines = draw_tree(next(TraceReader(path).episodes(text=True)), nodes=5000)
    assert len(lines) == 3001
    assert max(map(len, lines)) < 80


def test_text_is_escaped_and_cut():
    assert escaped("a\tb\u202ec\u2028") == r"a\tb\u202ec\u2028"
    assert escaped("über", unicode=False) == r"\xfcber"
    assert escaped("x" * 300).endswith("x...")


def test_revisits_agree_with_the_events(tmp_path):
    path = make_trace(tmp_path / "t.parquet", episodes=10, nodes=25, capture="tree")
    total = 0
    for episode in TraceReader(path).episodes():
        active, revisits, transitions = {0}, 0, 0
        for event in play(episode):
            if isinstance(event, Transition):
                parent = dict(event.opened)  # of new leaves; an old one goes on by itself
                revisits += sum(parent.get(leaf, leaf) not in active for leaf in event.leaves)
                active = set(event.leaves)
                transitions += 1
        facts = episode_facts(episode)
        assert (facts.transitions, facts.revisits) == (transitions, revisits)
        total += revisits
    assert total > 0


@pytest.mark.parametrize(("good", "n"), [(0, 1), (1, 1), (0, 40), (7, 40), (40, 40)])
def test_interval_is_that_of_scipy(good, n):
    reference = binomtest(good, n).proportion_ci(0.95, method="exact")
    np.testing.assert_allclose(clopper_pearson(good, n), (reference.low, reference.high))


def test_accuracy_counts_judged_answers_only():
    found = accuracy([True, None, False, True])
    assert found is not None
    assert (found.correct, found.judged) == (2, 3)
    assert accuracy([None]) is None


def test_description_of_a_trace(tmp_path):
    path = make_trace(tmp_path / "t.parquet", episodes=3)
    reader = TraceReader(path)
    found = describe(reader)
    assert found.num_episodes == len(found.episodes) == 3
    assert found.spreads["nodes"] == Spread(39.0, 13.0, 13.0, 13.0, 13.0)
    assert 0 < sum(size.stored_bytes for size in found.columns) < reader.file_bytes
    assert json.loads(to_json(found))["signals"][0] == Signal.ATTENTION


def test_sizes_are_the_same_for_parts(tmp_path, monkeypatch):
    whole = TraceReader(make_trace(tmp_path / "t.parquet", episodes=2))
    monkeypatch.setattr(TraceWriter, "close", lambda self: None)
    path = make_trace(tmp_path / "u.parquet", episodes=2)
    parts = TraceReader(path.with_name("u.parquet.parts"))
    assert {size.name: size.stored_bytes for size in column_sizes(whole)} == {
        size.name: size.stored_bytes for size in column_sizes(parts)
    }


def fake_policies(monkeypatch) -> None:
    class Fake:
        grouping = "shared"

        def __init__(self, *reads: Signal) -> None:
            self._reads = frozenset(reads)

        def reads(self) -> frozenset[Signal]:
            return self._reads

    from arborsim.policies import registry

    made = {"blind": Fake(), "attentive": Fake(Signal.ATTENTION, Signal.REWARD)}
    monkeypatch.setattr(registry, "names", lambda: tuple(made))
    monkeypatch.setattr(registry, "build", made.__getitem__)


def test_policies_and_what_they_miss(tmp_path, monkeypatch):
    fake_policies(monkeypatch)
    fits = policy_fits(TraceReader(make_trace(tmp_path / "t.parquet", capture="tree")))
    assert [(fit.name, fit.missing, fit.remedy) for fit in fits] == [
        ("attentive", ("attention",), "record with --capture signals"),
        ("blind", (), ""),
    ]


def run(path: Path, *options: str, columns: int = 80, charset: str = "utf-8") -> str:
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    result = CliRunner(charset=charset).invoke(
        Command("inspect", inspect), [str(path), *options], env=environment
    )
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("columns", [80, 160])
def test_output_fits_the_terminal(tmp_path, columns):
    path = make_trace(tmp_path / "t.parquet", episodes=3, attention="sparse", nodes=40)
    output = run(path, "--all", "--nodes", "30", columns=columns)
    assert max(len(line) for line in output.splitlines()) <= columns
    for part in ("Per episode", "Size per column", "Policies", "Episode 1", "... 11 more"):
        assert part in output
    assert "top 8 positions per row" in output
    assert "Episode 2" not in output
    if columns == 160:
        assert any(len(line) > 100 for line in output.splitlines())


def test_output_in_ascii(tmp_path):
    info = make_info(model="größer", task="[red]x[/red]\x1b[2J")
    path = make_trace(tmp_path / "t.parquet", episodes=1, info=info)
    output = run(path, charset="ascii")
    assert output.isascii()
    assert "\x1b" not in output
    assert "[red]x[/red]" in output


def test_json(tmp_path):
    path = make_trace(tmp_path / "t.parquet", episodes=2)
    found = json.loads(run(path, "--json"))
    assert found["num_episodes"] == 2
    assert found["info"]["model"] == "tiny"
