"""Tree of Thoughts, breadth first, run on the banks that its own logs are."""

from __future__ import annotations

from pathlib import Path

import pytest

from arborsim.searches import make_search
from arborsim.searches.bank import open_bank, read_bank
from arborsim.searches.visited import visited
from arborsim.searches.walk import walk
from arborsim.trace.importers.sources import read_list
from arborsim.trace.importers.tot import TotLog
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from tests.trace.import_helpers import imported, recording, tot_problem


def same_search(reader: TraceReader, keep: int, levels: int) -> int:
    """Run the logged search on every bank; it must select the same states. Returns those solved."""
    solved = 0
    for episode in range(reader.num_episodes):
        bank = read_bank(reader, episode)
        search = make_search(
            "tot-bfs", keep=keep, children=len(bank.parent), levels=levels, any_of=keep
        )
        done = walk(search, bank, dedupe=False)
        selected = {n for n, verdict in enumerate(bank.verdict) if verdict is not None}
        assert {done.bank_node[n] for n in done.candidates} == selected, f"problem {episode}"
        pruned = set(bank.episode.node[bank.episode.kind == Kind.PRUNE].tolist())
        given_up = {done.bank_node[n] for step in done.steps for n in step.dropped}
        assert pruned <= given_up  # and states whose proposals were all given up
        assert done.generated_tokens == sum(bank.tokens[1:])
        assert visited(done, bank.episode).num_tokens == bank.episode.num_tokens
        solved += done.correct is True
    return solved


def test_gpt4_on_the_game_of_24(tmp_path: Path) -> None:
    """The paper's run: b = 5, all proposals, any of 5; 69 of 100 puzzles."""
    log = recording("tot-gpt4-game24-bfs.json")
    imported(log, read_list(log, TotLog().search_of), tmp_path / "tot.parquet", token_ids="unknown")
    reader = open_bank(tmp_path / "tot.parquet")
    assert reader.num_episodes == 100
    assert same_search(reader, keep=5, levels=4) == 69


def test_a_made_up_log(tmp_path: Path) -> None:
    """Values that differ and proposals that do: then the log's order decides nothing."""
    import json

    problems = []
    for seed in range(300):
        problem = tot_problem(seed, steps=3, keep=2)
        steps = problem["steps"]
        if all(len(set(s["values"])) == len(s["values"]) for s in steps) and all(
            len(set(s["new_ys"])) == len(s["new_ys"]) for s in steps
        ):
            problems.append(problem)
    assert len(problems) >= 5
    log = tmp_path / "log.json"
    log.write_text(json.dumps(problems))
    imported(log, read_list(log, TotLog().search_of), tmp_path / "tot.parquet", token_ids="unknown")
    right = sum(any(info["r"] for info in problem["infos"]) for problem in problems)
    assert same_search(open_bank(tmp_path / "tot.parquet"), keep=2, levels=3) == right


def test_verdicts_that_the_log_lacks_are_unknown(tmp_path: Path) -> None:
    log = recording("tot-gpt4-game24-bfs.json")
    contents = read_list(log, TotLog().search_of, 20)
    imported(log, contents, tmp_path / "tot.parquet", token_ids="unknown")
    reader = open_bank(tmp_path / "tot.parquet")
    for episode in range(5):
        bank = read_bank(reader, episode)
        done = walk(make_search("best-of-n", n=64), bank)
        told = bank.verdict[done.bank_node[done.answer]]
        if done.finished[done.answer]:
            assert done.correct is told


@pytest.mark.parametrize("levels", [1, 2])
def test_fewer_levels_hand_in_no_answer(levels: int, tmp_path: Path) -> None:
    import json

    log = tmp_path / "log.json"
    log.write_text(json.dumps([tot_problem(seed) for seed in range(6)]))
    imported(log, read_list(log, TotLog().search_of), tmp_path / "tot.parquet", token_ids="unknown")
    reader = open_bank(tmp_path / "tot.parquet")
    for episode in range(6):
        done = walk(make_search("tot-bfs", levels=levels), read_bank(reader, episode))
        assert done.correct is False
        assert max(done.depth) <= levels
