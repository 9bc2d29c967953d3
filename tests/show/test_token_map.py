"""Pictures of a search, against literal ones taken after every event."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.core.events import Answer, Boundary, Decode, Transition
from arborsim.core.tiers import Tier
from arborsim.play.controller import Controller
from arborsim.play.pictures import (
    MAX_FRAMES,
    MOST_CELLS,
    NOT_BORN,
    TokenMapper,
    TreeFilm,
    packed_runs,
    tokens_by_tier,
)
from arborsim.policies.registry import build
from arborsim.trace.episode import Episode, play
from arborsim.trace.reader import TraceReader
from tests.helpers.plain_executor import PlainExecutor, in_steps
from tests.helpers.traces import make_trace

SETTINGS = {
    "h2o": {"per": "shared"},
    "hierarchy": {"interval": "4", "recent": "6"},
    "arborkv": {"margin": "2"},
}


@pytest.fixture(scope="module")
def episode(tmp_path_factory: pytest.TempPathFactory) -> Episode:
    path = make_trace(
        tmp_path_factory.mktemp("t") / "x.parquet", kind="tree", prompt=12, nodes=20, block=(4, 9),
        episodes=1,
    )  # fmt: skip
    needs = set().union(*(build(name, own).reads() for name, own in SETTINGS.items()))
    return next(iter(TraceReader(path).episodes(sorted(needs))))


def controlled(name: str, episode: Episode, meters: list[TokenMapper]) -> Controller:
    return Controller(
        build(name, SETTINGS[name]), PlainExecutor(1), layers=episode.info.geometry.layers,
        budget_tokens=int(0.8 * episode.num_tokens), vocabulary=128, meters=meters,
    )  # fmt: skip


def literal(name: str, episode: Episode) -> list[np.ndarray]:
    """Tiers after each decode iteration, and after all that followed before the next one."""
    controller, rows = controlled(name, episode, []), []
    for event in in_steps(play(episode)):
        controller.handle(event)
        tier = np.full(episode.num_tokens, NOT_BORN)
        tier[: controller.executor.tier.shape[1]] = controller.executor.tier[0]
        if isinstance(event, Decode):
            rows.append(tier)
        elif rows:
            rows[-1] = tier
    return rows


@pytest.mark.parametrize("name", SETTINGS)
def test_every_row_is_the_state_after_its_iteration(name: str, episode: Episode) -> None:
    rows = literal(name, episode)
    mapper = TokenMapper(episode.num_tokens, len(rows))
    controller = controlled(name, episode, [mapper])
    controller.run(play(episode))
    cells = mapper.finish(controller.executor.tier)
    assert len(rows) < MOST_CELLS
    assert np.array_equal(mapper.iterations, np.arange(1, len(rows) + 1))
    assert np.array_equal(cells, np.array(rows))
    assert (cells == Tier.EVICTED).any(), "nothing was evicted: the test shows nothing"


@pytest.mark.parametrize("nodes", [3, 40, 80])
def test_a_film_is_every_nth_of_all_its_moments(tmp_path: Path, nodes: int) -> None:
    path = make_trace(tmp_path / "x.parquet", kind="tree", prompt=8, nodes=nodes, episodes=1)
    searched = next(iter(TraceReader(path).episodes(sorted(build("h2o", SETTINGS["h2o"]).reads()))))
    controller, taken = controlled("h2o", searched, []), []
    for event in play(searched):
        controller.handle(event)
        if isinstance(event, Transition | Boundary | Answer):
            taken.append((controller.view().leaves, tokens_by_tier(controller)))
    picked = np.linspace(0, len(taken) - 1, min(len(taken), MAX_FRAMES)).round().astype(int)
    assert (len(picked) < len(taken)) == (nodes > 3), "one short search, and two that are thinned"

    film, again = TreeFilm.of(searched), controlled("h2o", searched, [])
    again.run(film.watch(play(searched), again))
    _, frames = film.finish(again.tree)
    assert len(frames) == len(picked)
    for frame, (active, table) in zip(frames, (taken[i] for i in picked), strict=True):
        assert frame.active == active
        assert np.array_equal(frame.tokens_by_tier[: len(table)], table)
        assert not frame.tokens_by_tier[len(table) :].any()


REPLAY = """
import resource, sys
from arborsim.cli.app import main
code = main(sys.argv[1:])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are in kB on Linux")
def test_a_page_of_a_large_tree_takes_little_memory(tmp_path: Path) -> None:
    """A table of 5,000 nodes for each of 10,000 moments took 0.7 GB."""
    arguments = (
        "generate --searches 1 --prompt-tokens 64 --thought-tokens 2 --first 100 --depth 50 "
        f"--model chain --out {tmp_path}/x.parquet"
    )
    assert main(arguments.split()) == 0
    peaks = []
    for more in ([], ["--report", f"{tmp_path}/x.html"]):
        command = ["replay", f"{tmp_path}/x.parquet", "--policy", "random", "--no-oracle", *more]
        done = subprocess.run(
            [sys.executable, "-c", REPLAY, *command], capture_output=True, text=True, check=True
        )
        code, peak_kb = map(int, done.stdout.splitlines()[-1].split())
        assert code == 0
        peaks.append(peak_kb / 1024)
    assert peaks[1] - peaks[0] < 200, peaks


def test_large_searches_shrink_to_the_commonest_tier() -> None:
    mapper = TokenMapper(tokens=4 * MOST_CELLS, iterations=10 * MOST_CELLS)
    assert len(mapper.first_tokens) == len(mapper.iterations) == MOST_CELLS
    assert mapper.iterations[-1] == 10 * MOST_CELLS
    assert (np.diff(mapper.first_tokens) == 4).all()
    tier = np.zeros((3, 4 * MOST_CELLS), dtype=np.int8)
    tier[:2, :3] = Tier.EVICTED  # three of four tokens, in two of three groups
    tier[2, 4:8] = Tier.EVICTED  # all of four, in one group
    mapper._now = int(mapper.iterations[0])
    cells = mapper.finish(tier)
    assert cells[0].tolist() == [Tier.EVICTED] + [0] * (MOST_CELLS - 1)


def test_runs_unpack_to_the_cells() -> None:
    rng = np.random.default_rng(0)
    cells = np.sort(rng.integers(0, NOT_BORN + 1, (300, 50)), axis=0).astype(np.uint8)
    runs = packed_runs(cells)
    unpacked = np.repeat(runs & 7, runs >> 3).reshape(50, 300).T
    assert np.array_equal(unpacked, cells)
    assert len(runs) <= (NOT_BORN + 1) * 50
