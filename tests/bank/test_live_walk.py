"""A search that ran live, walked over the trace that it recorded: the same search."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from arborsim.cli.app import main
from arborsim.core.observations import Signal
from arborsim.core.tiers import Budget
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.play.episode import Cell
from arborsim.play.meters import Quality
from arborsim.policies.registry import build
from arborsim.products.search.run import simulate
from arborsim.searches import Leaf, make_search
from arborsim.searches.bank import Bank, open_bank, read_bank
from arborsim.searches.visited import visited
from arborsim.searches.walk import walk
from arborsim.trace.schema import Capture
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Sampler
from tests.bank.banks import episode_of
from tests.live.tiny import FakeSource, tiny_info, tiny_model

#: Options with which each search does something on few, short problems.
SEARCHES: dict[str, dict[str, Any]] = {
    "best-of-n": {"n": 4}, "self-consistency": {"n": 4}, "weighted-vote": {"n": 4},
    "beam-4": {"width": 8}, "beam-sqrt": {"width": 6}, "dvts-4": {"width": 8},
    "dvts-sqrt": {"width": 6}, "rebase": {"width": 6}, "ets": {"width": 6},
    "ets-kv": {"width": 6}, "tot-bfs": {"keep": 3, "children": 3},
    "tot-dfs": {"steps": 25, "propose": 2, "width": 2}, "dpts": {"steps": 25},
    "mcts": {"steps": 20, "width": 2}, "linear": {},
}  # fmt: skip
_COLUMNS = (
    "kind", "iteration", "node", "parent", "depth", "position", "token", "end", "entropy", "reward",
    "correct", "answer", "embedding", "embedding_rows",
)  # fmt: skip
_SHOWN = ("node", "parent", "depth", "score", "finished", "dead", "visits", "tokens", "answer",
          "text", "entropy", "logprob")  # fmt: skip


class Watched:
    """A search that notes what it was shown."""

    def __init__(self, search: Any) -> None:
        self._search = search
        self.seen: list[list[tuple[Any, ...]]] = []
        self.embeddings: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._search, name)

    def expand(self, frontier: list[Leaf], width: int) -> Any:
        self.seen.append([_shown(leaf) for leaf in frontier])
        for leaf in frontier:
            if leaf.embedding is not None:
                self.embeddings[leaf.node] = leaf.embedding
        return self._search.expand(frontier, width)


def _shown(leaf: Leaf) -> tuple[Any, ...]:
    values = tuple(getattr(leaf, name) for name in _SHOWN)
    return tuple("nan" if isinstance(v, float) and np.isnan(v) else v for v in values)


RANKED: list[tuple[str, dict[str, Any]]] = [
    ("beam-4", {"width": 8, "keep": 2, "refill": True, "score": "min", "answer": "vote"}),
    ("rebase", {"width": 6, "score": "mean", "answer": "best"}),
    ("mcts", {"steps": 20, "score": "prod"}),
]


@pytest.mark.parametrize(("name", "options"), [*SEARCHES.items(), *RANKED])
def test_a_live_search_walked_again(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: list[Watched] = []

    steps = EpisodeRecorder.steps

    def watched(recorder: EpisodeRecorder, problem: Any) -> Any:
        live.append(Watched(recorder.search))
        recorder.search = live[-1]  # type: ignore[assignment]
        return steps(recorder, problem)

    monkeypatch.setattr(EpisodeRecorder, "steps", watched)
    out = tmp_path / "live.parquet"
    command = ["record", "--model", "game24", "--search", name, "--episodes", "1"]
    given = [part for key, value in options.items() for part in ("--set", f"{key}={value}")]
    assert main([*command, *given, "--out", str(out), "--seed", "3"]) == 0
    reader = open_bank(out)
    assert len(live) == reader.num_episodes == 1
    needs = (Signal.ATTENTION, Signal.HIDDEN_CHANGE)
    machine = Machine(load_profile("h200"))
    cells = [Cell(build("full"), Budget("any", share=1.0))]
    cells += [Cell(build("arborkv"), Budget("0.75", share=0.75))] if name == "rebase" else []
    for index, then in enumerate(live):
        bank = read_bank(reader, index, needs, embeddings=True)
        now = Watched(make_search(name, **options))
        done = walk(now, bank)  # type: ignore[arg-type]
        assert done.bank_misses == 0
        assert now.seen == then.seen
        for *_, text, entropy, logprob in (leaf for seen in then.seen for leaf in seen[1:]):
            assert isinstance(text, str)
            assert entropy != "nan"
            assert logprob < 0
        assert now.embeddings.keys() == then.embeddings.keys()
        for node, embedding in then.embeddings.items():
            np.testing.assert_array_equal(now.embeddings[node], embedding)
        assert done.bank_node == tuple(range(len(bank.parent)))
        again, episode = visited(done, bank.episode), bank.episode
        for column in _COLUMNS:
            np.testing.assert_array_equal(getattr(again, column), getattr(episode, column))
        assert again.text is not None
        assert episode.text is not None
        assert again.text[:-1] == episode.text[:-1]
        for cell in cells:
            first, second = (
                simulate(e, cell, machine, quality=Quality(frozenset({Signal.ATTENTION})))
                for e in (episode, again)
            )
            assert first == second


def test_what_was_still_running_is_no_thought(tmp_path: Path) -> None:
    """An asynchronous search may end while thoughts run: handed out again, they never end."""
    out = tmp_path / "live.parquet"
    command = ["record", "--model", "game24", "--search", "dpts", "--set", "accept=0"]
    assert main([*command, "--episodes", "6", "--out", str(out)]) == 0
    reader = open_bank(out)
    unfinished = 0
    for index in range(6):
        bank = read_bank(reader, index)
        unfinished += bank.complete.count(False)
        assert walk(make_search("dpts", accept=0), bank).bank_misses == 0
        wide = walk(make_search("tot-bfs"), Bank.of(bank.episode))
        broken = [n for s in wide.steps for x in s.runs for n in x.broken]
        assert len(broken) <= bank.complete.count(False)
        assert all(wide.dead[n] for n in broken)
        assert wide.bank_misses >= len(broken)
    assert unfinished > 0


class Unrewarded(FakeSource):
    """Nobody rewards its thoughts: the model's own probabilities rank them."""

    def reward(self, thought: Any, rng: Any) -> float:
        return math.nan


def test_scores_of_thoughts_that_nobody_rewards() -> None:
    source, search = Unrewarded(lambda generated: 3 + len(generated) % 4), make_search("rebase")
    sampler = Sampler(1.0, (0,))
    recorder = EpisodeRecorder(tiny_model(), source, search, None, sampler, 0, 40)
    columns = recorder.run(source.problem(0)).columns
    episode = episode_of(columns, tiny_info(capture=Capture.TREE, attention="none"))
    assert np.isnan(episode.reward).all()
    bank = Bank.of(episode, np.asarray(columns["logprob"]))
    done = walk(make_search("rebase"), bank)
    live = [node.score for node in recorder.nodes]
    assert len(live) > 20
    np.testing.assert_array_equal(done.score[1:], live[1:])
    assert done.bank_node == tuple(range(len(live)))
