"""A search that is recorded live, and then run on what it recorded: the same search."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.core.observations import Signal
from arborsim.searches import Expansion, Leaf, Search, make_search, search_names, search_options
from arborsim.searches.bank import Bank, read_bank
from arborsim.searches.walk import Walk, walk
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Capture as Level
from arborsim.trace.schema import End, Kind
from arborsim.trace.writer import TraceWriter
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import Capture
from arborsim_torch.live.feed import Feed
from arborsim_torch.models import geometry, load_model
from arborsim_torch.prefixes import PrefixDecoder
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import TaskSource
from tests.live.tiny import FakeSource, tiny_info, tiny_model

LENGTHS = {"game24": 200, "chain": 40, "tiny": 200}  # generated tokens, at most
SHORT = {
    "width": 5, "n": 5, "steps": 15, "keep": 3, "children": 3, "accept": 0.99,
}  # fmt: skip


class Thoughts(FakeSource):
    """Thoughts of 4 to 8 tokens: they end one by one.  Who has not finished is not right."""

    def __init__(self) -> None:
        super().__init__(block=lambda generated: 4 + generated[0] % 5, prompt=10)

    def correct(self, problem: Any, generated: Any) -> bool:
        return self.is_finished(problem, generated) and sum(generated) % 2 == 0


@cache
def problems(name: str) -> tuple[Any, Any, Any]:
    """A model, a source of problems, and a trace's metadata."""
    info = tiny_info(capture=Level.TREE, attention="none", embeddings=True)
    if name == "tiny":
        return tiny_model(), Thoughts(), info
    loaded = load_model(name, task_options={"lines": 4} if name == "chain" else {})
    assert loaded.task is not None
    source = TaskSource(loaded.task, noise=0.3, dead_penalty=0.5, floor=0.3)
    return loaded.model, source, replace(info, geometry=geometry(loaded))


def options(name: str) -> dict[str, Any]:
    found = {key: value for key, value in SHORT.items() if key in search_options(name)}
    return found | ({"keep": 2} if name == "beam-4" else {})


def watched(search: Search, shown: list[list[Leaf]]) -> Search:
    """The same search; what it is shown is noted."""
    expand: Callable[[Any, int], Expansion] = search.expand

    def note(frontier: list[Leaf], width: int) -> Expansion:
        shown.append(list(frontier))
        return expand(frontier, width)

    search.expand = note  # type: ignore[method-assign]
    return search


def live(name: str, on: str, index: int, path: Path, shown: list[list[Leaf]], dedupe: bool) -> Bank:
    """Record one search, and read it back."""
    model, source, info = problems(on)
    recorder = EpisodeRecorder(
        model, source, watched(make_search(name, **options(name)), shown),
        Capture(signals=frozenset()), Sampler(1.0, (index,)), index, LENGTHS[on], dedupe=dedupe,
    )  # fmt: skip
    result = recorder.run(source.problem(index))
    with TraceWriter(path, info, overwrite=True) as writer:
        writer.write_episode(result.columns)
    return read_bank(TraceReader(path), 0, embeddings=True)


def same_leaves(one: list[list[Leaf]], other: list[list[Leaf]]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert [repr(leaf).partition(", twin")[0] for leaf in mine] == [
            repr(leaf).partition(", twin")[0] for leaf in theirs
        ]  # repr: NaN is like NaN, and the last digit counts
        for a, b in zip(mine, theirs, strict=True):
            assert (a.embedding is None) == (b.embedding is None)
            if a.embedding is not None:
                np.testing.assert_array_equal(a.embedding, b.embedding)


def check(walked: Walk, episode: Episode) -> None:
    """The walk is the recording, row by row."""
    assert walked.bank_misses == 0
    assert walked.bank_node == tuple(range(int(episode.node.max()) + 1))
    assert walked.iterations == episode.iteration[-1]
    pruned = [n for step in walked.steps for n in step.dropped]
    assert pruned == episode.node[episode.kind == Kind.PRUNE].tolist()
    closed = [n for step in walked.steps for n in step.completed]
    assert closed == episode.node[episode.kind == Kind.BOUNDARY].tolist()
    assert walked.answer == episode.node[-1]
    assert walked.correct == {1: True, 0: False, -1: None}[int(episode.correct[-1])]


@pytest.mark.parametrize("on", ["tiny", "game24", "chain"])
@pytest.mark.parametrize("name", search_names())
def test_a_search_on_its_own_recording(name: str, on: str, tmp_path: Path) -> None:
    for index, dedupe in ((0, True), (1, False)) if on == "tiny" else ((0, True),):
        seen: list[list[Leaf]] = []
        replayed: list[list[Leaf]] = []
        bank = live(name, on, index, tmp_path / "t.parquet", seen, dedupe)
        search = watched(make_search(name, **options(name)), replayed)
        walked = walk(search, bank, dedupe)
        same_leaves(seen, replayed)
        check(walked, bank.episode)


def drawn(share: bool, temperature: float) -> tuple[EpisodeRecorder, dict[str, Any]]:
    """A search of many chains on a small tree, with or without computing anything twice."""
    model, source, _ = problems("game24")
    recorder = EpisodeRecorder(
        model, source, make_search("best-of-n", n=40), Capture(signals=frozenset()),
        Sampler(temperature, (3,)), 3, 200, share_prefixes=share,
        cache=TieredCache(Layout.of(model)) if share else None, release=share,
    )  # fmt: skip
    return recorder, recorder.run(source.problem(3)).columns


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prefixes_computed_once_give_the_same_recording(temperature: float) -> None:
    _, plain = drawn(False, temperature)
    recorder, shared = drawn(True, temperature)
    for name in ("kind", "node", "parent", "iteration", "position", "token", "answer", "correct"):
        assert list(shared[name]) == list(plain[name])
    for name in ("entropy", "logprob", "reward"):
        np.testing.assert_allclose(shared[name], plain[name], rtol=1e-3, atol=2e-4)
    for mine, theirs in zip(shared["embedding"], plain["embedding"], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-3)
    # Only distinct beginnings were computed.
    beginnings = {
        tuple(node.generated[:count])
        for node in recorder.nodes
        for count in range(1, len(node.generated) + 1)
    }
    assert recorder.decoder.computed_tokens == len(beginnings)
    generated = sum(node.tokens for node in recorder.nodes)
    assert len(beginnings) < (generated if temperature else generated / 30)


def test_prefixes_have_no_token_signals() -> None:
    model, source, _ = problems("tiny")
    with pytest.raises(ValueError, match="only a plain TreeDecoder"):
        PrefixDecoder(model, Capture())
    of_keys = PrefixDecoder(model, Capture(signals=frozenset({Signal.KEY_NORM})))
    with pytest.raises(ValueError, match="only a plain TreeDecoder"):
        of_keys.prefill(source.problem(0).prompt)


def test_prefixes_have_no_listener() -> None:
    model, source, _ = problems("tiny")
    recorder = EpisodeRecorder(
        model, source, make_search("best-of-n", n=2), None, Sampler(1.0, (0,)), 0, 20,
        listener=Feed([], None, frozenset(), ()), share_prefixes=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="do not share prefixes"):
        recorder.run(source.problem(0))


def record(*arguments: object) -> int:
    return main(["record", "--model", "game24", "--bank", *map(str, arguments)])


def fail(capsys: pytest.CaptureFixture[str], command: str) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(shlex.split(command)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bank") / "bank.parquet"
    wanted = ["--for", "all", "--width", "5,12", "--set", "steps=25", "--set", "ets.lambda_b=1.5"]
    assert record(*wanted, "--episodes", 2, "--batch", 40, "--out", out) == 0
    return out


def test_a_bank_for_searches_misses_none_of_them(grown: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    wanted = "--algorithm all --width 5,12 --set steps=25 --set ets.lambda_b=1.5"
    assert main(["search", str(grown), *wanted.split(), "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["searches"]
    assert {row["algorithm"] for row in rows} == set(search_names())
    assert {row["bank_misses"] for row in rows} == {0}


def test_what_a_bank_holds(grown: Path) -> None:
    reader = TraceReader(grown)
    info = reader.info
    assert (info.search, info.capture, info.embeddings) == ("shared-tree", Level.TREE, True)
    assert "rebase width=12" in info.search_parameters["for"]
    assert "ets lambda_b=1.5 width=5" in info.search_parameters["for"]
    assert "mcts steps=25" in info.search_parameters["for"]
    assert not info.search_parameters["dedupe"]
    for episode in reader.episodes(text=True, embedding=True):
        closed = np.flatnonzero(episode.kind == Kind.BOUNDARY)
        assert episode.embedding_rows is not None
        assert episode.end is not None
        assert episode.answer is not None
        assert episode.embedding_rows.tolist() == closed.tolist()
        finished = episode.end == End.FINISHED
        assert finished.sum() > 10
        assert set(episode.correct[finished]) <= {0, 1}
        assert all(
            (answer is not None) <= over
            for answer, over in zip(episode.answer, finished, strict=True)
        )
        # Repeated thoughts are there: a search drops them itself.
        bank = Bank.of(episode)
        assert any(twin != node for node, twin in enumerate(bank.twin))
        # The row of the answer says whether any thought is right.
        assert episode.correct[-1] == episode.correct[finished].max()


def test_a_dense_bank(tmp_path: Path) -> None:
    out = tmp_path / "bank.parquet"
    assert record("--children", "5,3,2", "--episodes", 2, "--batch", 7, "--out", out) == 0
    reader = TraceReader(out)
    assert reader.info.search == "dense"
    assert reader.info.search_parameters["children"] == [5, 3, 2]
    for episode in reader.episodes(text=True):
        bank = Bank.of(episode)
        for node, below in enumerate(bank.children):
            wanted = (5, 3, 2, 0)[bank.depth[node]] if bank.end[node] == End.NONE else 0
            assert len(below) == wanted
        running = Counter(episode.iteration[episode.kind == Kind.TOKEN].tolist())
        assert max(running.values()) == 7
        assert walk(make_search("tot-bfs", keep=2, children=5), bank).bank_misses > 0


def test_a_bank_of_all_signals_has_them_for_every_token(tmp_path: Path) -> None:
    out = tmp_path / "bank.parquet"
    # Enough that the pool holds several times a path.
    assert record("--children", "6,5,2", "--episodes", 1, "--capture", "signals", "--out", out) == 0
    command = f"replay {out} --policy full,raas --budget 0.6 --json"
    assert main(command.split()) == 0


def test_an_interrupted_bank_goes_on(tmp_path: Path) -> None:
    halves, whole = tmp_path / "halves.parquet", tmp_path / "whole.parquet"
    wanted = ["--for", "rebase,dpts", "--width", 4]
    assert record(*wanted, "--episodes", 1, "--out", halves) == 0
    assert record(*wanted, "--episodes", 2, "--out", halves, "--resume") == 0
    assert record(*wanted, "--episodes", 2, "--out", whole) == 0
    tokens = [[e.token.tolist() for e in TraceReader(p).episodes()] for p in (halves, whole)]
    assert tokens[0] == tokens[1]


BAD = {
    "neither": ("", "--children (e.g. 8 with --depth 3"),
    "both": ("--children 8,2 --for rebase", "needs either --children"),
    "a search": ("--for rebase --search ets", "--for ets instead of --search"),
    "no depth": ("--children 8", "--children 8 needs --depth"),
    "no number": ("--children 8,x", "expected whole numbers from 1 to"),
    "none": ("--children 0 --depth 2", "expected whole numbers from 1 to"),
    "too many": ("--children 100 --depth 4", "thoughts per problem, more than 1000000"),
    "depth of a search": ("--for rebase --depth 3", "--depth goes with --children"),
    "width of children": ("--children 8,2 --width 4", "--width goes with --for"),
    "a wrong width": ("--for rebase --width 0", "--width 0: expected whole numbers"),
    "unknown search": ("--for rebase,etz", "did you mean ets"),
    "unknown option": ("--for rebase --set lamda=3", "none of rebase has that option"),
    "greedy": ("--for rebase --temperature 0", "the same thought again and again"),
    "too narrow": ("--for tot-bfs --width 3", "tot-bfs: width 3 is less than one child"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, named = BAD[case]
    out = tmp_path / "t.parquet"
    assert named in fail(capsys, f"record --model game24 --bank {options} --out {out}")
    assert not out.exists()


def test_options_of_banks_need_a_bank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--children 8,2", "--for rebase,ets", "--width 4", "--depth 2"):
        error = fail(capsys, f"record --model game24 {option} --out {tmp_path / 't.parquet'}")
        named = option.partition(",")[0] if "--for" in option else option.split()[0]
        assert f"{named} is about banks: add --bank" in error
