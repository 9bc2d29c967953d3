"""The searches on a live model: `arborsim record` runs each, and recordings are what they chose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.searches import make_search
from arborsim.trace.reader import Episode, TraceReader
from arborsim.trace.schema import Kind
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.reference import get_task
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import PromptSource
from tests.live.tiny import FakeSource, tiny_model

SAMPLERS = ("best-of-n", "self-consistency", "weighted-vote")
LEVELS = ("beam-4", "beam-sqrt", "dvts-4", "dvts-sqrt", "rebase", "ets", "ets-kv")


def children(episode: Episode) -> Counter[int]:
    """How many children each node got."""
    first = {}
    for kind, node, parent in zip(episode.kind, episode.node, episode.parent, strict=True):
        if kind == Kind.TRANSITION:
            first.setdefault(int(node), int(parent))
    return Counter(first.values())


@pytest.mark.parametrize("name", [*SAMPLERS, *LEVELS])
def test_record(name: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.parquet"
    size = "n=4" if name in SAMPLERS else "width=4"
    arguments = ["--model", "game24", "--search", name, "--set", size, "--episodes", "2"]
    assert main(["record", "--out", str(out), *arguments]) == 0
    reader = TraceReader(out)
    assert reader.info.search == name
    assert reader.info.search_parameters["dedupe"] is (name in LEVELS)
    for episode in reader.episodes():
        below = children(episode)
        assert below.pop(0) == 4
        if name in SAMPLERS:
            assert set(below.values()) == {1}
            assert not (episode.kind == Kind.PRUNE).any()
        else:
            depth = {int(n): int(d) for n, d in zip(episode.node, episode.depth, strict=True)}
            wide = Counter[int]()
            for parent, count in below.items():
                wide[depth[parent]] += count
            assert max(wide.values()) <= 4
            kept = Counter(depth[parent] for parent in below)
            most = {"beam-sqrt": 2, "dvts-sqrt": 2}.get(name, 4)
            assert max(kept.values()) <= most
        assert episode.correct is not None


def test_mcts_records(tmp_path: Path) -> None:
    out = tmp_path / "trace.parquet"
    options = ["--set", "steps=12", "--set", "children=2", "--set", "width=2", "--episodes", "2"]
    arguments = ["--model", "game24", "--search", "mcts", "--capture", "tree"]
    assert main(["record", "--out", str(out), *arguments, *options]) == 0
    reader = TraceReader(out)
    assert reader.info.search == "mcts"
    for episode in reader.episodes():
        below = children(episode)
        assert below[0] == 2
        assert max(below.values()) == 2
        assert sum(below.values()) <= 12
        assert episode.correct is not None


def test_ets_without_signals_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", "game24", "--search", "ets", "--capture", "tree", "--episodes", "1"]
    assert main(["record", "--out", str(tmp_path / "t.parquet"), *arguments]) == 2
    assert (
        "has no embedding to cluster by: record with --capture signals" in capsys.readouterr().err
    )


def run(name: str, source: Any, **options: Any) -> EpisodeRecorder:
    """At temperature 0, where all siblings are equal."""
    search = make_search(name, **options)
    recorder = EpisodeRecorder(tiny_model(), source, search, None, Sampler(0.0, (0,)), 0, 200)
    recorder.run(source.problem(0))
    return recorder


def test_equal_samples_vote_but_equal_thoughts_of_a_beam_do_not_go_on() -> None:
    samples = run("self-consistency", FakeSource(thoughts=3), n=3)
    assert sum(node.finished for node in samples.nodes) == 3
    beam = run("beam-4", FakeSource(thoughts=3), width=3)
    assert sum(node.finished for node in beam.nodes) == 1


def test_a_finished_leaf_carries_its_answer() -> None:
    class Answering(FakeSource):
        def answer(self, generated: Any) -> str:
            return f"answer {len(generated)}"

    recorder = run("self-consistency", Answering(thoughts=3), n=2)
    leaves = recorder._frontier.leaves.values()
    assert {leaf.answer for leaf in leaves if leaf.finished} == {"answer 21"}
    assert {leaf.answer for leaf in leaves if not leaf.finished} == {None}
    silent = run("best-of-n", FakeSource(), n=1)
    assert {leaf.answer for leaf in silent._frontier.leaves.values()} == {None}


def test_answers_of_tasks() -> None:
    game = get_task("game24")
    words = "13 - 8 = 5 ( 4 6 5 ) Y 6 * 5 = 30 ( 4 30 ) N 30 - 4 = 26 ( 26 ) N"
    ids = game.vocab.encode(words.split())
    assert game.answer_text(ids) == "26"
    assert game.answer_text([*ids, game.eos_id]) == "26"
    assert game.answer_text(ids[:-1]) is None
    assert game.answer_text([*ids[:21], game.eos_id]) is None
    chain = get_task("chain", lines=10)
    problem = chain.problem("test", 0)
    solution = chain.solution(problem)
    answer = chain.answer_text(solution)
    assert answer == chain.text(solution[-3:])
    assert answer.startswith("? v")
    assert chain.answer_text([*solution, chain.eos_id]) == answer
    assert chain.answer_text(solution[:-1]) is None
    assert chain.answer_text([*solution[:-3], chain.eos_id]) is None
    assert chain.answer_text([]) is None


def test_answer_to_a_prompt_is_its_last_line() -> None:
    class Words:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [0]}

        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            words = ["\n", " so", " it is 4 ", "" if skip_special_tokens else "</s>"]
            return "".join(words[i] for i in ids)

    source = PromptSource(["?"], Words(), [3], 100, 64)
    assert source.answer([1, 0, 2, 3]) == "it is 4"
    assert source.answer([1, 0, 2, 0, 3]) == "it is 4"
    assert source.answer(np.array([0, 3])) is None
