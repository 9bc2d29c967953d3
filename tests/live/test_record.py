"""``arborsim record`` end to end: files, bad input, interruption, reproducibility."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.searches import make_search
from arborsim.trace.episode import play
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from arborsim.trace.writer import TraceWriter
from arborsim_torch.models import rope_of
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.reference import get_task
from arborsim_torch.rewards.base import Thought
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import TaskSource
from tests.live.tiny import FakeSource, save_tiny, tiny_model, torch

PATIENCE_S = 600  # reached only where something hangs
SHORT = ["--lines", "10", "--episodes", "2"]


def record(*arguments: object) -> int:
    return main(["record", *map(str, arguments)])


def fail(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert record(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("arborsim: ")
    return error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w3 w4 w5"}\n\n{"prompt": "w6 w7"}\n')
    return path


@pytest.mark.parametrize("search", ["linear", "tot-bfs", "tot-dfs", "dpts"])
def test_chain(search: str, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    options = {"dpts": ["--set", "steps=12"], "tot-bfs": ["--set", "keep=2"]}.get(search, [])
    assert record("--model", "chain", *SHORT, "--search", search, *options, "--out", out) == 0
    reader = TraceReader(out)
    info = reader.info
    assert (info.task, info.search, info.attention) == ("chain", search, "dense")
    assert info.timing["decode_tokens_per_s"] > 0
    assert info.search_parameters["task.lines"] == 10
    for episode in reader.episodes():
        assert episode.kind[-1] == Kind.ANSWER
        assert episode.correct[-1] in (0, 1)
        assert np.isnan(episode.reward[episode.kind != Kind.BOUNDARY]).all()
        assert not np.isnan(episode.reward[episode.kind == Kind.BOUNDARY]).any()
        assert sum(1 for _ in play(episode)) > 3


def test_game24_is_rewarded_by_the_model_itself(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    assert record("--model", "game24", "--search", "tot-bfs", "--episodes", 2, "--out", out) == 0
    episode = next(iter(TraceReader(out).episodes()))
    boundary = episode.kind == Kind.BOUNDARY
    assert len(np.unique(episode.reward[boundary])) > 3
    # All 8 proposals for the first line are one batch.
    token = episode.kind == Kind.TOKEN
    assert (episode.iteration[token] == 1).sum() == 8


@pytest.mark.parametrize("search", ["linear", "tot-bfs", "tot-dfs", "dpts"])
def test_plain_model_and_prompts(search: str, folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    options = ["--set", "steps=10"] if search in ("dpts", "tot-dfs") else []
    code = record("--model", folder, "--prompts", prompts, "--search", search, "--out", out,
                  "--max-tokens", 24, "--thought-tokens", 8, "--attention", "sparse",
                  "--attention-top", 6, "--capture", "qkv", *options)  # fmt: skip
    assert code == 0
    reader = TraceReader(out)
    assert reader.num_episodes == 2
    assert reader.info.qkv_layers == (1, 2)
    assert reader.info.rope == rope_of(tiny_model("llama"))
    assert reader.info.attention_top == 6
    for episode in reader.episodes():
        assert (episode.correct[-1], np.isnan(episode.reward).all()) == (-1, True)
        lengths = np.bincount(episode.node[episode.kind == Kind.TOKEN])
        assert lengths.max() <= 8


def test_bad_input_is_one_line(
    folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "t.parquet")
    assert "did you mean tot-bfs" in fail(capsys, *out, "--search", "tot-bsf")
    assert "did you mean steps" in fail(capsys, *out, "--search", "dpts", "--set", "step=3")
    assert "expected name=value" in fail(capsys, *out, "--set", "steps")
    assert "did you mean chain" in fail(capsys, *out, "--model", "chian")
    assert "no such folder" in fail(capsys, *out, "--model", "./nowhere/at/all")
    assert "no config.json" in fail(capsys, *out, "--model", tmp_path)
    assert "give --prompts" in fail(capsys, *out, "--model", folder)
    assert "its own problems" in fail(capsys, *out, "--prompts", prompts)
    assert "vocabularies differ" in fail(capsys, *out, "--model", "chain", "--task", "game24")
    assert "no split 'dev'" in fail(capsys, *out, "--split", "dev")
    assert "only 269 problems" in fail(capsys, *out, "--model", "game24", "--episodes", 300)
    assert "no problems from that" in fail(capsys, *out, "--model", "game24", "--first", 900)
    assert "unknown dtype 'float8'" in fail(capsys, *out, "--dtype", "float8")
    assert "use cpu or cuda" in fail(capsys, *out, "--device", "tpu")
    assert "layers 0 to 5" in fail(capsys, *out, "--capture", "qkv", "--qkv-layers", "2,9")
    assert "expected numbers" in fail(capsys, *out, "--qkv-layers", "a")
    assert "no directory" in fail(capsys, "--out", tmp_path / "no" / "t.parquet")
    missing = tmp_path / "none.jsonl"
    assert "no such file of prompts" in fail(capsys, *out, "--model", folder, "--prompts", missing)
    if not torch.cuda.is_available():
        assert "finds no CUDA" in fail(capsys, *out, "--device", "cuda")
    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": "a"}\n\n{"question": "b"}\n', "line 3: expected"),
        ("[1]\n", "line 1: expected"),
        ('{"prompt": ""}\n', "line 1: expected"),
        ("\n", "no prompts"),
    ],
)
def test_bad_prompts_name_their_line(
    text: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text)
    out = tmp_path / "t.parquet"
    assert message in fail(capsys, "--model", folder, "--prompts", bad, "--out", out)


def test_long_prompts_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "w3 " * 2048}))
    out = tmp_path / "t.parquet"
    assert "takes 2048 positions" in fail(
        capsys, "--model", folder, "--prompts", path, "--out", out
    )


def test_an_existing_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.parquet"
    out.write_bytes(b"precious")
    assert "exists" in fail(capsys, "--out", out, *SHORT)
    assert out.read_bytes() == b"precious"
    assert record("--out", out, *SHORT, "--overwrite", "--capture", "tree") == 0
    assert TraceReader(out).info.attention == "none"


def test_memory_errors_say_what_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall(self: Any, problem: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(EpisodeRecorder, "run", fall)
    options = ["--out", str(tmp_path / "t.parquet"), "--search", "tot-bfs", *map(str, SHORT)]
    assert main(["record", *options]) == 2
    size, error = capsys.readouterr().err.splitlines()
    assert size.startswith("recording about ")
    assert "out of memory on cpu: chain" in error
    assert "40 leaves" in error


def test_same_seed_same_tokens(tmp_path: Path) -> None:
    tokens = {}
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        out = tmp_path / f"{name}.parquet"
        assert record("--out", out, *SHORT, "--search", "dpts", "--seed", seed,
                      "--set", "steps=8") == 0  # fmt: skip
        tokens[name] = [e.token.tolist() for e in TraceReader(out).episodes()]
    assert tokens["a"] == tokens["b"] != tokens["c"]


@pytest.mark.parametrize("killed", [True, False])
def test_resuming_gives_the_same_trace(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    common = ["--lines", "4", "--search", "dpts", "--set", "steps=4"]
    halves, whole = tmp_path / "halves.parquet", tmp_path / "whole.parquet"
    with monkeypatch.context() as patch:
        if killed:
            patch.setattr(TraceWriter, "close", lambda self: None)
        assert record(*common, "--episodes", 1, "--out", halves) == 0
    assert halves.exists() != killed
    assert record(*common, "--episodes", 3, "--out", halves, "--resume") == 0
    assert record(*common, "--episodes", 3, "--out", whole) == 0
    tokens = [[e.token.tolist() for e in TraceReader(p).episodes()] for p in (halves, whole)]
    assert len(tokens[0]) == 3
    assert tokens[0] == tokens[1]
    capsys.readouterr()
    assert record(*common, "--episodes", 3, "--out", halves, "--resume") == 0
    assert capsys.readouterr().out == f"{halves}: 3 episodes, all of them there before\n"


def test_rewards_tell_a_dead_state_from_one_without_progress() -> None:
    task = get_task("chain", lines=20)
    source = TaskSource(task, floor=0.3)
    problem = source.problem(0)
    rng = np.random.default_rng(0)
    solution = task.solution(problem)

    def rewarded(source: TaskSource, generated: list[int]) -> float:
        return source.reward(Thought(problem, generated, (len(generated),)), rng)

    assert rewarded(source, []) == pytest.approx(0.3)
    assert rewarded(source, solution) == 1.0
    assert source.correct(problem, solution) is True
    wrong = [*solution[:8], task.pad_id]
    assert rewarded(source, wrong) == 0.0
    blind = TaskSource(task, dead_penalty=0.0, floor=0.3)
    assert rewarded(blind, wrong) >= 0.3
    noisy = TaskSource(task, noise=0.1, floor=0.3)
    rewards = [rewarded(noisy, []) for _ in range(200)]
    assert np.std(rewards) == pytest.approx(0.1, rel=0.2)


def test_temperature_samples_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]])).expand(4000, 3)
    for temperature in (1.0, 0.5):
        choice = Sampler(temperature, (1,)).choose(logits)
        expected = np.array([0.7, 0.2, 0.1]) ** (1 / temperature)
        share = np.bincount(choice.token, minlength=3) / 4000
        np.testing.assert_allclose(share, expected / expected.sum(), atol=0.03)
        assert choice.logprob[0] == pytest.approx(np.log([0.7, 0.2, 0.1][choice.token[0]]))
        assert choice.entropy[0] == pytest.approx(0.8018, abs=1e-3)
    assert Sampler(0.0, (1,)).choose(logits).token == [0] * 4000


def test_repeated_thoughts_are_given_up() -> None:
    """At temperature 0 all siblings are equal: only one of them goes on."""
    model, source = tiny_model(), FakeSource(thoughts=3)
    search = make_search("tot-bfs", keep=2, children=3)
    run = EpisodeRecorder(model, source, search, None, Sampler(0.0, (0,)), 0, 200)
    columns = run.run(source.problem(0)).columns
    depths = columns["depth"][np.asarray(columns["kind"]) == Kind.BOUNDARY]
    assert np.bincount(depths).tolist() == [0, 3, 3, 3]


def test_tree_that_backtracks_has_honest_events(tmp_path: Path) -> None:
    """Depth-first search returns to older states; pruned nodes never come back."""
    model, source = tiny_model(), FakeSource(thoughts=5)
    search = make_search("tot-dfs", threshold=0.5, steps=30)
    columns = EpisodeRecorder(
        model, source, search, None, Sampler(1.0, (0,)), 0, 200
    ).run(source.problem(0)).columns  # fmt: skip
    kind, node, parent = np.asarray(columns["kind"]), columns["node"], columns["parent"]
    opened = [(n, p) for n, p in zip(node[kind == Kind.TRANSITION], parent[kind == Kind.TRANSITION],
                                     strict=True)]  # fmt: skip
    returns = [p for (a, _), (_, p) in itertools.pairwise(opened) if p != a]
    assert len(returns) > 3
    assert (kind == Kind.PRUNE).sum() > 3


def test_interruption_leaves_whole_episodes(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    arguments = ["--episodes", "500", "--lines", "4", "--capture", "tree", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "arborsim.cli.app", "record", *arguments],
        stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        # what a shell starts in the background ignores the signal, and its children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    parts = tmp_path / "t.parquet.parts"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and len(list(parts.glob("*.parquet"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, error
    assert "interrupted" in error
    assert "Traceback" not in error
    reader = TraceReader(out)
    assert reader.num_episodes >= 2
    assert f"holds {reader.num_episodes} whole episodes" in error
    assert all(episode.kind[-1] == Kind.ANSWER for episode in reader.episodes())
    assert not parts.exists()


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from arborsim.cli.app import main\n"
        f"sys.exit(main(['record', '--out', {str(tmp_path / 't.parquet')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'arborsim[torch]'" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, arborsim.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
